"""ACDC: from the output backwards, every edge is cut whose loss hardly changes the task's loss (Conmy et al., 2023)."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from pellucid.core.edges import EdgeTap, edge_table
from pellucid.core.taps import Tap
from pellucid.core.transformer import Transformer
from pellucid.lab.ablate import all_logits
from pellucid.lab.fills import Ablation, Writes, fills
from pellucid.lab.patch import TOKENS, draw
from pellucid.lab.paths import fed, on_a_path, silent
from pellucid.lab.scores import Scores
from pellucid.tasks.task import Pairs, Task, learning_loss

THRESHOLDS = (1e-4, 1e-3, 1e-2, 1e-1)
Keep = Callable[[Writes, Tensor], Tap]
Losses = Callable[[Tensor], Tensor]
"""Masks (n, readers, writers) -> (n,): the mean loss of the model with the other edges cut."""


@torch.no_grad()
def acdc(
    model: Transformer,
    task: Task,
    *,
    pairs: int = 64,
    seed: int = 0,
    ablation: Ablation = "resample",
    threshold: float = 0.01,
    thresholds: Sequence[float] = THRESHOLDS,
) -> Scores:
    """An edge's score is by how much cutting it raises the loss, in the run of the largest threshold that kept it.

    `kept` is the circuit of `threshold`. The loss is the task's `learning_loss`, a mean over rows. Edges are tried from
    the last reader and writer backwards; one that raises the loss of what is left by less than the threshold is cut.
    Raises `ValueError` for a threshold that is not positive.
    """
    levels = sorted({*thresholds, threshold})
    if levels[0] <= 0:
        raise ValueError(f"thresholds must be positive, got {levels[0]}")
    batch, pool = draw(model, task, pairs, seed)
    replaced = fills(model, batch, ablation, pool)
    measured = Measured(model, task, batch, replaced, partial(EdgeTap, model.config))
    runs = cut_backwards(model, measured, levels)
    kept = on_a_path(model.config, runs.kept, from_embedding=silent(batch, ablation)).cpu()
    above = torch.tensor([*levels[1:], torch.inf])[:, None, None]
    values = (kept * runs.raised.float().cpu().minimum(above)).amax(0)
    return Scores("edge", values, 2 + measured.passes, kept=kept[levels.index(threshold)])


class Measured:
    """The mean `learning_loss` of masks, and in `passes` how many forward passes it took.

    `tap` makes of a batch's ablated writes and of masks (b, ...) what keeps so much of every part.
    """

    def __init__(self, model: Transformer, task: Task, batch: Pairs, replaced: Writes, tap: Keep):
        self.model, self.loss, self.batch, self.replaced, self.tap = (
            model,
            learning_loss(task),
            batch,
            replaced,
            tap,
        )
        self.passes = 0.0

    @torch.no_grad()
    def __call__(self, keep: Tensor) -> Tensor:
        """Masks (n, ...) -> (n,), many in one forward pass."""
        self.passes += len(keep)
        parts = keep.to(self.model.wte.weight).split(max(1, TOKENS // self.batch.tokens.numel()))
        return torch.cat([self.together(part) for part in parts])

    def together(self, keep: Tensor) -> Tensor:
        n, b = len(keep), len(self.batch)
        copies, rows = self.batch.repeat(n), torch.arange(b, device=keep.device).repeat(n)
        tap = self.tap({site: x[rows] for site, x in self.replaced.items()}, keep.repeat_interleave(b, 0))
        return self.loss(all_logits(self.model, copies, tap), copies).view(n, -1).mean(1)


class Runs:
    """One search for each threshold, side by side: what is `kept`, and by how much cutting a kept edge `raised` the loss."""

    def __init__(self, levels: Sequence[float], exists: Tensor, whole: Tensor):
        n = len(levels)
        self.levels, self.loss = list(levels), [float(whole)] * n
        self.kept = exists.expand(n, *exists.shape).clone()
        self.raised = torch.zeros(n, *exists.shape)


def cut_backwards(model: Transformer, losses: Losses, levels: Sequence[float]) -> Runs:
    """ACDC's search. All edges left of a reader are cut one more at a time, in one batch; the first cut that costs too
    much is undone, and the rest tried again: the same as one edge after the other, in fewer forward passes."""
    exists, feeds = edge_table(model.config).exists, fed(model.config)
    runs = Runs(levels, exists, losses(exists[None])[0])
    for reader in reversed(range(len(feeds))):
        writer = feeds[reader]
        left: list[list[int]] = []
        for kept in runs.kept:
            if writer is not None and not kept[:, writer].any():
                kept[reader] = False  # nothing that counts reads what this reader feeds
            left.append(kept[reader].nonzero().flatten().tolist()[::-1])
        while any(left):
            masks = [prefixes(kept, reader, todo) for kept, todo in zip(runs.kept, left, strict=True)]
            found = losses(torch.cat(masks)).tolist()
            for run, todo in enumerate(left):
                mine, found = found[: len(todo)], found[len(todo) :]
                left[run] = accept(runs, run, reader, todo, mine)
    return runs


def prefixes(kept: Tensor, reader: int, todo: Sequence[int]) -> Tensor:
    """(edges, readers, writers): the circuit without the first, the first two, ... of a reader's edges."""
    masks = kept.repeat(len(todo), 1, 1)
    for count, writer in enumerate(todo):
        masks[count:, reader, writer] = False
    return masks


def accept(runs: Runs, run: int, reader: int, todo: Sequence[int], losses: Sequence[float]) -> list[int]:
    """Cut edges up to the first that costs at least the threshold; returns those that come after it."""
    for count, (writer, loss) in enumerate(zip(todo, losses, strict=True)):
        raised = loss - runs.loss[run]
        if raised >= runs.levels[run]:
            runs.raised[run, reader, writer] = raised
            return list(todo[count + 1 :])
        runs.kept[run, reader, writer] = False
        runs.loss[run] = loss
    return []
