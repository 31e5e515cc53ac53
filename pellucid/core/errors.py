"""How Pellucid says what is wrong: a name and the nearest right ones, or the places in a file."""

from collections.abc import Iterable
from difflib import get_close_matches

from pydantic import ValidationError


def unknown(kind: str, name: object, known: Iterable[str]) -> ValueError:
    """A `ValueError` that names the unknown `name` of a `kind` and the known names nearest to it."""
    known = sorted(known)
    near = get_close_matches(str(name), known, n=3, cutoff=0.5)
    hint = (
        f"did you mean {' or '.join(repr(n) for n in near)}?"
        if near
        else f"known: {', '.join(known) or 'none'}"
    )
    return ValueError(f"unknown {kind} {name!r}; {hint}")


def places(error: ValidationError, most: int = 3) -> str:
    """What pydantic found wrong, in a line: the first few places, each with its reason."""
    found = [
        ": ".join(filter(None, (".".join(map(str, e["loc"])), e["msg"])))
        for e in error.errors(include_url=False)
    ]
    more = f"; and {len(found) - most} more" if len(found) > most else ""
    return "; ".join(found[:most]) + more
