"""Progress bars for long work: steps, losses, tokens a second, time left."""

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from pellucid.training import distributed

console = Console(stderr=True)
"""For progress and errors."""
results = Console()
"""For what a command was asked for."""


class StepProgress:
    """A bar over `total` steps, shown on rank 0. Where output is no terminal it prints a line at each tenth."""

    def __init__(self, label: str, total: int, start: int = 0):
        self.label, self.total, self.done, self.told = label, total, start, start
        self.values: dict[str, float] = {}
        self.shown = distributed.rank() == 0
        self.progress = Progress(
            TextColumn("{task.description:<24}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not (self.shown and console.is_terminal),
        )
        self.task = self.progress.add_task(label, total=total, completed=start, note="")
        self.tokens = 0

    def __enter__(self) -> "StepProgress":
        self.progress.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.progress.stop()

    def show(self, **values: float) -> None:
        """Set the numbers shown beside the bar."""
        self.values.update(values)

    def advance(self, tokens: int = 0) -> None:
        """One step is done, over so many tokens."""
        self.tokens += tokens
        elapsed = self.progress.tasks[0].elapsed or 0.0
        rate = f"  {self.tokens / elapsed:,.0f} tokens/s" if self.tokens and elapsed else ""
        self.reach(
            self.done + 1, "  ".join(f"{name} {value:.4g}" for name, value in self.values.items()) + rate
        )

    def step(self, **values: float) -> None:
        """One step is done, with these numbers to show."""
        self.show(**values)
        self.advance()

    def reach(self, done: int, note: str = "") -> None:
        """So many steps are done in all."""
        self.done = done
        self.progress.update(self.task, completed=done, note=note)
        if (
            self.shown
            and not console.is_terminal
            and (done >= self.total or done - self.told >= self.total / 10)
        ):
            self.told = done
            print(f"{self.label}: {done}/{self.total}  {note}", file=sys.stderr, flush=True)
