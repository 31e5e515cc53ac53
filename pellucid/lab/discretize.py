"""From ranked nodes to a circuit: the fewest top nodes that meet a target loss, their logits recalibrated.

Weight-sparse transformers, A.5. The loss is not monotone in the number of nodes, so a scan follows the bisection.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pellucid.core.transformer import Transformer
from pellucid.lab.ablate import keep_only, last_logits_by_length
from pellucid.tasks.task import Batch, Task


@dataclass(frozen=True)
class Calibration:
    """`scale * logits + shift`, shift (v,): what makes a circuit's confidence right."""

    scale: Tensor
    shift: Tensor


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


def calibrated_loss(task: Task, logits: Tensor, batch: Batch, calibration: Calibration) -> float:
    """The task's loss on recalibrated logits."""
    return task.metric(calibration.scale * logits + calibration.shift, batch).mean().item()


def top_nodes(scores: Mapping[str, Tensor], k: int) -> dict[str, Tensor]:
    """Bool masks of the `k` nodes of highest score over all sites; of equal ones the first."""
    flat = torch.cat(list(scores.values()))
    mask = torch.zeros(len(flat), dtype=torch.bool, device=flat.device)
    mask[flat.argsort(descending=True, stable=True)[:k]] = True
    return dict(zip(scores, mask.split([len(s) for s in scores.values()]), strict=True))


@torch.no_grad()
def discretize(
    model: Transformer,
    task: Task,
    means: Mapping[str, Tensor],
    scores: Mapping[str, Tensor],
    target: float,
    *,
    pairs: int = 256,
    seed: int = 0,
    scan: int = 8,
) -> Discretized:
    """The smallest verified number of top nodes whose calibrated loss is at most `target`.

    Calibration is fitted on one half of fresh training pairs, the loss measured on the other. If nothing up to the
    whole model reaches the target, the best found is returned with `reached=False`.
    """
    batch = task.pairs(2 * pairs, seed=seed, split="train").to(model.device)
    rows = torch.arange(len(batch.tokens), device=model.device)
    fit, score = rows < 2 * pairs, rows >= 2 * pairs
    total = sum(len(s) for s in scores.values())
    seen: dict[int, Discretized] = {}

    def probe(k: int) -> Discretized:
        if k not in seen:
            kept = top_nodes(scores, k)
            logits = last_logits_by_length(model, batch, keep_only(kept, means))
            calibration = calibrate(task, logits[fit], batch.select(fit).last())
            loss = calibrated_loss(task, logits[score], batch.select(score).last(), calibration)
            seen[k] = Discretized(kept, loss, loss <= target, calibration)
        return seen[k]

    # Start near what training kept, where the ranking means most; double until the target is met.
    low, high = 0, max(1, int(sum((s > 0).sum() for s in scores.values())))
    while not probe(high).reached and high < total:
        low, high = high, min(2 * high, total)
    while high - low > 1:
        middle = (low + high) // 2
        if probe(middle).reached:
            high = middle
        else:
            low = middle
    for k in range(max(1, high - scan), high):
        probe(k)
    best = min(seen, key=lambda k: (not seen[k].reached, k if seen[k].reached else seen[k].loss))
    return seen[best]
