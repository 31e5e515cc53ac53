"""Tokens from elsewhere in the sequence."""

from fractions import Fraction

from pellucid.compiled.library.case import ProgramCase
from pellucid.compiled.library.counting import earlier_occurrences, is_empty, length
from pellucid.compiled.library.predicates import less_by
from pellucid.compiled.rasp.language import (
    aggregate,
    eq,
    gt,
    indices,
    map,
    program,
    select,
    selector_width,
    tokens,
)
from pellucid.compiled.rasp.values import Value


@program
def copy_first():
    """The first token."""
    first = select(indices, 0, eq)
    return aggregate(first, tokens)


@program
def shift_by(steps: int, default: Value = None):
    """The token that many positions before; `default` where there is none."""
    before = select(indices, indices, less_by(steps))
    return aggregate(before, tokens, default=default)


@program
def reverse():
    """The tokens from last to first: as many positions are before a token's new place as were after its old one."""
    opposite = selector_width(select(indices, indices, gt))
    flip = select(indices, opposite, eq)
    return aggregate(flip, tokens)


@program
def interleave():
    """A token of the first half, one of the second, and so on. A middle one belongs to the first half."""
    source = map(lambda index, length: index // 2 + index % 2 * ((length + 1) // 2), indices, length())
    return aggregate(select(indices, source, eq), tokens)


@program
def is_palindrome():
    """Whether the tokens read the same from last to first."""
    differs = tokens != reverse()
    differences = select(differs, True, eq)
    return is_empty(differences)


@program
def compare_halves():
    """Whether both halves are the same. Of an odd length a half is no whole number, and no index is a partner."""
    partner = map(lambda index, length: (index + Fraction(length, 2)) % length, indices, length())
    differs = tokens != aggregate(select(indices, partner, eq), tokens)
    differences = select(differs, True, eq)
    return is_empty(differences)


@program
def first_occurrence():
    """Where this token occurs first."""
    before = earlier_occurrences()
    first = select(tokens, tokens, eq) & select(before, 0, eq)
    return aggregate(first, indices)


@program
def last_occurrence():
    """Where this token occurs last."""
    same_token = select(tokens, tokens, eq)
    after = selector_width(same_token & select(indices, indices, gt))
    last = same_token & select(after, 0, eq)
    return aggregate(last, indices)


CASES = {
    "copy": ProgramCase(
        program=tokens,
        vocab=("a", "b", "c"),
        max_len=5,
        layers=0,
        meaning="this token",
    ),
    "copy_first": ProgramCase(
        program=copy_first(),
        vocab=("a", "b", "c", "d"),
        max_len=5,
        layers=1,
        meaning="the first token",
    ),
    "shift": ProgramCase(
        program=shift_by(1),
        vocab=("a", "b", "c", "d"),
        max_len=5,
        layers=1,
        meaning="the token before, or None",
    ),
    "shift_by": ProgramCase(
        program=shift_by(2),
        vocab=("a", "b", "c", "d"),
        max_len=5,
        layers=1,
        meaning="the token two before, or None",
    ),
    "reverse": ProgramCase(
        program=reverse(),
        vocab=("a", "b", "c", "d"),
        max_len=5,
        layers=2,
        meaning="the tokens from last to first",
    ),
    "interleave": ProgramCase(
        program=interleave(),
        vocab=("a", "b", "c", "d"),
        max_len=6,
        layers=3,
        meaning="the tokens of the first half and of the second in turn; a middle one belongs to the first",
    ),
    "is_palindrome": ProgramCase(
        program=is_palindrome(),
        vocab=("a", "b", "c"),
        max_len=7,
        layers=3,
        meaning="whether the tokens read the same from last to first",
    ),
    "compare_halves": ProgramCase(
        program=compare_halves(),
        vocab=("a", "b", "c"),
        max_len=6,
        layers=4,
        meaning="whether the first half equals the second; False for an odd length",
    ),
    "first_occurrence": ProgramCase(
        program=first_occurrence(),
        vocab=("a", "b", "c"),
        max_len=6,
        layers=2,
        meaning="the index at which this token occurs first",
    ),
    "last_occurrence": ProgramCase(
        program=last_occurrence(),
        vocab=("a", "b", "c"),
        max_len=6,
        layers=2,
        meaning="the index at which this token occurs last",
    ),
}
