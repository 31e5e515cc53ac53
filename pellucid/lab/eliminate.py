"""Backward elimination: remove from a circuit what it does not need.

Learned masks leave nodes with next to no effect, which the seed removes by hand (weight-sparse transformers, section
3.2). Here it is a rule, the same for every model: freeze the nodes that cost least, most of them first, as long as the
circuit stays sufficient, with a loss within half its target (or where it was), and necessary: freezing it must still
leave the rest of the model no better than chance (or than it was). Without the two bounds elimination goes on to
circuits that do worse on held-out pairs, and whose leftovers do some of the task.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pellucid.core.taps import Mask
from pellucid.core.transformer import Transformer
from pellucid.lab.ablate import Kept, last_logits
from pellucid.lab.discretize import Calibration, Discretized, Probe
from pellucid.lab.extract import can_extract, extract
from pellucid.tasks.task import Batch, Task

AT_ONCE = 16
"""Candidates whose masks are stacked on the batch axis in one forward pass."""
CANDIDATES = 128
"""Nodes that are tried one by one in each round: those of least attribution."""

NECESSARY = 1.03
"""A circuit is necessary if the model without it has at least so many times the loss of guessing."""

Place = tuple[str, int]


def eliminate(
    model: Transformer,
    task: Task,
    means: Mapping[str, Tensor],
    found: Discretized,
    probe: Probe,
    strata: Sequence[Batch],
    rounds: int = 8,
) -> Discretized:
    """`found` with the nodes removed that it does not need, by rounds of trying each node and removing the cheapest.

    `probe` measures a circuit with its calibration fitted anew; `strata` are batches that single removals are
    measured on. A circuit that misses its target is returned as it is.
    """
    if not found.reached:
        return found
    nothing = probe({site: torch.zeros_like(mask) for site, mask in found.kept.items()})
    most, least = (
        max(found.loss, probe.target / 2),
        min(NECESSARY * nothing.loss, 0.99 * probe.ablated(found.kept)),
    )

    def holds(trial: Discretized) -> bool:
        return trial.reached and trial.loss <= most and probe.ablated(trial.kept) >= least

    for _ in range(rounds):
        candidates = least_attributed(model, task, means, found, strata)[:CANDIDATES]
        if not candidates:
            return found
        cost = removal_losses(model, task, means, found.kept, found.calibration, candidates, strata)
        order = [candidates[i] for i in cost.argsort(stable=True).tolist()]
        n, smaller = max(1, len(order) // 4), None
        while n >= 1 and smaller is None:
            trial = probe(without(found.kept, order[:n]))
            smaller, n = trial if holds(trial) else None, n // 2
        if smaller is None:
            return found
        found = smaller
    return found


def without(kept: Kept, places: Sequence[Place]) -> dict[str, Tensor]:
    """The circuit less some nodes."""
    out = {site: mask.clone() for site, mask in kept.items()}
    for site, channel in places:
        out[site][channel] = False
    return out


def least_attributed(
    model: Transformer, task: Task, means: Mapping[str, Tensor], found: Discretized, strata: Sequence[Batch]
) -> list[Place]:
    """The circuit's nodes, those first whose removal raises the loss least to first order: minus the mask's gradient."""
    gates = {site: mask.to(model.wte.weight).requires_grad_() for site, mask in found.kept.items()}
    with torch.enable_grad():
        losses = [
            task.metric(found.calibration(last_logits(model, batch, Mask(gates, means))), batch.last()).mean()
            for batch in strata
        ]
        grads = torch.autograd.grad(torch.stack(losses).mean(), list(gates.values()))
    places = [(site, c) for site, mask in found.kept.items() for c in mask.nonzero()[:, 0].tolist()]
    rise = torch.cat([-g[mask] for g, mask in zip(grads, found.kept.values(), strict=True)])
    return [places[i] for i in rise.argsort(stable=True).tolist()]


@torch.no_grad()
def removal_losses(
    model: Transformer,
    task: Task,
    means: Mapping[str, Tensor],
    kept: Kept,
    calibration: Calibration,
    candidates: Sequence[Place],
    strata: Sequence[Batch],
) -> Tensor:
    """The circuit's loss without each of `candidates` alone (candidates,), its logits recalibrated as they are."""
    if can_extract(model.config, means):
        each = [
            extracted_loss(model, task, means, without(kept, [c]), calibration, strata) for c in candidates
        ]
        return torch.tensor(each, device=model.device)
    losses = [torch.zeros(0, device=model.device)]
    for start in range(0, len(candidates), AT_ONCE):
        some = candidates[start : start + AT_ONCE]
        masks = {site: mask.to(model.wte.weight).repeat(len(some), 1) for site, mask in kept.items()}
        for row, (site, channel) in enumerate(some):
            masks[site][row, channel] = 0
        total = torch.zeros(len(some), device=model.device)
        for batch in strata:
            stacked = {site: m.repeat_interleave(len(batch), dim=0)[:, None] for site, m in masks.items()}
            many = batch.repeat(len(some))
            logits = last_logits(model, many, Mask(stacked, means))
            total += task.metric(calibration(logits), many.last()).view(len(some), -1).mean(1)
        losses.append(total / len(strata))
    return torch.cat(losses)


def extracted_loss(
    model: Transformer,
    task: Task,
    means: Mapping[str, Tensor],
    kept: Kept,
    calibration: Calibration,
    strata: Sequence[Batch],
) -> float:
    """The mean over `strata` of a circuit's loss, extracted."""
    tokens = torch.cat([batch.tokens.flatten() for batch in strata])
    circuit = extract(model, kept, means, tokens=tokens)
    losses = [
        task.metric(
            calibration(
                circuit(batch.tokens, mask=None if model.config.causal else batch.mask, only=batch.only)
            ),
            batch.last(),
        ).mean()
        for batch in strata
    ]
    return torch.stack(losses).mean().item()
