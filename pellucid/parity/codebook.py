"""The flat baseline: a learned codebook in the bottleneck's place, all of whose entries compete in every token.

Codebook features (Tamkin et al. 2023), with scores as weights; a TopK sparse autoencoder with tied weights.
"""

from typing import Any

import torch
from torch import Tensor, nn

from pellucid.parity.bases import StoredBasis
from pellucid.parity.bottleneck import At, at_norm, check_features, relative_error
from pellucid.parity.config import is_whole


class TopKCodebook(nn.Module):
    """`forward(x) -> (x_hat, aux_loss)`: the `k` entries of largest |score|, summed by score, at the input's norm.

    The product with all `features` entries is without gradients; only chosen ones have them.
    """

    sites = ("mlp.code.index", "mlp.code")

    def __init__(self, d_in: int, *, features: int, k: int, aux_weight: float = 0.01):
        super().__init__()
        if not is_whole(features) or features < 1:
            raise ValueError(f"features must be a positive integer, got {features!r}")
        if not is_whole(k) or not 1 <= k <= features:
            raise ValueError(f"k must be in 1..{features}, the number of features, got {k!r}")
        self.k, self.aux_weight = k, aux_weight
        self.basis = StoredBasis(d_in, features, "learned")

    @classmethod
    def make(cls, d_in: int, **fields: Any) -> "TopKCodebook":
        """The part that a model's `mlp_input` of kind `topk` names."""
        return cls(d_in, **fields)

    def forward(self, x: Tensor, at: At | None = None) -> tuple[Tensor, Tensor]:
        """x (..., d) -> (what the MLP reads, the weighted reconstruction loss)."""
        flat = x.reshape(-1, x.shape[-1])
        with torch.no_grad():
            every = self.basis.all_scores(flat)
            index = every.abs().topk(self.k, dim=-1).indices
        wide = flat if flat.dtype == torch.float64 else flat.float()
        score = self.basis.score(wide, index, every.gather(1, index).to(wide))
        if at is not None:
            shape = (*x.shape[:-1], self.k)
            index = at("mlp.code.index", index.view(shape)).view(index.shape)
            score = at("mlp.code", score.view(shape)).view(score.shape)
        check_features(index, len(self.basis.vectors))
        norm = wide.norm(dim=-1, keepdim=True)
        x_hat = at_norm(self.basis.decode(score, index), norm)
        return x_hat.view_as(x).to(x.dtype), self.aux_weight * relative_error(wide, x_hat, norm)
