"""Causal tracing: noise on the embedding, and how much of the answer each node's clean write brings back.

Meng et al., 2022.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from pellucid.core.edges import edge_table
from pellucid.core.taps import Tap
from pellucid.core.transformer import Transformer
from pellucid.lab.fills import Ablation, Writes, check_differ, clean_writes, writer_index
from pellucid.lab.patch import draw, stacked
from pellucid.lab.scores import Scores
from pellucid.tasks.task import Task


class Restore(Tap):
    """Adds `noise` (b, t, d) to the embedding; in copy i of a stacked batch, writer `writers[i]` writes what it does clean."""

    def __init__(self, model: Transformer, noise: Tensor, clean: Writes, writers: Sequence[int | None]):
        self.noise, self.clean, self.copies, self.index = noise, clean, len(writers), writer_index(model)
        self.copy = {writer: copy for copy, writer in enumerate(writers) if writer is not None}
        super().__init__({"embed"} | {edge_table(model.config).writers[writer][0] for writer in self.copy})

    def __call__(self, site: str, x: Tensor) -> Tensor:
        stacked = x.unflatten(0, (self.copies, -1)).clone()
        if site == "embed":
            stacked += self.noise
        for head, writer in enumerate(self.index[site]):
            if writer in self.copy:
                place = (..., head, slice(None)) if x.dim() == 4 else ...
                stacked[self.copy[writer]][place] = self.clean[site][place]
        return stacked.flatten(0, 1)


@torch.no_grad()
def trace(
    model: Transformer,
    task: Task,
    *,
    pairs: int = 64,
    seed: int = 0,
    ablation: Ablation = "resample",
    noise: float = 3.0,
    draws: int = 4,
) -> Scores:
    """By how much restoring a node's clean write lowers the metric of the noised run, mean over rows and draws.

    Normal noise of `noise` standard deviations of the embedding, on the tokens in which a pair differs. Noise stands in
    for the corrupt input: `ablation` changes nothing. Restoring is no ablation, so there are no `effects`.
    Raises `ValueError` for less than one draw, for noise that is not positive, and for pairs that never differ.
    """
    if draws < 1 or not noise > 0:
        raise ValueError(f"noise must be positive and draws at least 1, got noise={noise} and draws={draws}")
    batch, _ = draw(model, task, pairs, seed)
    check_differ(batch)
    clean = clean_writes(model, batch)
    differs = ((batch.tokens != batch.corrupt) | (batch.mask != batch.corrupt_mask)) & batch.mask
    size = noise * clean["embed"][batch.mask].std()
    generator = torch.Generator().manual_seed(seed)
    writers: list[int | None] = [None, *range(len(edge_table(model.config).writers))]
    found = []
    for _ in range(draws):
        drawn = torch.randn(clean["embed"].shape, generator=generator).to(clean["embed"])
        added = drawn * size * differs[..., None]
        found.append(stacked(model, batch, task.metric, writers, partial(Restore, model, added, clean)))
    metric = torch.stack(found).mean((0, 2))
    return Scores("node", (metric[0] - metric[1:]).abs().float().cpu(), 1.0 + draws * len(writers))
