"""Values of RASP programs: what may be one, when two are the same, how they are ordered and written.

Two values are the same if their types and they themselves are equal: 1, True and 1.0 are three values.
"""

import math
from collections.abc import Hashable, Iterable
from fractions import Fraction
from typing import Any

import numpy as np

Value = Any


class RaspError(ValueError):
    """A program or an input that has no meaning; the message names the expression and the value."""


class Undefined(RaspError):
    """An aggregate of a categorical s-op selected different values."""


def canonical(value: Value) -> Value:
    """`value` as it is stored: NumPy scalars become Python's, whole Fractions become ints. Raises `ValueError`."""
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) is tuple:
        value = tuple(canonical(v) for v in value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value!r} cannot be a value: it is not a finite number")
    if isinstance(value, Fraction) and value.denominator == 1:
        return value.numerator
    try:
        hash(value)
    except TypeError:
        raise ValueError(f"{value!r} cannot be a value: it is not hashable") from None
    return value


def number(value: Value) -> int | Fraction:
    """`value` as an exact number; floats are read in decimal, so that 0.6 is 3/5. Raises `ValueError`."""
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        value = Fraction(repr(value))
    if isinstance(value, Fraction):
        return value.numerator if value.denominator == 1 else value
    raise ValueError(f"{value!r} is not a number")


def key(value: Value) -> Hashable:
    """What tells a value from others: its type and itself, and so for the parts of a tuple."""
    if type(value) is tuple:
        return (tuple, *(key(v) for v in value))
    return (type(value), value)


def order(value: Value) -> tuple:
    """Sorts values of mixed types the same in every process: None, bools, numbers, text, tuples, others by repr."""
    if value is None:
        return (0,)
    if isinstance(value, bool):
        return (1, value)
    if isinstance(value, int | float | Fraction):
        return (2, value, type(value).__name__)
    if isinstance(value, str):
        return (3, value)
    if isinstance(value, tuple):
        return (4, len(value), tuple(order(v) for v in value))
    return (5, type(value).__name__, repr(value))


def ordered(values: Iterable[Value]) -> list[Value]:
    """The distinct values, sorted."""
    return sorted({key(v): v for v in values}.values(), key=order)


def show(value: Value) -> str:
    """A value as text, in labels and tables: text bare, Fractions as 2/3."""
    if isinstance(value, tuple):
        return f"({','.join(show(v) for v in value)})"
    return str(value)


class Table:
    """Distinct values, each with a number: its place in the order in which they came."""

    def __init__(self, values: Iterable[Value] = ()):
        self.values: list[Value] = []
        self.codes: dict[Hashable, int] = {}
        for value in values:
            self.code(value)

    def code(self, value: Value) -> int:
        """The value's number; a new one where it is new."""
        k = key(value)
        code = self.codes.get(k)
        if code is None:
            code = self.codes[k] = len(self.values)
            self.values.append(value)
        return code

    def __len__(self) -> int:
        return len(self.values)
