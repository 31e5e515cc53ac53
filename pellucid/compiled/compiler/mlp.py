"""Step 3, MLP blocks: a map to neurons over the variables that it reads.

Every map is compiled in one way. Its categorical inputs decide on a case; in each case its value is a function of one
number z, a weighted sum of its numerical inputs, which steps between the values of z where the result changes (or is a
line, or is interpolated, where that is more exact). Without numerical inputs each case is one neuron: a lookup table
(Tracr, appendix D.1). Values of an input that always lead to the same results share neurons.

Slopes come from each gap: a step rises over the part of the gap between two values that no rounding reaches. Steps face
away from the middle, so that steep ones are off where z is large.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pellucid.compiled.compiler.tables import distinct
from pellucid.compiled.compiler.values import Analysis
from pellucid.compiled.compiler.variables import Arithmetic, Imprecise, Variable
from pellucid.compiled.rasp.language import Map, SOp
from pellucid.compiled.rasp.values import show

CASES = 4_000_000


@dataclass
class MLPBlock:
    """Neurons that compute `target`: ReLU(sum of w_in[variable] @ variable + b_in), then w_out, plus b_out."""

    target: Variable
    reads: list[Variable]
    w_in: list[np.ndarray]
    """For each of `reads`: (neuron, direction)."""
    b_in: np.ndarray
    w_out: np.ndarray
    """(direction of the target, neuron)."""
    b_out: np.ndarray
    labels: list[str]
    """What each neuron stands for."""

    kind = "mlp"

    def at(self, vectors: Sequence[np.ndarray]) -> np.ndarray:
        """What is written, given what each of `reads` holds."""
        pre = self.b_in + sum(w @ x for w, x in zip(self.w_in, vectors, strict=True))
        return self.w_out @ np.maximum(pre, 0) + self.b_out


@dataclass
class Piece:
    """A function of z: base + the sum of delta * ReLU(slope * z + bias)."""

    base: np.ndarray
    slope: np.ndarray = field(default_factory=lambda: np.zeros(0))
    bias: np.ndarray = field(default_factory=lambda: np.zeros(0))
    delta: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))
    """(neuron, direction)."""
    labels: list[str] = field(default_factory=list)


@dataclass
class Literal:
    """An input that decides on cases: for each code, the reading of `variable` that is 1 for it and 0 for the others."""

    variable: Variable
    reading: np.ndarray
    """(code, direction)."""
    constant: np.ndarray
    """(code,)."""
    names: list[str]


def literal(variable: Variable) -> Literal | None:
    """The cases of a variable: its values, or whether it is None; a number that is never None has none."""
    size = len(variable.domain)
    if variable.encoding == "categorical":
        return Literal(variable, np.eye(size), np.zeros(size), [show(v) for v in variable.domain.values])
    if not variable.domain.optional:
        return None
    return Literal(variable, np.array([[0.0, 1.0], [0.0, -1.0]]), np.array([0.0, 1.0]), ["None", "number"])


@dataclass
class Numbers:
    """z in every row of a joint table: its value, the bound of its error, and the sum of its terms' sizes."""

    terms: dict[int, float]
    offset: float
    z: np.ndarray
    error: np.ndarray
    size: np.ndarray


class MapBuilder:
    """Builds the block of one map."""

    def __init__(
        self,
        node: Map,
        target: Variable,
        variables: dict[int, Variable],
        analysis: Analysis,
        arithmetic: Arithmetic,
        quiet: float,
    ):
        self.node, self.target, self.analysis, self.arithmetic = node, target, analysis, arithmetic
        roots = analysis.roots[id(node)]
        self.rows = analysis.together(roots)
        column = analysis.column(node, roots)
        self.result = target.domain.place(column.values)[column.codes]
        self.reads = [variables[id(r)] for r in roots]
        self.place = {v.node: i for i, v in enumerate(self.reads)}
        self.literals = [x for v in self.reads if (x := literal(v)) is not None]
        self.codes = [
            self.rows[:, i] if v.encoding == "categorical" else np.minimum(self.rows[:, i], 1)
            for i, v in enumerate(self.reads)
            if v.encoding == "categorical" or v.domain.optional
        ]
        # Twice: a term t that is added to a sum in floating point costs at most |t| by rounding, besides itself.
        self.noise = 2 * sum(x.variable.noise for x in self.literals)
        self.m = len(self.literals)
        self.fan_in = len(self.reads) + 1
        self.loud = self.noise > quiet
        self.single = len(self.reads) == 1 and not self.literals
        if self.noise > 0.2:
            raise Imprecise(f"what it reads may be off by {self.noise:.2g}")

    # z: the numbers that the map reads, as one.

    def numbers(self, form: dict[int, float], offset: float = 0.0) -> Numbers:
        z = np.full(len(self.rows), offset)
        error, size = np.zeros(len(self.rows)), np.full(len(self.rows), abs(offset))
        for root, coefficient in form.items():
            i = self.place[root]
            variable, codes = self.reads[i], self.rows[:, i]
            z += coefficient * variable.domain.magnitudes[codes]
            size += abs(coefficient) * np.abs(variable.domain.magnitudes[codes])
            error += abs(coefficient) * variable.errors[codes]
        return Numbers(form, offset, z, error + self.arithmetic.sum(len(form)) * size, size)

    def candidates(self) -> list[Numbers]:
        """Weighted sums of the numerical features that may tell apart all that must be."""
        forms = []
        for f in self.analysis.features[id(self.node)]:
            if f.encoding == "numerical":
                affine = self.analysis.affine.get(id(f)) if self.analysis.is_sum(f) else None
                terms = {id(f): 1.0} if affine is None else {r: float(c) for r, c in affine.terms.items()}
                forms.append(self.numbers(terms, 0.0 if affine is None else float(affine.offset)))
        if len(forms) <= 1:
            return forms or [self.numbers({})]
        weights = (
            [w for w in itertools.product((1.0, -1.0, 0.0), repeat=len(forms)) if any(w)]
            if len(forms) <= 4
            else []
        )
        apart, scale = [], 1.0
        for form in forms:
            values = np.unique(form.z)
            gap = np.diff(values).min(initial=np.inf) if len(values) > 1 else 1.0
            apart.append(scale / gap)
            scale *= (values[-1] - values[0]) / gap + 2
        return [self.combined(forms, w) for w in [*weights, tuple(apart)]]

    def combined(self, forms: Sequence[Numbers], weights: Sequence[float]) -> Numbers:
        terms: dict[int, float] = {}
        for form, w in zip(forms, weights, strict=True):
            for root, c in form.terms.items():
                terms[root] = terms.get(root, 0.0) + w * c
        return self.numbers(terms, sum(w * form.offset for form, w in zip(forms, weights, strict=True)))

    # Cases.

    def build(self) -> MLPBlock:
        failure: Imprecise | None = None
        for numbers in self.candidates():
            try:
                return self.with_numbers(numbers)
            except Imprecise as error:
                failure = failure or error
        assert failure is not None
        raise failure

    def with_numbers(self, numbers: Numbers) -> MLPBlock:
        cases, functions = self.functions(numbers)
        classes, readings, constants, names = self.classes(cases)
        bos_z = numbers.offset + sum(c * self.reads[self.place[r]].bos[0] for r, c in numbers.terms.items())
        low, high = float(numbers.z.min()), float(numbers.z.max())
        errors = np.zeros(len(self.target.domain))
        pieces: dict[tuple[int, bool], Piece] = {}
        bias, gates, w_in, b_in, out, labels = np.zeros(self.target.width), [], [], [], [], []
        for case in classes:
            function = functions[case[-1]]
            gate = [r[c] for r, c in zip(readings, case, strict=False)]
            constant = sum(k[c] for k, c in zip(constants, case, strict=False))
            name = ", ".join(n[c] for n, c in zip(names, case, strict=False))
            at_bos = all(
                (g @ x.variable.bos) + k[c] > 0.5
                for g, x, k, c in zip(gate, self.literals, constants, case, strict=False)
            )
            if (case[-1], at_bos) not in pieces:
                piece, found = self.piece(function, numbers, bos_z if at_bos else None, low, high)
                pieces[case[-1], at_bos] = piece
                np.maximum.at(errors, self.result[function], found)
            piece = pieces[case[-1], at_bos]
            if self.m == 0:
                bias = piece.base
            elif piece.base.any():
                # 1 where all m literals are 1, 0 where at most m - 1 are.
                for scale, shift, sign in [(4.0, 2.0, 1), (4.0, 1.0, -1)] if self.loud else [(2.0, 1.0, 1)]:
                    gates.append((scale, gate))
                    w_in.append(0.0)
                    b_in.append(scale * (constant - self.m) + shift)
                    out.append(sign * piece.base)
                    labels.append(name)
            for slope, b, delta, label, force in zip(
                piece.slope,
                piece.bias,
                piece.delta,
                piece.labels,
                self.forces(piece, low, high),
                strict=True,
            ):
                gates.append((force, gate))
                w_in.append(slope)
                b_in.append(b + force * (constant - self.m))
                out.append(delta)
                labels.append(f"{name}: {label}" if name else label)
        rounding = 0.0 if self.noise == 0 else self.arithmetic.sum(self.fan_in) * 8 * max(self.m, 1)
        gate_error = rounding + (0 if self.loud else 2 * self.noise)
        gate_error *= self.m > 0
        self.target.noise = float(errors.max(initial=0.0)) + gate_error
        if self.target.encoding == "numerical":
            sizes = np.abs(self.target.codes).sum(1)
            self.target.errors = errors + sizes * (gate_error + 2 * self.arithmetic.unit)
        return self.assemble(numbers, gates, w_in, b_in, out, bias, labels)

    def forces(self, piece: Piece, low: float, high: float) -> np.ndarray:
        """What keeps each neuron off where a literal is 0. Equal slopes have equal ones: noise in a literal then shifts z."""
        if not self.m:
            return np.zeros(len(piece.slope))
        ends = np.stack([piece.slope * low + piece.bias, piece.slope * high + piece.bias])
        slopes, of_slope = np.unique(piece.slope, return_inverse=True)
        top = np.ones(len(slopes))
        np.maximum.at(top, of_slope, ends.max(0))
        return 2.0 ** np.ceil(np.log2(2 * top))[of_slope]

    def assemble(self, numbers, gates, w_in, b_in, out, bias, labels) -> MLPBlock:
        if not b_in and bias.any():  # a constant: a layer without neurons would have no bias
            gates, w_in, b_in, out, labels = (
                [(0.0, [x.reading[0] for x in self.literals])],
                [0.0],
                [1.0],
                [bias],
                ["always"],
            )
            bias = np.zeros_like(bias)
        count = len(b_in)
        weights = [np.zeros((count, v.width)) for v in self.reads]
        for i, x in enumerate(self.literals):
            at = self.place[x.variable.node]
            for j, (scale, gate) in enumerate(gates):
                weights[at][j] += scale * gate[i]
        for root, c in numbers.terms.items():
            weights[self.place[root]][:, 0] += c * np.array(w_in)
        offsets = np.array(b_in) + numbers.offset * np.array(w_in) if count else np.zeros(0)
        w_out = np.array(out).T if count else np.zeros((self.target.width, 0))
        block = MLPBlock(self.target, self.reads, weights, offsets, w_out, bias, labels)
        self.target.block, self.target.bos = block, block.at([v.bos for v in self.reads])
        return block

    def functions(self, numbers: Numbers) -> tuple[np.ndarray, list[np.ndarray]]:
        """Cases (row: the literals' codes, then which function of z it is), and the rows of each function, by z."""
        sizes = [len(x.constant) for x in self.literals]
        cases, case_of = (
            distinct(self.codes, sizes) if self.m else (np.zeros((1, 0), int), np.zeros(len(self.rows), int))
        )
        if not numbers.terms:
            kinds, first = np.unique(self.result, return_index=True)
            kind_of = np.zeros(len(cases), dtype=np.int64)
            kind_of[case_of] = np.searchsorted(kinds, self.result)
            if len(distinct([case_of, self.result], [len(cases), len(self.target.domain)])[0]) > len(cases):
                raise Imprecise("its numerical inputs cannot be told apart")
            return np.column_stack([cases, kind_of]), [np.array([f]) for f in first]
        order = np.lexsort((numbers.z, case_of))
        starts = np.flatnonzero(np.diff(case_of[order], prepend=-1))
        known: dict[bytes, int] = {}
        functions: list[np.ndarray] = []
        kind_of = np.zeros(len(cases), dtype=np.int64)
        for rows in np.split(order, starts[1:]):
            signature = numbers.z[rows].tobytes() + b"|" + self.result[rows].tobytes()
            if signature not in known:
                known[signature] = len(functions)
                functions.append(rows)
            kind_of[case_of[rows[0]]] = known[signature]
        return np.column_stack([cases, kind_of]), functions

    def classes(self, cases: np.ndarray):
        """Cases with the codes of each input that always lead to the same function taken together."""
        sizes = [len(x.constant) for x in self.literals]
        readings = [x.reading for x in self.literals]
        constants = [x.constant for x in self.literals]
        names = [x.names for x in self.literals]
        if not self.m or int(np.prod(sizes)) > CASES:
            return cases, readings, constants, names
        tensor = np.full(sizes, -1)
        tensor[tuple(cases[:, i] for i in range(self.m))] = cases[:, -1]
        for axis in range(self.m):
            flat = np.moveaxis(tensor, axis, 0)
            shape = flat.shape
            kinds, member = np.unique(flat.reshape(shape[0], -1), axis=0, return_inverse=True)
            member = member.reshape(-1)
            tensor = np.moveaxis(kinds.reshape(len(kinds), *shape[1:]), 0, axis)
            together = np.zeros((len(kinds), shape[0]))
            together[member, np.arange(shape[0])] = 1
            readings[axis], constants[axis] = together @ readings[axis], together @ constants[axis]
            names[axis] = [
                "|".join(n for n, k in zip(names[axis], member, strict=True) if k == c)
                for c in range(len(kinds))
            ]
        where = np.nonzero(tensor >= 0)
        return np.column_stack([*where, tensor[where]]), readings, constants, names

    # Functions of z.

    def piece(
        self, rows: np.ndarray, numbers: Numbers, bos: float | None, low: float, high: float
    ) -> tuple[Piece, np.ndarray]:
        """The neurons of one function of z, and the bound of their error in each of `rows`."""
        codes = self.target.codes
        z, result = numbers.z[rows], self.result[rows]
        if not len(np.flatnonzero(np.diff(result))):
            return Piece(codes[result[0]]), np.zeros(len(rows))
        shift = 2 * (high - low + 1) * self.noise if self.m else 0.0
        error, size = numbers.error[rows] + shift, numbers.size[rows]
        options = []
        reasons = []
        smooth = self.target.encoding == "numerical" and not self.target.domain.optional
        for make in (self.line, self.steps, self.interpolation) if smooth else (self.steps,):
            try:
                options.append(make(z, error, size, result, bos, low, high))
            except Imprecise as problem:
                reasons.append(problem)
        if not options:
            raise reasons[0]
        return min(options, key=lambda option: option[1].max())

    def rounding(self, piece: Piece, z: np.ndarray, size: np.ndarray, single: bool = False) -> np.ndarray:
        """The bound of what rounding does to a piece's result, for each z; over all directions together."""
        out = np.zeros(len(z))
        weight = np.abs(piece.delta).sum(1)
        inside, count = self.arithmetic.sum(self.fan_in + self.m), len(piece.slope)
        total = self.arithmetic.sum(1 + np.count_nonzero(piece.delta, axis=0).max(initial=0))
        chunk = max(1, 2_000_000 // max(1, count))
        for start in range(0, len(z), chunk):
            part = slice(start, start + chunk)
            scale = np.abs(piece.slope) * size[part, None] + np.abs(piece.bias)
            active = piece.slope * z[part, None] + piece.bias
            on = active > -inside * scale
            # One exact product and one addition round once.
            error = self.arithmetic.unit * np.abs(active) if single else inside * scale
            out[part] = (on * weight * (error + total * np.maximum(active, 0))).sum(1)
        return out + self.arithmetic.unit * np.abs(piece.base).sum()

    def line(self, z, error, size, result, bos, low, high):
        """A straight line through all values."""
        values = self.target.domain.magnitudes[result]
        slope = (values[-1] - values[0]) / (z[-1] - z[0]) if z[-1] > z[0] else 0.0
        offset = values[0] - slope * z[0]
        if np.abs(slope * z + offset - values).max() > 1e-12 * np.abs(values).max():
            raise Imprecise("it is not a line")
        piece = Piece(
            np.array([offset]), np.array([1.0, -1.0]), np.zeros(2), np.array([[slope], [-slope]]), ["z", "-z"]
        )
        return piece, abs(slope) * error + self.rounding(piece, z, size)

    def steps(self, z, error, size, result, bos, low, high):
        """A step in every gap in which the result changes."""
        change = np.flatnonzero(np.diff(result))
        below, above = z[change], z[change + 1]
        lo, hi = below + 2 * error[change], above - 2 * error[change + 1]
        if bos is not None:  # BOS must not stand on a step: what it holds would be neither value
            inside = (lo < bos) & (bos < hi)
            pad = 2 * error.max()
            nearer = bos - below < above - bos
            lo, hi = np.where(inside & nearer, bos + pad, lo), np.where(inside & ~nearer, bos - pad, hi)
        tight = hi - lo < 0.1 * (above - below)
        if (above - below <= 1e-12 * max(1.0, np.abs(z).max())).any() or tight.any():
            i = int(np.argmin((hi - lo) / np.maximum(above - below, 1e-300)))
            raise Imprecise(
                f"{above[i]:.9g} and {below[i]:.9g} give different results and are {above[i] - below[i]:.2g} apart, "
                f"and may each be off by {error[change + 1][i]:.2g}"
            )
        # Slopes are powers of two: products with them are exact.
        slope = 2.0 ** np.ceil(np.log2(1 / (hi - lo)))
        middle = (lo + hi) / 2
        lo, hi = middle - 0.5 / slope, middle + 0.5 / slope
        left, right = slope * (hi - low), slope * (high - lo)
        pivot = int(
            np.argmin(
                np.concatenate([[0.0], np.cumsum(left)])
                + np.concatenate([np.cumsum(right[::-1])[::-1], [0.0]])
            )
        )
        codes = self.target.codes
        base = codes[result[change[pivot]] if pivot < len(change) else result[-1]]
        up = codes[result[change + 1]] - codes[result[change]]
        sign = np.where(np.arange(len(change)) < pivot, -1.0, 1.0)
        first = np.where(sign < 0, hi, lo)
        names = [
            f"z {'<' if s < 0 else '>'} {(a + b) / 2:.6g}" for s, a, b in zip(sign, below, above, strict=True)
        ]
        delta = sign[:, None] * up
        # The two biases of a step are 1 apart after rounding too.
        bias = (-sign * slope * first).astype(self.arithmetic.dtype).astype(float)
        piece = Piece(
            base,
            np.concatenate([sign * slope, sign * slope]),
            np.concatenate([bias, bias - 1]),
            np.concatenate([delta, -delta]),
            [*names, *(f"-({n})" for n in names)],
        )
        return piece, self.rounding(piece, z, size, single=self.single)

    def interpolation(self, z, error, size, result, bos, low, high):
        """Straight lines from value to value: each gap's slope carries the error of z on."""
        keep = np.flatnonzero(np.diff(z, prepend=-np.inf) > 1e-12 * max(1.0, np.abs(z).max()))
        if (np.diff(result) != 0)[np.flatnonzero(np.diff(z) <= 1e-12 * max(1.0, np.abs(z).max()))].any():
            raise Imprecise("it has two results for one number")
        points, values = z[keep], self.target.domain.magnitudes[result[keep]]
        slopes = np.diff(values) / np.diff(points)
        best = None
        for right in (True, False):
            if right:  # kinks that act above them
                kinks, bends, sign, base = points[:-1], np.diff(slopes, prepend=0.0), 1.0, values[0]
            else:
                kinks, bends, sign, base = points[1:], np.diff(slopes, append=0.0), -1.0, values[-1]
                # from the last point down: the slope changes by `bends` at each kink
            used = np.abs(bends) > 1e-14 * np.abs(slopes).max(initial=0.0)
            kinks, bends = kinks[used], bends[used]
            piece = Piece(
                np.array([base]),
                np.full(len(kinks), sign),
                -sign * kinks,
                bends[:, None],
                [f"z {'>' if right else '<'} {k:.6g}" for k in kinks],
            )
            beside = np.maximum(np.abs(np.append(slopes, 0.0)), np.abs(np.append(0.0, slopes)))
            local = beside[np.searchsorted(points, z).clip(0, len(points) - 1)]
            bound = local * error + self.rounding(piece, z, size)
            if best is None or bound.max() < best[1].max():
                best = (piece, bound)
        assert best is not None
        return best


def build_map(
    node: SOp,
    target: Variable,
    variables: dict[int, Variable],
    analysis: Analysis,
    arithmetic: Arithmetic,
    quiet: float,
) -> MLPBlock:
    """The MLP block of the map `node`. Raises `Imprecise` where rounding may change its result.

    Cases whose inputs are noisier than `quiet` take two neurons each, which removes the noise.
    """
    assert isinstance(node, Map)
    return MapBuilder(node, target, variables, analysis, arithmetic, quiet).build()
