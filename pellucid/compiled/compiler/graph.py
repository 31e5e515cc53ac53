"""Step 1: from an expression to a graph in which what is computed twice in the same way is one node.

A selector width becomes two nodes: what its head gives, 1/(1 + width), and a map that inverts it (Tracr, appendix D.2).
"""

from collections.abc import Hashable
from fractions import Fraction

from pellucid.compiled.rasp.language import (
    Aggregate,
    And,
    Constant,
    Expression,
    InverseWidth,
    Map,
    Not,
    Or,
    Primitive,
    Select,
    SelectorWidth,
    SOp,
    categorical,
    describe,
    numerical,
    selector_width,
    true,
    walk,
)
from pellucid.compiled.rasp.values import RaspError, Value, key, number


class CompileError(RaspError):
    """A program that cannot be compiled; the message lists every reason."""


def width(inverse: Value) -> Value:
    """The width, given 1 / (1 + width)."""
    return number(1 / Fraction(inverse) - 1)


class Graph:
    """The distinct expressions of a program as nodes, in the order in which they were added, inputs first."""

    def __init__(self, program: Expression):
        if not isinstance(program, Expression):
            raise CompileError(f"expected a RASP expression, got {program!r}")
        if not isinstance(program, SOp):
            raise CompileError(
                f"{describe(program)} is a selector: aggregate over it, or take its selector_width"
            )
        self.nodes: list[Expression] = []
        self.known: dict[Hashable, Expression] = {}
        self.place: dict[int, Expression] = {}
        self.kept: list[Expression] = []  # `place` goes by id: its expressions must stay alive
        self.output = self.add_sop(program)

    def add(self, program: Expression) -> Expression:
        """The node of `program`; new nodes are made for what is not there yet."""
        for expression in walk(program):
            if id(expression) not in self.place:
                self.kept.append(expression)
                self.place[id(expression)] = self.node(expression)
        return self.place[id(program)]

    def add_sop(self, program: SOp) -> SOp:
        """As `add`, of an s-op."""
        node = self.add(program)
        assert isinstance(node, SOp)
        return node

    def node(self, e: Expression) -> Expression:
        inputs: list = [self.place[id(x)] for x in e.inputs]
        ids = tuple(id(x) for x in inputs)
        if isinstance(e, Primitive):
            return self.intern(e, None, (Primitive, e.name))
        if isinstance(e, Constant):
            return self.intern(Constant(e.value), e.name, (Constant, key(e.value)))
        if isinstance(e, InverseWidth):
            return self.intern(InverseWidth(*inputs), None, (InverseWidth, *ids))
        if isinstance(e, SelectorWidth):
            inverse = self.add_sop(InverseWidth(*inputs))
            made = Map(width, (inverse,), "width", "categorical")
            return self.intern(made, e.name or describe(e), ("width", id(inverse)))
        if isinstance(e, Map):
            if e.symbol == "same" and e.encoding == inputs[0].encoding:
                return inputs[0]
            made = Map(e.function, tuple(inputs), e.symbol, e.encoding)
            # Operators are told apart by their symbols, functions by themselves.
            return self.intern(made, e.name, (Map, e.symbol or id(e.function), e.encoding, ids))
        if isinstance(e, Aggregate):
            return self.intern(
                Aggregate(inputs[0], inputs[1], e.default), e.name, (Aggregate, key(e.default), ids)
            )
        if isinstance(e, Select):
            if e.predicate is true:  # reads nothing
                inputs = [Constant(None), Constant(None)]
            keys, queries = (self.add_sop(categorical(x)) for x in inputs)
            return self.intern(
                Select(keys, queries, e.predicate),
                e.name,
                (Select, id(e.predicate), id(keys), id(queries)),
            )
        assert isinstance(e, Not | And | Or)
        return self.intern(type(e)(*inputs), e.name, (type(e), ids))

    def intern(self, made: Expression, name: str | None, how: Hashable) -> Expression:
        """The node that is made in this way: `made`, if it is the first."""
        node = self.known.get(how)
        if node is None:
            node = self.known[how] = made
            self.nodes.append(node)
            self.kept.append(node)
            self.place[id(node)] = node
        if node.name is None:
            node.name = name
        return node

    def count_either(self, either: Or) -> SOp:
        """The width of `s | t`, from those of `s`, `t` and `s & t`."""
        left, right = either.left, either.right
        widths = [numerical(selector_width(s)) for s in (left, right, And(left, right))]
        return self.add_sop(categorical(widths[0] + widths[1] - widths[2]))
