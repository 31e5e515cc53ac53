"""Exact patching: what ablating one edge, or one node, does to the task, measured by running the model.

All of a model's edges are stacked on the batch axis, so that one forward pass measures many.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pellucid.core.edges import edge_table
from pellucid.core.taps import Recorder, Tap
from pellucid.core.transformer import Transformer
from pellucid.core.weights import read_matrices
from pellucid.lab.ablate import all_logits, last_logits
from pellucid.lab.fills import Ablation, Writes, by_writer, clean_writes, fills, real, writer_index
from pellucid.lab.scores import Scores, estimated
from pellucid.tasks.task import Pairs, Task

Measure = Callable[[Tensor, Any], Tensor]
"""Logits and the batch -> (b, ...)."""
Readers = Sequence[tuple[str, int | None]]
"""Those of the edge table: (site, head)."""
TOKENS = 65_536
"""Tokens in one forward pass."""


class Nudge(Tap):
    """In copy i of a stacked batch, adds `difference[writer]` (b, t, d) at one reader: the edge `places[i]` is cut."""

    def __init__(self, readers: Readers, places: Sequence[tuple[int, int]], difference: Tensor):
        self.difference, self.copies = difference, len(places)
        self.at: dict[str, list[tuple[int, int | None, int]]] = {}
        for copy, (reader, writer) in enumerate(places):
            site, head = readers[reader]
            self.at.setdefault(site, []).append((copy, head, writer))
        super().__init__(self.at)

    def __call__(self, site: str, x: Tensor) -> Tensor:
        copies, heads, writers = zip(*self.at[site], strict=True)
        x = x.clone()
        stacked = x.view(self.copies, -1, *x.shape[1:])
        if x.dim() == 4:
            stacked[list(copies), :, :, list(heads)] += self.difference[list(writers)]
        else:
            stacked[list(copies)] += self.difference[list(writers)]
        return x


class Replace(Tap):
    """In copy i of a stacked batch, adds `difference[writers[i]]` (b, t, d) to that writer's write: the node is ablated."""

    def __init__(self, model: Transformer, writers: Sequence[int], difference: Tensor):
        self.difference, self.copies, self.index = difference, len(writers), writer_index(model)
        self.copy = {writer: copy for copy, writer in enumerate(writers)}
        super().__init__({edge_table(model.config).writers[writer][0] for writer in writers})

    def __call__(self, site: str, x: Tensor) -> Tensor:
        x = x.clone()
        stacked = x.view(self.copies, -1, *x.shape[1:])
        for head, writer in enumerate(self.index[site]):
            if writer in self.copy:
                part = stacked[self.copy[writer]]
                (part[:, :, head] if x.dim() == 4 else part).add_(self.difference[writer])
        return x


@torch.no_grad()
def cut_edges(
    model: Transformer, batch: Pairs, replaced: Writes, measure: Measure, places: Sequence[tuple[int, int]]
) -> Tensor:
    """(edges, b, ...): what `measure` says of the model with each of the (reader, writer) edges cut alone.

    What comes before a reader's layer is the same for all of its edges, and computed once. Where the writer says the same
    in both runs, or all that changes is nothing that the reader's weights read, the model is not run.
    """
    readers, n_layer = edge_table(model.config).readers, len(model.config.layers)
    states, clean = residuals(model, batch)
    difference = by_writer(model, replaced) - by_writer(model, clean)
    whole = measure(all_logits(model, batch, resume=(n_layer, states[n_layer])), batch)
    found, by_site = [whole] * len(places), dict[str, list[int]]()
    matter = noticed(model, difference)
    for i, (reader, writer) in enumerate(places):
        if matter[reader, writer]:
            by_site.setdefault(readers[reader][0], []).append(i)
    for site, here in by_site.items():
        layer, chosen = layer_of(site, n_layer), [places[i] for i in here]
        resume = layer, states[layer]
        values = stacked(model, batch, measure, chosen, lambda part: Nudge(readers, part, difference), resume)
        for i, value in zip(here, values, strict=True):
            found[i] = value
    return torch.stack(found)


@torch.no_grad()
def cut_nodes(
    model: Transformer, batch: Pairs, replaced: Writes, measure: Measure, writers: Sequence[int]
) -> Tensor:
    """(nodes, b, ...): what `measure` says of the model with each of these writers ablated alone."""
    difference = by_writer(model, replaced) - by_writer(model, clean_writes(model, batch))
    return stacked(model, batch, measure, writers, lambda part: Replace(model, part, difference))


def layer_of(site: str, n_layer: int) -> int:
    """The layer that a site is in; `n_layer` for what comes after the last."""
    layer = site.partition(".")[0]
    return int(layer) if layer.isdecimal() else n_layer


def residuals(model: Transformer, batch: Pairs) -> tuple[list[Tensor], Writes]:
    """The residual stream (b, t, d) before each layer and before the last norm, and every write, of one run."""
    sites = [*(f"{layer}.resid.pre" for layer in range(len(model.config.layers))), "final"]
    writes = {site for site, _ in edge_table(model.config).writers}
    recorder = Recorder(writes | set(sites))
    model(batch.tokens, mask=real(model, batch.mask), tap=recorder)
    return [recorder.values[site] for site in sites], {site: recorder.values[site] for site in writes}


def noticed(model: Transformer, difference: Tensor) -> Tensor:
    """(readers, writers), bool: where a change of `difference` (writers, b, t, d) can change what the reader computes.

    Never if it is zero; without a norm or AbsTopK, neither if all of its directions have weights of exactly zero.
    """
    changed = (difference != 0).flatten(1, 2).any(1)
    reads = torch.stack([(weights != 0).any(0) for weights in read_matrices(model)]).to(changed.device)
    if model.config.norm != "none" or model.config.activation_sparsity is not None:
        reads = torch.ones_like(reads)
    return (reads.float() @ changed.float().T) > 0


def stacked(
    model: Transformer,
    batch: Pairs,
    measure: Measure,
    parts: Sequence,
    tap: Callable[[Sequence], Tap],
    resume: tuple[int, Tensor] | None = None,
) -> Tensor:
    """What `measure` says under the tap of each part, many copies of the batch in one forward pass."""
    size = max(1, TOKENS // batch.tokens.numel())
    found = []
    for start in range(0, len(parts), size):
        chosen = parts[start : start + size]
        copies = batch.repeat(len(chosen))
        state = resume and (resume[0], resume[1].repeat(len(chosen), 1, 1))
        values = measure(all_logits(model, copies, tap(chosen), state), copies)
        found.append(values.unflatten(0, (len(chosen), -1)))
    return torch.cat(found)


def edges_of(model: Transformer) -> list[tuple[int, int]]:
    """All (reader, writer) edges of a model."""
    return [(r, w) for r, w in edge_table(model.config).exists.nonzero().tolist()]


@torch.no_grad()
def patch_edges(
    model: Transformer, task: Task, *, pairs: int = 64, seed: int = 0, ablation: Ablation = "resample"
) -> Scores:
    """The exact effect of cutting each edge alone."""
    batch, pool = draw(model, task, pairs, seed)
    whole = task.metric(last_logits(model, batch), batch.last())
    places = edges_of(model)
    cut = cut_edges(model, batch, fills(model, batch, ablation, pool), task.metric, places)
    effects = torch.zeros(edge_table(model.config).exists.shape)
    effects[tuple(torch.tensor(places).T)] = (cut - whole).mean(1).float().cpu()
    return estimated("edge", effects, 2.0 + len(places))


@torch.no_grad()
def patch_nodes(
    model: Transformer, task: Task, *, pairs: int = 64, seed: int = 0, ablation: Ablation = "resample"
) -> Scores:
    """The exact effect of ablating each node alone: activation patching."""
    batch, pool = draw(model, task, pairs, seed)
    whole = task.metric(last_logits(model, batch), batch.last())
    writers = range(len(edge_table(model.config).writers))
    cut = cut_nodes(model, batch, fills(model, batch, ablation, pool), task.metric, writers)
    return estimated("node", (cut - whole).mean(1).float().cpu(), 2.0 + len(writers))


def draw(model: Transformer, task: Task, pairs: int, seed: int) -> tuple[Pairs, Pairs]:
    """The pairs that a method is measured on, and a pool of other pairs for means."""
    pool = task.pairs(4 * pairs, seed=seed + 10_000)
    return task.pairs(pairs, seed=seed).to(model.device), pool.to(model.device)
