"""Predicates that several programs use, beside those of the language."""

import functools

from pellucid.compiled.rasp.language import Predicate

within = Predicate("within", lambda key, query: key in query)
"""The key is one of a tuple of values."""


@functools.cache
def less_by(steps: int) -> Predicate:
    """The key is `steps` less than the query. Of `select(indices + steps, indices, eq)` it saves the map."""
    return Predicate(f"less by {steps}", lambda key, query: key + steps == query)
