"""Answers found in the sequence: what came after, what a key stands for, where a pointer leads."""

from pellucid.compiled.library.case import ProgramCase
from pellucid.compiled.library.copying import shift_by
from pellucid.compiled.library.counting import earlier_occurrences
from pellucid.compiled.library.predicates import less_by
from pellucid.compiled.rasp.language import (
    Predicate,
    aggregate,
    eq,
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
def induction():
    """The token that followed the last earlier occurrence of this one, or None.

    Of the positions after such a token, it is the one that had seen the token as often as there are occurrences.
    """
    prev_token = shift_by(1)
    occurrences = earlier_occurrences()
    prev_occurrences = selector_width(select(tokens, prev_token, eq) & select(indices, indices, lt))
    followed_same = select(prev_token, tokens, eq) & select(prev_occurrences, occurrences, eq)
    return aggregate(followed_same & select(indices, indices, leq), tokens)


def key_of(token: str) -> str:
    """The key of "key=value" or "key"."""
    return token.partition("=")[0]


assigns = Predicate("assigns", lambda key, query: "=" in key and key_of(key) == key_of(query))
"""The key is "key=value", for the key of the query."""


@program
def key_value_lookup():
    """For a key, what the last "key=value" before it says, or None; None for a "key=value" itself."""
    assignments = select(tokens, tokens, assigns)
    earlier = assignments & select(indices, indices, lt)
    writes = selector_width(earlier)
    last_write = aggregate(earlier & select(writes, writes, less_by(1)), tokens)
    return map(
        lambda token, write: None if "=" in token or write is None else write.partition("=")[2],
        tokens,
        last_write,
    )


@program
def pointer_2_hop():
    """The token at the index that the token at the index that is this token is; None where there is none."""
    pointed_at = select(indices, tokens, eq)
    one_hop = aggregate(pointed_at, tokens)
    return aggregate(pointed_at, one_hop)


same_source = Predicate("same source", lambda key, query: key[0] == query[0])
continues = Predicate("continues", lambda key, query: key[0] == query[1])


@program
def graph_step():
    """Tokens are edges (source, target). The target of the first edge from this one's target, or None."""
    earlier_edges = selector_width(select(indices, indices, lt) & select(tokens, tokens, same_source))
    first_from_target = select(tokens, tokens, continues) & select(earlier_edges, 0, eq)
    next_edge = aggregate(first_from_target, tokens)
    return map(lambda edge: None if edge is None else edge[1], next_edge)


CASES = {
    "induction": ProgramCase(
        program=induction(),
        vocab=("a", "b", "c"),
        max_len=7,
        causal=True,
        layers=3,
        meaning="the token that followed the last earlier occurrence of this one, or None",
    ),
    "key_value_lookup": ProgramCase(
        program=key_value_lookup(),
        vocab=("a=0", "a=1", "b=0", "b=1", "a", "b"),
        max_len=5,
        causal=True,
        layers=2,
        meaning="for a key, the value that it was last given before, or None; None where one is given",
    ),
    "pointer_2_hop": ProgramCase(
        program=pointer_2_hop(),
        vocab=(0, 1, 2, 3, 4),
        max_len=5,
        layers=2,
        meaning="the token two pointers on, each token pointing at an index; None outside the sequence",
    ),
    "graph_step": ProgramCase(
        program=graph_step(),
        vocab=tuple((source, target) for source in "abc" for target in "abc"),
        max_len=4,
        layers=2,
        meaning="the target of the first edge from this edge's target, or None",
    ),
}
