"""RASP evaluated as its definition reads: one sequence, one position, one pair at a time. Slow, and short."""

from collections.abc import Sequence
from fractions import Fraction

from pellucid.compiled import rasp
from pellucid.compiled.rasp.language import And, Expression, Not, Or, Primitive
from pellucid.compiled.rasp.values import Value, key


class TwoValues(Exception):
    """A categorical aggregate selects different values."""


def values(e: Expression, sequence: Sequence[Value], causal: bool = False) -> list[Value] | None:
    """The values of an s-op; None where it is undefined."""
    try:
        return Naive(sequence, causal).sop(e)
    except TwoValues:
        return None


def plain(value: Value) -> Value:
    """Whole Fractions are ints."""
    return int(value) if isinstance(value, Fraction) and value == int(value) else value


def exact(value: Value) -> Fraction:
    """A number as it is written: 0.1 is a tenth."""
    return Fraction(str(value)) if isinstance(value, float) else Fraction(value)


class Naive:
    def __init__(self, sequence: Sequence[Value], causal: bool):
        self.sequence, self.causal = list(sequence), causal
        self.known: dict[int, list] = {}

    def sop(self, e: Expression) -> list[Value]:
        """A value for each position."""
        if id(e) not in self.known:
            self.known[id(e)] = [self.value(e, i) for i in range(len(self.sequence))]
        return self.known[id(e)]

    def value(self, e: Expression, i: int) -> Value:
        if isinstance(e, Primitive):
            return plain(self.sequence[i]) if e.name == "tokens" else i
        if isinstance(e, rasp.Constant):
            return e.value
        if isinstance(e, rasp.Map):
            return plain(e.function(*(self.sop(x)[i] for x in e.arguments)))
        if isinstance(e, rasp.SelectorWidth):
            return sum(self.row(e.selector, i))
        assert isinstance(e, rasp.Aggregate)
        chosen = [v for v, s in zip(self.sop(e.values), self.row(e.selector, i), strict=True) if s]
        if not chosen:
            return e.default
        if e.values.encoding == "numerical":
            return plain(sum(map(exact, chosen), Fraction(0)) / len(chosen))
        if len({key(v) for v in chosen}) > 1:
            raise TwoValues
        return chosen[0]

    def row(self, s: Expression, query: int) -> list[bool]:
        """Whether `query` selects each key."""
        return [
            (k <= query or not self.causal) and self.selects(s, k, query) for k in range(len(self.sequence))
        ]

    def selects(self, s: Expression, k: int, query: int) -> bool:
        if isinstance(s, Not):
            return not self.selects(s.other, k, query)
        if isinstance(s, And | Or):
            both = [self.selects(x, k, query) for x in (s.left, s.right)]  # where one is undefined, so is all
            return all(both) if isinstance(s, And) else any(both)
        assert isinstance(s, rasp.Select)
        return s.predicate(self.sop(s.keys)[k], self.sop(s.queries)[query])
