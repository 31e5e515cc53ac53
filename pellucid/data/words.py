"""Names and literals for generated Python, drawn without end from short lists and split by a hash of their text."""

from collections.abc import Callable, Sequence
from random import Random
from typing import TypeVar
from zlib import crc32

from pellucid.core.errors import unknown

T = TypeVar("T")

SPLITS = ("train", "validation")
HELD_OUT = 8  # one name, phrase or row of numbers in 8 belongs to the validation split

# Few and short, so that a 512-token BPE makes one token of most of them.
NOUNS = str.split(
    "area bag bank base boat book box card city coin cost day desk door edge face farm field flag food game gate goal "
    "group hall hand head hill home item key lake lamp land leaf line lock maze moon name node page path plan point "
    "price rate ring road room row score seat ship size star step stone team tool tree user value wall"
)
VERBS = str.split("add build check close copy draw find get load log make pick read save send show")
OTHERS = str.split(
    "a and at big cold dark far for from good in long near new not of old on open red small the to"
)
SYLLABLES = [consonant + vowel for consonant in "bdklmrst" for vowel in "aeiou"]


def pick(rng: Random, options: Sequence[T]) -> T:
    """One of `options`, by a single `rng.random()`: the same in every Python version, and fast."""
    return options[int(rng.random() * len(options))]


def in_split(text: str, split: str) -> bool:
    """Whether a name or literal belongs to `split`; raises ValueError for an unknown split."""
    if split not in SPLITS:
        raise unknown("split", split, SPLITS)
    return (crc32(text.encode()) % HELD_OUT == 0) == (split == "validation")


def _drawn(rng: Random, split: str, draw: Callable[[Random], str]) -> str:
    while not in_split(text := draw(rng), split):
        pass
    return text


def _coined(rng: Random) -> str:
    return "".join([pick(rng, SYLLABLES) for _ in range(2 + int(rng.random() * 2))])


def _variable(rng: Random) -> str:
    form = rng.random()
    if form < 0.35:
        return pick(rng, NOUNS)
    return f"{pick(rng, NOUNS)}_{pick(rng, NOUNS)}" if form < 0.65 else _coined(rng)


def _function(rng: Random) -> str:
    form = rng.random()
    if form < 0.35:
        return pick(rng, VERBS)
    return f"{pick(rng, VERBS)}_{pick(rng, NOUNS)}" if form < 0.65 else f"{pick(rng, VERBS)}_{_coined(rng)}"


def _class(rng: Random) -> str:
    return (
        _coined(rng).capitalize()
        if rng.random() < 0.5
        else (pick(rng, NOUNS) + pick(rng, NOUNS)).capitalize()
    )


def _phrase(rng: Random) -> str:
    n_words = 1 + int(rng.random() * 4)
    return " ".join([pick(rng, NOUNS) if rng.random() < 0.5 else pick(rng, OTHERS) for _ in range(n_words)])


def _number(rng: Random) -> str:
    return str(int(rng.random() * (10 if rng.random() < 0.75 else 100)))


def identifier(rng: Random, split: str) -> str:
    """A variable's name: a noun, two nouns, or a coined word."""
    return _drawn(rng, split, _variable)


def function_name(rng: Random, split: str) -> str:
    """A function's name: a verb, alone or with an object."""
    return _drawn(rng, split, _function)


def class_name(rng: Random, split: str) -> str:
    """A class's name: one capital, then lower-case letters."""
    return _drawn(rng, split, _class)


def phrase(rng: Random, split: str) -> str:
    """The inside of a string literal: one to four lower-case words."""
    return _drawn(rng, split, _phrase)


def key(rng: Random, split: str) -> str:
    """The inside of a short string literal, such as a dictionary's key: one name."""
    return _drawn(rng, split, _variable)


def source_name(rng: Random, split: str) -> str:
    """The name of a file that is read."""
    return _drawn(rng, split, lambda r: pick(r, ("input_", "source_")) + _variable(r))


def target_name(rng: Random, split: str) -> str:
    """The name of a file that is written."""
    return _drawn(rng, split, lambda r: pick(r, ("output_", "target_")) + _variable(r))


def number(rng: Random) -> str:
    """An integer below 100, more often below 10; integers are shared by both splits."""
    return _number(rng)


def row(rng: Random, split: str, width: int) -> str:
    """`width` integers joined by commas: the inside of a flat list, held out as a whole."""
    return _drawn(rng, split, lambda r: ", ".join([_number(r) for _ in range(width)]))


def pairs(rng: Random, width: int) -> str:
    """`width` keys and values, integers: the inside of a dictionary."""
    return ", ".join([f"{_number(rng)}: {_number(rng)}" for _ in range(width)])
