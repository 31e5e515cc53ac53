"""Tiny-python: an unlimited, seeded stream of small Python snippets with the constructs of all twenty tasks."""

import re
from collections.abc import Callable
from functools import lru_cache
from random import Random

from pellucid.core.errors import unknown
from pellucid.data import words
from pellucid.data.idioms import ASIDES, BLOCKS, FUNCTIONS, LINES
from pellucid.data.words import SPLITS, pick

VERSION = 3  # enters the cache key of prepared shards: raise it whenever a document changes

MIN_LINES, MAX_LINES = 5, 25
NAMES: dict[str, Callable[[Random, str], str]] = {
    **dict.fromkeys("xyzwv", words.identifier),
    **dict.fromkeys(("f", "g"), words.function_name),
    "T": words.class_name,
    "source": words.source_name,
    "target": words.target_name,
    "i": lambda rng, split: pick(rng, "ijk"),
}
LITERALS: dict[str, Callable[[Random, str], str]] = {
    "text": words.phrase,
    "key": words.key,
    "file": lambda rng, split: words.key(rng, split) + ".txt",
    "n": lambda rng, split: words.number(rng),
    "two": lambda rng, split: words.row(rng, split, 2),
    "many": lambda rng, split: words.row(rng, split, 2 + int(rng.random() * 5)),
    "pairs": lambda rng, split: words.pairs(rng, 2 + int(rng.random() * 3)),
    "three": lambda rng, split: words.row(rng, split, 3),
}
LINE_KINDS = {"line": LINES, "aside": ASIDES}
HOLE = re.compile(r"\$(\w+)|(\")")


class _Snippet:
    """The names and the current quote of one snippet while its holes are filled."""

    def __init__(self, rng: Random, split: str):
        self.rng, self.split = rng, split
        self.names: dict[str, str] = {}
        self.quote = '"'

    def name(self, role: str) -> str:
        if role not in self.names:
            while (drawn := NAMES[role](self.rng, self.split)) in self.names.values():
                pass
            self.names[role] = drawn
        return self.names[role]

    def open_quote(self) -> str:
        self.quote = '"' if self.rng.random() < 0.5 else "'"
        return self.quote

    def fill(self, template: "Template") -> str:
        return "".join([part if isinstance(part, str) else part(self) for part in template])


Part = str | Callable[[_Snippet], str]
Template = tuple[Part, ...]


@lru_cache(maxsize=4096)
def _compile(source: str, indent: str = "") -> Template:
    """The parts of a template whose lines after the first start with `indent`."""
    source = source.replace("\n", "\n" + indent).replace(f"\n{indent}\n", "\n\n")
    parts: list[Part] = []
    end, inside_string = 0, False
    for match in HOLE.finditer(source):
        parts.append(source[end : match.start()])
        end = match.end()
        if match[2]:
            parts.append((lambda snippet: snippet.quote) if inside_string else _Snippet.open_quote)
            inside_string = not inside_string
        else:
            line_start = source.rfind("\n", 0, match.start()) + 1
            parts.append(_hole(match[1], source[line_start : match.start()]))
    return tuple(part for part in (*parts, source[end:]) if part)


def _hole(kind: str, indent: str) -> Part:
    if kind in LINE_KINDS:
        return lambda snippet: snippet.fill(pick(snippet.rng, _lines(kind)))
    if kind == "block":
        return lambda snippet: snippet.fill(
            pick(snippet.rng, pick(snippet.rng, _blocks(snippet.split, indent)))
        )
    if kind in NAMES:
        return lambda snippet: snippet.name(kind)
    if kind in LITERALS:
        draw = LITERALS[kind]
        return lambda snippet: draw(snippet.rng, snippet.split)
    raise unknown("hole", kind, [*LINE_KINDS, "block", *NAMES, *LITERALS])


def variants(source: str, split: str) -> list[str]:
    """The variants of an idiom that belong to `split`: every fourth one is validation's."""
    every = source.strip("\n").split("\n\n")
    joined: list[str] = []
    for text in every:  # an indented text after a blank line continues a class
        if text.startswith(" "):
            joined[-1] += "\n\n" + text
        else:
            joined.append(text)
    return [text for number, text in enumerate(joined, 1) if (number % 4 == 0) == (split == "validation")]


@lru_cache(maxsize=2)
def _lines(kind: str) -> list[Template]:
    return [_compile(line) for line in LINE_KINDS[kind].strip("\n").split("\n")]


@lru_cache(maxsize=16)
def _blocks(split: str, indent: str = "") -> list[list[Template]]:
    return [[_compile(text, indent) for text in variants(source, split)] for source in BLOCKS.values()]


@lru_cache(maxsize=2)
def _functions(split: str) -> list[Template]:
    return [_compile(text) for text in variants(FUNCTIONS, split)]


def fill(template: str, rng: Random, split: str = "train") -> str:
    """A template in the notation of `idioms.py` with its holes filled."""
    return _Snippet(rng, split).fill(_compile(template))


def document(index: int, *, seed: int = 0, split: str = "train") -> str:
    """Document `index` of a split: 5 to 25 lines of valid Python, a function of the three arguments alone.

    Names, string literals, rows of numbers and a quarter of the idioms' variants occur in one split only.
    Raises ValueError for an unknown split.
    """
    if split not in SPLITS:
        raise unknown("split", split, SPLITS)
    rng = Random(f"{seed}/{split}/{index}")
    wanted = MIN_LINES + int(rng.random() * 12)
    sections: list[str] = []
    n_lines = 0
    while n_lines < wanted:
        is_function = rng.random() < 0.4
        template = pick(rng, _functions(split)) if is_function else pick(rng, pick(rng, _blocks(split)))
        section = _Snippet(rng, split).fill(template)
        n_lines += section.count("\n") + 2 if sections else section.count("\n") + 1
        sections.append(section)
    return "\n\n".join(sections) + "\n"
