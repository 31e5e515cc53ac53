"""Which selectors would select keys after the query, and lose them under a causal mask."""

from collections.abc import Sequence

import numpy as np

from pellucid.compiled.compiler.values import Analysis
from pellucid.compiled.rasp.interpreter import Interpreter
from pellucid.compiled.rasp.language import And, Not, Or, Primitive, Select, Selector, SOp, describe, walk
from pellucid.compiled.rasp.values import Undefined

LONGEST = 64
"""Positions that are looked at."""


class CausalWarning(UserWarning):
    """Selectors of a program lose keys to the causal mask."""


def lost_keys(analysis: Analysis, selectors: Sequence[Selector]) -> list[str]:
    """The names of those selectors that may select a later key."""
    n = min(analysis.max_len, LONGEST)
    later = ~np.tri(n, dtype=bool)
    names = [describe(s) for s in selectors if (pairs(analysis, s, n)[0] & later).any()]
    return sorted(set(names))


def pairs(analysis: Analysis, node: Selector, n: int) -> tuple[np.ndarray, np.ndarray]:
    """(query, key) positions that may be selected, and those that always are."""
    if isinstance(node, Select):
        table = analysis.tables[id(node)]
        places = [positions(analysis, side, n) for side in (node.queries, node.keys)]
        if places[0] is not None and places[1] is not None:
            exact = table[np.ix_(places[0], places[1])]
            return exact, exact
        return np.full((n, n), bool(table.any())), np.full((n, n), bool(table.all()))
    if isinstance(node, Not):
        may, must = pairs(analysis, node.other, n)
        return ~must, ~may
    assert isinstance(node, And | Or)
    (may, must), (may_too, must_too) = (pairs(analysis, x, n) for x in (node.left, node.right))
    return (may & may_too, must & must_too) if isinstance(node, And) else (may | may_too, must | must_too)


def positions(analysis: Analysis, node: SOp, n: int) -> np.ndarray | None:
    """The node's code at each position, where the tokens do not matter."""
    if any(isinstance(x, Primitive) and x.name == "tokens" for x in walk(node)):
        return None
    try:
        return analysis.domains[id(node)].place(Interpreter(node, causal=True)([[None] * n])[0])
    except Undefined:
        return None
