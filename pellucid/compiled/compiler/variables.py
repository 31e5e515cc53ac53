"""What the residual stream holds: variables, each with directions of its own, and how far from exact they may be.

A categorical variable has a direction for each value, None included; a numerical one a direction for its magnitude and,
where it can be None, one that is 1 for None.
"""

from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from itertools import pairwise

import numpy as np

from pellucid.compiled.compiler.tables import Domain
from pellucid.compiled.rasp.language import Encoding
from pellucid.compiled.rasp.values import Value, show

SMALL = 2.0
"""Only directions that never hold more than this are used again: what is written over them rounds at their size."""


class Imprecise(ValueError):
    """Rounding may exceed what a block can bear. `node` and `reason` say where."""


@dataclass
class Variable:
    """A value at every position, along directions `name:value`."""

    name: str
    node: int
    encoding: Encoding
    domain: Domain
    noise: float = 0.0
    """Bound of the sum over directions of |held - exact|; of a numerical variable, of its None direction alone."""
    errors: np.ndarray = field(default_factory=lambda: np.zeros(0))
    """Numerical: bound of |held - exact| for each value."""
    bos: np.ndarray = field(default_factory=lambda: np.zeros(0))
    """What the directions hold at the BOS position, where no value is meant."""
    primitive: str | None = None
    """`tokens` or `indices`, where the variable is one of them."""
    block: "object | None" = None
    """The block that writes it; None is the embedding."""

    def __post_init__(self):
        if not len(self.bos):
            self.bos = np.zeros(self.width)
        if not len(self.errors):
            self.errors = np.zeros(len(self.domain))

    @property
    def width(self) -> int:
        """The number of its directions."""
        return len(self.domain) if self.encoding == "categorical" else 1 + self.domain.optional

    @property
    def labels(self) -> list[str]:
        """A name for each direction."""
        if self.encoding == "categorical":
            return [f"{self.name}:{show(v)}" for v in self.domain.values]
        return [self.name, f"{self.name}:None"][: self.width]

    @cached_property
    def codes(self) -> np.ndarray:
        """(value, direction): what is held for each value."""
        if self.encoding == "categorical":
            return np.eye(len(self.domain))
        magnitudes = self.domain.magnitudes[:, None]
        if not self.domain.optional:
            return magnitudes
        return np.concatenate([magnitudes, [[float(v is None)] for v in self.domain.values]], axis=1)

    @cached_property
    def margin(self) -> float:
        """The distance of the nearest two values, in what decides between them."""
        if self.encoding == "categorical":
            return 1.0
        numbers = [Fraction(v) for v in self.domain.values if v is not None]
        gaps = [float(b - a) for a, b in pairwise(numbers)]
        return min([*gaps, 1.0]) if self.domain.optional or not gaps else min(gaps)

    @property
    def small(self) -> bool:
        """Whether no direction ever holds more than `SMALL`."""
        return self.encoding == "categorical" or bool((np.abs(self.domain.magnitudes) <= SMALL / 2).all())

    @property
    def bound(self) -> float:
        """The largest |held - exact| of any direction."""
        return self.noise if self.encoding == "categorical" else float(self.errors.max(initial=0.0))

    def encode(self, value: Value) -> np.ndarray:
        """What is held for `value`, which must be in the domain."""
        return self.codes[self.domain.place([value])[0]]


@dataclass(frozen=True)
class Arithmetic:
    """A float type: rounding of one operation, and of sums; whether variables are written over erased ones; coldness."""

    dtype: str
    reuse: bool = False
    inverse_temperature: float | None = None
    """What every head multiplies its logits by; None: what each needs."""

    @property
    def unit(self) -> float:
        """The relative error of one rounding."""
        return 2.0**-24 if self.dtype == "float32" else 2.0**-53

    def sum(self, terms: float) -> float:
        """The relative error of a product-sum of so many terms, in any order (weights rounded as well)."""
        return (terms + 3) * self.unit / (1 - (terms + 3) * self.unit)

    def check_range(self, variable: Variable) -> None:
        """Raise `Imprecise` for numbers so large or small that products with them may overflow or vanish."""
        if variable.encoding == "numerical":
            far = 10**12 if self.dtype == "float32" else 10**100
            for v in variable.domain.values:
                if v and not Fraction(1, far) <= abs(Fraction(v)) <= far:
                    raise Imprecise("it has numbers beyond what its range can hold")

    def after_write(self, variable: Variable) -> None:
        """Note what adding a variable to the residual stream rounds: nothing, but where something was erased."""
        if self.reuse:
            variable.noise += 2 * self.unit * SMALL * variable.width
            if variable.encoding == "numerical":
                variable.errors = variable.errors + 2 * self.unit * (
                    SMALL + np.abs(variable.domain.magnitudes)
                )
