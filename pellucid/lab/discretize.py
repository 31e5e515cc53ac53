"""From ranked nodes to a circuit: the fewest top nodes that meet a target loss, their logits recalibrated.

Weight-sparse transformers, A.5. The loss is not monotone in the number of nodes, so a scan follows the bisection.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pellucid.core.transformer import Transformer
from pellucid.lab.ablate import Kept, keep_only, last_logits_by_length, remove, task_loss
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
    """The kept nodes, the loss that they were chosen by, whether that meets the target, and the calibration."""

    kept: dict[str, Tensor]
    loss: float
    reached: bool
    calibration: Calibration


def calibrate(task: Task, logits: Tensor, batch: Batch, steps: int = 16) -> Calibration:
    """A scale and a shift of the logits (b, 1, v) that minimise the task's loss, by LBFGS."""
    scale = torch.ones((), device=logits.device, requires_grad=True)
    shift = torch.zeros(logits.shape[-1], device=logits.device, requires_grad=True)
    optimizer = torch.optim.LBFGS([scale, shift], max_iter=steps, line_search_fn="strong_wolfe")

    def closure() -> float:
        optimizer.zero_grad()
        loss = task.metric(scale * logits + shift, batch).mean()
        loss.backward()
        return loss.item()

    with torch.enable_grad():
        optimizer.step(closure)  # type: ignore[arg-type]
    return Calibration(scale.detach(), shift.detach())


class Probe:
    """Measures circuits against a target: calibration is fitted on one half of the pairs, the loss taken on the other."""

    def __init__(
        self,
        model: Transformer,
        task: Task,
        means: Mapping[str, Tensor],
        target: float,
        *,
        pairs: int = 256,
        seed: int = 0,
    ):
        self.model, self.task, self.means, self.target = model, task, means, target
        self.batch = task.pairs(2 * pairs, seed=seed, split="train").to(model.device)
        self.fit = torch.arange(len(self.batch), device=model.device) < 2 * pairs
        self.fitted, self.scored = self.batch.select(self.fit), self.batch.select(~self.fit)

    @torch.no_grad()
    def __call__(self, kept: Kept) -> Discretized:
        logits = last_logits_by_length(self.model, self.batch, keep_only(kept, self.means))
        calibration = calibrate(self.task, logits[self.fit], self.fitted.last())
        loss = self.task.metric(calibration(logits[~self.fit]), self.scored.last()).mean().item()
        return Discretized(dict(kept), loss, loss <= self.target, calibration)

    def ablated(self, kept: Kept) -> float:
        """The task's loss, on the second half, of the model without the circuit."""
        return task_loss(self.model, self.task, self.scored, remove(kept, self.means))


def top_nodes(scores: Mapping[str, Tensor], k: int) -> dict[str, Tensor]:
    """Bool masks of the `k` nodes of highest score over all sites; of equal ones the first."""
    flat = torch.cat(list(scores.values()))
    mask = torch.zeros(len(flat), dtype=torch.bool, device=flat.device)
    mask[flat.argsort(descending=True, stable=True)[:k]] = True
    return dict(zip(scores, mask.split([len(s) for s in scores.values()]), strict=True))


def discretize(scores: Mapping[str, Tensor], probe: Probe, scan: int = 8) -> Discretized:
    """The smallest verified number of top nodes whose calibrated loss meets the probe's target.

    If nothing up to the whole model does, the one of least loss is returned, with `reached=False`.
    """
    total = sum(len(s) for s in scores.values())
    seen: dict[int, Discretized] = {}

    def reached(k: int) -> bool:
        if k not in seen:
            seen[k] = probe(top_nodes(scores, k))
        return seen[k].reached

    # Start near what training kept, where the ranking means most; double until the target is met.
    low, high = 0, max(1, int(sum((s > 0).sum() for s in scores.values())))
    while not reached(high) and high < total:
        low, high = high, min(2 * high, total)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    for k in range(max(1, high - scan), high):
        reached(k)
    best = min(seen, key=lambda k: (not seen[k].reached, k if seen[k].reached else seen[k].loss))
    return seen[best]
