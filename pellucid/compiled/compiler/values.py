"""Step 2: which values every node can have, for a vocabulary and a maximum length.

Sets are over-approximations, never too small. They are exact for what depends on positions only (it is evaluated for
every length), and keep two more relations: maps of the same s-ops, and numerical aggregates over one selector, which
average the same positions.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from pellucid.compiled.compiler.graph import Graph
from pellucid.compiled.compiler.sums import TooLarge, fractions, sums
from pellucid.compiled.compiler.tables import (
    ROWS,
    Column,
    Domain,
    Problems,
    compare_ranks,
    distinct,
    mesh,
    same,
    unique,
)
from pellucid.compiled.rasp.interpreter import Interpreter, call, holds
from pellucid.compiled.rasp.language import (
    Aggregate,
    And,
    Constant,
    Expression,
    InverseWidth,
    Map,
    Not,
    Or,
    Predicate,
    Primitive,
    Select,
    Selector,
    SelectorWidth,
    SOp,
    describe,
)
from pellucid.compiled.rasp.values import RaspError, Table, Value, number

EXPAND = 30_000
"""Relations through maps are kept where their roots have at most so many joint values."""
VALUES = 100_000
"""The most values of one node."""
STATIC_CELLS = 60_000_000
"""With more (query, key) pairs over all lengths, what depends on positions only is not evaluated but bounded."""


@dataclass(frozen=True)
class Affine:
    """offset + the sum of coefficient * numerical s-op."""

    terms: dict[int, Fraction]
    offset: Fraction


class Analysis:
    """The domain of every s-op of a graph, the widths of every selector, and joint tables on demand.

    What is wrong with the program is collected in `problems`; a node that depends on a wrong one is passed over.
    """

    def __init__(self, graph: Graph, vocab: Sequence[Value], max_len: int, causal: bool):
        self.graph, self.vocab, self.max_len, self.causal = graph, list(vocab), max_len, causal
        self.problems: list[str] = []
        self.domains: dict[int, Domain] = {}
        self.features: dict[int, tuple[SOp, ...]] = {}
        """What the neurons of a map read: roots, held maps, and sums of numerical ones."""
        self.roots: dict[int, tuple[SOp, ...]] = {}
        """The held s-ops that a map's features are made of."""
        self.affine: dict[int, Affine] = {}
        self.held: set[int] = set()
        """Maps that other maps read from the residual stream, for it takes fewer neurons than to fuse them."""
        self.tables: dict[int, np.ndarray] = {}
        """(query value, key value) of each select."""
        self.widths: dict[int, list[int]] = {}
        self.diagonal: dict[int, tuple[bool, bool]] = {}
        """Whether every position selects itself, and whether none does."""
        self.static: dict[int, np.ndarray] = {}
        """Codes at every position of every length, of roots that depend on positions only."""
        self.joints: dict[tuple[int, ...], np.ndarray] = {}
        self.columns: dict[tuple[int, ...], dict[int, Column]] = {}
        self.bases: dict[int, tuple[SOp, ...]] = {}
        self.evaluate_static(graph.nodes)

    def visit(self, node: Expression) -> None:
        """Find the values of a node whose inputs were visited. A problem is noted, and leaves it without values."""
        if not all(id(x) in self.domains or id(x) in self.widths for x in node.inputs):
            return
        try:
            counts = isinstance(node, Selector) or (isinstance(node, Primitive) and node.name == "indices")
            if counts and self.max_len > VALUES:
                raise TooLarge(
                    f"{describe(node)}: max_len {self.max_len:,} is more than can be enumerated ({VALUES:,})"
                )
            if isinstance(node, Selector):
                self.visit_selector(node)
            elif isinstance(node, Map):
                self.visit_map(node)
            elif id(node) not in self.domains:
                self.domains[id(node)] = Domain(self.root_values(node))
            if isinstance(node, SOp) and len(self.domains[id(node)]) > VALUES:
                raise TooLarge(
                    f"{describe(node)} has {len(self.domains[id(node)]):,} values: too many to enumerate"
                )
        except RaspError as error:
            self.problems.append(str(error))
            self.domains.pop(id(node), None)
            self.widths.pop(id(node), None)

    # Roots: what is not a map.

    def evaluate_static(self, nodes: Sequence[Expression]) -> None:
        """Evaluate what depends on positions only, for every length (the longest is enough where causal)."""
        free: set[int] = set()
        for x in nodes:
            if not (isinstance(x, Primitive) and x.name == "tokens") and all(id(i) in free for i in x.inputs):
                free.add(id(x))
        sops = [
            x for x in nodes if id(x) in free and isinstance(x, SOp) and not isinstance(x, Map | Constant)
        ]
        selectors = [x for x in nodes if id(x) in free and isinstance(x, Selector)]
        n = self.max_len
        lengths = [n] if self.causal else range(1, n + 1)
        if not sops or (n**2 if self.causal else n * (n + 1) * (2 * n + 1) // 6) > STATIC_CELLS:
            return
        interpreter = Interpreter(*sops, *[SelectorWidth(s) for s in selectors], causal=self.causal)
        found = []
        try:
            for chunk, codes, undefined in interpreter.chunks([[None] * n for n in lengths]):
                for row, sequence in enumerate(chunk):
                    if undefined[row] is None:
                        found.append([c[row, : len(sequence)] for c in codes])
        except RaspError:
            return  # noted when the node that fails is visited
        if not found:
            return
        for node, out, parts in zip(
            [*sops, *selectors], interpreter.outputs, zip(*found, strict=True), strict=True
        ):
            values, codes = interpreter.tables[id(out)].values, np.concatenate(parts)
            occur, codes = np.unique(codes, return_inverse=True)
            occurring = [values[c] for c in occur]
            if isinstance(node, SOp):
                self.domains[id(node)] = Domain(occurring)
                self.static[id(node)] = self.domains[id(node)].place(occurring)[codes]
            else:
                self.widths[id(node)] = sorted(occurring)

    def root_values(self, node: Expression) -> Iterable[Value]:
        if isinstance(node, Primitive):
            return self.vocab if node.name == "tokens" else range(self.max_len)
        if isinstance(node, Constant):
            return [node.value]
        if isinstance(node, InverseWidth):
            return [number(Fraction(1, 1 + w)) for w in self.widths[id(node.selector)]]
        assert isinstance(node, Aggregate)
        if node.encoding == "numerical":
            _, (column,) = self.means(node.selector, [node])
            return column.values
        table = Table(self.domains[id(node.values)].values if self.widths[id(node.selector)] != [0] else [])
        if 0 in self.widths[id(node.selector)]:
            table.code(node.default)
        return table.values

    def means(self, selector: Selector, aggregates: Sequence[Aggregate]) -> tuple[np.ndarray, list[Column]]:
        """Numerical aggregates over one selector together: the width and every mean, in all rows that can be."""
        for a in aggregates:
            if self.domains[id(a.values)].optional:
                raise RaspError(f"{describe(a)} can be a mean over None: map None to a number first")
        together = self.together([a.values for a in aggregates])
        values = [self.domains[id(a.values)].values for a in aggregates]
        widths = self.widths[id(selector)]
        numbers = [[values[i][c] for c in together[:, i]] for i in range(len(aggregates))]
        try:
            found, totals, scales = sums(numbers, [w for w in widths if w], ROWS)
        except TooLarge as error:
            raise TooLarge(f"{', '.join(describe(a) for a in aggregates)}: {error}") from None
        columns = [
            Column(*fractions(total, found * scale)) for total, scale in zip(totals, scales, strict=True)
        ]
        if 0 in widths:
            found = np.append(found, 0)
            for a, column in zip(aggregates, columns, strict=True):
                table = Table(column.values)
                column.codes, column.values = np.append(column.codes, table.code(a.default)), table.values
        return found, columns

    # Selectors.

    def visit_selector(self, node: Selector) -> None:
        """The selector's possible widths; of a select also its table."""
        n = self.max_len
        if isinstance(node, Select):
            table = self.tables[id(node)] = self.predicate_table(node)
            same = node.keys is node.queries
            always = bool(table.all()) or (same and bool(table.diagonal().all()))
            never = not table.any() or (same and not table.diagonal().any())
            low, high = 0, n if table.any() else 0
        elif isinstance(node, Not):
            never, always = self.diagonal[id(node.other)]
            low, high = 0, n
        else:
            assert isinstance(node, And | Or)
            (always, never), (always_too, never_too) = (self.diagonal[id(x)] for x in (node.left, node.right))
            least, most = zip(
                *((self.widths[id(x)][0], self.widths[id(x)][-1]) for x in (node.left, node.right)),
                strict=True,
            )
            if isinstance(node, And):
                always, never, low, high = always and always_too, never or never_too, 0, min(most)
            else:
                always, never, low, high = (
                    always or always_too,
                    never and never_too,
                    max(least),
                    min(n, sum(most)),
                )
        self.diagonal[id(node)] = (always, never)
        if id(node) not in self.widths:
            low, high = max(low, int(always)), min(high, n - int(never))
            self.widths[id(node)] = list(range(low, high + 1))

    def predicate_table(self, node: Select) -> np.ndarray:
        """(query value, key value) bool."""
        queries, keys = self.domains[id(node.queries)].values, self.domains[id(node.keys)].values
        if len(queries) * len(keys) > 8 * ROWS:
            raise TooLarge(
                f"{describe(node)} compares {len(queries):,} with {len(keys):,} values: too many to enumerate"
            )
        if len(queries) * len(keys) > 1000 and isinstance(node.predicate, Predicate):
            table = compare_ranks(node.predicate.name, queries, keys)
            if table is not None:
                return table
        table = np.zeros((len(queries), len(keys)), dtype=bool)
        with Problems() as problems:
            for q, query in enumerate(queries):
                for k, value in enumerate(keys):
                    with problems.collect():
                        table[q, k] = holds(node, value, query)
        return table

    # Maps.

    def visit_map(self, node: Map) -> None:
        """The map's values, and what its neurons read: what the maps that it reads do, unless it is cheaper to hold those."""
        self.find_affine(node)
        arguments = list(unique(x for x in node.arguments if not self.is_constant(x)))
        features = self.leaves(arguments)
        if id(node) not in self.affine and len(features) > 1:
            maps = [x for x in arguments if isinstance(x, Map) and not same(self.leaves([x]), [x])]
            apart = self.neurons(arguments) + sum(self.neurons(self.features[id(x)]) for x in maps)
            # Numbers that maps made are read better than what they were made of: widths are spaced evenly, 1/(1+width) not.
            numbers = sum(f.encoding == "numerical" for f in features)
            if maps and (numbers > 1 or self.neurons(features) > apart):
                self.held |= {id(x) for x in maps}
                features = self.leaves(arguments)
                self.find_affine(node)
        self.features[id(node)] = (node,) if id(node) in self.affine else features
        self.roots[id(node)] = unique(
            r for f in features for r in (self.roots[id(f)] if self.is_sum(f) else (f,))
        )
        column = self.column(node, self.roots[id(node)])
        self.domains[id(node)] = Domain(column.values)

    def is_constant(self, node: SOp) -> bool:
        """Whether the node reads nothing that varies."""
        return isinstance(node, Constant) or (isinstance(node, Map) and not self.roots[id(node)])

    def is_sum(self, node: SOp) -> bool:
        """Whether neurons compute the node from numerical ones as they read it."""
        return id(node) in self.affine and id(node) not in self.held

    def leaves(self, nodes: Iterable[SOp]) -> tuple[SOp, ...]:
        """What neurons that compute functions of `nodes` read."""
        return unique(
            f
            for x in nodes
            for f in (self.features[id(x)] if isinstance(x, Map) and id(x) not in self.held else (x,))
        )

    def neurons(self, features: Sequence[SOp]) -> int:
        """About how many neurons a function of `features` takes: one a joint value, two where it is numerical."""
        return math.prod(len(self.domains[id(f)]) * (1 + (f.encoding == "numerical")) for f in features)

    def find_affine(self, node: Map) -> None:
        """Note `node` as a weighted sum of numerical held s-ops, where it is one."""
        signs = {"+": (1, 1), "-": (1, -1), "negate": (-1,), "same": (1,)}.get(node.symbol or "")
        arguments = node.arguments
        if node.encoding != "numerical" or any(
            not self.is_constant(x) and (x.encoding != "numerical" or self.domains[id(x)].optional)
            for x in arguments
        ):
            return
        if node.symbol in ("*", "/") and len(arguments) == 2:
            factor = [self.constant(x) for x in arguments]
            if factor[1] is not None and (node.symbol == "*" or factor[1]):
                arguments, signs = (
                    arguments[:1],
                    (factor[1] if node.symbol == "*" else 1 / Fraction(factor[1]),),
                )
            elif factor[0] is not None and node.symbol == "*":
                arguments, signs = arguments[1:], (factor[0],)
        if signs is None:
            return
        terms: dict[int, Fraction] = {}
        offset = Fraction(0)
        for x, sign in zip(arguments, signs, strict=True):
            if self.is_constant(x):
                part = Affine({}, Fraction(self.constant(x) or 0))
            elif isinstance(x, Map) and id(x) not in self.held:
                if id(x) not in self.affine:
                    return
                part = self.affine[id(x)]
            else:
                part = Affine({id(x): Fraction(1)}, Fraction(0))
            offset += sign * part.offset
            for root, coefficient in part.terms.items():
                terms[root] = terms.get(root, Fraction(0)) + sign * coefficient
        self.affine[id(node)] = Affine(terms, offset)

    def constant(self, node: SOp) -> int | Fraction | None:
        """The number that a constant node always is."""
        if not self.is_constant(node):
            return None
        (value,) = self.domains[id(node)].values
        return value if isinstance(value, int | Fraction) else None

    # Joint values.

    def together(self, nodes: Sequence[SOp]) -> np.ndarray:
        """(row, node): the codes of all joint values that `nodes` may have at one position."""
        ids = tuple(id(x) for x in nodes)
        if ids not in self.joints:
            base = unique(b for x in nodes for b in self.base(x))
            self.joints[ids] = self.join(base) if same(base, nodes) else self.image(nodes, base)
        return self.joints[ids]

    def base(self, node: SOp) -> tuple[SOp, ...]:
        """The roots of a node, through held maps as well."""
        if not isinstance(node, Map):
            return () if isinstance(node, Constant) else (node,)
        if id(node) not in self.bases:
            self.bases[id(node)] = unique(b for r in self.roots[id(node)] for b in self.base(r))
        return self.bases[id(node)]

    def image(self, nodes: Sequence[SOp], base: tuple[SOp, ...]) -> np.ndarray:
        """`nodes` as functions of their roots; every combination where the roots have too many joint values."""
        sizes = [len(self.domains[id(x)]) for x in nodes]
        try:
            if len(self.together(base)) > EXPAND:
                return mesh([np.arange(size)[:, None] for size in sizes])
        except TooLarge:
            return mesh([np.arange(size)[:, None] for size in sizes])
        columns = [self.column(x, base) for x in nodes]
        return self.possible(nodes, columns)

    def join(self, base: Sequence[SOp]) -> np.ndarray:
        """All combinations of groups of roots that have nothing to do with each other."""
        groups: dict[object, list[SOp]] = {}
        averaging = {id(x.selector) for x in base if isinstance(x, Aggregate) and id(x) not in self.static}
        for x in base:
            averaged = isinstance(x, InverseWidth) or (isinstance(x, Aggregate) and x.encoding == "numerical")
            shared = id(x.selector) if averaged else id(x)  # type: ignore[attr-defined]
            counted = isinstance(x, InverseWidth) and shared in averaging
            positional = id(x) in self.static and not counted
            groups.setdefault("positions" if positional else shared, []).append(x)
        rows = mesh([self.group(group) for group in groups.values()])
        members = [id(x) for group in groups.values() for x in group]
        return rows[:, [members.index(id(x)) for x in base]]

    def group(self, group: Sequence[SOp]) -> np.ndarray:
        """(row, root): joint codes of roots that depend on positions only, or that one selector averages."""
        if len(group) == 1:
            return np.arange(len(self.domains[id(group[0])]))[:, None]
        sizes = [len(self.domains[id(x)]) for x in group]
        if all(id(x) in self.static for x in group):
            return distinct([self.static[id(x)] for x in group], sizes)[0]
        aggregates = [x for x in group if isinstance(x, Aggregate)]
        try:
            widths, means = self.means(group[0].selector, aggregates)  # type: ignore[attr-defined]
        except TooLarge:
            return mesh([np.arange(size)[:, None] for size in sizes])
        columns = {id(a): column for a, column in zip(aggregates, means, strict=True)}
        of_width, where = np.unique(widths, return_inverse=True)
        inverse = Column(where, [number(Fraction(1, 1 + int(w))) for w in of_width])
        codes = [columns.get(id(x), inverse) for x in group]
        return self.possible(group, codes)

    def possible(self, nodes: Sequence[SOp], columns: Sequence[Column]) -> np.ndarray:
        """(row, node): the columns' joint codes, without rows in which a node has a value that it never has."""
        domains = [self.domains[id(x)] for x in nodes]
        codes = [d.find(c.values)[c.codes] for d, c in zip(domains, columns, strict=True)]
        there = np.logical_and.reduce([c >= 0 for c in codes])
        return distinct([c[there] for c in codes], [len(d) for d in domains])[0]

    def column(self, node: SOp, roots: tuple[SOp, ...]) -> Column:
        """The node's value in every row of `together(roots)`."""
        rows = self.together(roots)
        known = self.columns.setdefault(tuple(id(r) for r in roots), {})
        for i, root in enumerate(roots):
            known.setdefault(id(root), Column(rows[:, i], self.domains[id(root)].values))
        stack: list[SOp] = [node]
        while stack:
            x = stack[-1]
            if id(x) in known:
                stack.pop()
            elif isinstance(x, Constant):
                known[id(x)] = Column(np.zeros(len(rows), dtype=np.int64), [x.value])
            else:
                assert isinstance(x, Map), f"{describe(x)} is no root of {describe(node)}"
                missing = [a for a in x.arguments if id(a) not in known]
                if missing:
                    stack += missing
                else:
                    known[id(x)] = self.apply(x, [known[id(a)] for a in x.arguments])
        return known[id(node)]

    def apply(self, node: Map, arguments: Sequence[Column]) -> Column:
        """The map's function on every combination of its arguments' values that occurs."""
        combinations, where = distinct([c.codes for c in arguments], [len(c.values) for c in arguments])
        table, codes = Table(), np.zeros(len(combinations), dtype=np.int64)
        with Problems() as problems:
            for i, combination in enumerate(combinations.tolist()):
                with problems.collect():
                    values = [column.values[c] for column, c in zip(arguments, combination, strict=True)]
                    codes[i] = table.code(call(node, node.function, values))
        return Column(codes[where], table.values)
