"""The twenty next-token questions about Python (Table 1 of the weight-sparse paper), in the idioms of tiny-python.

The prompts of a pair are as long as each other. Where one needs fewer tokens, a list before it has more numbers.
"""

from random import Random

from pellucid.data.tiny_python import fill
from pellucid.data.words import identifier, phrase, pick, row
from pellucid.tasks.pairs import Question

CALLS = ("print(", "$f(", "$x = $f(", "$x.append(")
PLAIN_LINES = ("print($z)", "$g($z)", "$w = $g($z)", "$w = $n", "$z += $n", "$w = [$two]")
LOOPS_IN = ("", "", "def $f($y, $z):\n    ", "for $y in $z:\n    ", "if $y:\n    ")
DIGITS = "123456789"
FIXED = "item"

Draw = tuple[str, str]


def _before(rng: Random, split: str) -> str:
    """Up to two lines of code that hold no string and leave no bracket open."""
    n_lines = pick(rng, (0, 0, 0, 1, 1, 2))
    return "".join([fill(pick(rng, PLAIN_LINES), rng, split) + "\n" for _ in range(n_lines)])


def _short_and_long(rng: Random, split: str, tokens: int) -> Draw:
    """The same lines twice, the last of them a list: the second time it takes so many tokens more.

    Two tokens are a number more; an odd one is a second digit.
    """
    head, numbers = _before(rng, split) + fill("$w = ", rng, split), [pick(rng, DIGITS) for _ in range(2)]
    long = [*numbers, *(pick(rng, DIGITS) for _ in range(tokens // 2))]
    if tokens % 2:
        long[-1] += pick(rng, DIGITS)
    return f"{head}[{', '.join(numbers)}]\n", f"{head}[{', '.join(long)}]\n"


def _names(rng: Random, split: str, n: int) -> list[str]:
    """`n` different identifiers."""
    names: list[str] = []
    while len(names) < n:
        if (name := identifier(rng, split)) not in names:
            names.append(name)
    return names


def _quotes(rng: Random, split: str) -> Draw:
    head = _before(rng, split) + fill(pick(rng, CALLS), rng, split)
    text = phrase(rng, split)
    return f'{head}"{text}', f"{head}'{text}"


def _final_kwarg(rng: Random, split: str) -> Draw:
    n = pick(rng, (2, 2, 3))
    short, long = _short_and_long(rng, split, 2 * n)
    head, *names = fill("def $f(", rng, split), *_names(rng, split, n + 1)
    keywords = "".join([f"{name}=None, " for name in names[:-1]])
    plain = "".join([f"{name}, " for name in names[:-1]])
    return f"{short}{head}{keywords}{names[-1]}", f"{long}{head}{plain}{names[-1]}"


def _set_or_string(rng: Random, split: str, name: str | None = None) -> Draw:
    head, x = _before(rng, split), name or identifier(rng, split)
    between = fill(pick(rng, ("$w = $n\n", "for $y in $z:\n    ", "for $y in $z:\n    ")), rng, split)
    quotes = pick(rng, ('""', "''"))
    return f"{head}{x} = set()\n{between}{x}", f"{head}{x} = {quotes}\n{between}{x}"


def _class_init(rng: Random, split: str) -> Draw:
    head = fill("class $T:\n    def __init__(self, ", rng, split)
    first, *rest = _names(rng, split, pick(rng, (2, 3, 3, 4)))
    if len(rest) == 1:
        orders = [[first, *rest], [*rest, first]]
        done = 0
    else:
        orders = [[first, *rest], [first, rest[1], rest[0], *rest[2:]]]
        done = 1
    texts = []
    for names in orders:
        lines = "".join([f"        self.{name} = {name}\n" for name in names[:done]])
        texts.append(f"{head}{', '.join(names)}):\n{lines}        self.{names[done]} =")
    return texts[0], texts[1]


def _with_as(rng: Random, split: str) -> Draw:
    short, long = _short_and_long(rng, split, pick(rng, (1, 2, 3)))
    opened = fill(pick(rng, ('open("$file", "r")', 'open($source, "r")', 'open($target, "w")')), rng, split)
    return f"{long}with {opened}", f"{short}{identifier(rng, split)} = {opened}"


def _bracket_brace(rng: Random, split: str) -> Draw:
    head = _before(rng, split) + fill("$x = ", rng, split)
    numbers = row(rng, split, pick(rng, (3, 3, 5))).split(", ")
    inside = "".join([number + (", " if i % 2 else ": ") for i, number in enumerate(numbers[:-1])])
    return f"{head}{{{inside}{numbers[-1]}", f"{head}[{', '.join(numbers)}"


def _with_open(rng: Random, split: str) -> Draw:
    head = _before(rng, split) + fill(pick(rng, ("with open(", "$x = open(")), rng, split)
    source, target = (fill(hole, rng, split) for hole in ("$source", "$target"))
    quote = pick(rng, ('"', "'"))
    return f"{head}{source}, {quote}", f"{head}{target}, {quote}"


def _brackets(rng: Random, split: str) -> Draw:
    """A list of integers, left open: flat, or a list of lists in its last row.

    After complete rows the flat list needs a digit more for each, to make up for `],` and ` [` in place of a comma:
    most such draws differ in length and are drawn again, so they are offered more often.
    """
    head = _before(rng, split) + fill("$x = [", rng, split)
    n_rows, width = pick(rng, ((1, 2), (1, 3), (2, 2), (2, 2), (2, 3), (2, 3), (3, 2), (3, 2)))
    nested = "], [".join([row(rng, split, width) for _ in range(n_rows)])
    flat = nested if n_rows == 1 else row(rng, split, n_rows * width)
    return f"{head}{flat}", f"{head}[{nested}"


def _loops(rng: Random, split: str) -> Draw:
    head = _before(rng, split) + fill(pick(rng, LOOPS_IN), rng, split)
    name = identifier(rng, split)
    return f"{head}for {name}", f"{head}while {name}"


def _else_elif(rng: Random, split: str) -> Draw:
    head = _before(rng, split) + fill(pick(rng, ("if $x:\n    ", "if $x == $n:\n    ")), rng, split)
    head += fill(pick(rng, PLAIN_LINES), rng, split) + "\n"
    return f"{head}else", f"{head}elif"


def _fstring_brace(rng: Random, split: str) -> Draw:
    short, long = _short_and_long(rng, split, 2)
    text = phrase(rng, split)
    return f'{short}print(f"{text}', f'{long}print("{text}'


def _if_ternary(rng: Random, split: str) -> Draw:
    short, long = _short_and_long(rng, split, 1)
    assign, name = fill("$x = $y", rng, split), identifier(rng, split)
    return f"{short}{assign}\nif {name}", f"{long}{assign} if {name}"


def _var_swap(rng: Random, split: str) -> Draw:
    head = _before(rng, split) + fill(pick(rng, ("", "", "if $z:\n    ")), rng, split)
    x, y = _names(rng, split, 2)
    return f"{head}{x}, {y} = {y},", f"{head}{y}, {x} = {x},"


def _indent_for(rng: Random, split: str) -> Draw:
    outer = fill(pick(rng, ("for $y in $z:", "while $y:", "if $y:", "def $f($y):")), rng, split)
    outer += "\n    " + fill(pick(rng, PLAIN_LINES), rng, split)
    loop = fill("for $x in $y:", rng, split)
    return f"{outer}\n\n{loop}", f"{outer}\n    {loop}"


def _lambda_or_function(rng: Random, split: str) -> Draw:
    short, long = _short_and_long(rng, split, pick(rng, (2, 3, 4)))
    return short + fill("$x = lambda $y", rng, split), long + fill("def $f", rng, split)


def _if_equals(rng: Random, split: str) -> Draw:
    short, long = _short_and_long(rng, split, 1)
    name = identifier(rng, split)
    return f"{short}if {name}", f"{long}{name}"


def _enumerate_or_range(rng: Random, split: str) -> Draw:
    short, long = _short_and_long(rng, split, pick(rng, (2, 3, 4)))
    counter = pick(rng, "ijk")
    return f"{short}for {counter}, {identifier(rng, split)} in", f"{long}for {counter} in"


def _var_if(rng: Random, split: str) -> Draw:
    short, long = _short_and_long(rng, split, 1)
    name = identifier(rng, split)
    return f"{short}if {name} == True", f"{long}{name} = True"


def _while_return(rng: Random, split: str) -> Draw:
    head = _before(rng, split) + fill(pick(rng, ("def $f($x):\n    ", "def $f($x, $y):\n    ")), rng, split)
    head += fill(pick(rng, ("", "$w = $n\n    ", "print($x)\n    ")), rng, split)
    return f"{head}while True", f"{head}return True"


def _attribute(prompt: str) -> str:
    """`self.name =` is followed by that name."""
    return " " + prompt.rsplit("self.", 1)[1].removesuffix(" =")


def _swapped(prompt: str) -> str:
    """`x, y = y,` is followed by `x`."""
    return " " + prompt.split("\n")[-1].split(",")[0].strip()


QUESTIONS = (
    Question("single_double_quote", "close a string with the quote that opened it", _quotes, ('")', "')")),
    Question(
        "final_kwarg",
        "give the last argument a default if the one before has one",
        _final_kwarg,
        ("=", "):"),
        after=("None):\n", "\n"),
    ),
    Question(
        "set_or_string",
        "add to a variable that was set to `set()` or to an empty string",
        _set_or_string,
        (".", " +="),
        after=("add(x)\n", " y\n"),
    ),
    Question(
        "set_or_string_fixed_varname",
        "the same, of a variable that is always called the same",
        lambda rng, split: _set_or_string(rng, split, FIXED),
        (".", " +="),
        after=("add(x)\n", " y\n"),
    ),
    Question("class_init", "copy the argument that `self.name =` is about", _class_init, _attribute),
    Question(
        "with_as",
        "go on after `with open(...)` with `as`, after `x = open(...)` with a new line",
        _with_as,
        (" as", "\n"),
        after=(" x:\n", "x\n"),
    ),
    Question(
        "bracket_brace",
        "continue a dictionary with a colon, a list with a comma",
        _bracket_brace,
        (":", ","),
        after=(" 1}\n", " 1]\n"),
    ),
    Question(
        "with_open",
        "open a file to read or to write, by its name",
        _with_open,
        ("r", "w"),
        after=('")', '")'),
    ),
    Question("bracket_counting", "close a list or a list of lists", _brackets, ("]", "]]")),
    Question(
        "for_while",
        "continue `for name` with `in`, `while name` with a colon",
        _loops,
        (" in", ":"),
        after=(" items:\n", "\n"),
    ),
    Question(
        "else_elif",
        "continue `else` with a colon, `elif` with a condition",
        _else_elif,
        (":", " not"),
        after=("\n", " x:\n"),
    ),
    Question(
        "fstring_brace",
        "name a variable in an f-string, close any other string",
        _fstring_brace,
        (" {", '")'),
        after=('x}")\n', "\n"),
    ),
    Question(
        "if_ternary",
        "continue the condition of a statement with a colon, that of a ternary with `else`",
        _if_ternary,
        (":", " else"),
        after=("\n", " x\n"),
    ),
    Question("var_swap", "finish `x, y = y,` with `x`", _var_swap, _swapped),
    Question(
        "indent_for",
        "indent the body of a loop that is at the top level or inside a block",
        _indent_for,
        ("\n    ", "\n        "),
        after=("x\n", "x\n"),
    ),
    Question(
        "lambda_func",
        "continue a lambda with a colon, a function with its arguments",
        _lambda_or_function,
        (":", "("),
        after=(" x\n", "x):\n"),
    ),
    Question(
        "if_equals",
        "compare after `if x`, assign after `x`",
        _if_equals,
        (" ==", " ="),
        after=(" 1:\n", " 1\n"),
    ),
    Question(
        "enumerate_range",
        "loop over two variables with `enumerate`, over one with `range`",
        _enumerate_or_range,
        (" enumerate", " range"),
        after=("(x):\n", "(3):\n"),
    ),
    Question(
        "var_if",
        "end `if x == True` with a colon, `x = True` with a new line",
        _var_if,
        (":", "\n"),
        after=("\n", "x\n"),
    ),
    Question(
        "while_return_true",
        "end `while True` with a colon, `return True` with the function",
        _while_return,
        (":", "\n\n"),
        after=("\n", "x\n"),
    ),
)
