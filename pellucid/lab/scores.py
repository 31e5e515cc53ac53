"""What a method says of a model's parts: a score for each node or edge of the component universe.

Nodes are the writers of `core.edges.edge_table(config)`, edges its (reader, writer) pairs. Every method is a function
`method(model, task, *, pairs, seed, ablation, ...) -> Scores` and asks nothing of a model but its sites.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from pellucid.core.edges import edge_table
from pellucid.core.errors import unknown
from pellucid.core.transformer import Transformer

Universe = Literal["node", "edge"]


@dataclass(frozen=True)
class Scores:
    """A score for each node, (writers,), or edge, (readers, writers): higher is more important.

    Where an edge does not exist the score is ignored.
    """

    universe: Universe
    values: Tensor
    passes: float
    """What it cost in forward passes of one batch of the pairs; a backward pass counts as two."""
    effects: Tensor | None = None
    """For a method that estimates them: by how much ablating each part alone changes the task's metric, signed."""
    kept: Tensor | None = None
    """For a method that proposes a circuit: which parts are in it, bool."""


def shape_of(model: Transformer, universe: Universe) -> tuple[int, ...]:
    """The shape of scores of a model. A `ValueError` where its residual stream is no plain sum."""
    readers, writers = edge_table(model.config).exists.shape
    return (writers,) if universe == "node" else (readers, writers)


def estimated(universe: Universe, effects: Tensor, passes: float) -> Scores:
    """Scores of a method that estimates effects: ranked by their size, whatever their sign."""
    return Scores(universe, effects.abs(), passes, effects=effects)


def check_scores(scores: Scores, model: Transformer) -> Scores:
    """The scores, if they fit the model.

    Raises `ValueError` for what is no `Scores` of tensors, another universe's name or shape, NaN and infinite values, and
    a `kept` that is not bool.
    """
    if not isinstance(scores, Scores):
        raise ValueError(f"a method must return Scores, got {type(scores).__name__}")
    if scores.universe not in get_args(Universe):
        raise unknown("universe", scores.universe, get_args(Universe))
    wanted = shape_of(model, scores.universe)
    for name, values in (("values", scores.values), ("effects", scores.effects), ("kept", scores.kept)):
        if values is None:
            continue
        if not isinstance(values, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(values).__name__}")
        if tuple(values.shape) != wanted:
            raise ValueError(
                f"{name} of the {scores.universe} universe must have shape {wanted}, got {tuple(values.shape)}"
            )
        if values.is_floating_point() and not bool(torch.isfinite(values).all()):
            raise ValueError(f"{name} hold {int((~torch.isfinite(values)).sum())} values that are not finite")
        if name == "kept" and values.dtype != torch.bool:
            raise ValueError(f"kept must be bool, got {values.dtype}")
    return scores
