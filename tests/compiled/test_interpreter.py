"""Programs mean what they say: against a naive evaluator, by hand, and in what they refuse."""

import sys
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings

from pellucid.compiled.rasp import (
    RaspError,
    Undefined,
    aggregate,
    categorical,
    eq,
    geq,
    gt,
    indices,
    interpreter,
    leq,
    lt,
    map,
    neq,
    numerical,
    program,
    select,
    selector_width,
    tokens,
    true,
)
from pellucid.compiled.rasp.interpreter import Interpreter
from pellucid.compiled.rasp.values import key
from tests.compiled import naive
from tests.compiled.strategies import programs

everywhere, same = select(indices, indices, true), select(tokens, tokens, eq)
before, prevs = select(indices, indices, lt), select(indices, indices, leq)
never = select(indices, indices, lambda k, q: False)
length = selector_width(everywhere)
shift = aggregate(select(indices, indices - 1, eq), tokens)
reverse = aggregate(select(indices, length - 1 - indices, eq), tokens)
half = Fraction(1, 2)


def typed(values):
    """Values that are equal only if their types are."""
    return [key(v) for v in values]


def meanings(evaluator, sequences):
    """The first output's values on each sequence, None where they are undefined."""
    out = []
    for chunk, codes, undefined in evaluator.chunks(sequences):
        values = evaluator.tables[id(evaluator.outputs[0])].values
        for sequence, row, why in zip(chunk, codes[0], undefined, strict=True):
            out.append(typed(values[c] for c in row[: len(sequence)]) if why is None else None)
    return out


def naive_meaning(case, sequence):
    try:
        return typed(naive.evaluate(case.program, sequence, case.causal))
    except naive.TwoValues:
        return None


@settings(max_examples=300, deadline=None)
@given(programs())
def test_any_program_means_on_a_batch_what_a_naive_evaluator_says_of_each_sequence(case):
    expected = [naive_meaning(case, s) for s in case.sequences]
    evaluator = Interpreter(case.program, causal=case.causal)
    assert meanings(evaluator, case.sequences) == expected
    backwards = meanings(evaluator, case.sequences[::-1])  # by the tables that the first call filled
    assert backwards == expected[::-1]
    for sequence, values in zip(case.sequences[:2], expected, strict=False):
        if values is not None:
            assert typed(case.program.evaluate(sequence, causal=case.causal)) == values
        else:
            with pytest.raises(Undefined, match="selects both"):
                case.program.evaluate(sequence, causal=case.causal)


# What each construct means.


def test_tokens_are_the_sequence_indices_count_from_0_and_constants_stand_everywhere():
    assert tokens("abc") == ["a", "b", "c"]
    assert indices("abc") == [0, 1, 2]
    assert categorical("x")("abc") == ["x", "x", "x"]
    assert map(lambda t, i, c: (t, i, c), tokens, indices, 5)("ab") == [("a", 0, 5), ("b", 1, 5)]


def test_reverse_reads_backwards_and_causally_only_what_came_before():
    assert reverse("abc") == ["c", "b", "a"]
    assert reverse.evaluate("abc", causal=True) == [
        "a",
        "a",
        "a",
    ]  # the length so far, less 1, less the index: 0


def test_an_aggregate_of_categorical_values_is_the_one_value_that_is_selected():
    assert shift("abc") == [None, "a", "b"]
    assert aggregate(same, tokens)("aba") == ["a", "b", "a"]  # many keys, one value
    ahead = aggregate(select(indices, indices + 1, eq), tokens, default="end")
    assert ahead("abc") == ["b", "c", "end"]
    assert ahead.evaluate("abc", causal=True) == ["end", "end", "end"]


def test_an_aggregate_of_numerical_values_is_their_exact_mean():
    assert aggregate(prevs, numerical(tokens))([1, 2, 2]) == [1, Fraction(3, 2), Fraction(5, 3)]
    assert aggregate(everywhere, numerical(tokens))([-1, -2]) == [Fraction(-3, 2)] * 2
    assert aggregate(everywhere, numerical(tokens)).evaluate([3, -3, 6], causal=True) == [3, 0, 2]
    assert aggregate(everywhere, numerical(tokens == "x"))("xax") == [Fraction(2, 3)] * 3
    assert typed(aggregate(everywhere, numerical(tokens))([1, 3])) == typed(
        [2, 2]
    )  # an int where it is whole


def test_means_are_exact_whatever_the_size_of_the_numbers():
    mean = aggregate(everywhere, numerical(tokens))
    assert mean([2**80, 1]) == [Fraction(2**80 + 1, 2)] * 2
    assert mean([Fraction(1, 3**40), 1]) == [(1 + Fraction(1, 3**40)) / 2] * 2
    assert aggregate(prevs, mean - 10**20)([1, 2]) == [Fraction(3, 2) - 10**20] * 2


def test_where_nothing_is_selected_the_default_stands():
    assert aggregate(before, tokens)("a") == [None]
    assert aggregate(before, tokens, default="none")("aa") == ["none", "a"]
    assert aggregate(before, numerical(tokens))([4, 5]) == [None, 4]
    assert typed(aggregate(never, numerical(tokens), default=0.5)([1])) == typed([half])
    assert typed(aggregate(never, numerical(tokens), default=True)([1])) == typed([1])
    assert typed(aggregate(never, tokens, default=True)([1])) == typed([True])


@pytest.mark.parametrize(
    ("predicate", "widths"),
    [
        (eq, [1, 1, 1]),
        (neq, [2, 2, 2]),
        (lt, [0, 1, 2]),
        (leq, [1, 2, 3]),
        (gt, [2, 1, 0]),
        (geq, [3, 2, 1]),
        (true, [3, 3, 3]),
        (lambda k, q: k == 2 * q, [1, 0, 0]),
    ],
)
def test_a_predicate_compares_the_key_with_the_query(predicate, widths):
    assert selector_width(select(tokens, tokens, predicate))([1, 2, 3]) == widths


def test_keys_come_first_and_either_side_may_be_a_constant():
    assert selector_width(select(tokens, 2, geq))([1, 2, 3]) == [2, 2, 2]
    assert selector_width(select(2, tokens, geq))([1, 2, 3]) == [3, 3, 0]
    assert selector_width(select(None, "a", neq))("xy") == [2, 2]
    assert selector_width(select(tokens, indices, eq))([1, 1, 0]) == [1, 2, 0]


@pytest.mark.parametrize(
    ("selector", "widths", "causal"),
    [
        (same, [2, 1, 2], [1, 1, 2]),
        (~same, [1, 2, 1], [0, 1, 1]),
        (~~same, [2, 1, 2], [1, 1, 2]),
        (before, [0, 1, 2], [0, 1, 2]),
        (~before, [3, 2, 1], [1, 1, 1]),
        (same & before, [0, 0, 1], [0, 0, 1]),
        (same | before, [2, 2, 3], [1, 2, 3]),
        (~(same | before), [1, 1, 0], [0, 0, 0]),
        (~same & ~before, [1, 1, 0], [0, 0, 0]),
        (~(same & before), [3, 3, 2], [1, 2, 2]),
        (same & everywhere, [2, 1, 2], [1, 1, 2]),
        (never | never, [0, 0, 0], [0, 0, 0]),
    ],
)
def test_selectors_are_combined_as_sets_of_keys(selector, widths, causal):
    assert selector_width(selector)("aba") == widths
    assert selector_width(selector).evaluate("aba", causal=True) == causal


def test_none_is_a_value_that_maps_keys_and_queries_can_be():
    assert map(lambda v: v is None, shift)("ab") == [True, False]
    assert map(lambda v, t: t if v is None else v, shift, tokens)("abc") == ["a", "a", "b"]
    assert selector_width(select(shift, tokens, lambda k, q: k is None))("ab") == [1, 1]
    assert selector_width(select(shift, None, eq))("abc") == [1, 1, 1]
    assert aggregate(select(indices, 0, eq), shift, default="no key")("ab") == [None, None]
    assert numerical(shift)([True, 2]) == [None, 1]
    assert tokens([None, 1]) == [None, 1]


def test_a_mean_passes_over_a_none_that_is_not_selected():
    assert aggregate(select(indices, 0, gt), numerical(shift))([1, 2, 4]) == [Fraction(3, 2)] * 3


def test_values_of_different_types_are_different_though_python_calls_them_equal():
    alike = [1, True, 1.0]
    assert typed(tokens(alike)) == typed(alike)
    assert map(lambda t: type(t).__name__, tokens)(alike) == ["int", "bool", "float"]
    assert typed(shift(alike)) == typed([None, 1, True])
    assert typed(tokens([(1, True), (True, 1)])) == typed([(1, True), (True, 1)])
    assert selector_width(same)(alike) == [3, 3, 3]  # the predicate is Python's
    with pytest.raises(Undefined, match="both 1 and True"):
        aggregate(same, tokens)([1, True])
    evaluator = Interpreter(map(lambda t: type(t).__name__, tokens))
    assert [evaluator([[v]]) for v in (True, 1, 1.0, 1)] == [[["bool"]], [["int"]], [["float"]], [["int"]]]


def test_values_are_stored_as_plain_python_numbers():
    assert typed(tokens([np.int64(3), np.float64(0.5), np.bool_(True), Fraction(4, 2)])) == typed(
        [3, 0.5, True, 2]
    )
    assert typed(map(lambda t: np.float32(t), tokens)([2])) == typed([2.0])
    assert typed(map(lambda t: Fraction(t, 2), tokens)([2, 3])) == typed([1, Fraction(3, 2)])
    assert typed(numerical(tokens)([True, 2.0, 0.1, 5])) == typed([1, 2, Fraction(1, 10), 5])
    assert selector_width(select(tokens, 1, lambda k, q: np.int64(k) > q))([1, 2]) == [1, 1]


@pytest.mark.parametrize(
    ("sop", "values"),
    [
        (tokens + 1, [4, -1]),
        (1 + tokens, [4, -1]),
        (tokens - 1, [2, -3]),
        (5 - tokens, [2, 7]),
        (tokens * 2, [6, -4]),
        (2 * tokens, [6, -4]),
        (tokens / 2, [Fraction(3, 2), -1]),
        (6 / tokens, [2, -3]),
        (tokens / 0.1, [30, -20]),
        (tokens + 0.5, [Fraction(7, 2), Fraction(-3, 2)]),
        (tokens // 2, [1, -1]),
        (7 // tokens, [2, -4]),
        (tokens % 3, [0, 1]),
        (7 % tokens, [1, -1]),
        (tokens**2, [9, 4]),
        (2 ** (tokens + 2), [32, 1]),
        (tokens & 6, [2, 6]),
        (6 & tokens, [2, 6]),
        (tokens | 4, [7, -2]),
        (4 | tokens, [7, -2]),
        (tokens ^ 1, [2, -1]),
        (1 ^ tokens, [2, -1]),
        (-tokens, [-3, 2]),
        (abs(tokens), [3, 2]),
        (~tokens, [-4, 1]),
        (~(tokens > 0), [False, True]),
        ((tokens > 0) & (indices == 0), [True, False]),
        (tokens == 3, [True, False]),
        (tokens != 3, [False, True]),
        (tokens < 3, [False, True]),
        (tokens <= 3, [True, True]),
        (tokens > 3, [False, False]),
        (tokens >= 3, [True, False]),
        (tokens + tokens * indices, [3, -4]),
    ],
    ids=repr,
)
def test_operators_are_pythons_with_exact_division(sop, values):
    assert typed(sop([3, -2])) == typed(values)


@pytest.mark.parametrize(
    ("sop", "encoding"),
    [
        (tokens, "categorical"),
        (numerical(tokens), "numerical"),
        (categorical(numerical(tokens)), "categorical"),
        (numerical(tokens) + 1, "numerical"),
        (1 - numerical(tokens), "numerical"),
        (-numerical(tokens), "numerical"),
        (2 * numerical(tokens), "numerical"),
        (numerical(tokens) / 2, "numerical"),
        (numerical(tokens) - numerical(indices), "numerical"),
        (numerical(tokens) + indices, "categorical"),
        (numerical(tokens) * numerical(indices), "categorical"),
        (1 / numerical(tokens), "categorical"),
        (numerical(tokens) < 1, "categorical"),
        (abs(numerical(tokens)), "categorical"),
        (map(lambda t: t, numerical(tokens)), "categorical"),
        (selector_width(prevs), "categorical"),
        (aggregate(prevs, numerical(tokens)), "numerical"),
        (aggregate(prevs, tokens), "categorical"),
    ],
    ids=repr,
)
def test_sums_and_multiples_of_numerical_s_ops_are_numerical_and_all_else_is_categorical(sop, encoding):
    assert sop.encoding == encoding


def test_an_encoding_that_is_there_already_is_not_made_again():
    assert categorical(tokens) is tokens
    number = numerical(tokens)
    assert numerical(number) is number


# Batches.


def test_sequences_of_any_lengths_are_evaluated_together():
    assert Interpreter(reverse)(["abc", "", "a", "ba"]) == [["c", "b", "a"], [], ["a"], ["a", "b"]]
    assert Interpreter(reverse)(iter(["ab"])) == [["b", "a"]]
    assert Interpreter(reverse)([]) == []
    assert Interpreter(reverse)([[], []]) == [[], []]
    assert reverse([]) == []


def test_chunks_keep_the_order_and_the_values(monkeypatch):
    sequences = ["abcab"[: 1 + i % 5] for i in range(40)]
    whole = Interpreter(reverse)(sequences)
    monkeypatch.setattr(interpreter, "CELLS", 60)
    evaluator = Interpreter(reverse)
    assert len(list(evaluator.chunks(sequences))) == 20
    assert evaluator(sequences) == whole


def test_several_outputs_are_evaluated_at_once():
    evaluator = Interpreter(reverse, length, causal=True)
    ((_, (first, second), undefined),) = evaluator.chunks(["ab", "c"])
    tables = [evaluator.tables[id(e)].values for e in (reverse, length)]
    assert [tables[0][c] for c in first[0]] == ["a", "a"]
    assert [tables[1][c] for c in second[0]] == [1, 2]
    assert undefined == [None, None]


def test_maps_and_predicates_are_called_once_for_each_combination_of_values():
    calls = []
    doubled = map(lambda t: calls.append(t) or 2 * t, tokens)
    above = select(doubled, tokens, lambda k, q: calls.append((k, q)) or k > q)
    evaluator = Interpreter(selector_width(above))
    assert evaluator([[1, 2, 1], [2, 2]]) == [[3, 1, 3], [2, 2]]
    assert sorted(calls, key=str) == [(2, 1), (2, 2), (4, 1), (4, 2), 1, 2]
    evaluator([[1, 1, 2, 2]])
    assert len(calls) == 6


# Depth.


def test_long_chains_and_shared_parts_are_evaluated_once_each():
    deep = tokens
    for _ in range(3000):
        deep = map(lambda t: (t + 1) % 5, deep)
    assert deep([0, 3]) == [0, 3]
    assert len(repr(deep)) < 100
    shared = tokens
    for _ in range(60):
        shared = shared + shared
    assert shared([1, -1]) == [2**60, -(2**60)]
    selector = same
    for _ in range(60):
        selector = selector & selector
    assert selector_width(selector)("aba") == [2, 1, 2]


# What is refused, by name.


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (5, "expected an s-op, got 5"),
        (before, r"expected an s-op, got select\(indices, indices, lt\)"),
        ((~before).named("not before"), "expected an s-op, got not before"),
    ],
)
def test_an_output_that_is_no_s_op_is_named(output, message):
    with pytest.raises(RaspError, match=message):
        Interpreter(tokens, output)


@pytest.mark.parametrize(
    ("sop", "sequence", "message"),
    [
        (map(lambda t: 1 // t, tokens).named("inverse"), [1, 0], r"^inverse fails on \(0\): ZeroDivisionError: "),
        (map(lambda t, i: t + i, tokens, indices), ["a"], r"^lambda\(tokens, indices\) fails on \('a', 0\): TypeError"),
        (tokens + 1, [None], r"^\(tokens \+ 1\) fails on \(None, 1\): TypeError"),
        (map(lambda t: [t], tokens), [1], r"^lambda\(tokens\) fails on \(1\): \[1\] .* not hashable"),
        (map(lambda t: t * float("nan"), tokens), [1], r"fails on \(1\): nan cannot be a value: .*finite"),
        (map(lambda t: t * np.inf, tokens), [1], r"fails on \(1\): inf cannot be a value"),
        (tokens / (indices - 1), [1, 2], r"^\(tokens / \(indices - 1\)\) fails on \(2, 0\): ZeroDivisionError"),
        (numerical(tokens), [1, "a"], r"^numerical\(tokens\) fails on \('a'\): 'a' is not a number"),
        (selector_width(select(tokens, tokens, lt)), ["a", 1], r"^select\(tokens, tokens, lt\) fails on \(1, 'a'\): Type"),
        (
            selector_width(select(tokens, indices, lambda k, q: k).named("odd")),
            [2],
            "^odd: its predicate gives 2 on key 2 and query 0, not a bool",
        ),
        (tokens, [1, [2]], r"in the sequence \[1, \[2\]\]: \[2\] cannot be a value: it is not hashable"),
        (tokens, [1, float("nan")], "nan cannot be a value: it is not a finite number"),
        (tokens, [(1, float("nan"))], "nan cannot be a value"),
        (length, [float("-inf")], "-inf cannot be a value"),
        (aggregate(prevs, numerical(shift)).named("mean"), [1], "^mean is a mean over None: map None to a number first"),
    ],
)  # fmt: skip
def test_what_fails_is_named_with_the_values_on_which_it_does(sop, sequence, message):
    if sop is length:  # which reads no tokens
        sop = map(lambda n, t: n, length, tokens)
    with pytest.raises(RaspError, match=message):
        sop(sequence)


def test_different_categorical_values_for_one_query_are_undefined():
    spread = aggregate(before, tokens)
    message = (
        r"^aggregate\(select\(indices, indices, lt\), tokens\) selects both 'a' and 'b' at position 2; "
        r"it is categorical: use numerical\(\.\.\.\) for a mean, on 'abc'$"
    )
    with pytest.raises(Undefined, match=message) as caught:
        Interpreter(spread)(["aa", "aab", "abc"])
    assert isinstance(caught.value, RaspError)
    assert isinstance(caught.value, ValueError)
    assert spread("aab") == [None, "a", "a"]
    assert aggregate(everywhere, tokens).evaluate("a", causal=True) == ["a"]
    with pytest.raises(Undefined, match="'a' and 'b' at position 1"):
        aggregate(everywhere, tokens).evaluate("ab", causal=True)


def test_a_batch_tells_undefined_sequences_from_the_others():
    spread = map(lambda v, t: (v, t), aggregate(before, tokens), tokens)
    evaluator = Interpreter(spread)
    assert meanings(evaluator, ["aba", "ab", "a"]) == [
        None,
        typed([(None, "a"), ("a", "b")]),
        typed([(None, "a")]),
    ]


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x,
        lambda x: map(lambda v: v, x),
        lambda x: selector_width(select(map(lambda v: v, x), x, eq)),
        lambda x: aggregate(prevs, numerical(map(lambda v: 1, x))),
        lambda x: aggregate(everywhere, map(lambda v: 1, x)),
        lambda x: aggregate(select(map(lambda v: v, x), tokens, eq), numerical(map(lambda v: 1, x))),
    ],
)
def test_sequences_that_are_all_undefined_are_said_to_be_so_whatever_reads_the_aggregate(read):
    with pytest.raises(Undefined, match="both 'a' and 'b'"):
        Interpreter(read(aggregate(everywhere, tokens)))(["ab", "abb"])


@pytest.mark.parametrize("expression", [tokens == 1, tokens, before, same & before])
def test_an_expression_has_no_truth_value(expression):
    with pytest.raises(RaspError, match=r"has no truth value before it is evaluated: use & \| ~"):
        bool(expression)


def test_what_takes_the_truth_of_an_expression_is_refused():
    with pytest.raises(RaspError, match=r"\(tokens == 1\) has no truth value"):
        _ = tokens == 1 or tokens == 2
    with pytest.raises(RaspError, match=r"\(1 < tokens\)|\(tokens > 1\) has no truth value"):
        _ = 1 < tokens < 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: select(tokens, tokens, 5), r"a predicate is eq, .* or a function of \(key, query\), got 5"),
        (lambda: select(tokens, tokens, tokens == 1), "a predicate is eq, .* got .tokens == 1"),
        (lambda: select(before, tokens, eq), r"select\(indices, indices, lt\) is a selector; expected an s-op"),
        (lambda: select(tokens, [1], eq), r"not a constant: \[1\] cannot be a value: it is not hashable"),
        (lambda: aggregate(tokens, tokens), "expected a selector, made by select.*, got tokens"),
        (lambda: aggregate(True, tokens), "expected a selector, made by select.*, got True"),
        (lambda: aggregate(before, before), r"select\(indices, indices, lt\) is a selector; expected an s-op"),
        (lambda: aggregate(before, tokens, default=[]), r"default of aggregate\(select.*, tokens\): \[\] .* hashable"),
        (lambda: aggregate(before, tokens, default=float("nan")), "default of aggregate.*: nan"),
        (lambda: aggregate(before, numerical(tokens), default="a"), "default of aggregate.*: 'a' is not a number"),
        (lambda: selector_width(tokens), "expected a selector, made by select.*, got tokens"),
        (lambda: before & tokens, "expected a selector, .* got tokens"),
        (lambda: before | True, "expected a selector, .* got True"),
        (lambda: map(tokens, tokens), "map needs a function first, got tokens"),
        (lambda: map(3, tokens), "map needs a function first, got 3"),
        (lambda: map(abs), "map needs at least one s-op"),
        (lambda: map(abs, before), r"select\(indices, indices, lt\) is a selector; expected an s-op or a constant"),
        (lambda: tokens + before, "is a selector; expected an s-op or a constant"),
        (lambda: tokens + float("inf"), "not a constant: inf is not a number"),
        (lambda: numerical(before), "is a selector"),
        (lambda: (tokens + 1).named(""), "a name must be text, got ''"),
        (lambda: (tokens + 1).named(3), "a name must be text, got 3"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(make, message):
    with pytest.raises(RaspError, match=message):
        make()


# Names and text.


def test_a_programs_local_variables_name_its_expressions():
    @program
    def last_token(kept):
        so_far = selector_width(captured)
        last = select(indices, so_far - 1, eq) & kept
        given = (tokens + tokens).named("twice")
        again = given
        return aggregate(last, again)

    captured, kept = select(indices, indices, leq), select(tokens, 0, neq).named("not 0")
    made = last_token(kept)
    assert made.name == "last_token"
    assert repr(made) == "last_token"
    last, twice = made.inputs
    assert [last.name, twice.name, kept.name] == ["last", "twice", "not 0"]
    assert last.left.inputs[1].inputs[0].name == "so_far"
    assert captured.name is None
    assert last_token.__name__ == "last_token"


def test_a_program_that_returns_a_variable_keeps_its_name_and_programs_nest():
    @program
    def inner():
        count = selector_width(select(tokens, tokens, eq))
        return count

    @program
    def outer():
        hist = inner()
        return hist + 1

    made = outer()
    assert made.name == "outer"
    assert made.inputs[0].name == "count"


def test_a_program_leaves_the_profiler_as_it_was_also_where_it_fails():
    seen = []

    def profiler(*_):
        seen.append(1)

    @program
    def fails():
        raise KeyError("no")

    before_ = sys.getprofile()
    sys.setprofile(profiler)
    try:
        with pytest.raises(KeyError):
            fails()
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(before_)


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        (tokens, "tokens"),
        (tokens + 1, "(tokens + 1)"),
        (1 - tokens, "(1 - tokens)"),
        (-tokens, "-tokens"),
        (~(tokens == "a"), "~(tokens == 'a')"),
        (abs(tokens), "abs(tokens)"),
        (tokens * 0.5, "(tokens * 1/2)"),
        (numerical(tokens), "numerical(tokens)"),
        (map(lambda t: t, tokens), "lambda(tokens)"),
        (map(str.upper, tokens), "upper(tokens)"),
        (select(tokens, 0, lt), "select(tokens, 0, lt)"),
        (~before & same, "(~select(indices, indices, lt) & select(tokens, tokens, eq))"),
        (before | same, "(select(indices, indices, lt) | select(tokens, tokens, eq))"),
        (selector_width(same), "selector_width(select(tokens, tokens, eq))"),
        (aggregate(same, tokens), "aggregate(select(tokens, tokens, eq), tokens)"),
        (aggregate(same, tokens, "no"), "aggregate(select(tokens, tokens, eq), tokens, default='no')"),
        ((tokens + 1).named("next"), "next"),
        ((tokens + 1).named("next") * 2, "(next * 2)"),
        (tokens.named("letters"), "letters"),
        (((tokens + 1) * 2 - 3) % 4, "(((… * 2) - 3) % 4)"),
    ],
    ids=str,
)
def test_an_expression_is_written_as_it_was_made_a_few_levels_deep(expression, text):
    assert repr(expression) == text


def test_the_primitives_keep_their_names():
    assert tokens.named("letters")("ab") == ["a", "b"]
    assert (tokens.name, indices.name) == ("tokens", "indices")
