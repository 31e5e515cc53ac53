"""Does a compressed model still hold the variables of its program, where the ground truth says? Interchange tells.

A variable's value is replaced by that on another input, in the residual stream right after it was written: in the
compiled model along its directions, in the compressed one along its rows of W, as large as this model writes it. Both
must then say the same.

Axes: b input, t position, D compiled width, d compressed width.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pellucid.compiled.batched import Inputs, defined_inputs, stream_layers
from pellucid.compiled.compress import Compressed
from pellucid.compiled.model import CompiledModel
from pellucid.compiled.trace import site_after
from pellucid.compiled.verify import ideal_logits
from pellucid.core.record import record
from pellucid.core.taps import Patch

FAITHFUL = 0.99
"""The least interchange accuracy of every variable for which the ground truth holds."""


@dataclass(frozen=True)
class Held:
    """How well a compressed model holds one variable."""

    variable: str
    site: str
    """The residual stream right after it was written."""
    decoded: float
    """Share of positions at which the stream, mapped back to D, has the variable's value."""
    interchange: float | None
    """Share of swaps after which every output value is right: the mean over those that change the program's output and
    those that do not. None where no swap changes the variable, or all leave the program undefined."""


def truth_holds(held: list[Held]) -> bool:
    """Whether the compiled model's ground truth may be used for the compressed one; else it is void."""
    return all(h.interchange is None or h.interchange >= FAITHFUL for h in held)


def as_model(model: CompiledModel, compressed: Compressed, held: list[Held]) -> CompiledModel:
    """The compressed model with the tokens, values and ground truth of `model`, from which it was made.

    The ground truth's directions are the rows of W, which is `truth["basis"]`; `truth["holds"]` is whether it may be
    used. No error bound is known. Raises `ValueError` for models with more than one W, and for one with all weights trained.
    """
    if len(compressed.maps) > 1 or compressed.config.variant == "all":
        raise ValueError(f"variant {compressed.config.variant!r} has no one W; 'shared' and 'pca' have")
    w = compressed.maps[0].double()
    basis = w if model.basis is None else torch.from_numpy(model.basis) @ w
    edges = {**model.truth["edges"], "channel": None}
    truth = {**model.truth, "edges": edges, "basis": basis.tolist(), "holds": truth_holds(held)}
    return model.remade(compressed.transformer, error_bound=float("inf"), truth=lambda: truth)


@torch.no_grad()
def interchange(
    model: CompiledModel, compressed: Compressed, *, pairs: int = 512, seed: int = 0
) -> list[Held]:
    """Every variable of `model` in a model compressed from it, over `pairs` pairs of inputs of equal length.

    A variable's values at the source's positions are shuffled, so that `indices` can be swapped as well. Raises
    `ValueError` where all weights were trained: W does not say where variables are then.
    """
    if compressed.config.variant == "all":
        raise ValueError(
            "variant 'all' has no variables to swap: its weights are no longer the compiled ones"
        )
    data = defined_inputs(model)
    base, source, order = draw_pairs(data, pairs, torch.Generator().manual_seed(seed))
    full = model.transformer.config.d_model
    basis = torch.eye(full) if model.basis is None else torch.from_numpy(model.basis)
    basis = basis.to(model.transformer.wte.weight)
    found = []
    sites = stream_layers(model.transformer)
    for variable in model.truth["variables"]:
        site = site_after(variable["written"])
        rows = basis[variable["directions"]]
        w = rows @ compressed.maps[compressed.places[sites[site] + 1]]
        there = record(model.transformer, base.tokens, [site], mask=base.real)[site]
        here = record(compressed.transformer, base.tokens, [site], mask=base.real)[site]
        other = record(model.transformer, source.tokens, [site], mask=source.real)[site]
        change = (other.gather(1, order[:, :, None].expand_as(other)) - there) @ rows.T
        wanted = model.transformer(base.tokens, mask=base.real, tap=Patch({site: there + change @ rows}))
        held = there[base.counted] @ rows.T
        size = written_size(model, compressed, variable, rows, held, base)
        got = compressed.transformer(base.tokens, mask=base.real, tap=Patch({site: here + size * change @ w}))
        plain = model.codes(model.transformer(base.tokens, mask=base.real))
        codes, counted = model.codes(wanted), base.counted
        ideal = torch.from_numpy(ideal_logits(model)).to(wanted)[codes]
        defined = (((wanted - ideal).abs().amax(-1) < model.margin / 4) | ~counted).all(1)
        usable = defined & ((change.abs().amax(-1) > 1e-3) & counted).any(1)
        same = ((model.codes(got) == codes) | ~counted).all(1)
        changes = ((codes != plain) & counted).any(1)
        groups = [same[usable & kind] for kind in (changes, ~changes)]
        shares = [float(g.float().mean()) for g in groups if len(g)]
        decoded = read(variable, here[counted] @ w.T, held) == read(variable, held, held)
        found.append(
            Held(
                variable["name"],
                site,
                float(decoded.float().mean()),
                sum(shares) / len(shares) if shares else None,
            )
        )
    return found


def written_size(
    model: CompiledModel,
    compressed: Compressed,
    variable: dict[str, Any],
    rows: Tensor,
    held: Tensor,
    data: Inputs,
) -> float:
    """How many times a variable's true values (position, direction) the compressed model writes: a slope, by least squares.

    1 for the embedding. A sublayer may write less where its row of W is longer, for what is read is the product.
    """
    slot = variable["written"]
    if slot < 0:
        return 1.0
    block = model.transformer.blocks[slot // 2]
    site, part = ("mlp.act", block.mlp) if slot % 2 else ("attn.mix", block.attn)
    assert part is not None
    site = f"{slot // 2}.{site}"
    channels = record(compressed.transformer, data.tokens, [site], mask=data.real)[site][data.counted]
    written, true = ((x - x.mean(0)).flatten() for x in (part.proj(channels) @ rows.T, held))
    return float(written @ true / (true @ true).clamp(min=1e-9))


def draw_pairs(data: Inputs, pairs: int, generator: torch.Generator) -> tuple[Inputs, Inputs, Tensor]:
    """Inputs, as many others of the same lengths, and for each of these an order of its positions (b, t), BOS first."""
    lengths = data.counted.sum(1)
    base = torch.randint(len(data), (pairs,), generator=generator)
    source = base.clone()
    for n in lengths[base].unique():
        alike, here = torch.nonzero(lengths == n)[:, 0], lengths[base] == n
        source[here] = alike[torch.randint(len(alike), (int(here.sum()),), generator=generator)]
    counted = data[base].counted
    shuffled = torch.rand(counted.shape, generator=generator).masked_fill(~counted, 2.0).argsort(1)
    order = torch.arange(counted.shape[1]).repeat(pairs, 1)
    order[:, 1:] = torch.where(counted[:, 1:], shuffled[:, :-1], order[:, 1:])
    return data[base], data[source], order


def read(variable: dict[str, Any], held: Tensor, true: Tensor) -> Tensor:
    """Numbers of the values that directions (position, direction) hold; of a number the nearest of those in `true`."""
    if variable["encoding"] == "categorical":
        return held.argmax(-1)
    values = (true[:, 0] * 1e4).round().unique() / 1e4
    codes = torch.bucketize(held[:, 0].contiguous(), (values[1:] + values[:-1]) / 2)
    return torch.where(held[:, 1] > 0.5, -1, codes) if variable["optional"] else codes
