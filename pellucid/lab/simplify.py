"""A circuit less the nodes that move nothing and those that nothing moves: the same function with fewer nodes."""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pellucid.core.transformer import ACTIVATIONS, MLP, Attention, Transformer
from pellucid.lab.ablate import Kept


def simplify(
    model: Transformer, kept: Kept, means: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The same function with fewer nodes: one that nothing kept moves is frozen at its value, one that moves nothing falls."""
    kept, means = dict(kept), dict(means)
    for number, block in enumerate(model.blocks):
        if block.attn is not None:
            simplify_attention(block.attn, f"{number}.attn", kept, means)
        if block.mlp is not None:
            simplify_mlp(block.mlp, f"{number}.mlp", kept, means)
    return kept, means


def simplify_attention(attn: Attention, name: str, kept: dict[str, Tensor], means: dict[str, Tensor]) -> None:
    """`simplify` of one sublayer, in place."""
    source, out, reads = f"{name}.in", f"{name}.out", [f"{name}.{site}" for site in "qkv"]
    masks, values = settle(
        attn.qkv,
        kept[source],
        means[source],
        torch.cat([kept[site] for site in reads]),
        torch.cat([means[site] for site in reads]),
    )
    (q, k, v), (mean_q, mean_k, mean_v) = masks.split(attn.width), values.split(attn.width)
    # Under a sink even a frozen value's mix moves, with how much attention the sink leaves.
    moving = v if attn.sink is None else v | (mean_v != 0)
    kept[out], means[out] = settle(attn.proj, moving, mean_v, kept[out], means[out])
    moving = moving & sent_to(attn.proj, kept[out])
    live = head_any(moving, attn)[head_of(attn)]
    # A query channel whose key channel is frozen adds the same to all scores, which only a sink tells.
    q = q & live & (k if attn.sink is None else k | (mean_k != 0))
    k = k & live & (q | (mean_q != 0))
    masks = torch.cat([q, k, v & moving])
    kept[source] = kept[source] & sent_to(attn.qkv, masks)
    kept |= zip(reads, masks.split(attn.width), strict=True)
    means |= zip(reads, values.split(attn.width), strict=True)


def simplify_mlp(mlp: MLP, name: str, kept: dict[str, Tensor], means: dict[str, Tensor]) -> None:
    """`simplify` of one sublayer, in place."""
    source, act, out = f"{name}.in", f"{name}.act", f"{name}.out"
    if mlp.input is None:
        kept[act], means[act] = settle(
            mlp.fc, kept[source], means[source], kept[act], means[act], mlp.activation
        )
    kept[out], means[out] = settle(mlp.proj, kept[act], means[act], kept[out], means[out])
    kept[act] = kept[act] & sent_to(mlp.proj, kept[out])
    if mlp.input is None:
        kept[source] = kept[source] & sent_to(mlp.fc, kept[act])


def settle(
    linear: nn.Linear,
    moving: Tensor,
    sent: Tensor,
    kept: Tensor,
    means: Tensor,
    activation: Callable[[Tensor], Tensor] = ACTIVATIONS["identity"],
) -> tuple[Tensor, Tensor]:
    """The readers' `kept` and `means` with those nodes frozen that no `moving` writer reaches, at the value they have."""
    rows = kept.nonzero()[:, 0]
    weight = linear.weight.index_select(0, rows)
    still = ~((weight != 0) & moving).any(1)
    rows = rows[still]
    value = activation(received(linear, rows, torch.where(moving, 0, sent)))
    return kept.index_fill(0, rows, False), means.index_copy(0, rows, value)


def received(linear: nn.Linear, rows: Tensor, sent: Tensor) -> Tensor:
    """What the readers `rows` (n,) get, bias included, if the writers hold `sent`."""
    return F.linear(
        sent, linear.weight.index_select(0, rows), None if linear.bias is None else linear.bias[rows]
    )


def sent_to(linear: nn.Linear, readers: Tensor) -> Tensor:
    """Which writers have a weight to one of the `readers`, a mask."""
    return (linear.weight.index_select(0, readers.nonzero()[:, 0]) != 0).any(0)


def head_of(attn: Attention) -> Tensor:
    """(a,) the head of each channel."""
    sizes = torch.tensor(attn.sizes, device=attn.qkv.weight.device)
    return torch.arange(attn.h, device=sizes.device).repeat_interleave(sizes)


def head_any(channels: Tensor, attn: Attention) -> Tensor:
    """(h,) whether any of a head's channels is in the mask (a,)."""
    return head_of(attn)[channels].bincount(minlength=attn.h) > 0
