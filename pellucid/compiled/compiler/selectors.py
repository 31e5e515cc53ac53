"""Step 3, selectors: which boolean combinations one head can attend by, and the sums of logits that do it.

A `Form` is a sum of atoms, tables over one query and one key variable. A pair is selected where the sum is `top`, and
no pair reaches more, so that softmax spreads evenly over the selected keys. Conjunctions add (Appendix F), negations
flip a table, and a disjunction is a form where its sides read the same variables, or never hold together.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pellucid.compiled.compiler.tables import unique
from pellucid.compiled.compiler.values import Analysis
from pellucid.compiled.rasp.language import And, Constant, Map, Not, Or, Select, Selector, SOp, describe
from pellucid.compiled.rasp.values import RaspError

PAIRS = 16_000_000


@dataclass
class Atom:
    """A table (query value, key value) over a query and a key s-op; None is a side that does not matter (size 1)."""

    query: SOp | None
    key: SOp | None
    table: np.ndarray
    name: str = ""


@dataclass
class Form:
    """Logits whose largest value, `top`, marks the selected pairs; all others are at least 1 below.

    `gates` (query s-op, vector) lower the logit of BOS: a query for which no gate is 1 selects nothing (only with `top`
    0, where unselected pairs are at -2 or less).
    """

    atoms: list[Atom]
    top: int
    gates: list[tuple[SOp, np.ndarray]] = field(default_factory=list)

    @property
    def compared(self) -> tuple[SOp, ...]:
        """Every s-op that queries and keys read."""
        sides = [s for atom in self.atoms for s in (atom.query, atom.key)] + [q for q, _ in self.gates]
        return unique(s for s in sides if s is not None)


class NotOneHead(RaspError):
    """A selector that no single head can attend by."""


class Forms:
    """Finds the form of selectors, of the nodes of an analysed graph."""

    def __init__(self, analysis: Analysis):
        self.analysis = analysis
        self.known: dict[tuple[int, bool], Form] = {}

    def form(self, node: Selector) -> Form:
        """The form of a selector. Raises `NotOneHead` where it has none."""
        return self.make(node, True)

    def make(self, node: Selector, positive: bool) -> Form:
        """The form of a selector or of its negation; of a shared one once."""
        if (id(node), positive) not in self.known:
            self.known[id(node), positive] = self.find(node, positive)
        return self.known[id(node), positive]

    def find(self, node: Selector, positive: bool) -> Form:
        if isinstance(node, Select):
            table = self.analysis.tables[id(node)]
            return Form([self.atom(node, table if positive else ~table)], 1)
        if isinstance(node, Not):
            return self.make(node.other, not positive)
        assert isinstance(node, And | Or)
        left, right = self.make(node.left, positive), self.make(node.right, positive)
        return (
            self.both(node, left, right)
            if isinstance(node, And) == positive
            else self.either(node, left, right)
        )

    def atom(self, node: Select, table: np.ndarray) -> Atom:
        """The select's table; a side is dropped where it is constant or all its values behave alike."""
        query, key = node.queries, node.keys
        if self.analysis.is_constant(query) or (table == table[:1]).all():
            query, table = None, table[:1]
        if self.analysis.is_constant(key) or (table == table[:, :1]).all():
            key, table = None, table[:, :1]
        return Atom(query, key, table.astype(float), describe(node))

    def both(self, node: Selector, left: Form, right: Form) -> Form:
        if left.gates or right.gates:
            raise NotOneHead(
                f"{describe(node)}: its disjunction cannot be part of a larger selector in one head"
            )
        atoms, top = [*left.atoms], left.top + right.top
        for atom in right.atoms:
            for i, other in enumerate(atoms):
                if left.top == len(left.atoms) and right.top == len(right.atoms) and meet(other, atom):
                    atoms[i] = merge(other, atom, np.multiply)
                    top -= 1
                    break
            else:
                atoms.append(atom)
        return Form(atoms, top)

    def either(self, node: Selector, left: Form, right: Form) -> Form:
        if len(left.atoms) == len(right.atoms) == 1 and not left.gates and not right.gates:
            a, b = left.atoms[0], right.atoms[0]
            if meet(a, b):
                return Form([merge(a, b, np.maximum)], 1)
            gated = self.gated(a, b)
            if gated is not None:
                return gated
        once = left.top == right.top == 1 and not left.gates and not right.gates
        if once and all(self.disjoint(a, b) for a in left.atoms for b in right.atoms):
            return Form([*left.atoms, *right.atoms], 1)
        names = " and ".join(a.name for a in (*left.atoms, *right.atoms))
        raise NotOneHead(
            f"{describe(node)} is no one head's attention: {names} read different s-ops, and may both hold for one pair, "
            "which a sum of logits cannot count once (Tracr, Lemma F.1)"
        )

    def gated(self, a: Atom, b: Atom) -> Form | None:
        """The lemma's rank-1 case: both select the same keys, for queries that either lets through."""
        outer_a, outer_b = rank_one(a), rank_one(b)
        if outer_a is None or outer_b is None:
            return None
        (query_a, key_a), (query_b, key_b) = outer_a, outer_b
        same_key = a.key is b.key or (key_a.all() and key_b.all())
        if a.query is None or b.query is None or not same_key or not np.array_equal(key_a, key_b):
            return None
        keys = Atom(None, a.key, 2 * (key_a[None] - 1.0), f"{a.name} | {b.name}")
        return Form([keys], 0, [(a.query, query_a), (b.query, query_b)])

    def disjoint(self, a: Atom, b: Atom) -> bool:
        """Whether the two atoms never hold for the same query and key."""
        queries, keys = self.rows([a.query, b.query]), self.rows([a.key, b.key])
        if len(queries) * len(keys) > PAIRS:
            return False
        both = a.table[np.ix_(queries[:, 0], keys[:, 0])] * b.table[np.ix_(queries[:, 1], keys[:, 1])]
        return not both.any()

    def rows(self, sides: Sequence[SOp | None]) -> np.ndarray:
        """Joint codes of the s-ops; 0 for None."""
        there = unique(s for s in sides if s is not None)
        joint = self.analysis.together(there) if there else np.zeros((1, 0), dtype=np.int64)
        ids = [id(s) for s in there]
        return np.stack(
            [joint[:, ids.index(id(s))] if s is not None else joint[:, :0].sum(1) for s in sides], axis=1
        )

    def product(self, node: Selector) -> Select:
        """An equal select over s-ops whose values are all that `node` reads of a query and of a key."""
        selects = [x for x in leaves(node) if isinstance(x, Select)]
        queries = unique(s.queries for s in selects if not self.analysis.is_constant(s.queries))
        keys = unique(s.keys for s in selects if not self.analysis.is_constant(s.keys))

        def side(value, sops, of):
            place = {id(x): i for i, x in enumerate(sops)}
            return [
                value[place[id(x)]] if id(x) in place else self.analysis.domains[id(x)].values[0] for x in of
            ]

        def predicate(key, query):
            ks = side(key, keys, [s.keys for s in selects])
            qs = side(query, queries, [s.queries for s in selects])
            truth = {id(s): s.predicate(k, q) for s, k, q in zip(selects, ks, qs, strict=True)}
            return evaluate(node, truth)

        predicate.__name__ = "both sides"
        tuples = [
            Map(lambda *v: v, x, "tuple", "categorical") if x else Constant(()) for x in (keys, queries)
        ]
        return Select(tuples[0], tuples[1], predicate)


def leaves(node: Selector) -> list[Selector]:
    """The selects that a selector combines, each once."""
    found: dict[int, Selector] = {}
    stack: list[Selector] = [node]
    while stack:
        x = stack.pop()
        if isinstance(x, Select):
            found[id(x)] = x
        else:
            stack += x.inputs  # type: ignore[arg-type]
    return list(found.values())


def evaluate(node: Selector, truth: dict[int, bool]) -> bool:
    """The combination's truth, given that of its selects."""
    if isinstance(node, Select):
        return truth[id(node)]
    if isinstance(node, Not):
        return not evaluate(node.other, truth)
    assert isinstance(node, And | Or)
    left, right = evaluate(node.left, truth), evaluate(node.right, truth)
    return left and right if isinstance(node, And) else left or right


def meet(a: Atom, b: Atom) -> bool:
    """Whether one table can hold both: on each side they read the same s-op, or one reads none."""
    return (a.query is b.query or a.query is None or b.query is None) and (
        a.key is b.key or a.key is None or b.key is None
    )


def merge(a: Atom, b: Atom, how) -> Atom:
    """One atom of two that meet."""
    return Atom(
        a.query if a.query is not None else b.query,
        a.key if a.key is not None else b.key,
        how(a.table, b.table),
        a.name if a.name == b.name else f"{a.name}, {b.name}"[:300],
    )


def rank_one(atom: Atom) -> tuple[np.ndarray, np.ndarray] | None:
    """The table as an outer product of 0-1 vectors, if it is one."""
    query, key = atom.table.any(1).astype(float), atom.table.any(0).astype(float)
    return (query, key) if np.array_equal(np.outer(query, key), atom.table) else None
