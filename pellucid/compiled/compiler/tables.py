"""Sets of values as sorted domains, and joint ones as tables of codes: a row for each combination that can occur."""

import math
from collections.abc import Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np

from pellucid.compiled.compiler.sums import TooLarge
from pellucid.compiled.rasp.language import SOp
from pellucid.compiled.rasp.values import RaspError, Table, Value, key, order

ROWS = 1_000_000
"""The most rows of a joint table."""


class Domain:
    """The values that an s-op can have, sorted: None first, then bools, numbers, text, tuples."""

    def __init__(self, values: Iterable[Value]):
        table = Table(sorted(values, key=order))
        self.values, self.codes = table.values, table.codes

    def __len__(self) -> int:
        return len(self.values)

    @property
    def optional(self) -> bool:
        """Whether None is among the values."""
        return bool(self.values) and self.values[0] is None

    @cached_property
    def magnitudes(self) -> np.ndarray:
        """The numbers as float64; 0 for None."""
        return np.array([0.0 if v is None else float(v) for v in self.values])

    def find(self, values: Sequence[Value]) -> np.ndarray:
        """The code of each of `values`; -1 for what is not in the domain."""
        return np.array([self.codes.get(key(v), -1) for v in values], dtype=np.int64)

    def place(self, values: Sequence[Value]) -> np.ndarray:
        """The code of each of `values`."""
        return np.array([self.codes[key(v)] for v in values], dtype=np.int64)


@dataclass
class Column:
    """An s-op in the rows of a joint table: `values[codes[row]]`."""

    codes: np.ndarray
    values: list[Value]


class Problems:
    """Collects `RaspError`s, and raises one that tells of the first and of how many there are."""

    def __init__(self):
        self.found: list[str] = []

    def __enter__(self) -> "Problems":
        return self

    def __exit__(self, kind, error, trace) -> None:
        if self.found and error is None:
            more = f" (and on {len(self.found) - 1:,} more)" if len(self.found) > 1 else ""
            raise RaspError(self.found[0] + more)

    @contextmanager
    def collect(self):
        try:
            yield
        except RaspError as error:
            self.found.append(str(error))


def unique(items: Iterable[SOp]) -> tuple[SOp, ...]:
    """Each of `items` once, in order."""
    return tuple({id(x): x for x in items}.values())


def same(left: Sequence[SOp], right: Sequence[SOp]) -> bool:
    """Whether these are the same nodes in the same order (`==` on s-ops makes an s-op)."""
    return [id(x) for x in left] == [id(x) for x in right]


def mesh(groups: Sequence[np.ndarray]) -> np.ndarray:
    """Every combination of one row from each of `groups` (rows, columns), side by side."""
    total = math.prod(len(g) for g in groups)
    if total > ROWS:
        raise TooLarge(f"its inputs have {total:,} joint values: too many to enumerate")
    places = np.indices([len(g) for g in groups]).reshape(len(groups), total)
    return np.concatenate(
        [g[p] for g, p in zip(groups, places, strict=True)] or [np.zeros((1, 0), dtype=np.int64)], axis=1
    )


def distinct(columns: Sequence[np.ndarray], sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """The distinct rows of columns of codes below `sizes`, sorted, and which of them each row is."""
    flat = np.zeros(len(columns[0]) if columns else 1, dtype=np.int64)
    bound = 1
    for column, size in zip(columns, sizes, strict=True):
        if bound * size > 2**62:
            flat = np.unique(flat, return_inverse=True)[1]
            bound = int(flat.max(initial=0)) + 1
        flat, bound = flat * size + column, bound * size
    _, first, where = np.unique(flat, return_index=True, return_inverse=True)
    rows = np.stack([c[first] for c in columns], 1) if columns else np.zeros((1, 0), dtype=np.int64)
    return rows, where


def compare_ranks(predicate: str, queries: Sequence[Value], keys: Sequence[Value]) -> np.ndarray | None:
    """The table of a comparison of values that are totally ordered, else None."""
    kinds = {kind(v) for v in (*queries, *keys)}
    if len(kinds) != 1 or None in kinds:
        return None
    place: dict[Value, int] = {v: i for i, v in enumerate(sorted({*queries, *keys}))}
    q, k = np.array([place[v] for v in queries])[:, None], np.array([place[v] for v in keys])[None]
    compare = {
        "eq": np.equal,
        "neq": np.not_equal,
        "lt": np.less,
        "leq": np.less_equal,
        "gt": np.greater,
        "geq": np.greater_equal,
    }
    return compare[predicate](k, q) if predicate in compare else None


def kind(value: Value) -> object:
    """A name for the totally ordered values that this one is among: numbers, text, equally built tuples; or None."""
    if isinstance(value, int | float | Fraction):
        return "number"
    if isinstance(value, tuple):
        parts = tuple(kind(v) for v in value)
        return None if None in parts else parts
    return "text" if isinstance(value, str) else None
