"""Scores on the computed directions of the parity bottleneck, the largest of them, and sums of directions.

d = 2^t channels, and masks[k] = k | inv(k) << t with inv a bijection of 0..d-1. Feature i (2t bits) has the direction
phi_i[k] = (-1)^popcount(i & masks[k]) / sqrt(d). Child j of parent p is p | j << shift, a power of two of children each;
at the first level shift = t and parents are 0..d-1, and above it child 0 would be its parent over again and is left out.

Selections return (index, score), both (n, k), by falling |(score - mean) * scale| and of equal ones by rising feature
number. `score` is raw; it has a gradient in x, selection and moments have none. float32 runs on compiled kernels, which
never hold all scores or one parent's signed channels; float64 on the plain forms below. Other dtypes, shapes that
disagree and indices out of range raise `ValueError`. Parity bottlenecks, sections 3 and 4.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.library import custom_op

Selection = tuple[Int[Tensor, "n k"], Float[Tensor, "n k"]]


def select_channels(
    x: Float[Tensor, "n d"], mean: Float[Tensor, " d"], scale: Float[Tensor, " d"], k: int
) -> Selection:
    """The top k channels of every token: level 0."""
    d = _width(x)
    _moments(mean, scale, x, d)
    _count(k, d)
    if x.dtype == torch.float64:
        return select_channels_reference(x, mean, scale, k)
    return _select_channels(x, mean, scale, k)


def select_children(
    x: Float[Tensor, "n d"],
    parents: Int[Tensor, "n P"],
    masks: Int[Tensor, " d"],
    mean: Float[Tensor, " features"],
    scale: Float[Tensor, " features"],
    *,
    shift: int,
    children: int,
    k: int,
) -> Selection:
    """The top k of all children of every token's own parents; moments of feature i, 0 <= i < children << shift, at i."""
    d = _width(x)
    _family(x, parents, masks, shift, children)
    _moments(mean, scale, x, children << shift)
    _count(k, parents.shape[1] * (children - _first(d, shift)))
    if x.dtype == torch.float64:
        return select_children_reference(x, parents, masks, mean, scale, shift=shift, children=children, k=k)
    return _select_children(x, parents, masks, mean, scale, shift, children, k)


def select_flat(
    x: Float[Tensor, "n d"],
    masks: Int[Tensor, " d"],
    mean: Float[Tensor, " features"],
    scale: Float[Tensor, " features"],
    *,
    children: int,
    k: int,
) -> Selection:
    """The top k of all the channels (features 0..d-1) and all first-level directions i (features d + i), exactly."""
    d = _width(x)
    _shape("masks", masks, (d,))
    _children(d, d.bit_length() - 1, children)
    _moments(mean, scale, x, d + d * children)
    _count(k, d + d * children)
    if x.dtype == torch.float64:
        return select_flat_reference(x, masks, mean, scale, children=children, k=k)
    return _select_flat(x, masks, mean, scale, children, k)


def child_scores(
    x: Float[Tensor, "n d"],
    parents: Int[Tensor, "n P"],
    masks: Int[Tensor, " d"],
    *,
    shift: int,
    children: int,
) -> Float[Tensor, "n P children"]:
    """Raw scores of all children, child 0 included; without a gradient."""
    _width(x)
    _family(x, parents, masks, shift, children)
    if x.dtype == torch.float64:
        return child_scores_reference(x.detach(), parents, masks, shift=shift, children=children)
    return _child_scores(x.detach(), parents, masks, shift, children)


def score(
    x: Float[Tensor, "n d"], index: Int[Tensor, "n K"], masks: Int[Tensor, " d"]
) -> Float[Tensor, "n K"]:
    """<x, phi_i> of every token's own features; 0 for the index -1, which is no direction."""
    d = _width(x)
    _shape("masks", masks, (d,))
    _shape("index", index, (len(x), index.shape[-1]))
    return score_reference(x, index, masks) if x.dtype == torch.float64 else _score(x, index, masks)


def decode(
    z: Float[Tensor, "n K"], index: Int[Tensor, "n K"], masks: Int[Tensor, " d"]
) -> Float[Tensor, "n d"]:
    """Sum of z_i phi_i over every token's own features: the adjoint of `score`. The index -1 is no direction."""
    _floats("z", z)
    _width(masks[None], "masks")
    _shape("masks", masks, masks.shape)
    _shape("index", index, tuple(z.shape))
    return decode_reference(z, index, masks) if z.dtype == torch.float64 else _decode(z, index, masks)


# The same in plain torch, for any masks, dtype and device: matrix products and sorting.


def signs(index: Tensor, masks: Tensor) -> Tensor:
    """(...) indices and (d,) masks -> (..., d) bits of popcount(index & mask) mod 2, as 1 and -1; float32."""
    bits = index[..., None] & masks
    for shift in (16, 8, 4, 2, 1):
        bits = bits ^ bits >> shift
    return 1.0 - 2.0 * (bits & 1)


def top(z: Tensor, number: Tensor, k: int) -> Tensor:
    """Places (n, k) of the largest |z| along the last axis, of equal ones the lower `number` first; NaN is largest.

    In float32 by one key of both: |z| as bits, which order alike, over the number.
    """
    if z.dtype == torch.float32:
        return (z.abs().view(torch.int32).long() << 32 | 0xFFFFFFFF - number).topk(k).indices
    by_number = number.argsort(-1)
    order = z.abs().gather(1, by_number).argsort(dim=-1, descending=True, stable=True)[:, :k]
    return by_number.gather(1, order)


def select(raw: Tensor, number: Tensor, mean: Tensor, scale: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The top k of candidates (n, m) with raw scores and feature numbers."""
    with torch.no_grad():
        place = top((raw - mean[number]) * scale[number], number, k)
    return number.gather(1, place), raw.gather(1, place)


def select_channels_reference(x: Tensor, mean: Tensor, scale: Tensor, k: int) -> tuple[Tensor, Tensor]:
    number = torch.arange(x.shape[1], device=x.device).expand(x.shape)
    return select(x, number, mean, scale, k)


def select_children_reference(
    x: Tensor,
    parents: Tensor,
    masks: Tensor,
    mean: Tensor,
    scale: Tensor,
    *,
    shift: int,
    children: int,
    k: int,
) -> tuple[Tensor, Tensor]:
    raw = child_scores_reference(x, parents, masks, shift=shift, children=children)
    return select(*candidates(raw, parents, shift, x.shape[1]), mean, scale, k)


def candidates(raw: Tensor, parents: Tensor, shift: int, d: int) -> tuple[Tensor, Tensor]:
    """The raw scores (n, m), of scores (n, P, children), that compete, and their feature numbers."""
    number = parents[..., None] | torch.arange(raw.shape[2], device=raw.device) << shift
    first = _first(d, shift)
    return raw[..., first:].flatten(1), number[..., first:].flatten(1)


def select_flat_reference(
    x: Tensor, masks: Tensor, mean: Tensor, scale: Tensor, *, children: int, k: int
) -> tuple[Tensor, Tensor]:
    n, d = x.shape
    walsh = torch.arange(d, device=x.device)
    first_level = child_scores_reference(
        x, walsh.expand(n, d), masks, shift=d.bit_length() - 1, children=children
    )
    raw = torch.cat([x, first_level.mT.flatten(1)], dim=1)
    return select(raw, torch.arange(raw.shape[1], device=x.device).expand(raw.shape), mean, scale, k)


def child_scores_reference(x: Tensor, parents: Tensor, masks: Tensor, *, shift: int, children: int) -> Tensor:
    """The children's sign patterns are the same for all parents: one matrix product."""
    _range("parents", parents, 0, 1 << shift)
    patterns = signs(torch.arange(children, device=x.device) << shift, masks).to(x.dtype)
    return (x[:, None] * signs(parents, masks).to(x.dtype)) @ patterns.T / x.shape[1] ** 0.5


def _directions(index: Tensor, masks: Tensor, like: Tensor) -> Tensor:
    """(n, K, d), zeros for the index -1."""
    _range("index", index, -1, len(masks) ** 2)
    return (signs(index, masks) * (index >= 0)[..., None]).to(like.dtype) / len(masks) ** 0.5


def score_reference(x: Tensor, index: Tensor, masks: Tensor) -> Tensor:
    return torch.einsum("nd,nkd->nk", x, _directions(index, masks, x))


def decode_reference(z: Tensor, index: Tensor, masks: Tensor) -> Tensor:
    return torch.einsum("nk,nkd->nd", z, _directions(index, masks, z))


# What may be asked.


def _floats(name: str, x: Tensor) -> None:
    if x.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{name} must be float32 or float64, got {x.dtype}; cast it first")
    if x.ndim != 2:
        raise ValueError(f"{name} must have two axes, got shape {tuple(x.shape)}")


def _width(x: Tensor, name: str = "x") -> int:
    """d, a power of two from 8 to 65536."""
    if name == "x":
        _floats(name, x)
    d = x.shape[-1]
    if not 8 <= d <= 65536 or d & (d - 1):
        raise ValueError(f"d must be a power of two in 8..65536, got {name} with {d} channels")
    return d


def _shape(name: str, index: Tensor, shape: tuple[int, ...]) -> None:
    """An int64 tensor of this shape."""
    if index.dtype != torch.int64 or tuple(index.shape) != tuple(shape):
        raise ValueError(
            f"{name} must be int64 of shape {tuple(shape)}, got {index.dtype} of shape {tuple(index.shape)}"
        )


def _moments(mean: Tensor, scale: Tensor, x: Tensor, features: int) -> None:
    for name, moment in (("mean", mean), ("scale", scale)):
        if moment.dtype != x.dtype or tuple(moment.shape) != (features,):
            raise ValueError(
                f"{name} must be {x.dtype} of shape ({features},), got {moment.dtype} of shape {tuple(moment.shape)}"
            )


def _children(d: int, shift: int, children: int) -> None:
    t = d.bit_length() - 1
    if children < 2 or children & (children - 1):
        raise ValueError(f"children must be a power of two from 2 on, got {children}")
    if not t <= shift <= 2 * t or children << shift > d * d:
        raise ValueError(
            f"children={children} at shift={shift} do not fit: indices have bits {t}..{2 * t - 1} for them at d={d}"
        )


def _family(x: Tensor, parents: Tensor, masks: Tensor, shift: int, children: int) -> None:
    d = x.shape[1]
    _shape("masks", masks, (d,))
    _children(d, shift, children)
    if parents.ndim != 2 or parents.shape[1] < 1:
        raise ValueError(f"parents must be of shape ({len(x)}, P), P >= 1, got {tuple(parents.shape)}")
    _shape("parents", parents, (len(x), parents.shape[1]))


def _count(k: int, candidates: int) -> None:
    if not 1 <= k <= candidates:
        raise ValueError(f"k must be in 1..{candidates}, the candidates, got {k}")


def _first(d: int, shift: int) -> int:
    """The first child that is a candidate."""
    return int(shift > d.bit_length() - 1)


def _range(name: str, index: Tensor, low: int, high: int) -> None:
    """Looked at where that costs nothing: on the CPU."""
    if index.device.type == "cpu" and index.numel() and not torch.compiler.is_compiling():
        least, most = (int(v) for v in index.aminmax())
        if least < low or most >= high:
            raise ValueError(f"{name} must be in {low}..{high - 1}, got {least}..{most}")


# The operators that autograd, torch.compile and the meta device see.


def _path(name: str, device: torch.device) -> Callable:
    """The fast form of a function on a device; its reference where there is none."""
    if device.type == "cpu":
        from pellucid.kernels import parity_cpu as fast
    elif device.type == "cuda":
        from pellucid.kernels import parity_triton as fast
    else:
        return globals()[f"{name}_reference"]
    return getattr(fast, name)


def _empty_selection(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return x.new_empty((len(x), k), dtype=torch.int64), x.new_empty((len(x), k))


@custom_op("pellucid::parity_select_channels", mutates_args=())
def _select_channels(x: Tensor, mean: Tensor, scale: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return _path("select_channels", x.device)(x, mean, scale, k)


@_select_channels.register_fake
def _(x, mean, scale, k):
    return _empty_selection(x, k)


@custom_op("pellucid::parity_select_children", mutates_args=())
def _select_children(
    x: Tensor,
    parents: Tensor,
    masks: Tensor,
    mean: Tensor,
    scale: Tensor,
    shift: int,
    children: int,
    k: int,
) -> tuple[Tensor, Tensor]:
    _range("parents", parents, 0, 1 << shift)
    return _path("select_children", x.device)(
        x, parents, masks, mean, scale, shift=shift, children=children, k=k
    )


@_select_children.register_fake
def _(x, parents, masks, mean, scale, shift, children, k):
    return _empty_selection(x, k)


@custom_op("pellucid::parity_select_flat", mutates_args=())
def _select_flat(
    x: Tensor, masks: Tensor, mean: Tensor, scale: Tensor, children: int, k: int
) -> tuple[Tensor, Tensor]:
    return _path("select_flat", x.device)(x, masks, mean, scale, children=children, k=k)


@_select_flat.register_fake
def _(x, masks, mean, scale, children, k):
    return _empty_selection(x, k)


@custom_op("pellucid::parity_child_scores", mutates_args=())
def _child_scores(x: Tensor, parents: Tensor, masks: Tensor, shift: int, children: int) -> Tensor:
    _range("parents", parents, 0, 1 << shift)
    return _path("child_scores", x.device)(x, parents, masks, shift=shift, children=children)


@_child_scores.register_fake
def _(x, parents, masks, shift, children):
    return x.new_empty((*parents.shape, children))


@custom_op("pellucid::parity_score", mutates_args=())
def _score(x: Tensor, index: Tensor, masks: Tensor) -> Tensor:
    _range("index", index, -1, len(masks) ** 2)
    return _path("score", x.device)(x, index, masks)


@_score.register_fake
def _(x, index, masks):
    return x.new_empty(index.shape)


@custom_op("pellucid::parity_decode", mutates_args=())
def _decode(z: Tensor, index: Tensor, masks: Tensor) -> Tensor:
    _range("index", index, -1, len(masks) ** 2)
    return _path("decode", z.device)(z, index, masks)


@_decode.register_fake
def _(z, index, masks):
    return z.new_empty((len(z), len(masks)))


# Gradients: a score's is the sum of directions, a sum's the scores.


def _to_channels(grad: Tensor, index: Tensor, d: int) -> Tensor:
    """Each gradient added to the channel it belongs to; index -1 to none."""
    return F.pad(grad.new_zeros(len(grad), d), (0, 1)).scatter_add(1, index % (d + 1), grad)[:, :d]


def _save_channels(ctx, inputs, output):
    ctx.d = inputs[0].shape[1]
    ctx.save_for_backward(output[0])
    ctx.mark_non_differentiable(output[0])


def _channels_backward(ctx, _, grad):
    (index,) = ctx.saved_tensors
    return _to_channels(grad, index, ctx.d), None, None, None


def _save_children(ctx, inputs, output):
    ctx.save_for_backward(output[0], inputs[2])
    ctx.mark_non_differentiable(output[0])


def _children_backward(ctx, _, grad):
    return decode(grad, *ctx.saved_tensors), *(None,) * 7


def _save_flat(ctx, inputs, output):
    ctx.save_for_backward(output[0], inputs[1])
    ctx.mark_non_differentiable(output[0])


def _flat_backward(ctx, _, grad):
    index, masks = ctx.saved_tensors
    d = len(masks)
    own = _to_channels(grad, torch.where(index < d, index, -1), d)
    return own + decode(grad, (index - d).clamp(min=-1), masks), *(None,) * 5


def _save_index(ctx, inputs, output):
    ctx.save_for_backward(*inputs[1:])


_select_channels.register_autograd(_channels_backward, setup_context=_save_channels)
_select_children.register_autograd(_children_backward, setup_context=_save_children)
_select_flat.register_autograd(_flat_backward, setup_context=_save_flat)
_score.register_autograd(
    lambda ctx, grad: (decode(grad, *ctx.saved_tensors), None, None), setup_context=_save_index
)
_decode.register_autograd(
    lambda ctx, grad: (score(grad, *ctx.saved_tensors), None, None), setup_context=_save_index
)
