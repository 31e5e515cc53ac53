"""Where a bottleneck's directions come from: the parity code, or bases to compare it with.

All are asked the same: the top children of given parents, the top of all features, the scores of children, and sums of
directions. Direction i has children i | j << shift; an index of -1 is no direction. Scores are raw inner products.
"""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


class SignBasis(nn.Module):
    """phi_i = (-1)^popcount(i & mask) / sqrt(d), computed from the masks: those of the code, or random ones."""

    mask: Tensor

    def __init__(self, d: int, *, random: bool = False, seed: int = 0):
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.suffix = "_reference" if random else ""
        self.register_buffer(
            "mask",
            torch.randint(0, d * d, (d,), generator=draw) if random else masks(d).clone(),
            persistent=False,
        )

    def kernel(self, name: str) -> Callable:
        """The fast form, which needs the code's masks; the reference for others."""
        return getattr(kernels, name + self.suffix)

    def top_children(
        self, x: Tensor, parents: Tensor, mean: Tensor, scale: Tensor, *, shift: int, children: int, k: int
    ) -> Selection:
        return self.kernel("select_children")(
            x, parents, self.mask, mean, scale, shift=shift, children=children, k=k
        )

    def top_of_all(self, x: Tensor, mean: Tensor, scale: Tensor, *, children: int, k: int) -> Selection:
        return self.kernel("select_flat")(x, self.mask, mean, scale, children=children, k=k)

    def child_scores(self, x: Tensor, parents: Tensor, *, shift: int, children: int) -> Tensor:
        return self.kernel("child_scores")(x, parents, self.mask, shift=shift, children=children)

    def decode(self, z: Tensor, index: Tensor) -> Tensor:
        return self.kernel("decode")(z, index, self.mask)


class VectorBasis(nn.Module):
    """Stored unit vectors (m, d), drawn at random; learned, or as they are."""

    vectors: Tensor

    def __init__(self, d: int, m: int, *, learned: bool, seed: int = 0):
        super().__init__()
        drawn = F.normalize(torch.randn(m, d, generator=torch.Generator().manual_seed(seed)), dim=-1)
        if learned:
            self.vectors = nn.Parameter(drawn)
        else:
            self.register_buffer("vectors", drawn, persistent=False)

    def top_children(
        self, x: Tensor, parents: Tensor, mean: Tensor, scale: Tensor, *, shift: int, children: int, k: int
    ) -> Selection:
        with torch.no_grad():
            raw = self.child_scores(x, parents, shift=shift, children=children)
            raw, index = kernels.candidates(raw, parents, shift, x.shape[1])
            chosen = index.gather(1, kernels.top((raw - mean[index]) * scale[index], index, k))
        return chosen, self.score(x, chosen)

    def top_of_all(self, x: Tensor, mean: Tensor, scale: Tensor, *, children: int, k: int) -> Selection:
        d = x.shape[1]
        with torch.no_grad():
            z = (torch.cat([x, x @ self.vectors.T.to(x.dtype)], dim=1) - mean) * scale
            chosen = kernels.top(z, torch.arange(z.shape[1], device=x.device).expand_as(z), k)
        own = chosen < d
        score = torch.where(
            own, x.gather(1, torch.where(own, chosen, 0)), self.score(x, torch.where(own, 0, chosen - d))
        )
        return chosen, score

    def child_scores(self, x: Tensor, parents: Tensor, *, shift: int, children: int) -> Tensor:
        index = parents[..., None] | torch.arange(children, device=x.device) << shift
        return (x @ self.vectors.T.to(x.dtype)).gather(1, index.flatten(1)).view_as(index)

    def score(self, x: Tensor, index: Tensor) -> Tensor:
        """<x, vector> (n, k) of chosen vectors only, so that no gradient of all scores exists."""
        return torch.einsum("nd,nkd->nk", x, F.embedding(index, self.vectors).to(x.dtype))

    def decode(self, z: Tensor, index: Tensor) -> Tensor:
        z, vectors = torch.where(index < 0, 0, z), self.vectors.to(z.dtype)
        return F.embedding_bag(index.clamp(min=0), vectors, per_sample_weights=z, mode="sum")
