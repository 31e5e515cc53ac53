"""What a program means: its values on sequences, exactly. The compiled model must equal this.

Many sequences are evaluated at once: every s-op is an array of codes into its own table of distinct values, so that
a map or predicate is called once for each distinct combination of values, whatever the number of positions.

Axes: b sequence, q query, k key, n position.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction

import numpy as np

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
    describe,
    walk,
)
from pellucid.compiled.rasp.values import RaspError, Table, Undefined, Value, canonical, number, show

CELLS = 2_000_000
"""Sequences are taken in chunks of about so many (query, key) pairs."""


def call(expression: Expression, function, values: Sequence[Value]) -> Value:
    """`function(*values)` as a value of `expression`. Raises `RaspError` that names both where it fails."""
    try:
        return canonical(function(*values))
    except Exception as error:  # whatever the user's function raises
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        given = ", ".join(repr(v) if isinstance(v, str) else show(v) for v in values)
        raise RaspError(f"{describe(expression)} fails on ({given}): {reason}") from error


def holds(selector: Select, key: Value, query: Value) -> bool:
    """Whether the predicate holds. Raises `RaspError` where it fails or gives anything but a bool."""
    value = call(selector, selector.predicate, (key, query))
    if not isinstance(value, bool):
        raise RaspError(
            f"{describe(selector)}: its predicate gives {value!r} on key {key!r} and query {query!r}, not a bool"
        )
    return value


class Interpreter:
    """Evaluates one or more s-ops on batches of sequences. Tables of values are kept from call to call."""

    def __init__(self, *outputs: SOp, causal: bool = False):
        for output in outputs:
            if not isinstance(output, SOp):
                what = describe(output) if isinstance(output, Expression) else repr(output)
                raise RaspError(f"expected an s-op, got {what}")
        self.outputs, self.causal = outputs, causal
        self.order = list(walk(*outputs))
        self.tables: dict[int, Table] = {id(e): Table() for e in self.order if isinstance(e, SOp)}
        self.calls: dict[int, dict[tuple[int, ...], int]] = {id(e): {} for e in self.order}

    def __call__(self, sequences: Iterable[Sequence[Value]]) -> list[list[Value]]:
        """The first output's values on each sequence. Raises `Undefined` where an aggregate has no one value."""
        sequences = list(sequences)
        out = []
        for chunk, codes, undefined in self.chunks(sequences):
            for row, sequence in enumerate(chunk):
                if undefined[row] is not None:
                    raise Undefined(f"{undefined[row]} on {sequence!r}")
                values = self.tables[id(self.outputs[0])].values
                out.append([values[c] for c in codes[0][row, : len(sequence)]])
        return out

    def chunks(self, sequences: Sequence[Sequence[Value]]):
        """(sequences, codes (b, n) of every output, why each is undefined or None), for chunks of sequences in order."""
        longest = max((len(s) for s in sequences), default=0)
        size = max(1, CELLS // max(1, longest) ** 2)
        for start in range(0, len(sequences), size):
            chunk = sequences[start : start + size]
            yield chunk, *Evaluation(self, chunk).run()


class Evaluation:
    """One pass over a batch: `codes[id(s-op)]` (b, n) and `selected[id(selector)]` (b, q, k)."""

    def __init__(self, interpreter: Interpreter, sequences: Sequence[Sequence[Value]]):
        self.interpreter, self.sequences = interpreter, sequences
        lengths = np.array([len(s) for s in sequences], dtype=np.int64)
        n = int(lengths.max(initial=0))
        self.shape = (len(sequences), n)
        self.real = np.arange(n) < lengths[:, None]
        self.pairs = self.real[:, :, None] & self.real[:, None, :]
        if interpreter.causal:
            self.pairs &= np.tri(n, dtype=bool)
        self.codes: dict[int, np.ndarray] = {}
        self.selected: dict[int, np.ndarray] = {}
        self.undefined: list[str | None] = [None] * len(sequences)

    def run(self) -> tuple[list[np.ndarray], list[str | None]]:
        """The outputs' codes, and why each sequence is undefined, or None."""
        left = {}
        for expression in self.interpreter.order:
            for e in expression.inputs:
                left[id(e)] = left.get(id(e), 0) + 1
        for expression in self.interpreter.order:
            if isinstance(expression, SOp):
                self.codes[id(expression)] = self.sop(expression)
            else:
                self.selected[id(expression)] = self.selector(expression)
            for e in expression.inputs:  # selectors are large: drop each after its last use
                left[id(e)] -= 1
                if left[id(e)] == 0:
                    self.selected.pop(id(e), None)
        return [self.codes[id(e)] for e in self.interpreter.outputs], self.undefined

    def sop(self, e: Expression) -> np.ndarray:
        table = self.interpreter.tables[id(e)]
        if isinstance(e, Primitive):
            return self.indices(table) if e.name == "indices" else self.tokens(table)
        if isinstance(e, Constant):
            return np.full(self.shape, table.code(e.value))
        if isinstance(e, Map):
            return self.map(e, table)
        if isinstance(e, SelectorWidth):
            return self.intern(self.selected[id(e.selector)].sum(2), table)
        if isinstance(e, InverseWidth):
            return self.intern(
                self.selected[id(e.selector)].sum(2), table, lambda w: number(Fraction(1, 1 + w))
            )
        assert isinstance(e, Aggregate)
        return self.mean(e, table) if e.encoding == "numerical" else self.one_value(e, table)

    def indices(self, table: Table) -> np.ndarray:
        for i in range(len(table), self.shape[1]):
            table.code(i)
        return np.broadcast_to(np.arange(self.shape[1]), self.shape)

    def tokens(self, table: Table) -> np.ndarray:
        out = np.zeros(self.shape, dtype=np.int64)
        for row, sequence in enumerate(self.sequences):
            try:
                out[row, : len(sequence)] = [table.code(canonical(v)) for v in sequence]
            except ValueError as error:
                raise RaspError(f"in the sequence {sequence!r}: {error}") from None
        return out

    def intern(self, numbers: np.ndarray, table: Table, value: Callable[[int], Value] = int) -> np.ndarray:
        """Codes of the values of an array of integers."""
        distinct, where = np.unique(numbers[self.real], return_inverse=True)
        return self.spread(np.array([table.code(value(v)) for v in distinct.tolist()], dtype=np.int64)[where])

    def spread(self, values: np.ndarray) -> np.ndarray:
        """(real positions,) -> (b, n)."""
        out = np.zeros(self.shape, dtype=np.int64)
        out[self.real] = values
        return out

    def map(self, e: Map, table: Table) -> np.ndarray:
        flat = np.zeros(int(self.real.sum()), dtype=np.int64)
        sizes = []
        for x in e.arguments:
            sizes.append(len(self.interpreter.tables[id(x)]))
            if math.prod(sizes) > 2**62:  # renumber what occurs, so that codes of combinations stay small
                flat = np.unique(flat, return_inverse=True)[1]
                sizes = [int(flat.max(initial=0)) + 1, sizes[-1]]
            flat = flat * sizes[-1] + self.codes[id(x)][self.real]
        _, first, where = np.unique(flat, return_index=True, return_inverse=True)
        columns = [
            [self.interpreter.tables[id(x)].values[c] for c in self.codes[id(x)][self.real][first]]
            for x in e.arguments
        ]
        known = self.interpreter.calls[id(e)]
        ids = list(zip(*(self.codes[id(x)][self.real][first].tolist() for x in e.arguments), strict=True))
        for i, combination in enumerate(ids):
            if combination not in known:
                known[combination] = table.code(call(e, e.function, [column[i] for column in columns]))
        return self.spread(np.array([known[c] for c in ids], dtype=np.int64)[where])

    def selector(self, e: Expression) -> np.ndarray:
        if isinstance(e, Not):
            return self.pairs & ~self.selected[id(e.other)]
        if isinstance(e, And | Or):
            left, right = self.selected[id(e.left)], self.selected[id(e.right)]
            return left & right if isinstance(e, And) else left | right
        assert isinstance(e, Select)
        keys, queries = (self.interpreter.tables[id(x)].values for x in (e.keys, e.queries))
        if not keys or not queries:  # every sequence is undefined
            return np.zeros_like(self.pairs)
        flat = self.codes[id(e.queries)][:, :, None] * len(keys) + self.codes[id(e.keys)][:, None, :]
        seen = np.zeros(len(queries) * len(keys), dtype=bool)
        seen[flat[self.pairs]] = True
        found = np.zeros_like(seen)
        known = self.interpreter.calls[id(e)]
        for pair in np.flatnonzero(seen):
            q, k = divmod(int(pair), len(keys))
            if (q, k) not in known:
                known[q, k] = holds(e, keys[k], queries[q])
            found[pair] = known[q, k]
        return found[flat] & self.pairs

    def mean(self, e: Aggregate, table: Table) -> np.ndarray:
        values = self.interpreter.tables[id(e.values)].values
        if not values:  # every sequence is undefined
            return np.zeros(self.shape, dtype=np.int64)
        codes, selected = self.codes[id(e.values)], self.selected[id(e.selector)]
        missing = np.array([v is None for v in values], dtype=bool)
        if missing.any() and (selected & missing[codes][:, None, :]).any():
            raise RaspError(f"{describe(e)} is a mean over None: map None to a number first")
        numbers = [Fraction(0 if v is None else number(v)) for v in values]
        scale = math.lcm(*(v.denominator for v in numbers))
        whole = [int(v * scale) for v in numbers]
        exact = max(map(abs, whole), default=0) * self.shape[1] < 2**53
        scaled = np.array(whole, dtype=np.float64 if exact else object)
        if exact:
            sums = np.matmul(selected.astype(np.float64), scaled[codes][:, :, None])[:, :, 0].astype(np.int64)
        else:
            sums = np.where(selected, scaled[codes][:, None, :], 0).sum(2)
        counts, sums = selected.sum(2)[self.real], sums[self.real]
        known: dict[tuple[int, int], int] = {}
        out = np.zeros(len(counts), dtype=np.int64)
        for i, (total, count) in enumerate(zip(sums.tolist(), counts.tolist(), strict=True)):
            code = known.get((total, count))
            if code is None:
                value = number(Fraction(total, count * scale)) if count else e.default
                code = known[total, count] = table.code(value)
            out[i] = code
        return self.spread(out)

    def one_value(self, e: Aggregate, table: Table) -> np.ndarray:
        values = self.interpreter.tables[id(e.values)].values
        codes, selected = self.codes[id(e.values)], self.selected[id(e.selector)]
        low = np.where(selected, codes[:, None, :], len(values)).min(2, initial=len(values))
        high = np.where(selected, codes[:, None, :], -1).max(2, initial=-1)
        for row in np.flatnonzero(((high > low) & self.real).any(1)):
            q = int(np.argmax((high > low)[row]))
            a, b = values[low[row, q]], values[high[row, q]]
            self.undefined[row] = (
                f"{describe(e)} selects both {a!r} and {b!r} at position {q}; it is categorical: "
                "use numerical(...) for a mean,"
            )
            self.real[row] = self.pairs[row] = False
        out = np.array([table.code(v) for v in values] + [table.code(e.default)], dtype=np.int64)
        return out[np.where(high < 0, len(values), low)]
