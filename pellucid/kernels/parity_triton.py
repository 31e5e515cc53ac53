"""The parity kernels on a GPU: signs are made in registers from the parity of index & mask, and never stored.

Scores and sums are Triton; selection is torch's.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from pellucid.kernels import parity

BLOCK = 32
"""Features, or tokens' channels, that a program works on at a time."""


def kernel(f: Callable) -> Any:
    """`f` compiled by Triton when it is launched."""
    return triton.jit(f)


@kernel
def _signed(value, index, mask):
    """value * (-1)^popcount(index & mask)."""
    bits = index & mask
    bits ^= bits >> 16
    bits ^= bits >> 8
    bits ^= bits >> 4
    bits ^= bits >> 2
    bits ^= bits >> 1
    return tl.where((bits & 1) != 0, -value, value)


@kernel
def _bucket_sums(
    x, parents, channels, masks, out, many, d: tl.constexpr, children: tl.constexpr, step: tl.constexpr
):
    """The signed channels of one parent of one token, summed by the bits that its children see.

    `channels` lists the channels of bucket 0, then those of bucket 1, ...: equally many.
    """
    token, parent = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = tl.load(parents + token * many + parent)
    bucket = tl.arange(0, children)
    total = tl.zeros((children,), tl.float32)
    for first in range(0, d // children, step):
        place = bucket[:, None] * (d // children) + first + tl.arange(0, step)[None, :]
        channel = tl.load(channels + place)
        value = tl.load(x + token * d + channel)
        total += tl.sum(_signed(value, index, tl.load(masks + channel)), axis=1)
    tl.store(out + (token * many + parent) * children + bucket, total)


@kernel
def _score(x, index, masks, out, norm, many, d: tl.constexpr, features: tl.constexpr, step: tl.constexpr):
    """A block of one token's features."""
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * features + tl.arange(0, features)
    feature = tl.load(index + token * many + place, mask=place < many, other=-1)
    total = tl.zeros((features,), tl.float32)
    for first in range(0, d, step):
        channel = first + tl.arange(0, step)
        value = tl.load(x + token * d + channel)
        signed = _signed(
            tl.broadcast_to(value[None, :], (features, step)),
            feature[:, None],
            tl.load(masks + channel)[None, :],
        )
        total += tl.sum(signed, axis=1)
    tl.store(out + token * many + place, tl.where(feature < 0, 0.0, total * norm), mask=place < many)


@kernel
def _decode(z, index, masks, out, norm, many, d: tl.constexpr, features: tl.constexpr, step: tl.constexpr):
    """A block of one token's channels."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * step + tl.arange(0, step)
    mask = tl.load(masks + channel)
    total = tl.zeros((step,), tl.float32)
    for first in range(0, many, features):
        place = first + tl.arange(0, features)
        feature = tl.load(index + token * many + place, mask=place < many, other=-1)
        value = tl.load(z + token * many + place, mask=place < many, other=0.0)
        value = tl.where(feature < 0, 0.0, value)
        signed = _signed(tl.broadcast_to(value[:, None], (features, step)), feature[:, None], mask[None, :])
        total += tl.sum(signed, axis=0)
    tl.store(out + token * d + channel, total * norm)


def child_scores(x: Tensor, parents: Tensor, masks: Tensor, *, shift: int, children: int) -> Tensor:
    (n, d), many = x.shape, parents.shape[1]
    sums = x.new_empty((n, many, children))
    channels = (masks >> shift & children - 1).argsort(stable=True)
    step = min(d // children, max(2048 // children, 1))
    _bucket_sums[n, many](
        x.contiguous(), parents.contiguous(), channels, masks, sums, many, d, children, step
    )
    return sums @ _walsh(children, x) * d**-0.5


def score(x: Tensor, index: Tensor, masks: Tensor) -> Tensor:
    (n, d), many = x.shape, index.shape[1]
    out = x.new_empty(index.shape)
    grid = n, triton.cdiv(many, BLOCK)
    _score[grid](x.contiguous(), index.contiguous(), masks, out, d**-0.5, many, d, BLOCK, min(d, 128))
    return out


def decode(z: Tensor, index: Tensor, masks: Tensor) -> Tensor:
    (n, many), d = z.shape, len(masks)
    out = z.new_empty((n, d))
    step = min(d, 128)
    _decode[n, d // step](z.contiguous(), index.contiguous(), masks, out, d**-0.5, many, d, BLOCK, step)
    return out


def select_channels(x: Tensor, mean: Tensor, scale: Tensor, k: int) -> tuple[Tensor, Tensor]:
    number = torch.arange(x.shape[1], device=x.device).expand(x.shape)
    return parity.select(x, number, mean, scale, k)


def select_children(
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
    raw = child_scores(x, parents, masks, shift=shift, children=children)
    return parity.select(*parity.candidates(raw, parents, shift, x.shape[1]), mean, scale, k)


def select_flat(
    x: Tensor, masks: Tensor, mean: Tensor, scale: Tensor, *, children: int, k: int
) -> tuple[Tensor, Tensor]:
    """Child by child, the Walsh-Hadamard transform of all parents at once, as one of rows and one of columns; only the
    best so far are kept."""
    n, d = x.shape
    rows = 1 << d.bit_length() // 2
    channel = torch.arange(d, device=x.device).expand(n, d)
    index, raw = parity.select(x, channel, mean, scale, min(k, d))
    for j in range(children):
        signed = (x * parity.signs(torch.tensor(j * d, device=x.device), masks)).view(n, rows, d // rows)
        scores = (_walsh(rows, x) @ signed @ _walsh(d // rows, x)).flatten(1) * d**-0.5
        raw, index = torch.cat([raw, scores], dim=1), torch.cat([index, d + j * d + channel], dim=1)
        index, raw = parity.select(raw, index, mean, scale, min(k, raw.shape[1]))
    return index, raw


def _walsh(n: int, like: Tensor) -> Tensor:
    number = torch.arange(n, device=like.device)
    return parity.signs(number, number).to(like.dtype)
