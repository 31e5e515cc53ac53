"""How Pellucid says that a name is wrong: the name, and the nearest right ones."""

from collections.abc import Iterable
from difflib import get_close_matches


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
