"""Progress bars for long work: steps, losses, tokens a second, time left."""

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pellucid.training import distributed

console = Console(stderr=True)


class StepProgress:
    """A bar over `total` steps, shown on rank 0. Where output is no terminal it prints a line at each tenth."""

    def __init__(self, label: str, total: int, start: int = 0):
        self.label, self.total, self.done, self.values = label, total, start, {}
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
        self.done, self.tokens = self.done + 1, self.tokens + tokens
        elapsed = self.progress.tasks[0].elapsed or 0.0
        note = "  ".join(f"{name} {value:.3f}" for name, value in self.values.items())
        if self.tokens and elapsed:
            note += f"  {self.tokens / elapsed:,.0f} tokens/s"
        self.progress.update(self.task, advance=1, note=note)
        tenth = max(1, self.total // 10)
        if self.shown and not console.is_terminal and (self.done % tenth == 0 or self.done == self.total):
            print(f"{self.label}: {self.done}/{self.total}  {note}", file=sys.stderr, flush=True)
