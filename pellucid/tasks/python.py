"""Next-token questions about Python (Table 1 of the weight-sparse paper), asked in the idioms of tiny-python."""

from random import Random

from pellucid.data.tiny_python import fill
from pellucid.data.words import identifier, phrase, pick, row
from pellucid.tasks.pairs import Question

CALLS = ("print(", "$f(", "$x = $f(", "$x.append(")
PLAIN_LINES = ("print($z)", "$g($z)", "$w = $g($z)", "$w = $n", "$z += $n", "$w = [$two]")
LOOPS_IN = ("", "", "def $f($y, $z):\n    ", "for $y in $z:\n    ", "if $y:\n    ")


def _before(rng: Random, split: str) -> str:
    """Up to two lines of code that hold no string and leave no bracket open."""
    n_lines = pick(rng, (0, 0, 0, 1, 1, 2))
    return "".join([fill(pick(rng, PLAIN_LINES), rng, split) + "\n" for _ in range(n_lines)])


def _quotes(rng: Random, split: str) -> tuple[str, str]:
    head = _before(rng, split) + fill(pick(rng, CALLS), rng, split)
    text = phrase(rng, split)
    return f'{head}"{text}', f"{head}'{text}"


def _brackets(rng: Random, split: str) -> tuple[str, str]:
    """A list of integers, left open: flat, or a list of lists in its last row.

    After complete rows the flat list needs a digit more for each, to make up for `],` and ` [` in place of a comma:
    most such draws differ in length and are drawn again, so they are offered more often.
    """
    head = _before(rng, split) + fill("$x = [", rng, split)
    n_rows, width = pick(rng, ((1, 2), (1, 3), (2, 2), (2, 2), (2, 3), (2, 3), (3, 2), (3, 2)))
    nested = "], [".join([row(rng, split, width) for _ in range(n_rows)])
    flat = nested if n_rows == 1 else row(rng, split, n_rows * width)
    return f"{head}{flat}", f"{head}[{nested}"


def _loops(rng: Random, split: str) -> tuple[str, str]:
    head = _before(rng, split) + fill(pick(rng, LOOPS_IN), rng, split)
    name = identifier(rng, split)
    return f"{head}for {name}", f"{head}while {name}"


QUESTIONS = (
    Question(
        name="single_double_quote",
        description="close a string with the quote that opened it",
        draw=_quotes,
        answers=('")', "')"),
    ),
    Question(
        name="bracket_counting",
        description="close a list or a list of lists",
        draw=_brackets,
        answers=("]", "]]"),
    ),
    Question(
        name="for_while",
        description="continue `for name` with `in`, `while name` with a colon",
        draw=_loops,
        answers=(" in", ":"),
        after=(" items:\n", "\n"),
    ),
)
