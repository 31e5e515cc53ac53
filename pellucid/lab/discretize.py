"""From ranked nodes to a circuit: the fewest top nodes that meet a target loss, their logits recalibrated.

Weight-sparse transformers, A.5. The loss is not monotone in the number of nodes, so a scan follows the bisection.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pellucid.core.transformer import Transformer
from pellucid.lab.ablate import Kept, keep_only, last_logits_by_length, partial_logits, remove, task_loss
from pellucid.lab.config import Ablation, PruneConfig
from pellucid.lab.extract import can_extract, extract
from pellucid.tasks.task import Batch, Task


@dataclass(frozen=True)
class Calibration:
    """`scale * logits + shift`, shift (v,): what makes a circuit's confidence right."""

    scale: Tensor
    shift: Tensor

    def __call__(self, logits: Tensor) -> Tensor:
        return self.scale * logits + self.shift


@dataclass(frozen=True)
class Discretized:
    """The kept nodes, the loss that they were chosen by, whether that meets the target, and the calibration.

    `uncalibrated` is the loss of the circuit's own logits; `shift` is how far the loss moves under partial ablation.
    """

    kept: dict[str, Tensor]
    loss: float
    uncalibrated: float
    reached: bool
    calibration: Calibration
    shift: float = 0.0


MOST_SCALE = 4.0
"""Calibration multiplies or divides logits by so much at most: without a bound, and with negative scales, differences
that mean nothing are blown up until they answer a task (see `controls`)."""


def calibrate(task: Task, logits: Tensor, batch: Batch, steps: int = 16) -> Calibration:
    """A scale, within `MOST_SCALE`, and a shift of the logits (b, 1, v) that minimise the task's loss, by LBFGS."""
    bent = torch.zeros((), device=logits.device, requires_grad=True)
    shift = torch.zeros(logits.shape[-1], device=logits.device, requires_grad=True)
    optimizer = torch.optim.LBFGS([bent, shift], max_iter=steps, line_search_fn="strong_wolfe")

    def scale() -> Tensor:
        return (math.log(MOST_SCALE) * torch.tanh(bent)).exp()

    def closure() -> float:
        optimizer.zero_grad()
        loss = task.metric(scale() * logits + shift, batch).mean()
        loss.backward()
        return loss.item()

    with torch.enable_grad():
        optimizer.step(closure)  # type: ignore[arg-type]
    return Calibration(scale().detach(), shift.detach())


def circuit_logits(model: Transformer, batch: Batch, kept: Kept, means: Mapping[str, Tensor]) -> Tensor:
    """A circuit's logits (b, 1, v) at each row's last token: of the extracted circuit where there is one and it is small."""
    small = sum(int(m.sum()) for m in kept.values()) < 0.5 * sum(len(m) for m in kept.values())
    if not (small and can_extract(model.config, means)):
        return last_logits_by_length(model, batch, keep_only(kept, means))
    circuit = extract(model, kept, means, tokens=batch.tokens)
    return circuit(batch.tokens, mask=None if model.config.causal else batch.mask, only=batch.only)


class Probe:
    """Measures circuits against a target: calibration is fitted on one half of the pairs, the loss taken on the other.

    With `ablation="stochastic"` a circuit that meets the target is also measured with a random half of the other nodes
    frozen, drawn for each pair: one calibration is fitted to both, the loss is the larger of the two, and they must
    not be further apart than `shift`. Every such measurement draws anew, so that a search cannot suit itself to the
    draw; the sequence depends on the seed alone.
    """

    def __init__(
        self,
        model: Transformer,
        task: Task,
        means: Mapping[str, Tensor],
        target: float,
        *,
        ablation: Ablation = "mean",
        shift: float = PruneConfig.shift,
        pairs: int = 256,
        seed: int = 0,
    ):
        self.model, self.task, self.means = model, task, means
        self.target, self.ablation, self.shift = target, ablation, shift
        self.draws = itertools.count(seed)
        self.batch = task.pairs(2 * pairs, seed=seed, split="train").to(model.device)
        self.fit = torch.arange(len(self.batch), device=model.device) < 2 * pairs
        self.fitted, self.scored = self.batch.select(self.fit), self.batch.select(~self.fit)

    @torch.no_grad()
    def __call__(self, kept: Kept) -> Discretized:
        logits = circuit_logits(self.model, self.batch, kept, self.means)
        fitted, scored = logits[self.fit], logits[~self.fit]
        calibration = calibrate(self.task, fitted, self.fitted.last())
        loss, shift = self.loss(calibration(scored), self.scored), 0.0
        if self.ablation == "stochastic" and loss <= self.target:
            draw = next(self.draws)
            partly, partly_scored = (
                partial_logits(self.model, part, kept, self.means, seed=draw)
                for part in (self.fitted, self.scored)
            )
            rows = torch.arange(len(self.fitted), device=fitted.device).repeat(2)
            calibration = calibrate(self.task, torch.cat([fitted, partly]), self.fitted.last().select(rows))
            own = self.loss(calibration(scored), self.scored)
            partial = self.loss(calibration(partly_scored), self.scored)
            loss, shift = max(own, partial), abs(own - partial)
        reached = loss <= self.target and shift <= self.shift
        return Discretized(dict(kept), loss, self.loss(scored, self.scored), reached, calibration, shift)

    def loss(self, logits: Tensor, batch: Batch) -> float:
        """The task's mean loss of logits (b, 1, v)."""
        return self.task.metric(logits, batch.last()).mean().item()

    def ablated(self, kept: Kept) -> float:
        """The task's loss, on the second half, of the model without the circuit."""
        return task_loss(self.model, self.task, self.scored, remove(kept, self.means))


def top_nodes(scores: Mapping[str, Tensor], k: int) -> dict[str, Tensor]:
    """Bool masks (width,) of the `k` nodes of highest score over all sites; of equal ones the first."""
    flat = torch.cat(list(scores.values()))
    mask = torch.zeros(len(flat), dtype=torch.bool, device=flat.device)
    mask[flat.argsort(descending=True, stable=True)[:k]] = True
    return dict(zip(scores, mask.split([len(s) for s in scores.values()]), strict=True))


def discretize(
    scores: Mapping[str, Tensor], probe: Probe, scan: int = 8, *, start: int | None = None
) -> Discretized:
    """The smallest verified number of top nodes whose calibrated loss meets the probe's target.

    The search begins at `start` nodes, or where scores are masks' parameters at the positive ones.

    If nothing up to the whole model does, the one of least loss is returned, with `reached=False`.
    """
    total = sum(len(s) for s in scores.values())
    seen: dict[int, Discretized] = {}

    def reached(k: int) -> bool:
        if k not in seen:
            seen[k] = probe(top_nodes(scores, k))
        return seen[k].reached

    # Start near what training kept, where the ranking means most; double until the target is met.
    low, high = 0, min(total, max(1, start or int(sum((s > 0).sum() for s in scores.values()))))
    while not reached(high) and high < total:
        low, high = high, min(2 * high, total)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    for k in range(max(1, high - scan), high):
        reached(k)
    best = min(seen, key=lambda k: (not seen[k].reached, k if seen[k].reached else seen[k].loss))
    return seen[best]
