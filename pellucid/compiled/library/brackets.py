"""Brackets that match."""

import functools
import operator

from pellucid.compiled.library.case import ProgramCase
from pellucid.compiled.library.counting import is_empty
from pellucid.compiled.rasp.language import (
    aggregate,
    eq,
    indices,
    leq,
    map,
    numerical,
    program,
    select,
    selector_width,
    tokens,
    true,
)


@program
def pair_balance(pair: str):
    """The fraction of opening minus that of closing brackets, up to here. One mean, of 1 for each and -1."""
    prevs = select(indices, indices, leq)
    opens, closes = numerical(tokens == pair[0]), numerical(tokens == pair[1])
    return aggregate(prevs, opens - closes)


@program
def pair_balance_zero(pair: str):
    """Whether as many brackets closed as opened, up to here."""
    balance = pair_balance(pair)
    return balance == 0


@program
def shuffle_dyck(*pairs: str):
    """Whether the brackets of every kind match, whatever stands between them.

    No balance is ever negative and the balance of all kinds together is 0 in the end, so that each is.
    """
    everything = select(indices, indices, true)
    opening, closing = ("".join(brackets) for brackets in zip(*pairs, strict=True))
    step = numerical(map(lambda token: (token in opening) - (token in closing), tokens))
    balances = [pair_balance(pair).named(f"balance of {pair}") for pair in pairs]
    negatives = functools.reduce(operator.add, [numerical(balance < 0) for balance in balances])
    ever_negative, total = aggregate(everything, negatives), aggregate(everything, step)
    never_negative = ever_negative <= 0
    return never_negative & (total == 0)


@program
def dyck1(pair: str):
    """Whether brackets of one kind match, by counting them."""
    prevs = select(indices, indices, leq)
    is_open, is_close = select(tokens, pair[0], eq), select(tokens, pair[1], eq)
    opens, closes = selector_width(prevs & is_open), selector_width(prevs & is_close)
    depth = numerical(opens) - numerical(closes)
    all_opens, all_closes = selector_width(is_open), selector_width(is_close)
    final_depth = numerical(all_opens) - numerical(all_closes)
    negative = select(depth < 0, True, eq)
    return is_empty(negative) & (final_depth == 0)


CASES = {
    "pair_balance": ProgramCase(
        program=pair_balance("()"),
        vocab=("(", ")", "a"),
        max_len=6,
        layers=2,
        meaning='the fraction of "(" minus that of ")" among the tokens up to here',
    ),
    "pair_balance_zero": ProgramCase(
        program=pair_balance_zero("()"),
        vocab=("(", ")", "a"),
        max_len=6,
        layers=2,
        meaning='whether the tokens up to here have as many "(" as ")"',
    ),
    "shuffle_dyck1": ProgramCase(
        program=shuffle_dyck("()"),
        vocab=("(", ")"),
        max_len=10,
        layers=4,
        meaning="whether the brackets of the sequence match",
    ),
    "shuffle_dyck2": ProgramCase(
        program=shuffle_dyck("()", "[]"),
        vocab=("(", ")", "[", "]"),
        max_len=6,
        layers=5,
        meaning="whether the brackets of each of two kinds match, whatever stands between them",
    ),
    "shuffle_dyck3": ProgramCase(
        program=shuffle_dyck("()", "[]", "{}"),
        vocab=("(", ")", "[", "]", "{", "}"),
        max_len=6,
        layers=5,
        meaning="whether the brackets of each of three kinds match, whatever stands between them",
    ),
    "dyck1": ProgramCase(
        program=dyck1("()"),
        vocab=("(", ")", "a"),
        max_len=8,
        layers=4,
        meaning="whether the brackets of the sequence match, among other tokens",
    ),
}
