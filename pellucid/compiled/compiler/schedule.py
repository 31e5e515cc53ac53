"""Step 4: which sublayer computes which block.

Slot 2l is the attention of layer l, slot 2l + 1 its MLP. A block reads what the embedding or earlier slots wrote.

As soon as possible is minimal in depth: any number of heads and neurons fit into a slot, so a block's earliest slot
depends on its inputs' slots alone and grows with them; by induction over the graph no schedule puts any block earlier,
hence none ends earlier.
"""

from collections.abc import Sequence

import numpy as np

from pellucid.compiled.compiler.variables import Variable

LARGE = 120
"""With more blocks than this, the narrow schedule is found by a greedy search."""


def asap(blocks: Sequence) -> list[int]:
    """The earliest slot of each block; blocks come after those that they read."""
    slot: dict[int, int] = {}
    for block in blocks:
        ready = max((slot[v.node] + 1 for v in block.reads if v.node in slot), default=0)
        slot[block.target.node] = ready + (ready % 2 != (block.kind == "mlp"))
    return [slot[b.target.node] for b in blocks]


def alap(blocks: Sequence, last: int) -> list[int]:
    """The latest slot of each block such that all end by slot `last`."""
    latest: dict[int, int] = {}
    for block in reversed(blocks):
        due = latest.get(block.target.node, last)
        mine = due - (due % 2 != (block.kind == "mlp"))
        latest[block.target.node] = mine
        for v in block.reads:
            if v.block is not None:
                latest[v.node] = min(latest.get(v.node, last), mine - 1)
    return [latest[b.target.node] for b in blocks]


def occupied(
    held: Sequence[Variable], output: Variable, blocks: Sequence, slots: Sequence[int], last: int
) -> np.ndarray:
    """Directions in use after each slot, where a variable's are freed by the first MLP from its last reader on."""
    born, dead = lifetimes(held, output, blocks, slots, last)
    width = np.zeros(last + 2, dtype=np.int64)
    for v in held:
        width[max(born[v.node], 0) : dead[v.node]] += v.width
    return width[: last + 1]


def lifetimes(
    held: Sequence[Variable], output: Variable, blocks: Sequence, slots: Sequence[int], last: int
) -> tuple[dict[int, int], dict[int, int]]:
    """For each variable the slot that writes it (-1: the embedding), and the MLP slot that may erase it (last + 1: none)."""
    born = {v.node: -1 for v in held} | {b.target.node: s for b, s in zip(blocks, slots, strict=True)}
    read = dict.fromkeys(born, -1)
    for block, slot in zip(blocks, slots, strict=True):
        for v in block.reads:
            read[v.node] = max(read[v.node], slot)
    dead = {node: min(max(slot, born[node] + 1, 1) | 1, last + 1) for node, slot in read.items()}
    dead[output.node] = last + 1
    return born, dead


def narrow(held: Sequence[Variable], output: Variable, blocks: Sequence) -> list[int]:
    """Slots, no more than as soon as possible takes, with the fewest directions in use at once."""
    first = asap(blocks)
    last = max(first, default=-1)
    if not blocks:
        return first
    if len(blocks) <= LARGE:
        found = optimal(held, output, blocks, first, alap(blocks, last), last)
        if found is not None:
            return found
    return greedy(held, output, blocks, first, last)


def greedy(
    held: Sequence[Variable], output: Variable, blocks: Sequence, slots: list[int], last: int
) -> list[int]:
    """Move one block at a time to the slot that lowers the peak (then the sum) of occupied directions most."""

    def cost(slots: Sequence[int]) -> tuple[int, int]:
        width = occupied(held, output, blocks, slots, last)
        return int(width.max(initial=0)), int(width.sum())

    slots, place = list(slots), {b.target.node: i for i, b in enumerate(blocks)}
    readers: list[list[int]] = [[] for _ in blocks]
    for i, block in enumerate(blocks):
        for v in block.reads:
            if v.node in place:
                readers[place[v.node]].append(i)
    best, improved = cost(slots), True
    while improved:
        improved = False
        for i, block in enumerate(blocks):
            low = max((slots[place[v.node]] + 1 for v in block.reads if v.node in place), default=0)
            high = min((slots[r] - 1 for r in readers[i]), default=last)
            for slot in range(low, high + 1):
                if slot % 2 == (block.kind == "mlp") and slot != slots[i]:
                    trial = [*slots[:i], slot, *slots[i + 1 :]]
                    if cost(trial) < best:
                        slots, best, improved = trial, cost(trial), True
    return slots


def optimal(
    held: Sequence[Variable],
    output: Variable,
    blocks: Sequence,
    first: list[int],
    latest: list[int],
    last: int,
) -> list[int] | None:
    """The narrowest schedule by integer programming; None where none was found in time.

    z[b, s] = 1 where block b has run by slot s. A variable is held after s if its writer has run by s and a reader has
    not run by s (after an MLP) or by s - 1 (after attention, which cannot erase).
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    slots = range(last + 1)
    count = len(blocks) * len(slots)
    place = {b.target.node: i for i, b in enumerate(blocks)}
    variables = [v for v in held if v.node != output.node]
    live = {v.node: count + j * len(slots) for j, v in enumerate(variables)}
    total = count + len(variables) * len(slots) + 1
    rows: list[tuple[list[int], list[float], float]] = []  # sum(weight * x[column]) <= bound

    def z(block: int, slot: int) -> int:
        return block * len(slots) + slot

    for i, block in enumerate(blocks):
        for s in slots:
            if s:
                rows.append(([z(i, s - 1), z(i, s)], [1, -1], 0))
            if s and s % 2 != (block.kind == "mlp"):
                rows.append(([z(i, s), z(i, s - 1)], [1, -1], 0))
            for v in block.reads:
                if v.node in place and s:
                    rows.append(([z(i, s), z(place[v.node], s - 1)], [1, -1], 0))
    for v in variables:
        readers = [i for i, b in enumerate(blocks) if any(r.node == v.node for r in b.reads)]
        for s in slots:
            for r in readers:
                done = s if s % 2 else s - 1
                columns, weights, bound = [live[v.node] + s], [-1.0], 0.0
                if v.node in place:
                    columns.append(z(place[v.node], s))
                    weights.append(1.0)
                else:
                    bound -= 1
                if done >= 0:
                    columns.append(z(r, done))
                    weights.append(-1.0)
                rows.append((columns, weights, bound))
    for s in slots:
        columns = [live[v.node] + s for v in variables] + [total - 1]
        weights = [float(v.width) for v in variables] + [-1.0]
        bound = 0.0
        if output.node in place:
            columns.append(z(place[output.node], s))
            weights.append(float(output.width))
        else:
            bound = -float(output.width)
        rows.append((columns, weights, bound))
    low, high = np.zeros(total), np.ones(total)
    high[-1] = np.inf
    for i in range(len(blocks)):
        for s in slots:
            low[z(i, s)] = float(s >= latest[i])
            high[z(i, s)] = float(s >= first[i])
    objective = np.zeros(total)
    objective[-1] = 1.0
    objective[count:-1] = 1e-4 / max(1, len(variables) * len(slots))
    data = [
        (r, c, w)
        for r, (columns, weights, _) in enumerate(rows)
        for c, w in zip(columns, weights, strict=True)
    ]
    r, c, w = (np.array(x) for x in zip(*data, strict=True))
    matrix = coo_array((w, (r, c)), shape=(len(rows), total)).tocsr()
    integrality = np.concatenate([np.ones(count), np.zeros(total - count)])
    solved = milp(
        objective,
        constraints=LinearConstraint(matrix, ub=np.array([b for _, _, b in rows])),  # type: ignore[arg-type]
        bounds=Bounds(low, high),  # type: ignore[arg-type]
        integrality=integrality,
        options={"time_limit": 10.0},
    )
    if solved.x is None:
        return None
    done = solved.x[:count].reshape(len(blocks), len(slots)) > 0.5
    return [int(np.argmax(row)) for row in done]
