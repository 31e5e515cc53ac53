"""What is true of a model of the benchmark: which edges there are, and what cutting each one does.

There is no single true circuit. `structure` holds the edges that the weights have; `effects` what cutting each alone does to
the task, under four ablations; `circuits` the smallest sets of edges that keep every output right.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pellucid.bench.task import ProgramTask
from pellucid.core.edges import EdgeTable, EdgeTap, edge_table
from pellucid.core.transformer import Transformer
from pellucid.lab.ablate import last_logits
from pellucid.lab.fills import ABLATIONS, Ablation, Writes, fills
from pellucid.lab.patch import TOKENS, cut_edges, cut_nodes, edges_of
from pellucid.tasks.task import Outputs

PAIRS = 128
SEED = 1_000
"""Pairs of the truth are drawn apart from those that methods see; small programs have inputs that are in both."""
THRESHOLD = 0.01
"""Of the distance between clean and corrupt outputs: from here on an edge matters."""
MOST = 20
"""Edges up to which smallest circuits are looked for."""
TRIED = 4096
"""Sets of edges that are tried in looking for them."""


@dataclass(frozen=True)
class Effects:
    """What cutting each edge, and ablating each node, alone does, under one ablation."""

    edges: Tensor
    """(readers, writers): the mean change of the task's metric, signed."""
    edge_moves: Tensor
    """(readers, writers): the mean distance of the outputs from the right ones, in units of that to the corrupt ones:
    unlike an effect it cannot cancel."""
    nodes: Tensor
    node_moves: Tensor
    """(writers,)."""

    def effective(self, universe: str, threshold: float = THRESHOLD) -> Tensor:
        """The parts that move the outputs by more than `threshold`, bool."""
        return (self.edge_moves if universe == "edge" else self.node_moves) > threshold


@dataclass(frozen=True)
class Truth:
    """Everything that scores are held against."""

    table: EdgeTable
    structure: Tensor
    """(readers, writers), bool: S."""
    effects: dict[Ablation, Effects]
    circuits: tuple[Tensor, ...] | None
    """Smallest sets of edges, (readers, writers) bool, that keep all outputs right when all others are at their corrupt
    values; None where S is too large to look."""
    batch: Outputs
    replaced: dict[Ablation, Writes]

    @cached_property
    def used(self) -> Tensor:
        """(writers,), bool: the nodes with an edge in S."""
        return self.structure.any(0)

    def digest(self) -> str:
        """A hash of structure and effects (to four decimals), the same in every process."""
        parts = [self.structure.to(torch.uint8).numpy().tobytes()]
        parts += [
            (self.effects[a].edge_moves.double() * 1e4).round().numpy().astype("int64").tobytes()
            for a in ABLATIONS
        ]
        return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def structure_of(model: Transformer, edges: Sequence[dict]) -> Tensor:
    """(readers, writers), bool: edges written as in `CompiledModel.truth["edges"]["component"]`."""
    table = edge_table(model.config)
    readers, writers = (
        {tuple(x): i for i, x in enumerate(parts)} for parts in (table.readers, table.writers)
    )
    found = torch.zeros_like(table.exists)
    for edge in edges:
        found[readers[tuple(edge["reader"])], writers[tuple(edge["writer"])]] = True
    return found


def find_truth(
    model: Transformer, task: ProgramTask, structure: Tensor, *, pairs: int = PAIRS, seed: int = SEED
) -> Truth:
    """Measure every edge and node alone, under all four ablations; exact for the pairs that are drawn."""
    batch = task.pairs(pairs, seed=seed, split="test").to(model.device)
    pool = task.pairs(4 * pairs, seed=seed + 1, split="test").to(model.device)
    replaced: dict[Ablation, Writes] = {a: fills(model, batch, a, pool) for a in ABLATIONS}
    return Truth(
        table=edge_table(model.config),
        structure=structure,
        effects={a: measure_effects(model, task, batch, replaced[a]) for a in ABLATIONS},
        circuits=smallest_circuits(model, task, batch, replaced["resample"], structure),
        batch=batch,
        replaced=replaced,
    )


@torch.no_grad()
def measure_effects(model: Transformer, task: ProgramTask, batch: Outputs, replaced: Writes) -> Effects:
    """Each edge and each node alone."""

    def both(logits: Tensor, part: Outputs) -> Tensor:
        return torch.stack([task.metric(logits, part), task.loss(logits, part).sqrt()], 1)

    whole = both(last_logits(model, batch), batch)
    table, places = edge_table(model.config), edges_of(model)
    cut = cut_edges(model, batch, replaced, both, places)
    edges = torch.zeros(2, *table.exists.shape)
    edges[:, *torch.tensor(places).T] = (cut - whole).mean(1).T.float().cpu()
    nodes = (
        (cut_nodes(model, batch, replaced, both, range(len(table.writers))) - whole).mean(1).T.float().cpu()
    )
    return Effects(edges=edges[0], edge_moves=edges[1], nodes=nodes[0], node_moves=nodes[1])


@torch.no_grad()
def kept_only(
    model: Transformer, batch: Outputs, replaced: Writes, keep: Tensor, measure, rows: int | None = None
) -> Tensor:
    """(circuits, b): what `measure` says with only the edges of each of `keep` (circuits, readers, writers), the others cut."""
    size = rows or max(1, TOKENS // batch.tokens.numel())
    found = []
    for part in keep.split(size):
        copies = batch.repeat(len(part))
        writes = {site: x.repeat(len(part), *[1] * (x.dim() - 1)) for site, x in replaced.items()}
        masks = part.to(model.wte.weight).repeat_interleave(len(batch), 0)
        logits = last_logits(model, copies, EdgeTap(model.config, writes, masks))
        found.append(measure(logits, copies.last()).unflatten(0, (len(part), -1)))
    return torch.cat(found)


def smallest_circuits(
    model: Transformer, task: ProgramTask, batch: Outputs, replaced: Writes, structure: Tensor
) -> tuple[Tensor, ...] | None:
    """All sets of edges that keep every output right and of which no proper subset does.

    Edges without which, alone, some output is wrong are held to be in every set; subsets of the others are tried from
    the smallest on, but for those that contain one that suffices. None where S has more than `MOST` edges, or more than
    `TRIED` sets would have to be tried.
    """
    places = structure.nonzero()
    if len(places) > MOST:
        return None
    wrong = cut_edges(model, batch, replaced, task.wrong, [(r, w) for r, w in places.tolist()]).any(1)
    free = places[~wrong.cpu()]
    core = torch.zeros_like(structure)
    core[tuple(places[wrong.cpu()].T)] = True
    subsets = ((torch.arange(2 ** len(free))[:, None] >> torch.arange(len(free))) & 1).bool()
    found, tried = subsets[:0], 0
    for size in range(len(free) + 1):
        some = subsets[subsets.sum(1) == size]
        some = some[~(some.float() @ found.float().T == found.sum(1)).any(1)]
        if (tried := tried + len(some)) > TRIED:
            return None
        if len(some):
            keep = core.repeat(len(some), 1, 1)
            keep[:, free[:, 0], free[:, 1]] = some
            right = ~kept_only(model, batch, replaced, keep, task.wrong).any(1)
            found = torch.cat([found, some[right.cpu()]])
    keep = core.repeat(len(found), 1, 1)
    keep[:, free[:, 0], free[:, 1]] = found
    return tuple(keep)
