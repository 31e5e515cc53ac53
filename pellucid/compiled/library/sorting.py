"""Order among tokens. A token's place is how many tokens come before it in the order."""

from pellucid.compiled.library.case import ProgramCase
from pellucid.compiled.library.counting import hist
from pellucid.compiled.rasp.language import (
    SOp,
    aggregate,
    eq,
    gt,
    indices,
    leq,
    lt,
    map,
    program,
    select,
    selector_width,
    tokens,
)


@program
def rank():
    """How many tokens are less than this one."""
    smaller = select(tokens, tokens, lt)
    return selector_width(smaller)


@program
def sort_unique():
    """The tokens in order, if no two are equal. After equal ones, None stands for all but the first."""
    target_position = rank()
    sources = select(target_position, indices, eq)
    return aggregate(sources, tokens)


@program
def order_by(keys: SOp):
    """How many positions have a lesser key."""
    return selector_width(select(keys, keys, lt))


@program
def sort():
    """The tokens in order. With its index, no token equals another."""
    unique_token = map(lambda token, index: (token, index), tokens, indices)
    target_position = order_by(unique_token)
    sources = select(target_position, indices, eq)
    return aggregate(sources, tokens)


@program
def frequency_order():
    """This position's place, the most frequent tokens first, equally frequent ones as they come."""
    key = map(lambda frequency, index: (-frequency, index), hist(), indices)
    return order_by(key)


@program
def sort_freq():
    """The tokens, the most frequent first, equally frequent ones as they come."""
    target_position = frequency_order()
    sources = select(target_position, indices, eq)
    return aggregate(sources, tokens)


@program
def most_frequent():
    """The token that occurs most often, the first of those."""
    target_position = frequency_order()
    return aggregate(select(target_position, 0, eq), tokens)


@program
def largest():
    """The largest token: there is none greater."""
    greater = selector_width(select(tokens, tokens, gt))
    return aggregate(select(greater, 0, eq), tokens)


@program
def smallest():
    """The smallest token: there is none less."""
    smaller = rank()
    return aggregate(select(smaller, 0, eq), tokens)


@program
def running_max():
    """The largest token up to here: that of the latest record, which nothing before it exceeds."""
    prevs = select(indices, indices, leq)
    greater = selector_width(prevs & select(tokens, tokens, gt))
    record = select(greater, 0, eq)
    records = selector_width(prevs & record)
    latest_record = prevs & record & select(records, records, eq)
    return aggregate(latest_record, tokens)


CASES = {
    "rank": ProgramCase(
        program=rank(),
        vocab=(0, 1, 2, 3),
        max_len=5,
        layers=1,
        meaning="how many tokens are less than this one",
    ),
    "sort_unique": ProgramCase(
        program=sort_unique(),
        vocab=(1, 2, 3, 4, 5),
        max_len=5,
        layers=2,
        meaning="the token that has as many lesser ones as its new index; in order where no two are equal",
    ),
    "sort": ProgramCase(
        program=sort(),
        vocab=(0, 1, 2, 3),
        max_len=5,
        layers=3,
        meaning="the tokens in order",
    ),
    "sort_freq": ProgramCase(
        program=sort_freq(),
        vocab=("a", "b", "c"),
        max_len=6,
        layers=4,
        meaning="the tokens, the most frequent first, equally frequent ones as they come",
    ),
    "most_frequent": ProgramCase(
        program=most_frequent(),
        vocab=("a", "b", "c"),
        max_len=6,
        layers=4,
        meaning="the most frequent token, the first of those",
    ),
    "max": ProgramCase(
        program=largest(),
        vocab=(0, 1, 2, 3),
        max_len=5,
        layers=2,
        meaning="the largest token",
    ),
    "min": ProgramCase(
        program=smallest(),
        vocab=(0, 1, 2, 3),
        max_len=5,
        layers=2,
        meaning="the smallest token",
    ),
    "running_max": ProgramCase(
        program=running_max(),
        vocab=(0, 1, 2, 3),
        max_len=5,
        causal=True,
        layers=3,
        meaning="the largest token up to here",
    ),
}
