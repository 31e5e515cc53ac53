"""The L0 constraint: after each step every matrix keeps its largest magnitudes, an exact number of them.

Weight-sparse transformers, section 2.1 and A.2.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch

import torch
from torch import Tensor, nn

from pellucid.kernels.top_mask import top_mask

# Parameters whose rows or columns are neurons or attention channels: the axis that holds one unit's weights.
UNIT_AXIS = {"attn.qkv.weight": 1, "attn.proj.weight": 0, "mlp.fc.weight": 1, "mlp.proj.weight": 0}


@dataclass(frozen=True, kw_only=True)
class SparsityConfig:
    """How many weights stay, and on what schedule."""

    fraction: float
    """The fraction of each matrix and bias that is nonzero in the end."""

    anneal_start: float = 0.01
    """Where in training the fraction begins to fall from 1."""

    anneal_end: float = 0.5
    """Where in training it reaches `fraction`; equal to `anneal_start` is no annealing."""

    anneal_power: float = 1.0
    """The shape of the fall: 1 is linear, as in the seed; 3 is the cubic of Zhu & Gupta (2017), fast at first."""

    alive: int = 4
    """The least number of nonzeros of a neuron or attention channel, where the budget allows it."""

    sharkfin: bool = True
    """Whether the learning rate is multiplied by sqrt(fraction / current fraction) (Figure 11)."""

    legacy_embed_schedule: bool = False
    """Whether embeddings and biases stay dense until halfway through annealing and then drop to `fraction` at once: a
    bug of the seed's, which it kept (Figure 21)."""

    dense: tuple[str, ...] = ("bigram", "*.sink", "*norm*", "wpe.*")
    """Parameters (patterns of names) that stay dense."""

    def __post_init__(self):
        object.__setattr__(self, "dense", tuple(self.dense))
        if not 0 < self.fraction <= 1:
            raise ValueError(f"fraction must be in (0, 1], got {self.fraction}")
        if not 0 <= self.anneal_start <= self.anneal_end <= 1:
            raise ValueError(
                f"need 0 <= anneal_start <= anneal_end <= 1, got {self.anneal_start} and {self.anneal_end}"
            )
        if not self.anneal_power > 0:
            raise ValueError(f"anneal_power must be positive, got {self.anneal_power}")
        if self.alive < 0:
            raise ValueError(f"alive must be 0 or more, got {self.alive}")

    def of(self, name: str, progress: float) -> float:
        """The fraction of the parameter `name` at a `progress` of training."""
        if not self.legacy_embed_schedule or unit_axis(name) is not None:
            return self.at(progress)
        return self.fraction if progress >= (self.anneal_start + self.anneal_end) / 2 else 1.0

    def at(self, progress: float) -> float:
        """The fraction at a `progress` of training in 0..1: from 1 down to the target."""
        if progress >= self.anneal_end:
            return self.fraction
        if progress < self.anneal_start:
            return 1.0
        span = self.anneal_end - self.anneal_start
        through = min(1.0, max(0.0, (progress - self.anneal_start) / span))
        return self.fraction + (1 - self.fraction) * (1 - through) ** self.anneal_power


def unit_axis(name: str) -> int | None:
    """The axis along which the parameter `name` holds one neuron's or attention channel's weights."""
    return next((axis for suffix, axis in UNIT_AXIS.items() if name.endswith(suffix)), None)


class Projection:
    """Keeps a model's weights on the L0 constraint; what the training loop calls after each optimiser step."""

    def __init__(self, model: nn.Module, config: SparsityConfig):
        self.config = config
        self.parameters = {
            name: p
            for name, p in model.named_parameters()
            if not any(fnmatch(name, pattern) for pattern in config.dense)
        }
        self.begin()

    def begin(self) -> None:
        """Note which weights are nonzero now: what `churn` counts from."""
        self.masks = {name: p.detach() != 0 for name, p in self.parameters.items()}
        self.before = self.masks

    def lr_factor(self, progress: float) -> float:
        """What the learning rate is multiplied by."""
        return (self.config.fraction / self.config.at(progress)) ** 0.5 if self.config.sharkfin else 1.0

    @torch.no_grad()
    def apply(self, progress: float) -> None:
        """Zero all but the largest weights of every constrained parameter."""
        if self.config.at(progress) >= 1:
            return
        self.before, self.masks = self.masks, {}
        for name, p in self.parameters.items():
            k = round(self.config.of(name, progress) * p.numel())
            self.masks[name] = top_mask(p, k, alive=self.config.alive, axis=unit_axis(name))
            p.mul_(self.masks[name])

    def metrics(self) -> dict[str, float]:
        """Share of nonzero weights, of weights that the last step revived, and of neurons and channels without any."""
        return {
            "nonzero": nonzero_fraction(self.parameters),
            "churn": self.churn(),
            "dead": dead_fraction(self.parameters),
        }

    def churn(self) -> float:
        """The share of kept weights that were zero before the last step."""
        revived = sum(int((mask & ~self.before[name]).sum()) for name, mask in self.masks.items())
        return revived / sum(int(mask.sum()) for mask in self.masks.values())


def nonzero_fraction(parameters: Mapping[str, Tensor]) -> float:
    """The share of entries that are not zero."""
    total = sum(p.numel() for p in parameters.values())
    return sum(int(p.count_nonzero()) for p in parameters.values()) / total


def dead_fraction(parameters: Mapping[str, Tensor]) -> float:
    """The share of neurons and attention channels that read nothing or write nothing."""
    dead = total = 0
    for name, p in parameters.items():
        axis = unit_axis(name)
        if axis is not None:
            empty = (p != 0).sum(axis) == 0
            dead, total = dead + int(empty.sum()), total + empty.numel()
    return dead / max(1, total)
