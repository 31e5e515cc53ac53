"""Every program of the library means what a plain Python function says, and compiles to a model that equals it."""

import functools
import inspect
import itertools
import pkgutil
import random
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from importlib import import_module

import pytest

from pellucid.compiled import library
from pellucid.compiled.library import PROGRAMS, ProgramCase
from pellucid.compiled.model import CompiledModel, compile_program
from pellucid.compiled.rasp.interpreter import Interpreter
from pellucid.compiled.rasp.values import Undefined, Value
from pellucid.compiled.verify import Verification, compare, verify

PAIRS = {"(": ")", "[": "]", "{": "}"}


# Plain Python: each gives the values at all positions of s.


def everywhere(function: Callable[[Sequence[Value]], Value]) -> Callable[[Sequence[Value]], list[Value]]:
    """One value, which stands at every position."""
    return lambda s: [function(s)] * len(s)


def here(function: Callable[[Sequence[Value], int], Value]) -> Callable[[Sequence[Value]], list[Value]]:
    """A value that depends on the position."""
    return lambda s: [function(s, i) for i in range(len(s))]


def balance(s: Sequence[Value], i: int) -> Fraction:
    prefix = s[: i + 1]
    return Fraction(prefix.count("(") - prefix.count(")"), i + 1)


def brackets_match(s: Sequence[Value]) -> bool:
    """Cancels an adjacent pair as long as there is one, in each kind alone."""
    for opening, closing in PAIRS.items():
        left = "".join(x for x in s if x in (opening, closing))
        while opening + closing in left:
            left = left.replace(opening + closing, "")
        if left:
            return False
    return True


def double_hist(s: Sequence[Value], i: int) -> int:
    counts = Counter(s)
    return list(counts.values()).count(counts[s[i]])


def sort_unique(s: Sequence[Value], i: int) -> Value:
    """The token at index i of the sorted ones, if it is the first of its equals there, else None."""
    ordered = sorted(s)
    return ordered[i] if ordered.index(ordered[i]) == i else None


def by_frequency(s: Sequence[Value]) -> list[Value]:
    return [x for count in range(len(s), 0, -1) for x in s if s.count(x) == count]


def induction(s: Sequence[Value], i: int) -> Value:
    for j in range(i - 1, -1, -1):
        if s[j] == s[i]:
            return s[j + 1]
    return None


def interleave(s: Sequence[Value]) -> list[Value]:
    half = (len(s) + 1) // 2
    pairs = itertools.zip_longest(s[:half], s[half:])
    return [x for pair in pairs for x in pair][: len(s)]


def binary_add(s: Sequence[Value]) -> list[Value]:
    total = sum((int(a) + int(b)) << i for i, (a, b) in enumerate(s))
    return [total >> i & 1 for i in range(len(s))]


def ioi(s: Sequence[Value]) -> Value:
    once = [x for x in ("Mary", "John", "Tom") if s.count(x) == 1]
    return once[0] if len(once) == 1 else None


def key_value_lookup(s: Sequence[Value], i: int) -> Value:
    if "=" in s[i]:
        return None
    return dict(x.split("=") for x in s[:i] if "=" in x).get(s[i])


def pointer_2_hop(s: Sequence[Value], i: int) -> Value:
    target = s[i]
    if target < len(s) and s[target] < len(s):
        return s[s[target]]
    return None


def graph_step(s: Sequence[Value], i: int) -> Value:
    return next((target for source, target in s if source == s[i][1]), None)


REFERENCES: dict[str, Callable[[Sequence[Value]], list[Value]]] = {
    "length": everywhere(len),
    "hist": here(lambda s, i: s.count(s[i])),
    "double_hist": here(double_hist),
    "count": everywhere(lambda s: s.count("a")),
    "count_less_freq": everywhere(lambda s: sum(s.count(x) <= 2 for x in s)),
    "frac_prevs": here(lambda s, i: Fraction(s[: i + 1].count("x"), i + 1)),
    "frac_prevs_threshold": here(lambda s, i: 5 * s[: i + 1].count("x") > 3 * (i + 1)),
    "unique_first": here(lambda s, i: s[i] not in s[:i]),
    "all_equal": everywhere(lambda s: len(set(s)) == 1),
    "rank": here(lambda s, i: sum(x < s[i] for x in s)),
    "sort_unique": here(sort_unique),
    "sort": sorted,
    "sort_freq": by_frequency,
    "most_frequent": everywhere(lambda s: max(s, key=s.count)),
    "max": everywhere(max),
    "min": everywhere(min),
    "running_max": lambda s: list(itertools.accumulate(s, max)),
    "pair_balance": here(balance),
    "pair_balance_zero": here(lambda s, i: balance(s, i) == 0),
    "shuffle_dyck1": everywhere(brackets_match),
    "shuffle_dyck2": everywhere(brackets_match),
    "shuffle_dyck3": everywhere(brackets_match),
    "dyck1": everywhere(brackets_match),
    "copy": list,
    "copy_first": everywhere(lambda s: s[0]),
    "shift": lambda s: [None, *s[:-1]],
    "shift_by": lambda s: [None, None, *s][: len(s)],
    "reverse": lambda s: list(s[::-1]),
    "interleave": interleave,
    "is_palindrome": everywhere(lambda s: s == s[::-1]),
    "compare_halves": everywhere(lambda s: s[: len(s) // 2] * 2 == s),
    "first_occurrence": here(lambda s, i: s.index(s[i])),
    "last_occurrence": here(lambda s, i: len(s) - 1 - s[::-1].index(s[i])),
    "inc_mod": lambda s: [{4: 0}.get(x, x + 1) for x in s],
    "token_plus_index_mod": here(lambda s, i: (s[i] + i) % 4),
    "mod_sum": everywhere(lambda s: sum(s) % 3),
    "parity": everywhere(lambda s: sum(s) & 1),
    "binary_add": binary_add,
    "greater_than": here(lambda s, i: s[i] > s[0]),
    "induction": here(induction),
    "key_value_lookup": here(key_value_lookup),
    "pointer_2_hop": here(pointer_2_hop),
    "graph_step": here(graph_step),
    "caesar": lambda s: list("".join(s).translate(str.maketrans("abcdef", "cdefab"))),
    "detect_pattern": here(lambda s, i: "".join(s[: i + 1]).endswith("abc")),
    "ioi": everywhere(ioi),
    "distractor": list,
    "redundant_or": everywhere(lambda s: "a" in s),
    "and_of_two": everywhere(lambda s: {"a", "b"} <= set(s)),
    "constant_branch": list,
}


def inputs(case: ProgramCase) -> list[list[Value]]:
    """All inputs if they are at most 20,000, else 3,000 of all lengths."""
    total = sum(len(case.vocab) ** n for n in range(1, case.max_len + 1))
    if total <= 20_000:
        lengths = range(1, case.max_len + 1)
        return [list(s) for n in lengths for s in itertools.product(case.vocab, repeat=n)]
    rng = random.Random(0)
    return [rng.choices(case.vocab, k=1 + i % case.max_len) for i in range(3000)]


def typed(values: Sequence[Value]) -> list[tuple[type, Value]]:
    """1, True and Fraction(1) are different values, and whole fractions are integers."""
    whole = [v.numerator if isinstance(v, Fraction) and v.denominator == 1 else v for v in values]
    return [(type(v), v) for v in whole]


def disagreements(name: str, sequences: Sequence[list[Value]]) -> list[tuple]:
    """(input, the program's values, the reference's), where they differ."""
    case = PROGRAMS[name]
    values = Interpreter(case.program, causal=case.causal)(sequences)
    pairs = zip(sequences, values, map(REFERENCES[name], sequences), strict=True)
    return [(s, a, b) for s, a, b in pairs if typed(a) != typed(b)]


@functools.cache
def compiled(name: str) -> CompiledModel:
    case = PROGRAMS[name]
    return compile_program(case.program, case.vocab, case.max_len, causal=case.causal)


def check(model: CompiledModel, result: Verification) -> None:
    assert result, result.first_failure
    assert result.max_error <= model.error_bound < model.margin / 2


def test_every_program_has_a_reference_and_every_reference_a_program():
    assert set(PROGRAMS) == set(REFERENCES)


@pytest.mark.parametrize("name", PROGRAMS)
def test_meanings_are_one_line(name):
    meaning = PROGRAMS[name].meaning
    assert meaning.strip() == meaning
    assert len(meaning.splitlines()) == 1


def test_every_function_of_the_library_says_what_it_does():
    modules = [import_module(f"{library.__name__}.{m.name}") for m in pkgutil.iter_modules(library.__path__)]
    functions = {
        f for m in modules for f in vars(m).values() if inspect.isfunction(f) and f.__module__ == m.__name__
    }
    assert len(functions) > 40
    assert not [f.__qualname__ for f in functions if not f.__doc__]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_means_what_plain_python_says(name):
    assert not disagreements(name, inputs(PROGRAMS[name]))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_defined_on_every_input(name):
    case = PROGRAMS[name]
    rng = random.Random(1)
    try:
        Interpreter(case.program, causal=case.causal)(
            [rng.choices(case.vocab, k=case.max_len) for _ in range(500)]
        )
    except Undefined as error:
        pytest.fail(str(error))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_compiles_to_a_model_that_equals_it(name):
    check(compiled(name), verify(compiled(name), limit=2000))
    assert compiled(name).summary()["layers"] == PROGRAMS[name].layers


@pytest.mark.parametrize("opening", PAIRS)
def test_brackets_of_three_kinds_count_each_alone(opening):
    others = [x for pair in PAIRS.items() for x in pair if opening not in pair]
    balanced = [opening, others[0], others[2], PAIRS[opening], others[1], others[3]]
    assert not disagreements("shuffle_dyck3", [balanced, balanced[::-1], balanced[:-1]])
    assert PROGRAMS["shuffle_dyck3"].program(balanced) == [True] * 6
    assert compiled("shuffle_dyck3").batch([balanced, balanced[::-1]]) == [[True] * 6, [False] * 6]


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_model_equals_its_program_on_20000_inputs(name):
    check(compiled(name), verify(compiled(name)))


LARGE = {
    "reverse": (tuple(range(8)), 80),
    "sort": (tuple(range(8)), 80),
    "sort_freq": (tuple(range(6)), 40),
    "hist": (tuple(range(8)), 80),
    "length": (("a", "b"), 200),
    "frac_prevs_threshold": (("x", "a"), 100),
    "pair_balance_zero": (("(", ")", "x"), 60),
    "shuffle_dyck2": (("(", ")", "[", "]"), 40),
    "induction": (tuple(range(10)), 60),
}


def shuffled_brackets(rng: random.Random, kinds: Sequence[str], length: int) -> list[Value]:
    """A shuffle of balanced brackets: each step opens one, or closes one of those that are open."""
    out: list[Value] = []
    while len(out) < length:
        may_close = [k for k in kinds if out.count(k) > out.count(PAIRS[k])]
        must_close = sum(out.count(k) - out.count(PAIRS[k]) for k in kinds) == length - len(out)
        if may_close and (must_close or rng.random() < 0.5):
            out.append(PAIRS[rng.choice(may_close)])
        else:
            out.append(rng.choice(kinds))
    return out


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_a_program_compiles_for_long_inputs(name):
    vocab, n = LARGE[name]
    rng = random.Random(2)
    if name == "shuffle_dyck2":
        sequences = [shuffled_brackets(rng, "([", n) for _ in range(500)]
        for s in sequences[::2]:
            i = rng.randrange(n)
            s[i] = rng.choice([x for x in vocab if x != s[i]])
        assert [brackets_match(s) for s in sequences] == [False, True] * 250
    else:
        sequences = [rng.choices(vocab, k=n) for _ in range(500)]
    assert not disagreements(name, sequences)
    case = PROGRAMS[name]
    model = compile_program(case.program, vocab, n, causal=case.causal)
    result = compare(model, sequences)
    check(model, result)
    assert result.checked == 500
