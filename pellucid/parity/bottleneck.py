"""The parity bottleneck: an MLP reads only a sparse code of its input, over channels and computed directions.

Level 0 is the d channels. The top K_0 are active; their children compete for the K_1 places of level 1, and so on. What
is active, with its standardised score, is summed up again and given the input's norm. Parity bottlenecks, section 3.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from pellucid.kernels.parity import select_channels
from pellucid.parity.bases import Basis, ParityBasis, StoredBasis
from pellucid.parity.config import ParityConfig
from pellucid.training import distributed

At = Callable[[str, Tensor], Tensor]
"""Passes a value by the taps of a site."""


@dataclass(frozen=True)
class ParityCode:
    """What is active in each token: (index, score), both (..., K_l), for every level, and the input's norm (..., 1).

    Feature c < d is channel c, feature d + i is direction i. Scores are standardised and signed. With flat routing
    both levels compete, and there is one pair.
    """

    levels: tuple[tuple[Tensor, Tensor], ...]
    norm: Tensor

    @property
    def index(self) -> Tensor:
        """(..., K) of all levels."""
        return torch.cat([index for index, _ in self.levels], dim=-1)

    @property
    def score(self) -> Tensor:
        """(..., K) of all levels."""
        return torch.cat([score for _, score in self.levels], dim=-1)


def unfold(code: ParityCode) -> ParityCode:
    """Every feature as two, one for each sign of its score: feature 2 i + (score < 0), with scores of at least 0."""
    levels = tuple((2 * index + (score < 0), score.abs()) for index, score in code.levels)
    return ParityCode(levels, code.norm)


class Moments(nn.Module):
    """Running mean and mean square of every feature's raw score, over the tokens in which it was a candidate.

    The prior is mean 0 and variance 1. A feature with n observations in a batch moves by 1 - decay^n towards their mean.
    """

    mean: Tensor
    square: Tensor
    batches: Tensor

    def __init__(self, features: int, decay: float, eps: float):
        super().__init__()
        self.decay, self.eps = decay, eps
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("square", torch.ones(features))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Moments":
        """Moments go where the model goes, but not below float32, which would round their changes away."""

        def moved(t: Tensor) -> Tensor:
            new = fn(t)
            return t.to(new.device) if new.is_floating_point() and new.itemsize < 4 else new

        return super()._apply(moved, recurse)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """ValueError for moments that are not finite: they would spread to every output."""
        for name in ("mean", "square"):
            value = state_dict.get(prefix + name)
            if value is not None and not value.is_meta and not value.isfinite().all():
                raise ValueError(f"{prefix}{name} is not finite in {int((~value.isfinite()).sum())} features")
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def scale(self) -> Tensor:
        """(features,) 1 / (standard deviation + eps)."""
        return 1 / ((self.square - self.mean.square()).clamp(min=0).sqrt() + self.eps)

    @torch.no_grad()
    def update(self, counts: Tensor, sums: Tensor, squares: Tensor) -> None:
        """Take in how often each feature was seen, and the sums of its scores and their squares, over all ranks. Where
        these are not finite, as after a bad batch on a GPU, nothing is taken in."""
        seen = distributed.sum_of(torch.stack([counts, sums, squares]))
        counts, sums, squares = torch.where(seen.isfinite().all(0), seen, 0)
        keep = self.decay**counts
        seen = counts.clamp(min=1)
        self.mean.copy_(torch.lerp(sums / seen, self.mean.to(keep), keep))
        self.square.copy_(torch.lerp(squares / seen, self.square.to(keep), keep))
        self.batches.add_(1)


class ParityBottleneck(nn.Module):
    """`forward(x) -> (x_hat, aux_loss)`, both of x's leading shape; no parameters of its own (with the parity basis).

    Raises ValueError for an input of another width and for one that is not finite.
    """

    sites = ("mlp.code.index", "mlp.code")

    def __init__(self, config: ParityConfig):
        super().__init__()
        self.config = config
        if config.basis == "parity":
            self.basis = cast(Any, ParityBasis(config.d))
        else:
            self.basis = cast(Any, StoredBasis(config.d, config.features - config.d, config.basis))
        self.moments = Moments(config.features, config.decay, config.eps)

    @classmethod
    def make(cls, d_in: int, **fields: Any) -> "ParityBottleneck":
        """The part that a model's `mlp_input` of kind `parity` names."""
        return cls(ParityConfig(d=d_in, **fields))

    def standards(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """(features,) the means that scores are taken from and the factors they are multiplied by."""
        if self.config.standardise:
            return self.moments.mean.to(dtype), self.moments.scale().to(dtype)
        mean = torch.zeros_like(self.moments.mean, dtype=dtype)
        return mean, torch.ones_like(mean)

    def select(self, x: Tensor, mean: Tensor, scale: Tensor) -> list[tuple[Tensor, Tensor]]:
        """x (n, d) -> the active features of each level and their raw scores."""
        c, basis = self.config, cast(Basis, self.basis)
        if c.routing == "flat":
            return [basis.top_of_all(x, mean, scale, children=c.children[0], k=c.k)]
        found = [select_channels(x, mean[: c.d], scale[: c.d], c.active[0])]
        parents = found[0][0]
        for level, (children, k) in enumerate(zip(c.children, c.active[1:], strict=True), start=1):
            shift = c.shift(level)
            own = slice(c.d, c.d + (children << shift))
            parents, score = basis.top_children(
                x, parents, mean[own], scale[own], shift=shift, children=children, k=k
            )
            found.append((parents + c.d, score))
        return found

    def encode(self, x: Tensor) -> ParityCode:
        """x (..., d) -> its code. In training mode this is also an observation for the moments."""
        c = self.config
        if x.shape[-1] != c.d:
            raise ValueError(f"the bottleneck codes {c.d} channels, got {x.shape[-1]}")
        flat = x.reshape(-1, c.d)
        check_finite(flat)
        mean, scale = self.standards(x.dtype)
        found = self.select(flat, mean, scale)
        levels = tuple(
            tuple(v.view(*x.shape[:-1], v.shape[-1]) for v in (index, (score - mean[index]) * scale[index]))
            for index, score in found
        )
        if self.training and c.standardise:
            self.observe(flat.detach(), [index for index, _ in found])
        return ParityCode(cast(Any, levels), x.norm(dim=-1, keepdim=True))

    def decode(self, code: ParityCode) -> Tensor:
        """The sum of the active features, by their scores, at the norm of what was coded: (..., d)."""
        d = self.config.d
        index, score = code.index.flatten(0, -2), code.score.flatten(0, -2)
        channel = index < d
        check_features(index, self.config.features)
        own = torch.zeros(len(index), d, dtype=score.dtype, device=score.device)
        own = own.scatter_add(1, torch.where(channel, index, 0), torch.where(channel, score, 0))
        x_hat = own + cast(Basis, self.basis).decode(score, torch.where(channel, -1, index - d))
        x_hat = x_hat.view(*code.norm.shape[:-1], d)
        return at_norm(x_hat, code.norm)

    def forward(self, x: Tensor, at: At | None = None) -> tuple[Tensor, Tensor]:
        """x (..., d) -> (what the MLP reads, (..., d); the weighted reconstruction loss). `at` passes the code by taps."""
        wide = x if x.dtype == torch.float64 else x.float()
        with full_precision(x.device):
            code = self.encode(wide)
            if at is not None:
                code = ParityCode(
                    ((at("mlp.code.index", code.index), at("mlp.code", code.score)),), code.norm
                )
            x_hat = self.decode(code)
        return x_hat.to(x.dtype), self.config.aux_weight * relative_error(wide, x_hat, code.norm)

    @torch.no_grad()
    def observe(self, x: Tensor, active: list[Tensor]) -> None:
        """Update the moments: channels from all tokens (n, d), the rest from candidates in a few tokens."""
        c = self.config
        counts = x.new_zeros(c.features)
        sums, squares = torch.zeros_like(counts), torch.zeros_like(counts)
        counts[: c.d] = len(x)
        sums[: c.d], squares[: c.d] = x.sum(0), x.square().sum(0)
        rows = self.sample(len(x))
        few, parents = x[rows], None
        for level, children in enumerate(c.children, start=1):
            if c.routing == "flat":
                parents = torch.arange(c.d, device=x.device).expand(len(rows), -1)
            else:
                parents = active[level - 1][rows] - (c.d if level > 1 else 0)
            shift, first = c.shift(level), int(level > 1)
            scores = cast(Basis, self.basis).child_scores(few, parents, shift=shift, children=children)
            child = torch.arange(first, children, device=x.device) << shift
            index = (c.d + (parents[..., None] | child)).flatten()
            scores = scores[..., first:].flatten()
            counts.index_add_(0, index, torch.ones_like(scores))
            sums.index_add_(0, index, scores)
            squares.index_add_(0, index, scores.square())
        self.moments.update(counts, sums, squares)

    def sample(self, n: int) -> Tensor:
        """Which of this rank's `n` tokens are observed: evenly spaced, others in every batch, the same for any number of
        ranks that share a batch."""
        mine = min(n, max(1, self.config.samples // distributed.size()))
        apart = n // max(1, mine)
        places = torch.arange(mine, device=self.moments.mean.device) * apart
        return places + self.moments.batches % max(1, apart)


TINY = 1e-30


def full_precision(device: torch.device) -> AbstractContextManager:
    """No autocast: which features are active must not follow the rounding of scores. (A meta device has none.)"""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def at_norm(x_hat: Tensor, norm: Tensor) -> Tensor:
    """x_hat (..., d) scaled to `norm` (..., 1)."""
    return x_hat * (norm / x_hat.norm(dim=-1, keepdim=True).clamp(min=TINY))


def relative_error(x: Tensor, x_hat: Tensor, norm: Tensor) -> Tensor:
    """||x - x_hat||^2 / ||x||^2, the mean over tokens; 0 of none. `norm` (..., 1) is that of x."""
    error = (x - x_hat).square().sum(-1) / norm.squeeze(-1).square().clamp(min=TINY)
    return error.mean() if error.numel() else error.sum()


def checked(x: Tensor) -> bool:
    """Whether values are looked at: on a GPU that would wait for them, and compiled code has none."""
    return x.device.type == "cpu" and x.numel() > 0 and not torch.compiler.is_compiling()


def check_features(index: Tensor, features: int) -> None:
    """ValueError for a CPU tensor of features that holds one out of range, naming it."""
    if checked(index):
        for i in (int(index.min()), int(index.max())):
            if not 0 <= i < features:
                raise ValueError(f"mlp.code.index: feature {i} is not in 0..{features - 1}")


def check_finite(x: Tensor) -> None:
    """ValueError for a CPU tensor (n, d) that holds NaN or infinity, naming one."""
    if not checked(x):
        return
    finite = torch.isfinite(x)
    if not finite.all():
        token, channel = (~finite).nonzero()[0].tolist()
        raise ValueError(
            f"the bottleneck's input is not finite: {x[token, channel].item()} at token {token}, channel {channel}, "
            f"one of {int((~finite).sum())}"
        )
