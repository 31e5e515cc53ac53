"""AbsTopK: keep the entries of largest magnitude along the last axis, with their signs."""

import torch
from jaxtyping import Float
from torch import Tensor


def abs_topk(x: Float[Tensor, "*batch width"], k: int) -> Float[Tensor, "*batch width"]:
    """`x` with all but the `k` entries of largest magnitude zeroed; of equal ones the first stay.

    The gradient flows through the kept entries only. Weight-sparse transformers, A.1.
    """
    width = x.shape[-1]
    if not 0 < k <= width:
        raise ValueError(f"k must be in 1..{width}, got {k}")
    if k == width:
        return x
    magnitude = x.detach().abs()
    threshold = magnitude.topk(k, dim=-1).values[..., -1:]
    above = magnitude > threshold
    tied = magnitude == threshold
    places = k - above.sum(-1, keepdim=True)
    return torch.where(above | (tied & (tied.cumsum(-1) <= places)), x, 0)
