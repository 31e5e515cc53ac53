"""Where a bottleneck's directions come from: the parity code, or bases to compare it with.

All are asked the same: the top children of given parents, the top of all features, the scores of children, and sums of
directions. Direction i has children i | j << shift; an index of -1 is no direction. Scores are raw inner products.
"""

from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pellucid.kernels import parity as kernels
from pellucid.parity.code import masks

Selection = tuple[Tensor, Tensor]
"""(index, score), both (n, k): by falling |standardised score|, of equal ones the lower index first."""


class Basis(Protocol):
    """What a bottleneck asks of its directions; x is (n, d)."""

    def top_children(
        self, x: Tensor, parents: Tensor, mean: Tensor, scale: Tensor, *, shift: int, children: int, k: int
    ) -> Selection: ...

    def top_of_all(self, x: Tensor, mean: Tensor, scale: Tensor, *, children: int, k: int) -> Selection: ...

    def child_scores(self, x: Tensor, parents: Tensor, *, shift: int, children: int) -> Tensor: ...

    def decode(self, z: Tensor, index: Tensor) -> Tensor: ...


class ParityBasis(nn.Module):
    """The code's directions, computed from its masks."""

    mask: Tensor

    def __init__(self, d: int):
        super().__init__()
        self.register_buffer("mask", masks(d).clone(), persistent=False)

    def top_children(
        self, x: Tensor, parents: Tensor, mean: Tensor, scale: Tensor, *, shift: int, children: int, k: int
    ) -> Selection:
        return kernels.select_children(
            x, parents, self.mask, mean, scale, shift=shift, children=children, k=k
        )

    def top_of_all(self, x: Tensor, mean: Tensor, scale: Tensor, *, children: int, k: int) -> Selection:
        return kernels.select_flat(x, self.mask, mean, scale, children=children, k=k)

    def child_scores(self, x: Tensor, parents: Tensor, *, shift: int, children: int) -> Tensor:
        return kernels.child_scores(x, parents, self.mask, shift=shift, children=children)

    def decode(self, z: Tensor, index: Tensor) -> Tensor:
        return kernels.decode(z, index, self.mask)


class StoredBasis(nn.Module):
    """Unit vectors (m, d) that are stored: the directions of random masks, random Gaussian ones, or learned ones, which
    begin as those. They are part of a checkpoint."""

    vectors: Tensor

    def __init__(self, d: int, m: int, kind: Literal["random", "gaussian", "learned"]):
        super().__init__()
        self.kind = kind
        if kind == "learned":
            self.vectors = nn.Parameter(torch.empty(m, d))
        else:
            self.register_buffer("vectors", torch.empty(m, d))
        self.draw(torch.Generator().manual_seed(0))

    @torch.no_grad()
    def draw(self, generator: torch.Generator) -> None:
        """Draw the vectors anew; on the meta device there is nothing to draw."""
        if self.vectors.is_meta:
            return
        m, d = self.vectors.shape
        if self.kind == "random":
            mask = torch.randint(0, d * d, (d,), generator=generator, device="cpu")
            drawn = kernels.signs(torch.arange(m, device="cpu"), mask) / d**0.5
        else:
            drawn = F.normalize(torch.randn(m, d, generator=generator, device="cpu"), dim=-1)
        self.vectors.copy_(drawn)

    def top_children(
        self, x: Tensor, parents: Tensor, mean: Tensor, scale: Tensor, *, shift: int, children: int, k: int
    ) -> Selection:
        with torch.no_grad():
            raw = self.child_scores(x, parents, shift=shift, children=children)
            index, value = kernels.select(
                *kernels.candidates(raw, parents, shift, x.shape[1]), mean, scale, k
            )
        return index, self.score(x, index, value)

    def top_of_all(self, x: Tensor, mean: Tensor, scale: Tensor, *, children: int, k: int) -> Selection:
        d = x.shape[1]
        with torch.no_grad():
            raw = torch.cat([x, self.all_scores(x)], dim=1)
            number = torch.arange(raw.shape[1], device=x.device).expand(raw.shape)
            index, value = kernels.select(raw, number, mean, scale, k)
        own = index < d
        channels = x.gather(1, torch.where(own, index, 0))
        return index, torch.where(own, channels, self.score(x, torch.where(own, 0, index - d), value))

    def child_scores(self, x: Tensor, parents: Tensor, *, shift: int, children: int) -> Tensor:
        index = parents[..., None] | torch.arange(children, device=x.device) << shift
        return self.all_scores(x).gather(1, index.flatten(1)).view_as(index)

    def all_scores(self, x: Tensor) -> Tensor:
        """(n, m) inner products."""
        return x @ self.vectors.T.to(x.dtype)

    def score(self, x: Tensor, index: Tensor, value: Tensor) -> Tensor:
        """`value` (n, k), the inner products of x and chosen vectors, with its gradient in both."""
        return Chosen.apply(x, self.vectors.to(x.dtype), index, value)  # type: ignore[return-value]

    def decode(self, z: Tensor, index: Tensor) -> Tensor:
        return weighted(index.clamp(min=0), torch.where(index < 0, 0, z), self.vectors.to(z.dtype))


def weighted(index: Tensor, z: Tensor, vectors: Tensor) -> Tensor:
    """index and z (n, k) -> (n, d): sums of vectors by weight; none of (n, k, d) is held."""
    return F.embedding_bag(index, vectors, per_sample_weights=z, mode="sum")


class Chosen(torch.autograd.Function):
    """Scores that are known already; their gradients are sums: of vectors for a token, of tokens for a vector."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, vectors: Tensor, index: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(x, vectors, index)
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, vectors, index = ctx.saved_tensors
        to_x = weighted(index, grad, vectors) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return to_x, None, None, None
        chosen, order = index.flatten().sort()
        first = torch.searchsorted(chosen, torch.arange(len(vectors), device=x.device))
        to_vectors = F.embedding_bag(
            order // index.shape[1], x, first, mode="sum", per_sample_weights=grad.flatten()[order]
        )
        return to_x, to_vectors, None, None
