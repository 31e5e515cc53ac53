"""Random RASP programs that are well typed: none of their maps and predicates fails on any value whatsoever.

That is more than the interpreter needs, which calls them on the values that occur; the compiler calls them on all that
might. Sets of values are kept small, for it lists them.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from hypothesis import strategies as st

from pellucid.compiled import rasp
from pellucid.compiled.rasp.language import Expression, Primitive
from pellucid.compiled.rasp.values import Value, key, number, order

CATEGORICAL, NUMERICAL, COMPARED = 150, 3000, 72
"""The most values of a categorical s-op, of a numerical one, and of a key or query."""


@dataclass(frozen=True, eq=False, repr=False)
class Case:
    """A program, what to compile it for, and sequences of mixed lengths, 1 and `max_len` among them."""

    program: rasp.SOp
    vocab: list[Value]
    max_len: int
    causal: bool
    sequences: list[list[Value]]

    def __repr__(self) -> str:
        return (
            f"Case({text(self.program)}, vocab={self.vocab!r}, max_len={self.max_len}, "
            f"causal={self.causal}, sequences={self.sequences!r})"
        )


def text(e: Expression) -> str:
    """All of an expression, whatever is named."""
    return str(e.name) if isinstance(e, Primitive) else e.head([text(x) for x in e.inputs])


# Functions of any values. Each is made once, so that the same map can be made twice.


def to_int(value: Value) -> int:
    """A number for any value."""
    if value is None:
        return -1
    if isinstance(value, str):
        return sum(ord(c) - 96 for c in value)
    if isinstance(value, tuple):
        return sum(to_int(v) for v in value)
    return math.floor(value)


def named(name: str, function: Callable) -> Callable:
    function.__name__ = name
    return function


@functools.cache
def residue(m: int) -> Callable:
    return named(f"mod_{m}", lambda v: to_int(v) % m)


@functools.cache
def or_else(default: Value) -> Callable:
    return named(f"or_{default}", lambda v: default if v is None else v)


@functools.cache
def no_multiples(m: int) -> Callable:
    return named(f"no_multiples_of_{m}", lambda v: None if to_int(v) % m == 0 else v)


@functools.cache
def to_fraction(m: int) -> Callable:
    return named(f"fraction_of_{m}", lambda v: Fraction(to_int(v) % 5 - 2, m))


@functools.cache
def to_half(m: int) -> Callable:
    return named(f"half_of_mod_{m}", lambda v: to_int(v) % m / 2)


@functools.cache
def to_text(m: int) -> Callable:
    return named(f"letter_{m}", lambda v: "abcd"[to_int(v) % m])


@functools.cache
def is_multiple(m: int) -> Callable:
    return named(f"is_multiple_of_{m}", lambda v: to_int(v) % m == 0)


@functools.cache
def minus_residue(m: int) -> Callable:
    return named(f"minus_mod_{m}", lambda v: -(to_int(v) % m))


def one_of_look_alikes(value: Value) -> Value:
    return (1, True, 1.0)[to_int(value) % 3]


def in_a_tuple(value: Value) -> Value:
    return (value, to_int(value) % 2)


def is_none(value: Value) -> Value:
    return value is None


def pair(a: Value, b: Value) -> Value:
    return (a, b)


def is_identical(a: Value, b: Value) -> bool:
    return key(a) == key(b)


def first_there(a: Value, b: Value) -> Value:
    return b if a is None else a


def lower(a: Value, b: Value) -> Value:
    return min(a, b, key=order)


def unless_equal(a: Value, b: Value) -> Value:
    return None if a == b else a


@functools.cache
def sum_residue(m: int) -> Callable:
    return named(f"sum_mod_{m}", lambda a, b: (to_int(a) + to_int(b)) % m)


@functools.cache
def ratio(m: int) -> Callable:
    return named(f"ratio_{m}", lambda a, b: Fraction(to_int(a) % m, 1 + to_int(b) % m))


@functools.cache
def choose(m: int) -> Callable:
    return named(f"choose_{m}", lambda a, b, c: b if to_int(a) % m else c)


@functools.cache
def weighted_residue(m: int) -> Callable:
    return named(f"weighted_mod_{m}", lambda a, b, c: (to_int(a) - 2 * to_int(b) + 3 * to_int(c)) % m)


def middle(a: Value, b: Value, c: Value) -> Value:
    return sorted((a, b, c), key=order)[1]


# Predicates of any values.


def below(k: Value, q: Value) -> bool:
    return order(k) < order(q)


def same_parity(k: Value, q: Value) -> bool:
    return to_int(k) % 2 == to_int(q) % 2


def adjacent(k: Value, q: Value) -> bool:
    return abs(to_int(k) - to_int(q)) == 1


def one_less(k: Value, q: Value) -> bool:
    return to_int(k) + 1 == to_int(q)


def only_key_is_none(k: Value, q: Value) -> bool:
    return k is None and q is not None


def query_is_odd(k: Value, q: Value) -> bool:
    return to_int(q) % 2 == 1


@functools.cache
def weighted_multiple(m: int) -> rasp.Predicate:
    return rasp.Predicate(f"sum_is_multiple_of_{m}", lambda k, q: (to_int(k) + 2 * to_int(q)) % m == 0)


never = rasp.Predicate("never", lambda k, q: False)
ANY = [rasp.eq, rasp.neq, rasp.true, below, is_identical, same_parity, adjacent, one_less, only_key_is_none]
ANY += [query_is_odd, weighted_multiple(2), weighted_multiple(3), never]
ORDERED = [rasp.lt, rasp.leq, rasp.gt, rasp.geq]
"""Predicates for numbers, or for texts."""

VOCABULARIES: list[list[Value]] = [
    list("abcdef"),
    [0, 1, 2, 3, 4, 5],
    [-3, -1, 0, 2, 5, 1],
    [False, True],
    [1, True, 1.0, None, "a", -1, (1, 2), False, 0, 0.5, Fraction(1, 2), "", ()],
    [0.5, -2.5, 1.0, 0.25, 0, Fraction(1, 3)],
    [None, 1, 2, -1],
    [(0, 1), (1, 0), (1, 1), (1,), (True, 0), (None, "a")],
]
CONSTANTS: list[Value] = [0, 1, -1, 2, "a", None, True, 3, Fraction(1, 2), (1, 2), 1.5]
FACTORS: list[Value] = [1, 2, -1, 3, -2, Fraction(1, 2), 0.5]
DEFAULTS: list[Value] = [None, None, 0, -1, 2, "none", True, 1.5, ()]
NUMBERS: list[Value] = [None, None, 0, -1, 2, Fraction(1, 2), 0.5, True]
"""Defaults of means."""


@dataclass(frozen=True)
class Drawn:
    """An s-op and what is known of its values."""

    sop: rasp.SOp
    kind: str
    """int (or bool), number, text or any."""
    size: int
    """A bound on how many values there are."""
    depth: int = 0
    optional: bool = False
    """Whether None may be among them."""
    high: int = 0
    """Numbers are at most so large."""
    denominator: int = 1
    """Numbers are multiples of 1 / denominator; where it is 0, of nothing that is known."""

    @property
    def ordered(self) -> bool:
        return self.kind != "any" and not self.optional


@dataclass(frozen=True)
class Drawing:
    """A selector; whether it selects no more than one key; and how deep it is."""

    selector: rasp.Selector
    one: bool
    depth: int


def about(values: Sequence[Value]) -> dict[str, Any]:
    """What is known of s-ops with these values."""
    there = [v for v in values if v is not None]
    known = {"size": len(values), "optional": len(there) < len(values)}
    if there and all(isinstance(v, int | float | Fraction) for v in there):
        numbers = [Fraction(number(v)) for v in there]
        high = max(math.ceil(abs(v)) for v in numbers)
        kind = "int" if all(isinstance(v, int) for v in there) else "number"
        return known | {"kind": kind, "high": high, "denominator": math.lcm(*(v.denominator for v in numbers))}
    return known | {"kind": "text" if there and all(isinstance(v, str) for v in there) else "any"}


def joined(*parts: Drawn) -> dict[str, Any]:
    """What is known of a value that is one of these s-ops'."""
    kinds = {p.kind for p in parts}
    kind = kinds.pop() if len(kinds) == 1 else "number" if kinds == {"int", "number"} else "any"
    return {
        "kind": kind,
        "size": sum(p.size for p in parts),
        "optional": any(p.optional for p in parts),
        "high": max(p.high for p in parts),
        "denominator": math.prod({p.denominator for p in parts}),
    }


@functools.cache
def up_to(n: int) -> st.SearchStrategy[int]:
    return st.integers(0, n)


class Programs:
    """Draws s-ops and selectors, and keeps them to be used again."""

    def __init__(self, draw: Callable, vocab: Sequence[Value], max_len: int):
        self.draw, self.max_len = draw, max_len
        self.tokens = Drawn(rasp.tokens, **about(vocab))
        self.indices = Drawn(rasp.indices, "int", max_len, high=max_len - 1)
        self.sops: list[Drawn] = []
        self.selectors: list[Drawing] = []

    def below(self, n: int) -> int:
        return self.draw(up_to(n - 1))

    def rarely(self) -> bool:
        return self.below(12) == 11

    def one_of(self, options: Sequence[Any]) -> Any:
        return options[self.below(len(options))]

    # S-ops.

    def sop(self, depth: int, leaf: bool = True) -> Drawn:
        """Any s-op of at most `depth` levels."""
        old = [x for x in self.sops if x.depth <= depth]
        options = [self.leaf] if leaf or depth == 0 else []
        if depth:
            options += [self.map_one, self.operator, self.map_two, self.mean, self.value, self.width, self.operator]
            options += [self.mean, self.map_three, self.encoded]
        if old and leaf:
            options += [lambda _: self.one_of(old)] * 2
        made = self.one_of(options)(depth)
        if self.rarely():
            made = replace(made, sop=made.sop.named(self.one_of(["x", "y"])))
        limit = CATEGORICAL if made.sop.encoding == "categorical" else NUMERICAL
        if made.size > limit or made.high > 500:
            made = self.residue(made)
        if made not in self.sops:
            self.sops.append(made)
        return made

    def leaf(self, depth: int) -> Drawn:
        option = self.below(7)
        if option == 6:
            value = self.one_of(CONSTANTS)
            return Drawn(rasp.map(or_else(0), value) if value is None else rasp.numerical(value) if value == 1 else rasp.categorical(value), **about([value]))
        if option >= 4:
            steps = self.one_of([1, -1, 2])
            return replace(self.indices, sop=self.indices.sop + steps, high=self.max_len + 1)
        return self.indices if option >= 2 else self.tokens
