"""Compression (Tracr, section 5): a compiled model with a residual stream narrower than its variables need.

A matrix W (D, d) stands between the sublayers and the residual stream: what is written goes through W, what is read
through its transpose. The compiled weights stay, and W is trained for the outputs and for what each sublayer writes.
As nothing between is nonlinear, W times the compiled weights is an ordinary transformer of width d. That is what runs,
for all d and seeds at once.

Axes: D compiled width, d compressed width, k matrix. `batched.py` runs them, `fit.py` trains them, `scores.py` measures them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pellucid.compiled.batched import Batched, CompressConfig, Inputs, defined_inputs, map_places
from pellucid.compiled.fit import train
from pellucid.compiled.model import CompiledModel
from pellucid.compiled.rasp.values import Value
from pellucid.compiled.scores import Scores, measure
from pellucid.core.record import record
from pellucid.core.sites import stream_sites
from pellucid.core.transformer import Transformer


@dataclass(frozen=True, eq=False)
class Compressed:
    """One compressed model."""

    d: int
    seed: int
    config: CompressConfig
    transformer: Transformer
    """An ordinary transformer of width d, for the compiled model's tokens and logits."""
    maps: Tensor
    """(k, D, d): the matrices W."""
    places: tuple[int, ...]
    """Which of them the embedding, each layer, and the unembedding go through."""
    scores: Scores


def compress(
    model: CompiledModel,
    d: int | Iterable[int],
    seeds: int | Iterable[int] = 0,
    config: CompressConfig | None = None,
    *,
    sequences: Iterable[Sequence[Value]] | None = None,
    state: Path | None = None,
) -> list[Compressed]:
    """Compress `model` to each width `d` with each seed, all at once; the result is in that order.

    Trained and measured on `sequences`: without, on all inputs, or `LIMIT` that are drawn. A seed draws the orthonormal
    W that training starts from. With a file `state`, a call that was killed goes on where it stopped.
    Raises `ValueError` for widths not within 1..D, repeated ones, no seeds, and other models than compiled ones.
    """
    config = config or CompressConfig()
    widths, chosen = check_list("d", d), check_list("seeds", seeds)
    full = model.transformer.config.d_model
    for width in widths:
        if not 1 <= width <= full:
            raise ValueError(f"d must be between 1 and {full}, the model's width, got {width}")
    data = defined_inputs(model, sequences)
    starts = config.warm if config.variant != "pca" else (1.0,)
    tries = [(width, seed, warm) for width in widths for seed in chosen for warm in starts]
    count = max(map_places(config.variant, len(model.transformer.config.layers))) + 1
    start = torch.zeros(len(tries), count, full, max(widths), dtype=model.transformer.wte.weight.dtype)
    principal = principal_directions(model, data) if config.variant == "pca" else None
    for i, (width, seed, _) in enumerate(tries):
        start[i, :, :, :width] = orthonormal(full, width, seed) if principal is None else principal[:, :width]
    batched = Batched(model, [t[0] for t in tries], start, config, [t[2] for t in tries])
    if config.variant != "pca":
        train(batched, data, state)
    scores, maps = measure(batched, data), batched.maps.detach()
    losses = [s.output_loss + config.layer_weight * s.layer_loss for s in scores]
    kept = (min(range(i, i + len(starts)), key=losses.__getitem__) for i in range(0, len(tries), len(starts)))
    return [
        Compressed(
            width,
            seed,
            config,
            batched.transformer(i),
            maps[i, ..., :width].clone(),
            batched.places,
            scores[i],
        )
        for i in kept
        for width, seed, _ in [tries[i]]
    ]


def check_list(name: str, values: int | Iterable[int]) -> list[int]:
    """`values` as a list of distinct integers. Raises `ValueError` for others and for none."""
    found = list(values) if isinstance(values, Iterable) else [values]
    if not found:
        raise ValueError(f"{name} must be one integer or more, got none")
    for value in found:
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{name} must be integers, got {value!r}")
    if len(set(found)) < len(found):
        raise ValueError(f"{name} must be distinct, got {found}")
    return found


def orthonormal(rows: int, columns: int, seed: int) -> Tensor:
    """(rows, columns) random orthonormal columns."""
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(rows, rows, generator=generator, dtype=torch.float64))[0][:, :columns]


@torch.no_grad()
def principal_directions(model: CompiledModel, data: Inputs) -> Tensor:
    """(D, D): directions of the residual stream in columns, by falling second moment over all sublayers and positions."""
    moment = torch.zeros(())
    for part in data.parts():
        streams = record(
            model.transformer, part.tokens, stream_sites(model.transformer.config), mask=part.real
        )
        for stream in streams.values():
            found = stream[part.real].double()
            moment = moment + found.T @ found
    return torch.linalg.eigh(moment)[1].flip(1)
