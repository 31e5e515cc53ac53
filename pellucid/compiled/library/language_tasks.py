"""Small relatives of what language models do with text."""

from collections.abc import Sequence

from pellucid.compiled.library.case import ProgramCase
from pellucid.compiled.library.copying import shift_by
from pellucid.compiled.library.counting import hist
from pellucid.compiled.library.predicates import within
from pellucid.compiled.rasp.language import (
    Predicate,
    aggregate,
    eq,
    map,
    program,
    select,
    selector_width,
    tokens,
)
from pellucid.compiled.rasp.values import Value


@program
def caesar(shift: int, alphabet: str):
    """The letter `shift` places on in the alphabet, which starts again after its end. Other tokens stay."""
    cipher = {letter: alphabet[(i + shift) % len(alphabet)] for i, letter in enumerate(alphabet)}
    return map(lambda token: cipher.get(token, token), tokens)


@program
def detect_pattern(pattern: Sequence[Value]):
    """Whether `pattern` ends here."""
    found = tokens == pattern[-1]
    for steps, token in enumerate(pattern[-2::-1], 1):
        found &= shift_by(steps).named(f"{steps} before") == token
    return found


one_candidate = Predicate("one candidate", lambda key, query: query == 1)


@program
def ioi(names: Sequence[str]):
    """The name that occurs once, as an indirect object does; None unless just one name does."""
    single_name = select(hist(), 1, eq) & select(tokens, tuple(names), within)
    candidates = selector_width(single_name)
    return aggregate(single_name & select(tokens, candidates, one_candidate), tokens)


CASES = {
    "caesar": ProgramCase(
        program=caesar(2, "abcdef"),
        vocab=("a", "b", "c", "d", "e", "f"),
        max_len=4,
        layers=1,
        meaning="the letter two places on in the alphabet a to f, which starts again after its end",
    ),
    "detect_pattern": ProgramCase(
        program=detect_pattern("abc"),
        vocab=("a", "b", "c", "d"),
        max_len=6,
        layers=3,
        meaning='whether "abc" ends here',
    ),
    "ioi": ProgramCase(
        program=ioi(("Mary", "John", "Tom")),
        vocab=("Mary", "John", "Tom", "and", "gave"),
        max_len=5,
        layers=3,
        meaning="the name that occurs once, or None unless just one does",
    ),
}
