"""What the benchmark's command shows: its methods, programs and tiers, and the leaderboard."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from pellucid.bench.methods import find_methods
from pellucid.bench.report import Sheet
from pellucid.bench.subject import SUITE, TIERS
from pellucid.compiled.library import PROGRAMS


def listing() -> list[Table]:
    """The methods, the programs and the tiers."""
    methods, programs, tiers = (
        Table("method", "what it does"),
        Table("program", "its output"),
        Table("tier", ""),
    )
    for name, method in find_methods().items():
        methods.add_row(name, Text(method.meaning))
    for name in SUITE:
        programs.add_row(name, Text(PROGRAMS[name].meaning))
    for name, make in TIERS.items():
        tiers.add_row(name, Text((make.__doc__ or "").partition("\n")[0]))
    return [methods, programs, tiers]


SHOWN = (
    "method",
    "AP, E",
    "AUROC, S",
    "recall at 1%",
    "precision at 1%",
    "Jaccard",
    "sufficiency",
    "passes",
    "seconds",
    "stability",
)
"""The columns of the leaderboard that a wide terminal has room for."""
FEWER = ("method", "AP, E", "recall at 1%", "sufficiency", "passes", "seconds")
WIDE = 140
"""Characters in a line that the columns `SHOWN` need."""


def show(sheets: Sequence[Sheet], console: Console) -> None:
    """Print the leaderboards, and what does not apply or failed."""
    columns = SHOWN if console.width >= WIDE else FEWER
    for sheet in sheets:
        whole = sheet.head[0].endswith("tier") or "also" in sheet.head
        chosen = [i for i, name in enumerate(sheet.head) if whole or name in columns]
        if whole or "passes" in sheet.head:
            first, *heads = [escape(sheet.head[i]) for i in chosen]
            longest = max(len(row[0]) for row in sheet.rows)
            table = Table(
                Column(first, min_width=longest),
                *heads,
                title=escape(sheet.title),
                title_justify="left",
                caption=escape(sheet.note),
            )
            for row in sheet.rows:
                table.add_row(*(Text(row[i]) for i in chosen))
            console.print(table)
