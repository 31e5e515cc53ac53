"""Step 3, attention blocks: an aggregate or a selector width to one head.

Selected keys have logit top, all others at most top - 1, BOS top - 1/2 (it is attended to where nothing is selected) or,
for a width, top. All times an inverse temperature chosen so that what leaks to the others is far below what decides
between values, or given (Tracr, appendix D.1, fixes 100 and forgets the head size; here nothing is divided by it).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pellucid.compiled.compiler.selectors import Form
from pellucid.compiled.compiler.variables import Arithmetic, Imprecise, Variable
from pellucid.compiled.rasp.language import Aggregate, InverseWidth, Selector, SOp


@dataclass
class HeadBlock:
    """One attention head. `w_q[i]` (channel, direction) reads `queries[i]`; keys and values likewise.

    `bos_k`, `bos_v`, `bos_q` read the BOS direction. What variables hold at the BOS position is taken off them there.
    """

    target: Variable
    selector: Selector
    queries: list[Variable]
    w_q: list[np.ndarray]
    b_q: np.ndarray
    bos_q: np.ndarray
    keys: list[Variable]
    w_k: list[np.ndarray]
    bos_k: np.ndarray
    b_k: np.ndarray
    values: list[Variable]
    w_v: list[np.ndarray]
    bos_v: np.ndarray
    inverse_temperature: float
    always_bos: bool

    kind = "attention"

    @property
    def reads(self) -> list[Variable]:
        """Every variable that the head reads, each once."""
        return list({v.node: v for v in (*self.queries, *self.keys, *self.values)}.values())

    @property
    def size(self) -> int:
        """Channels: the larger of what the logits and what the values need."""
        return max(len(self.b_q), self.target.width)


class Channels:
    """Collects the query and key channels of a head."""

    def __init__(self):
        self.queries: dict[int, tuple[Variable, list[tuple[int, np.ndarray]]]] = {}
        self.keys: dict[int, tuple[Variable, list[tuple[int, np.ndarray]]]] = {}
        self.b_q: list[float] = []
        self.b_k: list[float] = []
        self.bos_k: list[float] = []

    def add(self, b_q: float = 0.0, b_k: float = 0.0, bos_k: float = 0.0) -> int:
        """A new channel."""
        self.b_q.append(b_q)
        self.b_k.append(b_k)
        self.bos_k.append(bos_k)
        return len(self.b_q) - 1

    def read(self, side: dict, variable: Variable, channel: int, weights: np.ndarray) -> None:
        side.setdefault(variable.node, (variable, []))[1].append((channel, weights))

    def matrices(self, side: dict) -> tuple[list[Variable], list[np.ndarray]]:
        """The variables of a side, and each one's (channel, direction) weights."""
        variables, weights = [], []
        for variable, parts in side.values():
            w = np.zeros((len(self.b_q), variable.width))
            for channel, row in parts:
                w[channel] += row
            variables.append(variable)
            weights.append(w)
        return variables, weights


def build_head(
    node: SOp,
    target: Variable,
    form: Form,
    variables: dict[int, Variable],
    max_len: int,
    can_be_empty: bool,
    arithmetic: Arithmetic,
) -> HeadBlock:
    """The head of an aggregate or an inverse width. Raises `Imprecise` where rounding may change its result."""
    assert isinstance(node, Aggregate | InverseWidth)
    counts = isinstance(node, InverseWidth)
    channels = Channels()
    for atom in form.atoms:
        add_atom(
            channels,
            atom.table,
            None if atom.query is None else variables[id(atom.query)],
            None if atom.key is None else variables[id(atom.key)],
        )
    gap = 1.0 if counts else 0.5
    bos_channel = channels.add(form.top - (0.0 if counts else 0.5) + (1.0 if form.gates else 0.0), bos_k=1.0)
    for query, gate in form.gates:
        channels.read(channels.queries, variables[id(query)], bos_channel, -gate)
    queries, w_q = channels.matrices(channels.queries)
    keys, w_k = channels.matrices(channels.keys)
    b_q, b_k, bos_k = np.array(channels.b_q), np.array(channels.b_k), np.array(channels.bos_k)
    # At BOS itself only BOS is attended to, whatever its variables hold: what it writes there is then known.
    bos_q = np.zeros(len(b_q))
    reach = form.top + 2 + sum(float(np.abs(a.table).max(initial=0)) for a in form.atoms)
    free = all(a.query is not None for a in form.atoms) and not any(v.bos.any() for v in queries)
    if not free or b_q[bos_channel] <= 0:
        bos_q[bos_channel] = reach
    bos_k = bos_k - b_k - sum((w @ v.bos for w, v in zip(w_k, keys, strict=True)), np.zeros(len(b_k)))

    n = max_len + 1
    scale = arithmetic.inverse_temperature or cold_enough(target, counts, n, gap, arithmetic)
    values, w_v, bos_v = value_side(node, target, variables, can_be_empty)
    bound_head(node, target, queries, keys, values, form, n, scale, gap, arithmetic)
    block = HeadBlock(
        target, node.selector, queries, [scale * w for w in w_q], scale * b_q, scale * bos_q, keys, w_k, bos_k, b_k,
        values, w_v, bos_v, scale, counts,
    )  # fmt: skip
    target.block = block
    target.bos = bos_v + sum((w @ v.bos for w, v in zip(w_v, values, strict=True)), np.zeros(target.width))
    return block


def cold_enough(target: Variable, counts: bool, n: int, gap: float, arithmetic: Arithmetic) -> float:
    """The inverse temperature at which what leaks to other keys is less than rounding, and than what decides."""
    wanted = arithmetic.unit * 2.0**-8
    if target.encoding == "numerical" and len(target.domain) > 1 and not counts:
        size = float(np.abs(target.domain.magnitudes).max())
        wanted = min(wanted, target.margin / max(size, 1e-300) * 2.0**-12)
    return 2.0 * math.ceil((math.log(n) - math.log(wanted)) / gap / 2)


def add_atom(channels: Channels, table: np.ndarray, query: Variable | None, key: Variable | None) -> None:
    """Channels whose products sum to `table`: one for each kind of query or of key, whichever are fewer."""
    rows, row_of = np.unique(table, axis=0, return_inverse=True)
    columns, column_of = np.unique(table.T, axis=0, return_inverse=True)
    by_query = int(rows.any(1).sum()) <= int(columns.any(1).sum())
    kinds, kind_of = (rows, row_of) if by_query else (columns, column_of)
    kind_of = kind_of.reshape(-1)
    for kind in np.flatnonzero(kinds.any(1)):
        which, other = (kind_of == kind).astype(float), kinds[kind]
        of_query, of_key = (which, other) if by_query else (other, which)
        channel = channels.add(
            b_q=float(of_query[0]) if query is None else 0.0, b_k=float(of_key[0]) if key is None else 0.0
        )
        if query is not None:
            channels.read(channels.queries, query, channel, of_query)
        if key is not None:
            channels.read(channels.keys, key, channel, of_key)


def value_side(node: SOp, target: Variable, variables: dict[int, Variable], can_be_empty: bool):
    """What the head reads and writes of each key: its value, nothing of BOS but the default (a width: 1 of BOS)."""
    bos = np.zeros(target.width)
    if isinstance(node, InverseWidth):
        bos[0] = 1.0
        return [], [], bos
    assert isinstance(node, Aggregate)
    if can_be_empty:
        bos = bos + target.encode(node.default)
    variable = variables.get(id(node.values))
    if variable is None:
        return [], [], bos
    w = np.zeros((target.width, variable.width))
    if target.encoding == "numerical":
        w[0, 0] = 1.0
    else:
        for i, k in enumerate(variable.domain.codes):
            if k in target.domain.codes:
                w[target.domain.codes[k], i] = 1.0
    return [variable], [w], bos - w @ variable.bos


def bound_head(
    node: SOp,
    target: Variable,
    queries: Sequence[Variable],
    keys: Sequence[Variable],
    values: Sequence[Variable],
    form: Form,
    n: int,
    scale: float,
    gap: float,
    arithmetic: Arithmetic,
) -> None:
    """Note how far from exact the head's result may be. Raises `Imprecise` where its selection may be wrong."""
    noise = sum(v.noise for v in queries) + sum(v.noise for v in keys)
    noise += math.prod([sum(v.noise for v in queries), sum(v.noise for v in keys)])
    size = max((float(np.abs(a.table).max(initial=0)) for a in form.atoms), default=1.0)
    # Products of exact one-hots and half-integer logits are exact. Otherwise the few large terms round, and each term of
    # noise costs at most itself once more.
    large = len(form.atoms) + len(form.gates) + 1
    exact = noise == 0 and (2 * scale).is_integer()
    logits = 0.0 if exact else scale * (2 * noise * size + arithmetic.sum(large) * (size * large + 1))
    if logits > scale * gap / 4:
        raise Imprecise(f"its attention logits may be off by {logits:.2g} where {scale * gap:.0f} decides")
    leak = n * math.exp(-scale * gap + 2 * logits)
    share = math.expm1(2 * logits) + 2 * arithmetic.sum(2 * n + 8) + leak
    if isinstance(node, InverseWidth):
        target.errors = target.domain.magnitudes * share
        return
    (variable,) = values or (None,)
    if target.encoding == "categorical":
        inner = variable.noise if variable is not None else 0.0
        target.noise = inner * (1 + share) + 2 * leak + 2 * arithmetic.sum(2 * n + 8)
        return
    assert variable is not None
    held, magnitudes = target.domain.magnitudes, variable.domain.magnitudes
    largest = float(max(np.abs(magnitudes).max(initial=0), np.abs(held).max(initial=0)))
    one_sign = bool((magnitudes >= 0).all() or (magnitudes <= 0).all())
    averaged = np.abs(held) if one_sign else np.full(len(held), largest)
    target.errors = averaged * share + variable.errors.max(initial=0) * (1 + share) + 2 * leak * largest
    target.noise = 2 * leak + arithmetic.sum(2 * n + 8)
