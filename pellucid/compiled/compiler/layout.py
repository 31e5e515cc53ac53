"""Step 5: which directions of the residual stream hold which variable, and when.

Without reuse every variable has directions of its own throughout. With reuse, a variable may take those of one that no
later block reads; what is there must be erased first, by neurons that write its negative.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pellucid.compiled.compiler.schedule import lifetimes
from pellucid.compiled.compiler.variables import Variable

BOS = 0
"""The direction that is 1 at the BOS position."""


@dataclass
class Layout:
    """Where variables are. Directions are numbered from 0, which marks BOS."""

    width: int
    directions: dict[int, list[int]]
    """For each variable (by node) its directions."""
    born: dict[int, int]
    """The slot that writes it; -1 is the embedding."""
    gone: dict[int, int]
    """The slot from whose end on it is no longer held; one past the last slot: never."""
    erased: dict[int, list[tuple[Variable, list[int]]]] = field(default_factory=dict)
    """By MLP slot: variables with the numbers of their own directions that are erased there."""


def lay_out(
    held: Sequence[Variable], output: Variable, blocks: Sequence, slots: Sequence[int], reuse: bool
) -> Layout:
    """Give every variable directions; `held` are those of the embedding and of the blocks, in that order."""
    last = max(slots, default=-1)
    born, dead = lifetimes(held, output, blocks, slots, last)
    order = sorted(held, key=lambda v: born[v.node])
    layout = Layout(BOS + 1, {}, born, {v.node: last + 1 for v in held})
    if not reuse:
        for v in order:
            layout.directions[v.node] = list(range(layout.width, layout.width + v.width))
            layout.width += v.width
        return layout
    free: list[tuple[int, Variable, int]] = []  # direction, who held it, which of its directions
    waiting = list(order)
    for v in order:
        start = born[v.node]
        for old in [x for x in waiting if dead[x.node] < start or (dead[x.node] == start and start % 2 == 1)]:
            if old.node in layout.directions and old.small:
                waiting.remove(old)
                free += [(d, old, i) for i, d in enumerate(layout.directions[old.node])]
        free.sort(key=lambda f: f[0])
        taken, free = free[: v.width], free[v.width :]
        for _, old, i in taken:
            slot = dead[old.node]
            layout.gone[old.node] = slot
            erased = layout.erased.setdefault(slot, [])
            known = next((part for who, part in erased if who is old), None)
            if known is None:
                erased.append((old, [i]))
            else:
                known.append(i)
        fresh = v.width - len(taken)
        layout.directions[v.node] = [d for d, _, _ in taken] + list(range(layout.width, layout.width + fresh))
        layout.width += fresh
    return layout
