"""Numbers: sums, remainders, carries."""

import functools
import operator

from pellucid.compiled.library.case import ProgramCase
from pellucid.compiled.library.copying import copy_first
from pellucid.compiled.library.counting import count
from pellucid.compiled.library.predicates import less_by, within
from pellucid.compiled.rasp.language import (
    Predicate,
    aggregate,
    indices,
    lt,
    map,
    program,
    select,
    selector_width,
    tokens,
)


@program
def inc_mod(modulus: int):
    """This token and 1, modulo `modulus`."""
    return (tokens + 1) % modulus


@program
def token_plus_index_mod(modulus: int):
    """This token and its index, modulo `modulus`."""
    return (tokens + indices) % modulus


@program
def mod_sum(modulus: int):
    """The sum of all tokens, modulo `modulus`, by counting the tokens of every remainder."""
    leaves = Predicate(f"% {modulus} leaves", lambda key, query: key % modulus == query)
    counts = [selector_width(select(tokens, r, leaves)).named(f"remainder {r}") for r in range(1, modulus)]
    total = functools.reduce(operator.add, [r * count for r, count in enumerate(counts, 1)])
    return total % modulus


@program
def parity():
    """Whether the number of ones is odd, as 0 or 1."""
    ones = count(1)
    return ones % 2


@program
def binary_add():
    """A digit of the sum of two binary numbers. Tokens are pairs of their digits, the least significant first.

    A pair of equal digits decides its carry, whatever comes in; the others pass on what the last such pair decided.
    """
    decides = select(tokens, ("00", "11"), within)
    decided = selector_width(select(indices, indices, lt) & decides)
    last_decided = decides & select(decided, decided, less_by(1))
    carry = aggregate(last_decided, tokens, default="00") == "11"
    return map(lambda pair, carry: (int(pair[0]) + int(pair[1]) + carry) % 2, tokens, carry)


@program
def greater_than():
    """Whether this token is greater than the first."""
    first = copy_first()
    return tokens > first


CASES = {
    "inc_mod": ProgramCase(
        program=inc_mod(5),
        vocab=(0, 1, 2, 3, 4),
        max_len=4,
        layers=1,
        meaning="this token and 1, modulo 5",
    ),
    "token_plus_index_mod": ProgramCase(
        program=token_plus_index_mod(4),
        vocab=(0, 1, 2, 3),
        max_len=5,
        layers=1,
        meaning="this token and its index, modulo 4",
    ),
    "mod_sum": ProgramCase(
        program=mod_sum(3),
        vocab=(0, 1, 2, 3),
        max_len=6,
        layers=2,
        meaning="the sum of all tokens, modulo 3",
    ),
    "parity": ProgramCase(
        program=parity(),
        vocab=(0, 1),
        max_len=10,
        layers=1,
        meaning="1 where the number of ones is odd, else 0",
    ),
    "binary_add": ProgramCase(
        program=binary_add(),
        vocab=("00", "01", "10", "11"),
        max_len=6,
        layers=3,
        meaning="the digit here of the sum of two binary numbers, given as pairs of digits from the least significant on",
    ),
    "greater_than": ProgramCase(
        program=greater_than(),
        vocab=(0, 1, 2, 3, 4),
        max_len=4,
        layers=1,
        meaning="whether this token is greater than the first",
    ),
}
