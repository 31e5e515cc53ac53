"""What an ablated write is replaced by: nothing, its mean, its mean at each position, or its value on the corrupt input."""

from typing import Literal, get_args

import torch
from torch import Tensor

from pellucid.core.edges import edge_table, record_writes
from pellucid.core.errors import unknown
from pellucid.core.transformer import Transformer
from pellucid.tasks.task import Pairs

Ablation = Literal["zero", "mean", "position", "resample"]
ABLATIONS: tuple[Ablation, ...] = get_args(Ablation)
Writes = dict[str, Tensor]
"""What every writer writes, by site: (b, t, d), heads (b, t, h, d)."""


@torch.no_grad()
def clean_writes(model: Transformer, batch: Pairs) -> Writes:
    """What every writer writes on the batch."""
    return record_writes(model, batch.tokens, real(model, batch.mask))


@torch.no_grad()
def fills(model: Transformer, batch: Pairs, ablation: Ablation, pool: Pairs | None = None) -> Writes:
    """What every write is replaced by when it is ablated, in the shapes of `clean_writes`.

    zero: 0, but for the output bias of an MLP (or of attention that is one writer), which is no part of what it says.
    mean: over all real tokens of `pool`. position: over the pool's rows, at each position. resample: the write on the
    corrupt input; at positions that the corrupt input does not have, the clean write.
    Raises `ValueError` for an unknown ablation, for a mean without a pool, and for corrupt inputs that all equal the clean
    ones.
    """
    if ablation not in ABLATIONS:
        raise unknown("ablation", ablation, ABLATIONS)
    if ablation in ("mean", "position") and pool is None:
        raise ValueError(f"ablation {ablation!r} takes means over data: give it a pool of pairs")
    clean = clean_writes(model, batch)
    if ablation == "resample":
        check_differ(batch)
        corrupt = record_writes(model, batch.corrupt, real(model, batch.corrupt_mask))
        has = batch.corrupt_mask
        return {site: torch.where(fit(has, x), corrupt[site], x) for site, x in clean.items()}
    if ablation == "zero":
        return {site: zero(model, site, x) for site, x in clean.items()}
    assert pool is not None
    writes, mask = clean_writes(model, pool), pool.mask
    return {
        site: average(writes[site], mask, ablation == "position", x.shape[1]).expand_as(x).contiguous()
        for site, x in clean.items()
    }


def check_differ(batch: Pairs) -> None:
    """Raise `ValueError` where every row's corrupt input equals its clean one."""
    masks = batch.mask, batch.corrupt_mask
    if torch.equal(*masks) and torch.equal(batch.tokens[masks[0]], batch.corrupt[masks[1]]):
        raise ValueError("the corrupt input of every row equals its clean one: there is no effect to measure")


def real(model: Transformer, mask: Tensor) -> Tensor | None:
    """The mask that a model needs: rows are padded on the right, so a causal one needs none."""
    return None if model.config.causal or bool(mask.all()) else mask


def fit(mask: Tensor, x: Tensor) -> Tensor:
    """(b, t) with the trailing axes of `x`."""
    return mask.view(*mask.shape, *[1] * (x.dim() - 2))


def zero(model: Transformer, site: str, x: Tensor) -> Tensor:
    """A write that says nothing: its bias."""
    layer, _, part = site.partition(".")
    if part not in ("mlp.out", "attn.out"):
        return torch.zeros_like(x)
    block = model.blocks[int(layer)]
    module = block.mlp if part == "mlp.out" else block.attn
    bias = None if module is None else module.proj.bias
    return torch.zeros_like(x) if bias is None else bias.expand_as(x).contiguous()


def average(x: Tensor, mask: Tensor, by_position: bool, positions: int) -> Tensor:
    """The mean of (b, t, ...) over real tokens, (1, 1, ...), or at each position, (1, positions, ...).

    A position that no row of the pool has gets the mean over all.
    """
    weight = fit(mask, x).to(x)
    overall = (x * weight).sum((0, 1), keepdim=True) / weight.sum()
    if not by_position:
        return overall
    count = weight.sum(0, keepdim=True)
    found = torch.where(count > 0, (x * weight).sum(0, keepdim=True) / count.clamp(min=1), overall)
    missing = positions - x.shape[1]
    return (
        torch.cat([found, overall.expand(1, missing, *x.shape[2:])], 1)
        if missing > 0
        else found[:, :positions]
    )


def writer_index(model: Transformer) -> dict[str, list[int]]:
    """For each write site the numbers of its writers in the edge table."""
    found: dict[str, list[int]] = {}
    for number, (site, _) in enumerate(edge_table(model.config).writers):
        found.setdefault(site, []).append(number)
    return found


def by_writer(model: Transformer, writes: Writes) -> Tensor:
    """(writers, b, t, d): the writes one by one, in the order of the edge table."""
    parts = [
        writes[site].unbind(2) if writes[site].dim() == 4 else (writes[site],) for site in writer_index(model)
    ]
    return torch.stack([x for part in parts for x in part])
