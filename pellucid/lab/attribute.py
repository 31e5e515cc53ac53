"""Attribution: what ablating each edge, or node, would do to the task's metric, to first order, from a few backward passes.

An edge's effect is the metric's gradient at its reader times what ablation changes in its writer's write. EAP takes the
gradient on the clean run; integrated gradients average it along a path to the ablated one; the query-key fix computes the
softmax exactly.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pellucid.core.attention import allowed_keys
from pellucid.core.edges import edge_table
from pellucid.core.record import record
from pellucid.core.taps import LiveTap, Recorder, Tap, chain
from pellucid.core.transformer import Attention, Run, Transformer
from pellucid.lab.ablate import all_logits
from pellucid.lab.fills import Ablation, by_writer, clean_writes, fills, real, writer_index
from pellucid.lab.patch import draw
from pellucid.lab.scores import Scores, estimated
from pellucid.tasks.task import Pairs, Task

NUMBERS = 2**26
"""Gradient entries held at once."""
BACKWARD = 3.0
"""Forward passes that a forward and a backward pass cost."""

Move = tuple[int, float]
"""A writer, and which share of the way to its ablated write it is moved."""


class Slope(Tap):
    """In copy i of a stacked batch, moves one writer by a share of `difference` (writers, b, t, d).

    `leaves` hold a zero, added at every reader and at the sites in `beside`, at which to take gradients.
    """

    def __init__(
        self, model: Transformer, difference: Tensor, moves: Sequence[Move], beside: Sequence[str] = ()
    ):
        table = edge_table(model.config)
        self.index, self.difference = writer_index(model), difference
        self.shares = difference.new_zeros(len(moves), len(table.writers))
        for copy, (writer, share) in enumerate(moves):
            self.shares[copy, writer] = share
        self.leaves: dict[str, Tensor] = {}
        moved = {table.writers[writer][0] for writer, share in moves if share}
        super().__init__(moved | {site for site, _ in table.readers} | set(beside))

    def __call__(self, site: str, x: Tensor) -> Tensor:
        if site in self.index:
            writers = self.index[site]
            step = torch.einsum("cw,wbtd->cbtwd", self.shares[:, writers], self.difference[writers])
            return x + step.flatten(0, 1).view_as(x)
        leaf = self.leaves[site] = x.new_zeros(x.shape).requires_grad_()
        return x + leaf


@torch.enable_grad()
def gradients(
    model: Transformer,
    task: Task,
    batch: Pairs,
    difference: Tensor,
    moves: Sequence[Move],
    beside: Sequence[str] = (),
) -> dict[str, Tensor]:
    """The gradient of each row's metric at every reader's site and those in `beside`, the moves stacked as rows."""
    tap, copies = Slope(model, difference, moves, beside), batch.repeat(len(moves))
    metric = task.metric(all_logits(model, copies, tap), copies).sum()
    return dict(zip(tap.leaves, torch.autograd.grad(metric, list(tap.leaves.values())), strict=True))


def products(model: Transformer, found: dict[str, Tensor], difference: Tensor) -> Tensor:
    """(moves, readers, writers): gradient at each reader times each writer's difference, mean over rows."""
    sites = dict.fromkeys(site for site, _ in edge_table(model.config).readers)
    by_reader = [
        x for site in sites for x in (found[site].unbind(2) if found[site].dim() == 4 else [found[site]])
    ]
    stacked = torch.stack(by_reader).unflatten(1, (-1, difference.shape[1]))
    return torch.einsum("rcbtd,wbtd->crw", stacked, difference) / difference.shape[1]


def slopes(model: Transformer, task: Task, batch: Pairs, difference: Tensor, moves: Sequence[Move]) -> Tensor:
    """`products` of all moves, as many in one run as memory allows."""
    size = max(1, NUMBERS // (len(edge_table(model.config).readers) * difference[0].numel()))
    parts = [moves[start : start + size] for start in range(0, len(moves), size)]
    return torch.cat(
        [products(model, gradients(model, task, batch, difference, part), difference) for part in parts]
    )


def changes(
    model: Transformer, task: Task, pairs: int, seed: int, ablation: Ablation
) -> tuple[Pairs, Tensor]:
    """The pairs that a method is measured on, and by how much ablation changes every write, (writers, b, t, d)."""
    batch, pool = draw(model, task, pairs, seed)
    clean = by_writer(model, clean_writes(model, batch))
    return batch, by_writer(model, fills(model, batch, ablation, pool)) - clean


def edge_scores(model: Transformer, effects: Tensor, passes: float) -> Scores:
    """Scores of the edges that exist."""
    effects = effects.float().cpu()
    return estimated("edge", effects.where(edge_table(model.config).exists, 0), passes)


def eap(
    model: Transformer, task: Task, *, pairs: int = 64, seed: int = 0, ablation: Ablation = "resample"
) -> Scores:
    """Edge attribution patching: gradient on the clean run times the writer's difference (Syed et al., 2023)."""
    batch, difference = changes(model, task, pairs, seed, ablation)
    return edge_scores(model, slopes(model, task, batch, difference, [(0, 0.0)])[0], 2 + BACKWARD)


def atp(
    model: Transformer, task: Task, *, pairs: int = 64, seed: int = 0, ablation: Ablation = "resample"
) -> Scores:
    """Attribution patching of nodes: gradient at the write times its difference (Nanda, 2023).

    The write is read by all later readers, so this is the sum over its edges.
    """
    batch, difference = changes(model, task, pairs, seed, ablation)
    effects = slopes(model, task, batch, difference, [(0, 0.0)])[0]
    effects = effects.where(edge_table(model.config).exists.to(effects.device), 0).sum(0)
    return estimated("node", effects.float().cpu(), 2 + BACKWARD)


def eap_ig_inputs(
    model: Transformer,
    task: Task,
    *,
    pairs: int = 64,
    seed: int = 0,
    ablation: Ablation = "resample",
    steps: int = 20,
) -> Scores:
    """EAP with the gradient averaged as the embedding moves from clean to ablated (Hanna et al., 2024).

    Over the edges out of the embedding, effects sum to what ablating the embedding does (completeness), as far as the
    midpoint rule of so many steps has converged.
    """
    batch, difference = changes(model, task, pairs, seed, ablation)
    moves = [(0, share) for share in midpoints(steps)]
    effects = slopes(model, task, batch, difference, moves).mean(0)
    return edge_scores(model, effects, 2 + BACKWARD * len(moves))


def eap_ig_activations(
    model: Transformer,
    task: Task,
    *,
    pairs: int = 64,
    seed: int = 0,
    ablation: Ablation = "resample",
    steps: int = 5,
) -> Scores:
    """EAP with the gradient averaged as the edge's own writer moves from clean to ablated, everything later responding.

    Over the edges out of each writer, effects sum to what ablating that writer does. It costs writers * steps runs.
    """
    batch, difference = changes(model, task, pairs, seed, ablation)
    shares = midpoints(steps)
    moves = [(writer, share) for writer in range(len(difference)) for share in shares]
    each = slopes(model, task, batch, difference, moves).unflatten(0, (len(difference), steps)).mean(1)
    effects = each.diagonal(dim1=0, dim2=2)
    return edge_scores(model, effects, 2 + BACKWARD * len(moves))


def midpoints(steps: int) -> list[float]:
    """The middles of so many equal parts of 0..1."""
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    return [(step + 0.5) / steps for step in range(steps)]


def eap_query_key(
    model: Transformer, task: Task, *, pairs: int = 64, seed: int = 0, ablation: Ablation = "resample"
) -> Scores:
    """EAP, but edges into queries and keys change the attention pattern exactly (AtP*, Kramar et al., 2024).

    Their effect is the gradient at the head's mix times by how much the mix changes with the edge cut. It costs one
    attention sublayer for each writer before it, twice.
    """
    batch, difference = changes(model, task, pairs, seed, ablation)
    rows = {place: row for row, place in enumerate(edge_table(model.config).readers)}
    attentions = [block.attn for block in model.blocks if block.attn is not None]
    sublayers = sum(bool(layer.heads) + bool(layer.d_mlp) for layer in model.config.layers)
    mixes, streams = ([attn.name(site) for attn in attentions] for site in ("attn.mix", "resid.pre"))
    values = record(model, batch.tokens, [*mixes, *streams], mask=real(model, batch.mask))
    slope = gradients(model, task, batch, difference, [(0, 0.0)], mixes)
    effects, passes = products(model, slope, difference)[0], 3 + BACKWARD
    differs = difference.flatten(1).any(
        1
    )  # where nothing does, two runs that round differently would say otherwise
    for attn, mix, stream in zip(attentions, mixes, streams, strict=True):
        for side in ("q", "k"):
            site = attn.name(f"attn.{side}.read")
            before = int(edge_table(model.config).exists[rows[site, 0]].sum())
            moved = moved_mixes(model, attn, site, values[stream], batch, difference[:before])
            effect = ((moved - values[mix]) * slope[mix]).sum((1, 2)) / len(batch)
            for head, part in enumerate(effect.split(attn.sizes, dim=-1)):
                effects[rows[site, head], :before] = part.sum(-1) * differs[:before]
            passes += before / sublayers
    return edge_scores(model, effects, passes)


@torch.no_grad()
def moved_mixes(
    model: Transformer, attn: Attention, site: str, stream: Tensor, batch: Pairs, difference: Tensor
) -> Tensor:
    """(writers, b, t, a): all heads' mixes in one attention where the readers at `site` get one writer's difference."""
    mix, found = attn.name("attn.mix"), []
    for part in difference.split(max(1, NUMBERS // (stream.numel() * attn.h))):
        mask = real(model, batch.mask.repeat(len(part), 1))
        added = part.flatten(0, 1)[:, :, None]
        recorder = Recorder([mix])
        tap = chain(Tap.at(lambda _, x, added=added: x + added, [site]), recorder)
        position = model.positions(mask, 0, stream.shape[1]) if model.config.d_position else None
        allowed = None if mask is None else allowed_keys(mask, stream.shape[1], model.config.causal)
        attn(stream.repeat(len(part), 1, 1), Run(LiveTap(tap, model.config), allowed, None, position))
        found.append(recorder.values[mix].unflatten(0, (len(part), -1)))
    return torch.cat(found)
