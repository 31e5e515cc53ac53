"""How many, how often, what part."""

from pellucid.compiled.library.case import ProgramCase
from pellucid.compiled.rasp.language import (
    Selector,
    SOp,
    aggregate,
    eq,
    indices,
    leq,
    lt,
    neq,
    numerical,
    program,
    select,
    selector_width,
    tokens,
    true,
)
from pellucid.compiled.rasp.values import Value


@program
def length():
    """The number of tokens."""
    everything = select(indices, indices, true)
    return selector_width(everything)


@program
def hist():
    """How often this token occurs."""
    same_token = select(tokens, tokens, eq)
    return selector_width(same_token)


@program
def count(token: Value):
    """How often `token` occurs."""
    return selector_width(select(tokens, token, eq))


@program
def count_less_freq(most: int):
    """How many positions hold a token that occurs at most `most` times."""
    frequency = hist()
    rare = select(frequency, most, leq)
    return selector_width(rare)


@program
def frac_prevs(token: Value):
    """The fraction of `token` among the tokens up to here."""
    prevs = select(indices, indices, leq)
    is_token = numerical(tokens == token)
    return aggregate(prevs, is_token)


@program
def frac_prevs_threshold(token: Value, threshold: float):
    """Whether `token` is more than that fraction of the tokens up to here."""
    fraction = frac_prevs(token)
    return fraction > threshold


@program
def earlier_occurrences():
    """How often this token occurs before this position."""
    earlier = select(indices, indices, lt) & select(tokens, tokens, eq)
    return selector_width(earlier)


@program
def unique_first():
    """Whether this token occurs here for the first time."""
    occurrences = earlier_occurrences()
    return occurrences == 0


@program
def double_hist():
    """How many distinct tokens occur as often as this one, each counted where it occurs first."""
    frequency, first = hist(), unique_first()
    same_frequency = select(frequency, frequency, eq)
    return selector_width(same_frequency & select(first, True, eq))


def is_empty(selector: Selector) -> SOp:
    """Whether a query selects no key."""
    return selector_width(selector) < 1


@program
def all_equal():
    """Whether all tokens are equal."""
    others = select(tokens, tokens, neq)
    return is_empty(others)


CASES = {
    "length": ProgramCase(
        program=length(),
        vocab=("a", "b", "c"),
        max_len=6,
        layers=1,
        meaning="the number of tokens",
    ),
    "hist": ProgramCase(
        program=hist(),
        vocab=("a", "b", "c", "d"),
        max_len=5,
        layers=1,
        meaning="how often this token occurs",
    ),
    "double_hist": ProgramCase(
        program=double_hist(),
        vocab=("a", "b", "c", "d"),
        max_len=6,
        layers=2,
        meaning="how many distinct tokens occur as often as this one",
    ),
    "count": ProgramCase(
        program=count("a"),
        vocab=("a", "b", "c"),
        max_len=6,
        layers=1,
        meaning='how often "a" occurs',
    ),
    "count_less_freq": ProgramCase(
        program=count_less_freq(2),
        vocab=("a", "b", "c"),
        max_len=7,
        layers=2,
        meaning="how many positions hold a token that occurs at most twice",
    ),
    "frac_prevs": ProgramCase(
        program=frac_prevs("x"),
        vocab=("x", "a", "b", "c"),
        max_len=5,
        layers=2,
        meaning='the fraction of "x" among the tokens up to here',
    ),
    "frac_prevs_threshold": ProgramCase(
        program=frac_prevs_threshold("x", 0.6),
        vocab=("x", "a", "b"),
        max_len=6,
        layers=2,
        meaning='whether more than 0.6 of the tokens up to here are "x"',
    ),
    "unique_first": ProgramCase(
        program=unique_first(),
        vocab=("a", "b", "c", "d"),
        max_len=5,
        layers=1,
        meaning="whether this token occurs here for the first time",
    ),
    "all_equal": ProgramCase(
        program=all_equal(),
        vocab=("a", "b", "c"),
        max_len=6,
        layers=1,
        meaning="whether all tokens are equal",
    ),
}
