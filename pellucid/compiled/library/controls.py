"""Programs for testing methods that explain models: what they should find, and should not, is plain."""

from pellucid.compiled.library.case import ProgramCase
from pellucid.compiled.library.copying import shift_by
from pellucid.compiled.library.counting import count, hist, length
from pellucid.compiled.rasp.language import (
    aggregate,
    eq,
    map,
    program,
    select,
    tokens,
)
from pellucid.compiled.rasp.values import Value


@program
def distractor():
    """This token. Its frequency is computed and read, but the result is the same for every frequency."""
    frequency = hist()
    return map(lambda token, frequency: token, tokens, frequency)


@program
def redundant_or(token: Value):
    """Whether `token` occurs, found out by counting and by copying it. Either alone is enough."""
    counted = count(token) > 0
    copied = aggregate(select(tokens, token, eq), tokens) == token
    return counted | copied


@program
def and_of_two(first: Value, second: Value):
    """Whether both tokens occur. Neither count alone is enough."""
    has_first = count(first) > 0
    has_second = count(second) > 0
    return has_first & has_second


@program
def constant_branch():
    """This token, for a token occurs at most as often as there are tokens; otherwise it would be the one before."""
    always = hist() <= length()
    other = shift_by(1)
    return map(lambda always, token, other: token if always else other, always, tokens, other)


CASES = {
    "distractor": ProgramCase(
        program=distractor(),
        vocab=("a", "b", "c"),
        max_len=5,
        layers=2,
        meaning="this token; its frequency is computed and read, and changes nothing",
    ),
    "redundant_or": ProgramCase(
        program=redundant_or("a"),
        vocab=("a", "b", "c"),
        max_len=6,
        layers=2,
        meaning='whether "a" occurs, found out in two ways of which either is enough',
    ),
    "and_of_two": ProgramCase(
        program=and_of_two("a", "b"),
        vocab=("a", "b", "c"),
        max_len=6,
        layers=2,
        meaning='whether both "a" and "b" occur',
    ),
    "constant_branch": ProgramCase(
        program=constant_branch(),
        vocab=("a", "b", "c"),
        max_len=5,
        layers=3,
        meaning="this token; a condition that always holds keeps out the one before",
    ),
}
