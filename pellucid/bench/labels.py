"""What is true on a batch, read from a compiled model by its own ground truth: variables, where they are, selections."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal

import torch
from torch import Tensor

from pellucid.compiled.model import CompiledModel
from pellucid.compiled.trace import site_after
from pellucid.compiled.verify import ideal_logits
from pellucid.core.errors import unknown
from pellucid.core.record import record
from pellucid.core.sites import stream_sites
from pellucid.core.taps import Tap
from pellucid.core.weights import TOLERANCE, read_matrices
from pellucid.lab.decodability import streams
from pellucid.lab.fills import real
from pellucid.tasks.task import Outputs, Pairs

State = Literal["present", "absent", "constant"]


def variables(compiled: CompiledModel, batch: Pairs) -> dict[str, Tensor]:
    """For each variable the number of its value (b, t), in the order of the ground truth's `values`.

    -1 at BOS and padding, and where none is held. None is a value. Read right after the variable was written.
    """
    found, device = {}, batch.tokens.device
    batch = batch.to(compiled.transformer.device)
    stream = {site: upright(compiled, x) for site, x in streams(compiled.transformer, batch).items()}
    for v in compiled.truth["variables"]:
        codes = decode(v, stream[site_after(v["written"])][..., v["directions"]])
        codes = codes.where(batch.mask, -1)
        codes[:, 0] = -1
        found[v["name"]] = codes.to(device)
    return found


def labels(compiled: CompiledModel, batch: Pairs) -> dict[str, Tensor]:
    """What probes are asked for: `variables`, but of numerical ones the number (b, t), and NaN for None and no value."""
    found = variables(compiled, batch)
    for v in compiled.truth["variables"]:
        if v["encoding"] == "numerical":
            numbers = torch.tensor([*values(v), float("nan")], dtype=torch.float64)
            found[v["name"]] = numbers.to(batch.tokens.device)[found[v["name"]]]
    return found


def decode(variable: dict[str, Any], held: Tensor) -> Tensor:
    """What a variable's directions (..., directions) hold, as numbers of its values; -1 for nothing."""
    if variable["encoding"] == "categorical":
        size, codes = held.max(-1)
        return codes.where(size > 0.5, -1)
    numbers = torch.tensor(values(variable), dtype=torch.float64, device=held.device)
    distance = (held[..., :1].double() - numbers).abs().nan_to_num(float("inf"))
    codes = distance.argmin(-1)
    if variable["optional"]:
        codes = codes.where(held[..., 1] <= 0.5, variable["values"].index("None"))
    return codes


def values(variable: dict[str, Any]) -> list[float]:
    """The numbers of a numerical variable; None is NaN."""
    special = {"None": float("nan"), "True": 1.0, "False": 0.0}
    return [special[x] if x in special else float(Fraction(x)) for x in variable["values"]]


def slot_before(site: str) -> int:
    """The slot that `site` comes after."""
    layer, _, place = site.partition(".")
    return -1 if site == "embed" else 2 * int(layer) + (place == "resid.post")


def held(variable: dict[str, Any], site: str) -> bool:
    """Whether a variable is in the residual stream at `site`."""
    slot = slot_before(site)
    return variable["written"] <= slot and (variable["gone"] is None or slot < variable["gone"])


def upright(compiled: CompiledModel, stream: Tensor) -> Tensor:
    """The stream (..., d) in the directions that the ground truth labels, which a rotated model turned."""
    if compiled.basis is None:
        return stream
    return stream @ torch.from_numpy(compiled.basis).to(stream).T


def directions(compiled: CompiledModel, name: str) -> Tensor:
    """The directions (n, d) of a variable in the residual stream. Raises `ValueError` for an unknown one."""
    basis = torch.eye(compiled.transformer.config.d_model, dtype=torch.float64)
    if compiled.basis is not None:
        basis = torch.from_numpy(compiled.basis)
    return basis[variable(compiled, name)["directions"]]


def variable(compiled: CompiledModel, name: str) -> dict[str, Any]:
    """A variable's entry in the ground truth. Raises `ValueError` for an unknown one."""
    by_name = {v["name"]: v for v in compiled.truth["variables"]}
    if name not in by_name:
        raise unknown("variable", name, by_name)
    return by_name[name]


def unread(compiled: CompiledModel) -> list[int]:
    """The directions, as the ground truth numbers them, that no head, MLP or output reads: what is in them changes nothing.

    A weight counts as zero below `TOLERANCE` times the length of its row.
    """
    basis = torch.eye(compiled.transformer.config.d_model, dtype=torch.float64)
    if compiled.basis is not None:
        basis = torch.from_numpy(compiled.basis).double()
    reads = torch.cat(read_matrices(compiled.transformer))
    read = (reads @ basis.T).abs() > TOLERANCE * reads.norm(dim=1, keepdim=True)
    return (~read.any(0)).nonzero()[:, 0].tolist()


@dataclass(frozen=True)
class Presence:
    """Whether each variable is in the residual stream at each site; one that never varies in the data is constant."""

    features: tuple[str, ...]
    sites: tuple[str, ...]
    states: tuple[tuple[State, ...], ...]
    """For each feature, by site."""


def presence(compiled: CompiledModel, batch: Pairs) -> Presence:
    """Where each variable is, and whether it varies on the batch."""
    sites, codes = stream_sites(compiled.transformer.config), variables(compiled, batch)
    there: dict[str, State] = {
        name: "present" if len(x[x >= 0].unique()) > 1 else "constant" for name, x in codes.items()
    }
    return Presence(
        tuple(codes),
        sites,
        tuple(
            tuple(there[v["name"]] if held(v, site) else "absent" for site in sites)
            for v in compiled.truth["variables"]
        ),
    )


def selected(compiled: CompiledModel, batch: Pairs) -> dict[tuple[int, int], Tensor]:
    """For each (layer, head) of a selector the keys that it attends to, bool (b, query, key), all of them equally.

    Key 0 is BOS. A head that counts always attends to it ("always" in the ground truth), others where nothing is
    selected ("default"), and all at BOS: without key 0, these are the selector's own. Padded queries select nothing.
    """
    model, device = compiled.transformer, batch.tokens.device
    batch = batch.to(model.device)
    heads = [tuple(s["head"]) for s in compiled.truth["selectors"]]
    sites = {f"{layer}.attn.pattern" for layer, _ in heads}
    if not sites:
        return {}
    patterns = record(model, batch.tokens, sites, mask=real(model, batch.mask))
    out = {}
    for layer, head in heads:
        pattern = patterns[f"{layer}.attn.pattern"][:, head]
        chosen = pattern > pattern.amax(-1, keepdim=True) / 2
        out[layer, head] = (chosen & batch.mask[:, :, None]).to(device)
    return out


def counterfactual(compiled: CompiledModel, name: str, site: str) -> Callable[..., Outputs]:
    """What the program says of a batch when, at `site`, a variable has another value at one position.

    Of `(batch, here, there)`: at position `here` (b,) the directions of `name` get what the corrupt input holds in them at
    `there` (b,). `wanted` are the values that the compiled model then says, and only positions where it says one clearly
    stay scored: a program may have no answer to a mixture.
    Raises `ValueError` for an unknown variable, and for a site where it is not held.
    """
    found, own, model = variable(compiled, name), directions(compiled, name), compiled.transformer
    if not held(found, site):
        sites = [s for s in stream_sites(model.config) if held(found, s)]
        raise ValueError(f"{name!r} is not held at {site!r}, only at {', '.join(sites)}")
    ideal = torch.from_numpy(ideal_logits(compiled)).to(model.wte.weight)

    @torch.no_grad()
    def swap(batch: Outputs, here: Tensor, there: Tensor) -> Outputs:
        device = batch.tokens.device
        batch, rows = batch.to(model.device), torch.arange(len(batch), device=model.device)
        corrupt = record(model, batch.corrupt, [site], mask=real(model, batch.real))[site]
        span = (own.T @ own).to(corrupt)

        def tap(_: str, x: Tensor) -> Tensor:
            x = x.clone()
            x[rows, here] += (corrupt[rows, there] - x[rows, here]) @ span
            return x

        logits = model(batch.tokens, mask=real(model, batch.mask), tap=Tap.at(tap, [site]))
        wanted = ideal[compiled.codes(logits)]
        clear = (logits - wanted).abs().amax(-1) < compiled.margin / 4
        return replace(batch, wanted=wanted, scored=batch.scored & clear).to(device)

    return swap
