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
    SOp,
    describe,
    walk,
)
from pellucid.compiled.rasp.values import Value, canonical, key
from pellucid.core.errors import unknown
from pellucid.core.transformer import Transformer

SCHEDULES = ("asap", "narrow")


@dataclass
class Compilation:
    """Everything that the steps made of a program."""

    program: SOp
    vocab: list[Value]
    max_len: int
    causal: bool
    analysis: Analysis
    held: list[Variable]
    """The variables of the residual stream: those of the embedding, then those that blocks write."""
    output: Variable
    blocks: list[HeadBlock | MLPBlock]
    slots: list[int]
    layout: Layout
    transformer: Transformer
    forms: dict[int, Form]


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
) -> Compilation:
    """Compile `program`. Raises `CompileError` with every problem that was found."""
    tokens = check_vocabulary(vocab)
    if not isinstance(max_len, int) or isinstance(max_len, bool) or max_len < 1:
        raise CompileError(f"max_len must be a positive integer, got {max_len!r}")
    if schedule not in SCHEDULES:
        raise unknown("schedule", schedule, SCHEDULES)
    if dtype not in ("float32", "float64"):
        raise unknown("dtype", dtype, ("float32", "float64"))
    graph = Graph(program)
    analysis = Analysis(graph, tokens, max_len, causal)
    forms = analyse(graph, analysis, allow_products)
    held, blocks = make_blocks(graph, analysis, forms, Arithmetic(dtype))
    output = next(v for v in held if v.node == id(graph.output))
    check_output(output, dtype)
    slots = asap(blocks) if schedule == "asap" else narrow(held, output, blocks)
    layout = lay_out(held, output, blocks, slots, reuse)
    transformer = assemble(
        held, output, blocks, slots, layout, vocab=tokens, max_len=max_len, causal=causal, dtype=dtype
    )
    if causal and (lost := lost_keys(analysis, [b.selector for b in blocks if isinstance(b, HeadBlock)])):
        warnings.warn(
            f"compiled causally, these selectors lose keys after the query that they would select: {', '.join(lost)}",
            CausalWarning,
            stacklevel=3,
        )
    return Compilation(
        graph.output, tokens, max_len, causal, analysis, held, output, blocks, slots, layout, transformer, forms
    )


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
                node.selector = graph.add(forms.product(node.selector))  # type: ignore[assignment]
                visit_all(node.selector)
                if id(node.selector) in analysis.widths:
                    found[id(node)] = forms.form(node.selector)
            elif isinstance(node, InverseWidth) and isinstance(node.selector, Or):
                counted = graph.count_either(node.selector)
                for other in graph.nodes:
                    if isinstance(other, Map) and other.symbol == "width" and other.arguments[0] is node:
                        other.function, other.arguments, other.symbol = _same, (counted,), "same"
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
            analysis.problems[0] if len(analysis.problems) == 1 else f"{len(analysis.problems)} problems:\n{listed}"
        )
    return found


def _same(x: Value) -> Value:
    return x


def make_blocks(
    graph: Graph, analysis: Analysis, forms: dict[int, Form], arithmetic: Arithmetic
) -> tuple[list[Variable], list[HeadBlock | MLPBlock]]:
    """The variables that the output needs, and the blocks that write them, inputs first."""
    needed = demand(graph, analysis, forms)
    names = variable_names(needed)
    held: dict[int, Variable] = {}
    blocks: list[HeadBlock | MLPBlock] = []
    problems: list[str] = []
    for node in needed:
        target = Variable(names[id(node)], id(node), node.encoding, analysis.domains[id(node)])
        try:
            if not analysis.is_constant(node) and not isinstance(node, Primitive):
                if any(id(x) not in held for x in reads(node, analysis, forms)):
                    continue  # reads what could not be built
                blocks.append(build(node, target, forms, held, analysis, arithmetic))
        except Imprecise as problem:
            problems.append(f"{describe(node)} cannot be exact in {arithmetic.dtype}: {problem}")
            continue
        held[id(node)] = target
    if problems:
        hint = "; try dtype='float64'" if arithmetic.dtype == "float32" else ""
        raise CompileError("; ".join(problems) + hint)
    embedded = [v for v in held.values() if v.block is None]
    return [*embedded, *(b.target for b in blocks)], blocks


def build(node, target, forms, held, analysis: Analysis, arithmetic: Arithmetic) -> HeadBlock | MLPBlock:
    """The block that computes `node`."""
    if isinstance(node, Map):
        return build_map(node, target, held, analysis, arithmetic)
    empty = 0 in analysis.widths[id(node.selector)]
    return build_head(node, target, forms[id(node)], held, analysis.max_len, empty, arithmetic)


def reads(node: SOp, analysis: Analysis, forms: dict[int, Form]) -> list[SOp]:
    """The s-ops that the block of `node` reads from the residual stream."""
    if isinstance(node, Map):
        return list(analysis.roots[id(node)])
    if not isinstance(node, Aggregate | InverseWidth):
        return []
    form = forms[id(node)]
    sides = [s for atom in form.atoms for s in (atom.query, atom.key)] + [q for q, _ in form.gates]
    return [s for s in sides if s is not None] + ([node.values] if isinstance(node, Aggregate) else [])


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


def check_output(output: Variable, dtype: str) -> None:
    """Raise `CompileError` where rounding may change what the output decodes to."""
    if max(output.bound, output.noise) >= output.margin / 2:
        hint = "; try dtype='float64'" if dtype == "float32" else ""
        raise CompileError(
            f"{output.name} cannot be exact in {dtype}: it may be off by {max(output.bound, output.noise):.2g}, "
            f"and its nearest values are {output.margin:.2g} apart{hint}"
        )
