"""RASP, embedded in Python: expressions of sequence operations (s-ops) and selectors.

An s-op gives every position of a sequence a value; a selector gives every pair of positions (query, key) a bool.
Expressions are made once and shared freely; nothing is computed until one is called on a sequence or compiled.
Source: Weiss et al. 2021, in the form of Tracr (section 3, appendix B).
"""

import functools
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from pellucid.compiled.rasp.values import RaspError, Value, canonical, number, show

Encoding = Literal["categorical", "numerical"]


@dataclass(frozen=True)
class Predicate:
    """A comparison of a key with a query."""

    name: str
    function: Callable[[Value, Value], bool]

    def __call__(self, key: Value, query: Value) -> bool:
        return self.function(key, query)


eq = Predicate("eq", operator.eq)
neq = Predicate("neq", operator.ne)
lt = Predicate("lt", operator.lt)
leq = Predicate("leq", operator.le)
gt = Predicate("gt", operator.gt)
geq = Predicate("geq", operator.ge)
true = Predicate("true", lambda key, query: True)


def _divide(a: Value, b: Value) -> Value:
    return number(a) / Fraction(number(b))


def _invert(a: Value) -> Value:
    return not a if isinstance(a, bool) else ~a


OPERATORS: dict[str, Callable[..., Value]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": _divide,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
    "&": operator.and_,
    "|": operator.or_,
    "^": operator.xor,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "negate": operator.neg,
    "~": _invert,
    "abs": abs,
}


class Expression:
    """A node of a program. Compared by identity; its operators build further expressions."""

    name: str | None = None

    @property
    def inputs(self) -> "tuple[Expression, ...]":
        """The expressions that this one is made of."""
        return ()

    def head(self, inputs: Sequence[str]) -> str:
        """This expression as text, given its inputs' texts."""
        raise NotImplementedError

    def named(self, text: str):
        """This expression under a name, which labels, errors and the ground truth use."""
        if not isinstance(text, str) or not text:
            raise RaspError(f"a name must be text, got {text!r}")
        self.name = text
        return self

    def __bool__(self) -> bool:
        raise RaspError(
            f"{describe(self)} has no truth value before it is evaluated: use & | ~, not and, or, not"
        )

    def __repr__(self) -> str:
        return describe(self)


def describe(expression: Expression, depth: int = 3) -> str:
    """The name of an expression, or its text down to `depth` levels."""
    if expression.name is not None:
        return expression.name
    return expression.head(
        [describe(e, depth - 1) if depth > 1 or not e.inputs else "…" for e in expression.inputs]
    )


def _operator(symbol: str, reflected: bool = False) -> Callable[..., "SOp"]:
    if reflected:
        return lambda self, other: Map(OPERATORS[symbol], (lift(other), self), symbol)
    return lambda self, *other: Map(OPERATORS[symbol], (self, *(lift(o) for o in other)), symbol)


class SOp(Expression):
    """A value for every position. Calling it on a sequence evaluates it."""

    encoding: Encoding = "categorical"

    def __eq__(self, other: Any) -> "SOp":  # type: ignore[override]
        return Map(OPERATORS["=="], (self, lift(other)), "==")

    def __ne__(self, other: Any) -> "SOp":  # type: ignore[override]
        return Map(OPERATORS["!="], (self, lift(other)), "!=")

    __hash__ = object.__hash__
    __add__, __radd__ = _operator("+"), _operator("+", True)
    __sub__, __rsub__ = _operator("-"), _operator("-", True)
    __mul__, __rmul__ = _operator("*"), _operator("*", True)
    __truediv__, __rtruediv__ = _operator("/"), _operator("/", True)
    __floordiv__, __rfloordiv__ = _operator("//"), _operator("//", True)
    __mod__, __rmod__ = _operator("%"), _operator("%", True)
    __pow__, __rpow__ = _operator("**"), _operator("**", True)
    __and__, __rand__ = _operator("&"), _operator("&", True)
    __or__, __ror__ = _operator("|"), _operator("|", True)
    __xor__, __rxor__ = _operator("^"), _operator("^", True)
    __lt__, __le__ = _operator("<"), _operator("<=")
    __gt__, __ge__ = _operator(">"), _operator(">=")
    __neg__, __invert__, __abs__ = _operator("negate"), _operator("~"), _operator("abs")

    def __call__(self, sequence: Iterable[Value]) -> list[Value]:
        """The values on `sequence`, by the interpreter."""
        return self.evaluate(sequence)

    def evaluate(self, sequence: Iterable[Value], causal: bool = False) -> list[Value]:
        """The values on `sequence`; where `causal`, selectors see only keys at or before the query.

        Raises `RaspError` where a map or predicate fails, `Undefined` where a categorical aggregate selects
        different values.
        """
        from pellucid.compiled.rasp.interpreter import Interpreter

        return Interpreter(self, causal=causal)([list(sequence)])[0]


class Selector(Expression):
    """Which keys each query selects."""

    def __invert__(self) -> "Selector":
        return Not(self)

    def __and__(self, other: "Selector") -> "Selector":
        return And(self, selector(other))

    def __or__(self, other: "Selector") -> "Selector":
        return Or(self, selector(other))


class Primitive(SOp):
    """`tokens`, the sequence itself, or `indices`, each position's number from 0."""

    def __init__(self, name: str):
        self.name = name

    def named(self, text: str):
        """The primitives keep their names: this is a copy of one."""
        return Map(same_value, (self,), "same").named(text)


class Constant(SOp):
    """The same value at every position."""

    def __init__(self, value: Value):
        self.value = value

    def head(self, inputs: Sequence[str]) -> str:
        return repr(self.value) if isinstance(self.value, str) else show(self.value)


def same_value(x: Value) -> Value:
    """The value itself."""
    return x


class Map(SOp):
    """A function of the values at each position. `symbol` tells the functions that the compiler knows."""

    def __init__(
        self,
        function: Callable[..., Value],
        inputs: "tuple[SOp, ...]",
        symbol: str | None = None,
        encoding: Encoding | None = None,
    ):
        self.function, self.arguments, self.symbol = function, inputs, symbol
        self.encoding = encoding or self.natural_encoding()

    @property
    def inputs(self) -> tuple[SOp, ...]:
        return self.arguments

    def natural_encoding(self) -> Encoding:
        """Sums, differences and multiples of numerical s-ops are numerical; all else is categorical."""
        varying = [x for x in self.arguments if not isinstance(x, Constant)]
        linear = self.symbol in ("+", "-", "negate") or (
            (self.symbol == "*" and len(varying) == 1)
            or (self.symbol == "/" and isinstance(self.arguments[1], Constant))
        )
        numerical = bool(varying) and all(x.encoding == "numerical" for x in varying)
        return "numerical" if linear and numerical else "categorical"

    def head(self, inputs: Sequence[str]) -> str:
        if self.symbol == "same":
            return inputs[0] if self.encoding == "categorical" else f"numerical({inputs[0]})"
        if self.symbol in ("negate", "~"):
            return f"{'-' if self.symbol == 'negate' else '~'}{inputs[0]}"
        if self.symbol in OPERATORS and len(inputs) == 2:
            return f"({inputs[0]} {self.symbol} {inputs[1]})"
        name = self.symbol or getattr(self.function, "__name__", "function").strip("<>")
        return f"{name}({', '.join(inputs)})"


class Aggregate(SOp):
    """Over the selected keys: the mean of numerical values, the one value of categorical ones."""

    def __init__(self, selector: Selector, values: SOp, default: Value):
        self.selector, self.values, self.default = selector, values, default
        self.encoding = values.encoding

    @property
    def inputs(self) -> tuple[Expression, ...]:
        return (self.selector, self.values)

    def head(self, inputs: Sequence[str]) -> str:
        default = "" if self.default is None else f", default={self.default!r}"
        return f"aggregate({', '.join(inputs)}{default})"


class _Width(SOp):
    def __init__(self, selector: Selector):
        self.selector = selector

    @property
    def inputs(self) -> tuple[Selector, ...]:
        return (self.selector,)


class SelectorWidth(_Width):
    """How many keys each query selects."""

    def head(self, inputs: Sequence[str]) -> str:
        return f"selector_width({inputs[0]})"


class InverseWidth(_Width):
    """1 / (1 + width): what a head gives that attends to the selected keys and, always, to a 1 at BOS.

    Programs do not say it; it stands between a `SelectorWidth` and its head (Tracr, appendix D.2).
    """

    encoding: Encoding = "numerical"

    def head(self, inputs: Sequence[str]) -> str:
        return f"1/(1+selector_width({inputs[0]}))"


class Select(Selector):
    """predicate(key, query) of a key s-op and a query s-op."""

    def __init__(self, keys: SOp, queries: SOp, predicate: Callable[[Value, Value], bool]):
        self.keys, self.queries, self.predicate = keys, queries, predicate

    @property
    def inputs(self) -> tuple[SOp, ...]:
        return (self.keys, self.queries)

    def head(self, inputs: Sequence[str]) -> str:
        name = getattr(self.predicate, "name", None) or getattr(
            self.predicate, "__name__", "predicate"
        ).strip("<>")
        return f"select({', '.join([*inputs, name])})"


class Not(Selector):
    """Every key that the other selector does not select."""

    def __init__(self, other: Selector):
        self.other = other

    @property
    def inputs(self) -> tuple[Selector, ...]:
        return (self.other,)

    def head(self, inputs: Sequence[str]) -> str:
        return f"~{inputs[0]}"


class _Both(Selector):
    symbol = ""

    def __init__(self, left: Selector, right: Selector):
        self.left, self.right = left, right

    @property
    def inputs(self) -> tuple[Selector, ...]:
        return (self.left, self.right)

    def head(self, inputs: Sequence[str]) -> str:
        return f"({inputs[0]} {self.symbol} {inputs[1]})"


class And(_Both):
    """The keys that both select."""

    symbol = "&"


class Or(_Both):
    """The keys that either selects."""

    symbol = "|"


tokens = Primitive("tokens")
indices = Primitive("indices")


def lift(value: Any) -> SOp:
    """An s-op as it is, anything else as a constant. Floats among numbers are read in decimal."""
    if isinstance(value, SOp):
        return value
    if isinstance(value, Expression):
        raise RaspError(f"{describe(value)} is a selector; expected an s-op or a constant")
    try:
        return Constant(canonical(number(value) if isinstance(value, float) else value))
    except ValueError as error:
        raise RaspError(f"not a constant: {error}") from None


def selector(value: Any) -> Selector:
    """A selector as it is; anything else is a `RaspError`."""
    if isinstance(value, Selector):
        return value
    what = describe(value) if isinstance(value, Expression) else repr(value)
    raise RaspError(f"expected a selector, made by select(keys, queries, predicate), got {what}")


def select(keys: Any, queries: Any, predicate: Callable[[Value, Value], bool]) -> Selector:
    """Each query selects the keys for which `predicate(key, query)` holds."""
    if not callable(predicate) or isinstance(predicate, Expression):
        raise RaspError(
            f"a predicate is eq, neq, lt, leq, gt, geq, true or a function of (key, query), got {predicate!r}"
        )
    return Select(lift(keys), lift(queries), predicate)


def aggregate(selector_: Selector, values: Any, default: Value = None) -> SOp:
    """Over the keys that each query selects: the mean of numerical values, the one value of categorical ones.

    `default` is the result where none is selected.
    """
    made, values = selector(selector_), lift(values)
    try:
        default = canonical(default)
        if default is not None and values.encoding == "numerical":
            default = number(default)
    except ValueError as error:
        raise RaspError(f"default of aggregate({describe(made)}, {describe(values)}): {error}") from None
    return Aggregate(made, values, default)


def selector_width(selector_: Selector) -> SOp:
    """The number of keys that each query selects."""
    return SelectorWidth(selector(selector_))


def map(function: Callable[..., Value], *sops: Any) -> SOp:
    """`function` of the values of `sops` at each position."""
    if not callable(function) or isinstance(function, Expression):
        raise RaspError(f"map needs a function first, got {function!r}")
    if not sops:
        raise RaspError("map needs at least one s-op after the function")
    return Map(function, tuple(lift(s) for s in sops))


def numerical(sop: Any) -> SOp:
    """The same values as exact numbers, each held as a magnitude along one direction. True is 1."""
    sop = lift(sop)
    return sop if sop.encoding == "numerical" else Map(_number_or_none, (sop,), "same", "numerical")


def categorical(sop: Any) -> SOp:
    """The same values, each with a direction of its own."""
    sop = lift(sop)
    return sop if sop.encoding == "categorical" else Map(same_value, (sop,), "same", "categorical")


def _number_or_none(value: Value) -> Value:
    return None if value is None else number(value)


def walk(*outputs: Expression) -> Iterator[Expression]:
    """Every expression that `outputs` are made of, inputs first, each once. Any depth; no recursion."""
    seen: set[int] = set()
    stack = [(e, False) for e in reversed(outputs)]
    while stack:
        expression, ready = stack.pop()
        if ready:
            yield expression
        elif id(expression) not in seen:
            seen.add(id(expression))
            stack.append((expression, True))
            stack += [(e, False) for e in reversed(expression.inputs)]


def program(function: Callable[..., Expression]) -> Callable[..., Any]:
    """Names every expression that `function` assigns to a local variable after that variable."""

    @functools.wraps(function)
    def named(*args: Any, **kwargs: Any) -> Expression:
        assigned: dict[str, Any] = {}

        def watch(frame: Any, event: str, arg: Any) -> None:
            if event == "return" and frame.f_code is function.__code__:
                free = function.__code__.co_freevars  # what is defined outside is named there
                assigned.update({k: v for k, v in frame.f_locals.items() if k not in free})

        before = sys.getprofile()
        sys.setprofile(watch)
        try:
            result = function(*args, **kwargs)
        finally:
            sys.setprofile(before)
        for name, value in assigned.items():
            if isinstance(value, Expression) and value.name is None:
                value.name = name
        if isinstance(result, Expression) and result.name is None:
            result.name = function.__name__
        return result

    return named
