"""The compiler: a RASP program to a transformer that computes it, one line a step."""

import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from pellucid.compiled.compiler.assemble import assemble
from pellucid.compiled.compiler.causal import CausalWarning, lost_keys
from pellucid.compiled.compiler.graph import CompileError, Graph
from pellucid.compiled.compiler.heads import HeadBlock, build_head
from pellucid.compiled.compiler.layout import Layout, lay_out
from pellucid.compiled.compiler.mlp import MLPBlock, build_map
from pellucid.compiled.compiler.schedule import asap, narrow
from pellucid.compiled.compiler.selectors import Form, Forms, NotOneHead
from pellucid.compiled.compiler.values import Analysis
from pellucid.compiled.compiler.variables import Arithmetic, Imprecise, Variable
from pellucid.compiled.rasp.language import (
    Aggregate,
    Expression,
    InverseWidth,
    Map,
    Or,
    Primitive,
    Selector,
    SOp,
    describe,
    same_value,
    walk,
)
from pellucid.compiled.rasp.values import Value, canonical, key
from pellucid.core.errors import unknown
from pellucid.core.transformer import Transformer

SCHEDULES = ("asap", "narrow")
COLDEST = 10_000
"""The largest inverse temperature: logits that are whole numbers stay exact in float32."""


@dataclass
class Compilation:
    """Everything that the steps made of a program."""

    program: SOp
    vocab: list[Value]
    max_len: int
    causal: bool
    held: list[Variable]
    """The variables of the residual stream: those of the embedding, then those that blocks write."""
    output: Variable
    blocks: list[HeadBlock | MLPBlock]
    slots: list[int]
    layout: Layout
    transformer: Transformer


def run_pipeline(
    program: Expression,
    vocab: Sequence[Value],
    max_len: int,
    *,
    causal: bool = False,
    schedule: str = "asap",
    reuse: bool = False,
    allow_products: bool = False,
    dtype: str = "float32",
    inverse_temperature: float | None = None,
) -> Compilation:
    """Compile `program`. Raises `CompileError` with every problem that was found."""
    tokens = check_vocabulary(vocab)
    if not isinstance(max_len, int) or isinstance(max_len, bool) or max_len < 1:
        raise CompileError(f"max_len must be a positive integer, got {max_len!r}")
    if schedule not in SCHEDULES:
        raise unknown("schedule", schedule, SCHEDULES)
    if dtype not in ("float32", "float64"):
        raise unknown("dtype", dtype, ("float32", "float64"))
    if inverse_temperature is not None:
        inverse_temperature = check_temperature(inverse_temperature)
    graph = Graph(program)
    analysis = Analysis(graph, tokens, max_len, causal)
    forms = analyse(graph, analysis, allow_products)
    held, blocks = make_blocks(graph, analysis, forms, Arithmetic(dtype, reuse, inverse_temperature))
    output = next(v for v in held if v.node == id(graph.output))
    slots = asap(blocks) if schedule == "asap" else narrow(held, output, blocks)
    layout = lay_out(held, output, blocks, slots, reuse)
    transformer = assemble(
        held, output, blocks, slots, layout, vocab=tokens, max_len=max_len, causal=causal, dtype=dtype
    )
    if causal and (
        lost := lost_keys(
            analysis, [x.selector for x in walk(graph.output) if isinstance(x, Aggregate | InverseWidth)]
        )
    ):
        warnings.warn(
            f"compiled causally, these selectors lose keys after the query that they would select: {', '.join(lost)}",
            CausalWarning,
            stacklevel=3,
        )
    return Compilation(
        graph.output,
        tokens,
        max_len,
        causal,
        held,
        output,
        blocks,
        slots,
        layout,
        transformer,
    )


def check_temperature(value: float) -> float:
    """An inverse temperature that attention logits bear: above 0, at most 10,000."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= COLDEST:
        raise CompileError(
            f"inverse_temperature must be above 0 and at most {COLDEST:,}, or None, got {value!r}"
        )
    return float(value)


def check_vocabulary(vocab: Sequence[Value]) -> list[Value]:
    """The vocabulary's distinct values in their order."""
    try:
        values = list(vocab)
    except TypeError:
        raise CompileError(f"the vocabulary must be a sequence of values, got {vocab!r}") from None
    if not values:
        raise CompileError("the vocabulary is empty")
    seen: dict[Hashable, Value] = {}
    for value in values:
        try:
            value = canonical(value)
        except ValueError as error:
            raise CompileError(f"vocabulary: {error}") from None
        if key(value) in seen:
            raise CompileError(f"the vocabulary has {value!r} twice")
        seen[key(value)] = value
    return list(seen.values())


def analyse(graph: Graph, analysis: Analysis, allow_products: bool) -> dict[int, Form]:
    """The values of every node and the form of every head's selector. Raises `CompileError` with all problems."""
    forms = Forms(analysis)
    found: dict[int, Form] = {}
    visited: set[int] = set()

    def visit_all(output: Expression) -> None:
        for node in walk(output):
            if id(node) not in visited:
                visited.add(id(node))
                if isinstance(node, InverseWidth | Aggregate) and id(node.selector) in analysis.widths:
                    find_form(node)
                analysis.visit(node)

    def find_form(node: InverseWidth | Aggregate) -> None:
        try:
            form = forms.form(node.selector)
            if form.gates and isinstance(node, InverseWidth):
                raise NotOneHead(f"{describe(node.selector)} cannot be counted by one head")
            found[id(node)] = form
        except NotOneHead as error:
            if allow_products:
                product: Selector = graph.add(forms.product(node.selector))  # type: ignore[assignment]
                node.selector = product
                visit_all(product)
                if id(product) in analysis.widths:
                    found[id(node)] = forms.form(product)
            elif isinstance(node, InverseWidth) and isinstance(node.selector, Or):
                counted = graph.count_either(node.selector)
                for other in graph.nodes:
                    if isinstance(other, Map) and other.symbol == "width" and other.arguments[0] is node:
                        other.function, other.arguments, other.symbol = same_value, (counted,), "same"
                visit_all(counted)
            else:
                analysis.problems.append(
                    f"{error}. Write it as one select over s-ops that hold both values, such as "
                    "map(lambda a, b: (a, b), x, y), or compile with allow_products=True, which does that"
                )

    visit_all(graph.output)
    if analysis.problems:
        listed = "\n".join(f"  {i}. {p}" for i, p in enumerate(analysis.problems, 1))
        raise CompileError(
            analysis.problems[0]
            if len(analysis.problems) == 1
            else f"{len(analysis.problems)} problems:\n{listed}"
        )
    return found


def make_blocks(
    graph: Graph, analysis: Analysis, forms: dict[int, Form], arithmetic: Arithmetic
) -> tuple[list[Variable], list[HeadBlock | MLPBlock]]:
    """The variables that the output needs, and the blocks that write them, inputs first.

    Where rounding leaves too much noise, lookups take two neurons a case, which removes it; and where that is not enough,
    what selectors compare is looked up once more before.
    """
    needed = demand(graph, analysis, forms)
    first: CompileError | None = None
    for quiet, sharpen in ((1e-4, False), (1e-6, False), (1e-6, True)):
        try:
            return Blocks(needed, analysis, forms, arithmetic, quiet, sharpen).made()
        except CompileError as error:
            first = first or error
    assert first is not None
    raise first


class Blocks:
    """Builds every needed s-op's block, in order."""

    def __init__(
        self,
        needed: Sequence[SOp],
        analysis: Analysis,
        forms: dict[int, Form],
        arithmetic: Arithmetic,
        quiet: float,
        sharpen: bool,
    ):
        self.needed, self.analysis, self.forms, self.arithmetic = needed, analysis, forms, arithmetic
        self.quiet, self.sharpen = quiet, sharpen
        self.held: dict[int, Variable] = {}
        self.sharp: dict[int, Variable] = {}
        self.blocks: list[HeadBlock | MLPBlock] = []
        self.copies: list[SOp] = []  # variables go by id: these must stay alive

    def made(self) -> tuple[list[Variable], list[HeadBlock | MLPBlock]]:
        """All variables and blocks. Raises `CompileError` that names each s-op that cannot be exact."""
        names = variable_names(self.needed)
        problems: list[str] = []
        for node in self.needed:
            target = Variable(names[id(node)], id(node), node.encoding, self.analysis.domains[id(node)])
            if isinstance(node, Primitive):
                target.primitive = node.name
            elif not self.analysis.is_constant(node):
                if any(id(x) not in self.held for x in reads(node, self.analysis, self.forms)):
                    continue  # reads what could not be built
                try:
                    self.arithmetic.check_range(target)
                    self.blocks.append(self.build(node, target))
                    self.arithmetic.after_write(target)
                    if node is self.needed[-1]:
                        check_output(target)
                except Imprecise as problem:
                    problems.append(f"{describe(node)} cannot be exact in {self.arithmetic.dtype}: {problem}")
                    continue
            self.held[id(node)] = target
        if problems:
            cold = self.arithmetic.inverse_temperature
            hints = [f"an inverse_temperature above {cold:g}"] if cold is not None else []
            hints += ["dtype='float64'"] if self.arithmetic.dtype == "float32" else []
            raise CompileError("; ".join(problems) + (f"; try {' or '.join(hints)}" if hints else ""))
        embedded = [v for v in self.held.values() if v.block is None]
        return [*embedded, *(b.target for b in self.blocks)], self.blocks

    def build(self, node: SOp, target: Variable) -> HeadBlock | MLPBlock:
        """The block that computes `node`."""
        if isinstance(node, Map):
            return build_map(node, target, self.held, self.analysis, self.arithmetic, self.quiet)
        assert isinstance(node, Aggregate | InverseWidth)
        empty = 0 in self.analysis.widths[id(node.selector)]
        form = self.forms[id(node)]
        variables = dict(self.held)
        if self.sharpen:
            variables |= {id(s): self.sharpened(s) for s in form.compared}
            if isinstance(node, Aggregate):
                variables[id(node.values)] = self.held[id(node.values)]
        return build_head(node, target, form, variables, self.analysis.max_len, empty, self.arithmetic)

    def sharpened(self, node: SOp) -> Variable:
        """The variable of `node`; a copy without noise, if it has much."""
        variable = self.held[id(node)]
        if variable.noise <= self.quiet:
            return variable
        if id(node) not in self.sharp:
            copy = Map(same_value, (node,), "same", "categorical")
            self.copies.append(copy)
            self.analysis.features[id(copy)] = self.analysis.roots[id(copy)] = (node,)
            self.analysis.domains[id(copy)] = variable.domain
            target = Variable(f"{variable.name} (sharp)", id(copy), "categorical", variable.domain)
            self.blocks.append(build_map(copy, target, self.held, self.analysis, self.arithmetic, self.quiet))
            self.arithmetic.after_write(target)
            self.sharp[id(node)] = target
        return self.sharp[id(node)]


def reads(node: SOp, analysis: Analysis, forms: dict[int, Form]) -> list[SOp]:
    """The s-ops that the block of `node` reads from the residual stream."""
    if isinstance(node, Map):
        return list(analysis.roots[id(node)])
    if not isinstance(node, Aggregate | InverseWidth):
        return []
    compared = forms[id(node)].compared
    return [*compared, node.values] if isinstance(node, Aggregate) else list(compared)


def demand(graph: Graph, analysis: Analysis, forms: dict[int, Form]) -> list[SOp]:
    """Every s-op that must be held for the output, inputs first."""
    out: list[SOp] = []
    seen: set[int] = set()
    stack: list[tuple[SOp, bool]] = [(graph.output, False)]
    while stack:
        node, ready = stack.pop()
        if ready:
            out.append(node)
        elif id(node) not in seen:
            seen.add(id(node))
            stack.append((node, True))
            if not analysis.is_constant(node):
                stack += [(x, False) for x in reversed(reads(node, analysis, forms))]
    return out


def variable_names(nodes: Sequence[SOp]) -> dict[int, str]:
    """A name for each variable, none twice."""
    taken: dict[str, int] = {}
    names = {}
    for node in nodes:
        name = node.name or describe(node)
        if isinstance(node, InverseWidth):
            name = f"1/(1+width({describe(node.selector)}))"
        taken[name] = taken.get(name, 0) + 1
        names[id(node)] = name if taken[name] == 1 else f"{name}#{taken[name]}"
    return names


def check_output(output: Variable) -> None:
    """Raise `Imprecise` where rounding may change what the output decodes to."""
    bound = max(output.bound, output.noise)
    if bound >= output.margin / 2:
        raise Imprecise(f"it may be off by {bound:.2g}, and its nearest values are {output.margin:.2g} apart")
