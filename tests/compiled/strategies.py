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

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """So that Hypothesis, too, prints all of the program."""
        printer.text(repr(self))


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
def to_letter(m: int) -> Callable:
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
LEVELS = (1, 2, 3, 4, 4, 5, 5, 6, 6)
LENGTHS = (*range(1, 13), *range(2, 13), *range(2, 13), 16, 20, 25, 30, 40, 50, 59, 60)
CONSTANTS: list[Value] = [0, 1, -1, 2, "a", None, True, 3, Fraction(1, 2), (1, 2), 1.5]
FACTORS: list[Value] = [1, 2, -1, 3, -2, Fraction(1, 2), 0.5]
DEFAULTS: list[Value] = [None, None, None, None, None, 0, -1, 2, "none", True, 1.5, ()]
NUMBERS: list[Value] = [None, None, None, None, 0, -1, 2, Fraction(1, 2), 0.5, True]
"""Defaults of means."""


@dataclass(frozen=True, eq=False)
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


@dataclass(frozen=True, eq=False)
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
        denominator = math.lcm(*(v.denominator for v in numbers))
        return known | {"kind": kind, "high": high, "denominator": denominator}
    return known | {"kind": "text" if there and all(isinstance(v, str) for v in there) else "any"}


def ints(size: int, high: int) -> dict[str, Any]:
    """What is known of so many ints, at most so large."""
    return {"kind": "int", "size": size, "high": high}


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


class Choices:
    """Choices by bytes, one each; the first option once none is left."""

    def __init__(self, some: bytes):
        self.bytes = iter(some)

    def below(self, n: int) -> int:
        return next(self.bytes, 0) % n

    def one_of(self, options: Sequence[Any]) -> Any:
        return options[self.below(len(options))]

    def distinct(self, options: Sequence[Any], most: int) -> list[Any]:
        """One to `most` of the options, in any order."""
        left = list(options)
        return [left.pop(self.below(len(left))) for _ in range(1 + self.below(min(most, len(left))))]


class Programs(Choices):
    """Draws s-ops and selectors, and keeps them to be used again."""

    def __init__(self, some: bytes, vocab: Sequence[Value], max_len: int):
        super().__init__(some)
        self.max_len = max_len
        self.tokens = Drawn(rasp.tokens, **about(vocab))
        self.indices = Drawn(rasp.indices, "int", max_len, high=max_len - 1)
        self.sops: list[Drawn] = []
        self.selectors: list[Drawing] = []

    def rarely(self) -> bool:
        return self.below(12) == 11

    # S-ops.

    def sop(self, depth: int, leaf: bool = True) -> Drawn:
        """Any s-op of at most `depth` levels."""
        old = [x for x in self.sops if x.depth <= depth]
        options = [self.leaf] if leaf or depth == 0 else []
        if depth:
            options += [self.map_one, *[self.operator] * 2, self.map_two, self.map_three, self.encoded]
            options += [*[self.mean] * 2, self.value, self.width]
        if old and leaf:
            options += [lambda _: self.one_of(old)] * 2
        made = self.one_of(options)(depth)
        if self.rarely():
            made = replace(made, sop=made.sop.named(self.one_of(["x", "y"])))
        limit = CATEGORICAL if made.sop.encoding == "categorical" else NUMERICAL
        if made.size > limit or made.high > 500:
            made = self.residue(made)
        if made.depth and made not in self.sops:
            self.sops.append(made)
        return made

    def leaf(self, depth: int) -> Drawn:
        """Tokens, indices, indices somewhat off, or a constant."""
        option = self.below(16)
        if option == 15:
            return self.constant()
        if option >= 13:
            steps = self.one_of([1, -1, 2])
            return replace(self.indices, sop=rasp.indices + steps, high=self.max_len + 1)
        return self.indices if option % 3 == 1 else self.tokens

    def constant(self) -> Drawn:
        value = self.one_of(CONSTANTS)
        return Drawn(rasp.categorical(value), **about([value]))

    def apply(self, function: Callable, *inputs: Drawn, **known: Any) -> Drawn:
        """A map with an opaque function; `known` says what its values are."""
        depth = 1 + max(x.depth for x in inputs)
        return Drawn(rasp.map(function, *(x.sop for x in inputs)), depth=depth, **known)

    def residue(self, x: Drawn, m: int = 0) -> Drawn:
        """The s-op's values, made few."""
        m = m or 2 + self.below(3)
        return self.apply(residue(m), x, **ints(m, m - 1))

    def few(self, x: Drawn, most: int) -> Drawn:
        return x if x.size <= most else self.residue(x)

    def several(self, depth: int, n: int) -> list[Drawn]:
        """The inputs of a map, with few combinations of values; mostly at least one is as deep as may be."""
        inputs = [self.sop(depth - 1), *(self.sop(self.below(depth)) for _ in range(n - 1))]
        while math.prod(x.size for x in inputs) > 1500:
            inputs = [self.residue(x) if x.size == max(y.size for y in inputs) else x for x in inputs]
        return inputs

    def number(self, depth: int) -> Drawn:
        """An s-op of numbers, none of them None."""
        x = self.sop(depth)
        return self.filled(x) if x.kind in ("int", "number") else self.residue(x)

    def filled(self, x: Drawn) -> Drawn:
        """The s-op with a number for None."""
        if not x.optional:
            return x
        sop = rasp.map(or_else(0), x.sop)
        return replace(x, sop=sop, optional=False, size=x.size + 1, depth=x.depth + 1)

    def encoded(self, depth: int) -> Drawn:
        """An s-op of numbers in the other encoding."""
        x = self.sop(depth - 1)
        if x.sop.encoding == "numerical":
            x = self.few(x, CATEGORICAL)
            return replace(x, sop=rasp.categorical(x.sop), depth=x.depth + 1)
        return self.numerical(x if x.kind in ("int", "number") else self.residue(x))

    def numerical(self, x: Drawn) -> Drawn:
        return replace(x, sop=rasp.numerical(x.sop), depth=x.depth + (x.sop.encoding == "categorical"))

    def map_one(self, depth: int) -> Drawn:
        x, m = self.sop(depth - 1), 2 + self.below(3)
        more = joined(x) | {"size": x.size + 1}
        options: list[tuple[Callable, dict[str, Any]]] = [
            (residue(m), ints(m, m)),
            (is_multiple(m), ints(2, 1)),
            (no_multiples(m), more | {"optional": True}),
            (to_fraction(m), {"kind": "number", "size": 5, "high": 2, "denominator": m}),
            (minus_residue(m), ints(m, m)),
            (to_half(m), {"kind": "number", "size": m, "high": 2, "denominator": 2}),
            (to_letter(m), {"kind": "text", "size": m}),
            (one_of_look_alikes, {"kind": "number", "size": 3, "high": 1}),
            (in_a_tuple, {"kind": "any", "size": x.size}),
        ]
        if x.optional:
            default = self.one_of([0, -1, "none"])
            filled = joined(x, Drawn(rasp.tokens, **about([default]))) | {"optional": False}
            options += [(is_none, ints(2, 1)), (or_else(default), filled)] * 3
        function, known = self.one_of(options)
        return self.apply(function, x, **known)

    def map_two(self, depth: int) -> Drawn:
        (x, y), m = self.several(depth, 2), 2 + self.below(3)
        fraction = {"kind": "number", "size": m * m, "high": m}
        function, known = self.one_of(
            [
                (sum_residue(m), ints(m, m)),
                (is_identical, ints(2, 1)),
                (lower, joined(x, y)),
                (first_there, joined(x, y) | {"optional": y.optional}),
                (unless_equal, joined(x) | {"optional": True}),
                (ratio(m), fraction | {"denominator": math.lcm(*range(1, m + 1))}),
                (pair, {"kind": "any", "size": x.size * y.size}),
            ]
        )
        return self.apply(function, x, y, **known)

    def map_three(self, depth: int) -> Drawn:
        (x, y, z), m = self.several(depth, 3), 2 + self.below(3)
        function, known = self.one_of(
            [
                (weighted_residue(m), ints(m, m)),
                (choose(m), joined(y, z)),
                (middle, joined(x, y, z)),
            ]
        )
        return self.apply(function, x, y, z, **known)

    # Operators.

    def operator(self, depth: int) -> Drawn:
        option = self.below(8)
        if option == 7:
            return self.equality(depth)
        if option == 6:
            return self.operator_of_text(self.sop(depth - 1))
        x = self.number(depth - 1)
        if self.below(3) == 2:
            x = self.numerical(x)
        if option >= 4:
            y = self.number(self.below(depth))
            return self.operator_of_two(x, self.numerical(y) if x.sop.encoding == "numerical" else y)
        return self.operator_of_one(x, self.one_of(FACTORS))

    def equality(self, depth: int) -> Drawn:
        x, y = self.several(depth, 2)
        other = self.one_of([y.sop, *CONSTANTS])
        sop = x.sop == other if self.below(2) else x.sop != other
        return Drawn(sop, "int", 2, 1 + max(x.depth, y.depth), high=1)

    def operator_of_one(self, x: Drawn, c: Value) -> Drawn:
        """An operator of a number and a constant."""
        a, exact, r = x.sop, Fraction(c), abs(Fraction(c))
        kind = "int" if x.kind == "int" and isinstance(c, int) else "number"
        finer = x.denominator * exact.denominator
        known = {"kind": kind, "size": x.size, "denominator": finer}
        smaller = known | {"kind": "number", "high": math.ceil(x.high / r)}
        smaller["denominator"] = x.denominator * abs(exact.numerator)
        left = math.ceil(r) * finer + 1 if finer else x.size
        truth = ints(2, 1)
        linear: list[tuple[Callable, dict[str, Any]]] = [
            (lambda: a + c, known | {"high": x.high + math.ceil(r)}),
            (lambda: c - a, known | {"high": x.high + math.ceil(r)}),
            (lambda: a * c, known | {"high": math.ceil(x.high * r)}),
            (lambda: -a, joined(x)),
            (lambda: c + a, known | {"high": x.high + math.ceil(r)}),
            (lambda: a - c, known | {"high": x.high + math.ceil(r)}),
            (lambda: c * a, known | {"high": math.ceil(x.high * r)}),
            (lambda: a / c, smaller),
        ]
        others: list[tuple[Callable, dict[str, Any]]] = [
            (lambda: a < c, truth),
            (lambda: a >= c, truth),
            (lambda: a > c, truth),
            (lambda: c >= a, truth),
            (lambda: a % c, known | {"high": math.ceil(r), "size": min(x.size, left)}),
            (lambda: abs(a), joined(x)),
            (lambda: a // c, known | {"high": math.ceil(x.high / r) + 1, "denominator": 1}),
            (lambda: a**2, known | {"high": x.high**2, "denominator": x.denominator**2}),
            (lambda: a**0, truth | {"kind": kind}),
        ]
        if x.kind == "int":
            whole = self.residue(x, 4).sop + 1
            others += [
                (lambda: ~a, joined(x) | {"high": x.high + 1}),
                (lambda: a & 3, known | {"kind": "int", "denominator": 1, "high": 3}),
                (lambda: a | 1, known | {"kind": "int", "denominator": 1, "high": x.high + 1}),
                (lambda: 2 ^ a, known | {"kind": "int", "denominator": 1, "high": x.high + 3}),
                (lambda: 7 // whole, ints(4, 7)),
                (lambda: -7 % whole, ints(4, 4)),
                (lambda: 2**whole, ints(4, 16)),
            ]
        make, known = self.one_of([*linear, *others])
        return Drawn(make(), depth=x.depth + 1, **known)

    def operator_of_text(self, x: Drawn) -> Drawn:
        if x.kind != "text" or x.optional:
            x = self.apply(to_letter(3), x, kind="text", size=3)
        a, truth = x.sop, ints(2, 1)
        options: list[tuple[Callable, dict[str, Any]]] = [
            (lambda: a + "b", joined(x)),
            (lambda: "b" + a, joined(x)),
            (lambda: a * 2, joined(x)),
            (lambda: a < "b", truth),
            (lambda: a >= "c", truth),
        ]
        make, known = self.one_of(options)
        return Drawn(make(), depth=x.depth + 1, **known)

    def operator_of_two(self, x: Drawn, y: Drawn) -> Drawn:
        """An operator of two numbers."""
        x, y = (self.filled(v) for v in (x, y))
        if x.size * y.size > 1500:
            x, y = self.residue(x), self.few(y, 300)
        a, b = x.sop, y.sop
        kind = "int" if x.kind == y.kind == "int" else "number"
        finer = x.denominator * y.denominator
        high, size = x.high + y.high, x.size * y.size
        whole = {"size": min(size, 2 * high + 1) if kind == "int" else size, "high": high}
        truth = ints(2, 1) | {"denominator": 1}
        options: list[tuple[Callable, dict[str, Any]]] = [
            (lambda: a + b, whole),
            (lambda: a - b, whole),
            (lambda: a < b, truth),
            (lambda: a >= b, truth),
            (lambda: a == b, truth),
            (lambda: a * b, {"size": size, "high": x.high * y.high}),
        ]
        if kind == "int":
            bits = {"high": 2 * high + 1, "size": size}
            options += [(lambda: a & b, bits), (lambda: a | b, bits), (lambda: a ^ b, bits)]
        make, known = self.one_of(options)
        known = {"kind": kind, "denominator": finer} | known
        return Drawn(make(), depth=1 + max(x.depth, y.depth), **known)

    # What reads selectors.

    def mean(self, depth: int) -> Drawn:
        """An aggregate of numerical values; or a function of two, over one selector."""
        selected = self.selector(depth - 1)
        x = self.mean_over(selected, depth)
        return self.operator_of_two(x, self.mean_over(selected, 1)) if self.below(6) == 5 else x

    def mean_over(self, selected: Drawing, depth: int) -> Drawn:
        x = self.number(depth - 1)
        if x.denominator == 0 and (self.max_len > 3 or not self.rarely()):
            x = self.residue(x)
        if self.means(x) > NUMERICAL:
            x = self.residue(x, 2)
        x, default = self.numerical(x), self.one_of(NUMBERS)
        return Drawn(
            rasp.aggregate(selected.selector, x.sop, default=default),
            "number",
            self.means(x),
            1 + max(selected.depth, x.depth),
            optional=default is None,
            high=max(x.high, 2),
            denominator=0,
        )

    def means(self, x: Drawn) -> int:
        """About how many means there can be of such values: a third of the fractions is in lowest terms."""
        steps = 2 * x.high * x.denominator or 20 * x.size
        return 2 + steps * self.max_len**2 // 3

    def value(self, depth: int) -> Drawn:
        """An aggregate of categorical values, of which one is selected, or equal ones."""
        option = self.below(8)
        if option >= 6:
            chosen, x = self.alike(depth)
        else:
            chosen, x = self.pick(depth), self.sop(self.below(depth)) if option else self.tokens
        if x.sop.encoding == "numerical":
            x = self.few(x, CATEGORICAL)
            x = replace(x, sop=rasp.categorical(x.sop), depth=x.depth + 1)
        default = self.one_of(DEFAULTS)
        known = joined(x, Drawn(rasp.tokens, **about([default])))
        if default is None:
            known |= {"kind": x.kind}
        sop = rasp.aggregate(chosen.selector, x.sop, default=default)
        return Drawn(sop, depth=1 + max(chosen.depth, x.depth), **known)

    def alike(self, depth: int) -> tuple[Drawing, Drawn]:
        """A selector of keys that have the same value, mostly, and that value."""
        option = self.below(8)
        if option == 7:  # undefined on many sequences
            return self.selector(depth - 1), self.sop(self.below(depth))
        if option == 6:
            return self.selector(depth - 1), self.constant()
        if option >= 4:  # undefined where 1 and True are, say
            x = self.apply(one_of_look_alikes, self.sop(max(depth - 2, 0)), kind="number", size=3, high=1)
            return Drawing(rasp.select(x.sop, x.sop, rasp.eq), False, x.depth + 1), x
        x = self.few(self.sop(max(depth - 2, 0)), COMPARED)
        y = self.few(self.sop(self.below(max(depth - 1, 1))), COMPARED) if option == 3 else x
        same = rasp.select(x.sop, y.sop, self.one_of([is_identical, is_identical, rasp.eq]))
        chosen = Drawing(same, False, 1 + max(x.depth, y.depth))
        if option == 2:
            other = self.conjunction(max(depth - 2, 0))
            chosen = Drawing(same & other.selector, False, 1 + max(chosen.depth, other.depth))
        return chosen, self.apply(residue(3), x, **ints(3, 2)) if option == 1 else x

    def width(self, depth: int) -> Drawn:
        """A selector width; of a disjunction of any two selectors too, which the compiler counts part by part."""
        selected = self.selector(depth - 1)
        if self.below(8) == 7:
            other = self.conjunction(depth - 1)
            either = selected.selector | other.selector
            selected = Drawing(either, False, 1 + max(selected.depth, other.depth))
        n = self.max_len
        made = Drawn(rasp.selector_width(selected.selector), "int", n + 1, selected.depth + 1, high=n)
        return self.numerical(made) if self.below(4) == 3 else made

    # Selectors.

    def selector(self, depth: int) -> Drawing:
        """A selector that one head can attend by."""
        old = [s for s in self.selectors if s.depth <= depth]
        if old and self.below(3) == 2:
            return self.one_of(old)
        made = self.either(depth) if self.below(8) == 7 else self.conjunction(depth)
        self.selectors.append(made)
        return made

    def compared(self, depth: int) -> Drawn:
        """A key or query."""
        return self.few(self.sop(depth), COMPARED)

    def predicate(self, x: Drawn, y: Drawn) -> Any:
        """Any predicate that can compare these."""
        comparable = x.ordered and y.ordered and (x.kind == "text") == (y.kind == "text")
        return self.one_of([*ANY, *ORDERED * 2] if comparable else ANY)

    def atom(self, depth: int) -> Drawing:
        """A select, a pick, or a disjunction of two selects that compare the same."""
        option = self.below(8)
        if option == 7:
            return self.pick(depth + 1)
        x, y = self.compared(depth), self.compared(self.below(depth + 1))
        if option == 6:
            x, y = y, x
        made = rasp.select(x.sop, y.sop, self.predicate(x, y))
        if option == 5:
            made = made | rasp.select(x.sop, y.sop, self.predicate(x, y))
        return Drawing(made, False, max(x.depth, y.depth))

    def conjunction(self, depth: int, positive: bool = True) -> Drawing:
        """A selector that is a conjunction of selects and negated ones; or, if not `positive`, one whose negation is.

        Then `one` is about its negation.
        """
        option = self.below(8) if depth else 0
        if option < 4:
            made = self.atom(max(depth - 1, 0))
            return made if positive else replace(made, one=False)
        if option == 4:
            inner = self.conjunction(depth - 1, not positive)
            return replace(inner, selector=~inner.selector, depth=inner.depth + 1)
        left, right = self.conjunction(depth - 1, positive), self.conjunction(self.below(depth), positive)
        both = left.selector & right.selector if positive else left.selector | right.selector
        return Drawing(both, left.one or right.one, 1 + max(left.depth, right.depth))

    def either(self, depth: int) -> Drawing:
        """A disjunction that one head can attend by, though its parts compare different s-ops."""
        x, y = self.compared(max(depth - 1, 0)), self.compared(self.below(max(depth, 1)))
        option = self.below(3)
        if option == 0:  # never both: where values are the same, so are their residues
            m = 2 + self.below(2)
            k, q = self.residue(x, m), self.residue(y, m)
            differ = rasp.select(k.sop, q.sop, self.one_of([rasp.lt, rasp.gt, rasp.neq]))
            parts = [rasp.select(x.sop, y.sop, is_identical), differ]
        elif option == 1:  # a condition of the key or one of the query
            here, there = self.one_of(CONSTANTS), self.one_of(CONSTANTS)
            parts = [rasp.select(x.sop, here, self.one_of(ANY)), rasp.select(there, y.sop, self.one_of(ANY))]
        else:  # the same keys, for one reason of the query or another
            here, there = self.one_of(CONSTANTS), self.one_of(CONSTANTS)
            parts = [rasp.select(here, x.sop, self.one_of(ANY)), rasp.select(there, y.sop, self.one_of(ANY))]
        return Drawing(parts[0] | parts[1], False, 1 + max(x.depth, y.depth))

    def pick(self, depth: int) -> Drawing:
        """A selector of at most one key."""
        old = [s for s in self.selectors if s.one and s.depth < depth]
        option = self.below(8)
        if old and option == 7:
            return self.one_of(old)
        if option == 6 and depth > 1:
            one, other = self.pick(depth - 1), self.conjunction(depth - 2)
            made = Drawing(one.selector & other.selector, True, 1 + max(one.depth, other.depth))
        elif option == 5 and self.tokens.size * self.max_len <= COMPARED:
            made = self.by_rank()
        else:
            made = self.by_index(depth)
        self.selectors.append(made)
        return made

    def by_index(self, depth: int) -> Drawing:
        """The key at an index that the query says."""
        keys, back, one_index = self.one_of(
            [
                (rasp.indices, lambda q: q, rasp.eq),
                (rasp.indices, lambda q: q, one_less),
                (rasp.indices * 2 + 1, lambda q: 2 * q + 1, rasp.eq),
                (-rasp.indices, lambda q: -q, rasp.eq),
                (rasp.numerical(rasp.indices), lambda q: q, rasp.eq),
                (rasp.map(in_a_tuple, rasp.indices), lambda q: rasp.map(in_a_tuple, q), is_identical),
            ]
        )
        option = self.below(4)
        if option == 0:
            q = self.few(self.number(max(depth - 2, 0)), COMPARED)
        elif option == 1:
            q = replace(self.indices, sop=rasp.indices - 1)
        elif option == 2:
            length = rasp.selector_width(rasp.select(rasp.indices, rasp.indices, rasp.true))
            q = Drawn(length - 1 - rasp.indices, "int", 2 * self.max_len, depth=2)
        else:
            q = Drawn(rasp.categorical(self.below(self.max_len)), "int", 1)
        return Drawing(rasp.select(keys, back(q.sop), one_index), True, q.depth + 1)

    def by_rank(self) -> Drawing:
        """The key that comes at the query's index when tokens are sorted."""
        keys = rasp.map(pair, rasp.tokens, rasp.indices)
        rank = rasp.selector_width(rasp.select(keys, keys, below))
        return Drawing(rasp.select(rank, rasp.indices, rasp.eq), True, 3)


@st.composite
def programs(draw) -> Case:
    """A case: any program of up to 6 levels (functions that make its values few come on top), any vocabulary and length.

    All choices come from one string of bytes: Hypothesis, left with many small draws, mostly mutates what it has drawn.
    """
    max_len = draw(st.sampled_from(LENGTHS))
    some = draw(st.binary(min_size=100 + 8 * max_len, max_size=400 + 8 * max_len))
    first, middle, last = some[:16], some[16 : -8 * max_len], some[-8 * max_len :]
    choices = Choices(first)
    levels, causal = choices.one_of(LEVELS), choices.below(2) == 1
    rows = [1, max_len, *(1 + choices.below(max_len) for _ in range(6))]
    vocab = choices.distinct(choices.one_of(VOCABULARIES), 6)
    program = Programs(middle, vocab, max_len).sop(levels, leaf=False)
    sequences = [[vocab[i % len(vocab)] for i in last[row * max_len :][:n]] for row, n in enumerate(rows)]
    return Case(program.sop, vocab, max_len, causal, sequences)
