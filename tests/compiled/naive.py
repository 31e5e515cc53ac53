"""What a RASP program means, said as plainly as possible: recursion over one sequence, loops over its positions."""

import operator
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from pellucid.compiled.rasp.language import (
    Aggregate,
    And,
    Constant,
    Expression,
    Map,
    Not,
    Or,
    Predicate,
    Primitive,
    Select,
    SelectorWidth,
)
from pellucid.compiled.rasp.values import Value, key

OPERATORS: dict[str, Callable] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": lambda a, b: exact(a) / exact(b),
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "**": lambda a, b: a**b,
    "&": lambda a, b: a & b,
    "|": lambda a, b: a | b,
    "^": lambda a, b: a ^ b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "negate": lambda a: -a,
    "abs": abs,
    "~": lambda a: (not a) if isinstance(a, bool) else ~a,
}
PREDICATES = {"eq": "==", "neq": "!=", "lt": "<", "leq": "<=", "gt": ">", "geq": ">="}


class TwoValues(Exception):
    """A categorical aggregate selects different values."""


def exact(value: Value) -> Fraction:
    return Fraction(str(value)) if isinstance(value, float) else Fraction(value)


def stored(value: Value) -> Value:
    return int(value) if isinstance(value, Fraction) and value == int(value) else value


def evaluate(program: Expression, sequence: Sequence[Value], causal: bool) -> list[Value]:
    """The program's values. Raises `TwoValues` where it has none."""
    n = len(sequence)
    found: dict[Expression, Any] = {}

    def of(e: Expression) -> Any:
        """The values of an s-op, by position; whether a selector selects a key, by query and key."""
        if e not in found:
            found[e] = meaning(e)
        return found[e]

    def meaning(e: Expression) -> Any:
        if isinstance(e, Primitive):
            return [stored(v) for v in sequence] if e.name == "tokens" else list(range(n))
        if isinstance(e, Constant):
            return [e.value] * n
        if isinstance(e, Map):
            inputs = [of(x) for x in e.arguments]
            return [applied(e, [values[i] for values in inputs]) for i in range(n)]
        if isinstance(e, SelectorWidth):
            return [sum(row) for row in of(e.selector)]
        if isinstance(e, Aggregate):
            values = of(e.values)
            return [combined(e, [values[k] for k in range(n) if row[k]]) for row in of(e.selector)]
        return [[(k <= q or not causal) and selects(e, q, k) for k in range(n)] for q in range(n)]

    def selects(e: Expression, q: int, k: int) -> bool:
        if isinstance(e, Select):
            return holds(e.predicate, of(e.keys)[k], of(e.queries)[q])
        if isinstance(e, Not):
            return not of(e.other)[q][k]
        assert isinstance(e, And | Or)
        both = (of(e.left)[q][k], of(e.right)[q][k])
        return all(both) if isinstance(e, And) else any(both)

    return of(program)


def applied(e: Map, values: list[Value]) -> Value:
    if e.symbol == "same":
        (value,) = values
        return stored(exact(value)) if e.encoding == "numerical" and value is not None else value
    return stored(OPERATORS[e.symbol](*values) if e.symbol else e.function(*values))


def holds(predicate: Callable, k: Value, q: Value) -> bool:
    name = predicate.name if isinstance(predicate, Predicate) else ""
    if name == "true":
        return True
    return OPERATORS[PREDICATES[name]](k, q) if name in PREDICATES else predicate(k, q)


def combined(e: Aggregate, selected: list[Value]) -> Value:
    if not selected:
        return e.default
    if e.encoding == "numerical":
        return stored(sum((exact(v) for v in selected), Fraction(0)) / len(selected))
    if len({key(v) for v in selected}) > 1:
        raise TwoValues
    return selected[0]
