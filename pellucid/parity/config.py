"""The parity bottleneck, as data."""

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from pellucid.core.errors import unknown
from pellucid.parity.code import log2

Routing = Literal["hierarchical", "flat"]
Basis = Literal["parity", "random", "gaussian", "learned"]


def is_whole(n: object) -> bool:
    """An integer, which True is not."""
    return isinstance(n, int) and not isinstance(n, bool)


@dataclass(frozen=True, kw_only=True)
class ParityConfig:
    """A sparse code over the d channels (level 0) and computed directions that descend from them."""

    d: int = field(kw_only=False)
    """Width of what is coded: a power of two, 8 to 65536."""

    active: tuple[int, ...] = (16, 32)
    """How many features of each level are active in a token."""

    children: tuple[int, ...] = (32,)
    """Children of each active feature at level 1, 2, ...: powers of two."""

    routing: Routing = "hierarchical"
    """Whether a level's candidates are the children of active features, or all features of both levels compete."""

    basis: Basis = "parity"
    """Where directions come from: the code; or, to compare with, a random linear code, random Gaussian unit vectors, or
    vectors that are learned."""

    standardise: bool = True
    """Whether scores are compared and decoded less their running mean, over their running deviation."""

    decay: float = 0.99
    """Of the running moments, for each observation of a feature."""

    eps: float = 1e-5
    """Added to a feature's standard deviation."""

    samples: int = 64
    """Tokens of a batch, over all ranks, whose candidates at levels >= 1 are observed."""

    aux_weight: float = 0.01
    """Of the reconstruction loss ||x - x_hat||^2 / ||x||^2 of each bottleneck."""

    def __post_init__(self):
        for name in ("active", "children"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        t = log2(self.d)
        for name, choices in (("routing", get_args(Routing)), ("basis", get_args(Basis))):
            if getattr(self, name) not in choices:
                raise unknown(name, getattr(self, name), choices)
        if len(self.active) != len(self.children) + 1:
            raise ValueError(
                f"active needs one number for level 0 and one for each of children: got active={self.active} and "
                f"children={self.children}"
            )
        for n in self.children:
            if not is_whole(n) or n < 2 or n & (n - 1):
                raise ValueError(f"children must be powers of two from 2 on, got {self.children}")
        bits = t + sum(n.bit_length() - 1 for n in self.children)
        if bits > 2 * t:
            raise ValueError(
                f"children={self.children} need indices of {bits} bits; d={self.d} has 2 t = {2 * t}"
            )
        if self.routing == "flat" and len(self.children) != 1:
            raise ValueError(f"flat routing has one level of children, got children={self.children}")
        for level, k in enumerate(self.active):
            most = self.candidates(level)
            if not is_whole(k) or not 1 <= k <= most:
                raise ValueError(f"active[{level}] must be in 1..{most}, its candidates, got {k!r}")
        if not is_whole(self.samples) or self.samples < 1:
            raise ValueError(f"samples must be a positive integer, got {self.samples!r}")
        if not 0 < self.decay < 1:
            raise ValueError(f"decay must be between 0 and 1, got {self.decay!r}")
        for name in ("eps", "aux_weight"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0 or (name == "eps" and value == 0):
                raise ValueError(
                    f"{name} must be {'positive' if name == 'eps' else '0 or more'}, got {value!r}"
                )

    def candidates(self, level: int) -> int:
        """How many features compete at a level. From level 2 on child 0 is its parent over again, and left out."""
        if self.routing == "flat":
            return self.features
        if level == 0:
            return self.d
        return self.active[level - 1] * (self.children[level - 1] - (level > 1))

    def shift(self, level: int) -> int:
        """The lowest bit of a child's number in the direction index of a feature at `level` >= 1."""
        return log2(self.d) + sum(n.bit_length() - 1 for n in self.children[: level - 1])

    @property
    def k(self) -> int:
        """Active features of a token, over all levels."""
        return sum(self.active)

    @property
    def features(self) -> int:
        """All features: the d channels, then the directions. Channel c is feature c, direction i is feature d + i."""
        return self.d * (1 + math.prod(self.children))
