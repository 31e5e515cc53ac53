"""What any method must beat: chance, the graph of the weights alone, and the size of what is written."""

import torch

from pellucid.core.errors import unknown
from pellucid.core.transformer import Transformer
from pellucid.core.weights import weight_graph
from pellucid.lab.attribute import changes
from pellucid.lab.fills import Ablation
from pellucid.lab.paths import fed, on_a_path
from pellucid.lab.scores import Scores, Universe, shape_of
from pellucid.tasks.task import Task


def random(
    model: Transformer,
    task: Task,
    *,
    pairs: int = 64,
    seed: int = 0,
    ablation: Ablation = "resample",
    universe: Universe = "edge",
) -> Scores:
    """Uniform random scores of edges, or of nodes."""
    shape = shape_of(model, checked(universe))
    return Scores(universe, torch.rand(shape, generator=torch.Generator().manual_seed(seed)), 0.0)


def degree(
    model: Transformer,
    task: Task,
    *,
    pairs: int = 64,
    seed: int = 0,
    ablation: Ablation = "resample",
    universe: Universe = "edge",
) -> Scores:
    """How many edges of the weight graph touch a node. An edge of it scores the sum over its two ends, others 0.

    The output, which is no node, counts with the edges into it.
    """
    checked(universe)
    edges = weight_graph(model).float()
    into = edges.new_zeros(edges.shape[1] + 1)
    number = torch.tensor([edges.shape[1] if writer is None else writer for writer in fed(model.config)])
    into.index_add_(0, number, edges.sum(1))
    nodes = into[:-1] + edges.sum(0)
    if universe == "node":
        return Scores(universe, nodes, 0.0)
    ends = torch.cat([nodes, into[-1:]])[number]
    return Scores(universe, edges * (ends[:, None] + nodes), 0.0)


def reachability(
    model: Transformer, task: Task, *, pairs: int = 64, seed: int = 0, ablation: Ablation = "resample"
) -> Scores:
    """1 for an edge whose weights have a product that is not zero, on a path from the embedding to the output; else 0."""
    kept = on_a_path(model.config, weight_graph(model))
    return Scores("edge", kept.float(), 0.0, kept=kept)


def activation_norm(
    model: Transformer, task: Task, *, pairs: int = 64, seed: int = 0, ablation: Ablation = "resample"
) -> Scores:
    """How far ablation moves what a node writes: the root mean square length over real tokens.

    Under zero ablation this is the size of the write, under mean ablation its spread.
    """
    batch, difference = changes(model, task, pairs, seed, ablation)
    squares = difference.square().sum(-1) * batch.mask
    return Scores("node", (squares.sum((1, 2)) / batch.mask.sum()).sqrt().float().cpu(), 2.0)


def checked(universe: Universe) -> Universe:
    if universe not in ("node", "edge"):
        raise unknown("universe", universe, ("node", "edge"))
    return universe
