"""Programs with names, and inputs to try them on."""

from pellucid.compiled.library import (
    arithmetic,
    brackets,
    controls,
    copying,
    counting,
    language_tasks,
    lookup,
    sorting,
)
from pellucid.compiled.library.case import ProgramCase

PROGRAMS: dict[str, ProgramCase] = {
    **counting.CASES,
    **sorting.CASES,
    **brackets.CASES,
    **copying.CASES,
    **arithmetic.CASES,
    **lookup.CASES,
    **language_tasks.CASES,
    **controls.CASES,
}

__all__ = ["PROGRAMS", "ProgramCase"]
