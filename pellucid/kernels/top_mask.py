"""Which k entries of a matrix are its largest magnitudes, where every unit keeps some of its own.

Weight-sparse transformers, section 2.1 and A.2.
"""

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

STRIDE = 16
"""The CPU path looks at every so many-th entry to guess where the threshold lies."""


def top_mask(
    weight: Float[Tensor, "*shape"], k: int, *, alive: int = 0, axis: int | None = None
) -> Bool[Tensor, "*shape"]:
    """Which `k` entries of `weight` stay: each unit's own largest `alive`, then the largest of the rest.

    A unit's weights lie along `axis`. Where k is too small for `alive` of every unit, each gets k // units. The count
    is exact, also where magnitudes tie. Raises `ValueError` for a k that is not in 0..entries.
    """
    if not 0 <= k <= weight.numel():
        raise ValueError(f"k must be in 0..{weight.numel()}, got {k}")
    each = 0
    if axis is not None and weight.numel():
        each = min(alive, k // (weight.numel() // weight.shape[axis]), weight.shape[axis])
    if (
        weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.float64)
        and 0 < k < weight.numel()
    ):
        mask = _top_mask_numpy(weight.detach().numpy(), k, each, axis or 0)
        if mask is not None:
            return torch.from_numpy(mask)
    return top_mask_reference(weight, k, each, axis or 0)


def top_mask_reference(
    weight: Float[Tensor, "*shape"], k: int, each: int, axis: int
) -> Bool[Tensor, "*shape"]:
    """The rule by sorting: `each` of every unit along `axis` first, then the largest of the rest up to `k`."""
    magnitude = weight.detach().abs()
    if each:
        magnitude.scatter_(axis, magnitude.topk(each, dim=axis, sorted=False).indices, torch.inf)
    mask = torch.zeros(weight.numel(), dtype=torch.bool, device=weight.device)
    mask[magnitude.flatten().topk(k, sorted=False).indices] = True
    return mask.view_as(weight)


def _top_mask_numpy(weight: np.ndarray, k: int, each: int, axis: int) -> np.ndarray | None:
    """The rule by thresholds, without sorting; None where ties make a threshold ambiguous."""
    magnitude = np.abs(weight)
    if each:
        by_unit = (
            magnitude if axis == weight.ndim - 1 else np.ascontiguousarray(np.moveaxis(magnitude, axis, -1))
        )
        least = np.partition(by_unit, -each, axis=-1)[..., -each]
        own = magnitude >= np.expand_dims(least, axis)
        if own.sum() != each * least.size:
            return None
        magnitude[own] = np.inf
    mask = magnitude >= _kth_largest(magnitude.ravel(), k)
    return mask if mask.sum() == k else None


def _kth_largest(x: np.ndarray, k: int) -> np.floating:
    """The k-th largest entry, looked for among those above a guess; among all where the guess was too high."""
    sample = x[::STRIDE]
    rank = int(1.2 * k / STRIDE) + 16  # a little further down than the sample's share of k
    if rank < len(sample):
        above = x[x >= np.partition(sample, -rank)[-rank]]
        if len(above) >= k:
            x = above
    return np.partition(x, -k)[-k]
