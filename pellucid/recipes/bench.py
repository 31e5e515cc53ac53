"""What the benchmark's command shows: its methods, programs and tiers, and the leaderboard."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
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


def show(sheets: Sequence[Sheet], console: Console) -> None:
    """Print the tables that have one row a method."""
    for sheet in sheets:
        if sheet.head[0] in ("method", "tier"):
            table = Table(
                *map(Text, sheet.head),
                title=Text(sheet.title),
                title_justify="left",
                caption=Text(sheet.note),
            )
            for row in sheet.rows:
                table.add_row(*map(Text, row))
            console.print(table)
