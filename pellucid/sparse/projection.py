"""The L0 constraint: after each step every matrix keeps its largest magnitudes, an exact number of them.

Weight-sparse transformers, section 2.1 and A.2.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch

import torch
from torch import Tensor, nn

from pellucid.kernels.top_mask import top_mask
from pellucid.training.constraint import Constraint

# Parameters whose rows or columns are neurons or attention channels: the axis that holds one unit's weights.
UNIT_AXIS = {"attn.qkv.weight": 1, "attn.proj.weight": 0, "mlp.fc.weight": 1, "mlp.proj.weight": 0}

DENSE = ("bigram", "*.sink", "*norm*", "wpe.*")
"""Parameters (patterns of names) that stay dense, where nothing else is said."""


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

    every: int = 1
    """Steps from one choice of the weights that stay to the next; in between, weights that are zero stay zero. More
    than 1 spreads the cost of the choice over steps, as in RigL (Evci et al. 2021), but new weights enter by Adam's
    momentum (appendix B)."""

    sharkfin: bool = True
    """Whether the learning rate is multiplied by sqrt(fraction / current fraction) (Figure 11)."""

    legacy_embed_schedule: bool = False
    """Whether embeddings and biases stay dense until halfway through annealing and then drop to `fraction` at once: a
    bug of the seed's, which it kept (Figure 21)."""

    dense: tuple[str, ...] = DENSE
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
        if self.every < 1:
            raise ValueError(f"every must be 1 or more, got {self.every}")

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


def constrained(model: nn.Module, dense: Sequence[str]) -> dict[str, nn.Parameter]:
    """The parameters of `model` whose names match none of the patterns in `dense`; a `ValueError` if all do."""
    found = {n: p for n, p in model.named_parameters() if not any(fnmatch(n, pattern) for pattern in dense)}
    if not found:
        raise ValueError(f"nothing is left to make sparse: all parameters match dense = {tuple(dense)}")
    return found


class Projection(Constraint):
    """Keeps a model's weights on the L0 constraint; what the training loop calls after each optimiser step."""

    def __init__(self, model: nn.Module, config: SparsityConfig):
        self.config, self.parameters = config, constrained(model, config.dense)
        self.hold = False
        self.begin()

    def begin(self) -> None:
        """Note which weights are nonzero now: what `churn` counts from."""
        self.masks = self.nonzeros()
        self.previous = self.masks

    def nonzeros(self) -> dict[str, Tensor]:
        """Where each constrained parameter is not zero."""
        return {name: p.detach() != 0 for name, p in self.parameters.items()}

    def lr_factor(self, progress: float) -> float:
        """What the learning rate is multiplied by."""
        return (self.config.fraction / self.config.at(progress)) ** 0.5 if self.config.sharkfin else 1.0

    def before(self, step: int) -> None:
        """Note which weights are nonzero, if they are to be the same after this step."""
        self.hold = (step + 1) % self.config.every != 0
        if self.hold:
            self.held = self.nonzeros()

    @torch.no_grad()
    def apply(self, progress: float) -> None:
        """Zero all but the largest weights of every constrained parameter, or those that are held at zero."""
        if self.config.at(progress) >= 1:
            return
        self.previous, self.masks = self.masks, {}
        for name, p in self.parameters.items():
            if self.hold and progress < 1:
                self.masks[name] = self.held[name]
            else:
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
        revived = sum(int((mask & ~self.previous[name]).sum()) for name, mask in self.masks.items())
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
