"""Edge pruning: a gate on every edge, learned by gradient, so that few edges do what the whole model does.

Bhaskar et al., 2024, with HardConcrete gates (Louizos et al., 2018). `learn` serves masks on nodes too.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pellucid.core.edges import EdgeTap, edge_table
from pellucid.core.taps import Tap
from pellucid.core.transformer import Transformer
from pellucid.lab.ablate import all_logits
from pellucid.lab.acdc import Keep, Measured
from pellucid.lab.fills import Ablation, Writes, fills
from pellucid.lab.gates import Gate, HardConcreteGate
from pellucid.lab.patch import draw
from pellucid.lab.paths import on_a_path, silent
from pellucid.lab.scores import Scores
from pellucid.tasks.task import Pairs, Task, learning_loss
from pellucid.training.schedules import warmup_decay


@dataclass(frozen=True, kw_only=True)
class MaskConfig:
    """How masks are learned."""

    penalties: tuple[float, ...] = (1e-3, 1e-2, 1e-1)
    """One try for each: the loss that one more open gate must save."""

    steps: int = 300
    """Optimiser steps, all tries at once."""

    batch: int = 16
    """Pairs in a step."""

    lr: float = 0.015
    """Of Adam on the parameters; it falls linearly to 0."""

    init: float = 0.5
    """The parameters at first: gates are mostly open."""

    target: float = 0.05
    """By how much the loss of the proposed circuit may be above that of the whole model."""

    def __post_init__(self):
        object.__setattr__(self, "penalties", tuple(self.penalties))
        if not self.penalties:
            raise ValueError("penalties must name at least one try")
        for name in ("steps", "batch", "lr", "init", "target"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


def edge_masks(
    model: Transformer,
    task: Task,
    *,
    pairs: int = 64,
    seed: int = 0,
    ablation: Ablation = "resample",
    config: MaskConfig | None = None,
) -> Scores:
    """An edge's score is its mask parameter, the mean over tries and the learning's second half.

    `kept` are the fewest edges of largest score that reach the target with all others cut, but for those that lie on no
    path to the output.
    """
    exists = edge_table(model.config).exists.to(model.device)

    def on_edges(gates: Tensor) -> Tensor:
        keep = gates.new_zeros(len(gates), *exists.shape)
        keep[:, exists] = gates
        return keep

    def tap(replaced: Writes, gates: Tensor) -> Tap:
        return EdgeTap(model.config, replaced, on_edges(gates))

    config, parts = config or MaskConfig(), int(exists.sum())
    drawn = draw(model, task, pairs, seed)
    learned = learn(model, task, HardConcreteGate(), tap, parts, config, drawn, seed, ablation)
    values, kept = (on_edges(x[None])[0].cpu() for x in (learned.values, learned.kept))
    kept = on_a_path(model.config, kept, from_embedding=silent(drawn[0], ablation))
    return Scores("edge", values.float(), learned.passes, kept=kept)


@dataclass(frozen=True)
class Learned:
    """Scores of all parts (parts,), those of the circuit (parts,), and what it cost in forward passes."""

    values: Tensor
    kept: Tensor
    passes: float


@torch.enable_grad()
def learn(
    model: Transformer,
    task: Task,
    gate: Gate,
    tap: Keep,
    parts: int,
    config: MaskConfig,
    drawn: tuple[Pairs, Pairs],
    seed: int,
    ablation: Ablation,
) -> Learned:
    """Learn a gate for each part by the task's `learning_loss` and a penalty on open gates, all tries on the batch axis."""
    batch, pool = drawn
    pairs, replaced = len(batch) // 2, fills(model, batch, ablation, pool)
    loss, tries, n = learning_loss(task), len(config.penalties), min(config.batch, pairs)
    order, noise = (torch.Generator().manual_seed(seed) for _ in range(2))
    parameters = model.wte.weight.new_full((tries, parts), config.init).requires_grad_()
    penalties = parameters.new_tensor(config.penalties)
    optimizer = torch.optim.Adam([parameters], lr=config.lr, betas=(0.9, 0.99))
    total, half = torch.zeros_like(parameters), config.steps // 2
    for step in range(config.steps):
        chosen = torch.randperm(pairs, generator=order)[:n].to(model.device)
        rows = torch.stack([2 * chosen, 2 * chosen + 1], 1).flatten().repeat(tries)
        gates, sizes = gate(parameters[:, None].expand(-1, 2 * n, -1), noise)
        part = batch.select(rows)
        logits = all_logits(model, part, tap({s: x[rows] for s, x in replaced.items()}, gates.flatten(0, 1)))
        losses = loss(logits, part).view(tries, -1).mean(1)
        objective = (losses + penalties * sizes.mean(1).sum(1)).sum()
        (parameters.grad,) = torch.autograd.grad(objective, [parameters])
        optimizer.param_groups[0]["lr"] = config.lr * warmup_decay(step, config.steps, warmup=0.0, final=0.0)
        optimizer.step()
        with torch.no_grad():
            gate.bound(parameters)
            if step >= half:
                total += parameters
    values = total.mean(0) / (config.steps - half)
    losses = Measured(model, task, batch, replaced, tap)
    kept = fewest(values, losses, config.target)
    return Learned(values, kept, 2 + 3 * config.steps * tries * n / pairs + losses.passes)


def fewest(values: Tensor, losses: Measured, target: float) -> Tensor:
    """The fewest parts of largest value, bool (parts,), whose loss is within `target` of that of all, by bisection."""
    place = values.argsort(descending=True, stable=True).argsort()
    low, high = -1, len(values)
    most = losses((place < high)[None]).item() + target
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if losses((place < middle)[None]).item() <= most else (middle, high)
    return place < high
