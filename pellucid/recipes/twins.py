"""Runs beside each other: validation loss against tokens, and how many tokens one needs to come to another's loss.

`python -m pellucid.recipes.twins RUN RUN ... --out FIGURE.svg` draws them and prints the table; the first is compared with.
"""

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import tyro
from rich.table import Table

from pellucid.core.checkpoint import load_metadata
from pellucid.recipes.figures import draw
from pellucid.training.log import read_log
from pellucid.training.progress import results


@dataclass(frozen=True)
class Curve:
    """One run's validation losses (nats a token, mean over corpora) after so many tokens, and its speed."""

    name: str
    tokens: tuple[int, ...]
    losses: tuple[float, ...]
    tokens_per_second: float | None
    """The median over its log; None where a run was too short to log it."""

    def tokens_to(self, loss: float) -> float | None:
        """Tokens until the loss first was so low, between two validations by interpolation; None if it never was."""
        below = [i for i, value in enumerate(self.losses) if value <= loss]
        if not below:
            return None
        i = below[0]
        if i == 0:
            return float(self.tokens[0])
        high, low = self.losses[i - 1], self.losses[i]
        return float(np.interp(high - loss, [0, high - low], self.tokens[i - 1 : i + 1]))


def read_curve(run: str | Path) -> Curve:
    """The curve of the run in a directory. ValueError if it holds no validation."""
    lines = read_log(Path(run) / "log.jsonl")
    train = load_metadata(run)["train"]
    size = train["batch_size"] * train["seq_len"]
    points = [
        (line["step"] * size, float(np.mean([v for k, v in line.items() if k.startswith("validation/")])))
        for line in lines
        if any(k.startswith("validation/") for k in line)
    ]
    if not points:
        raise ValueError(f"{run} has no validation in its log: train it with --recipe.train.validate-every")
    speeds = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
    tokens, losses = zip(*points, strict=True)
    return Curve(Path(run).name, tokens, losses, median(speeds) if speeds else None)


def twins_table(curves: list[Curve]) -> Table:
    """Final losses, and the tokens that each run needs to come to the first one's."""
    first = curves[0]
    table = Table("run", "final loss", f"tokens to {first.name}'s loss", "token budget", "tokens/s")
    for curve in curves:
        tokens = curve.tokens_to(first.losses[-1])
        table.add_row(
            curve.name,
            f"{curve.losses[-1]:.3f}",
            "never" if tokens is None else f"{tokens:,.0f}",
            "" if tokens is None else f"{first.tokens[-1] / tokens:.2f}x",
            "" if curve.tokens_per_second is None else f"{curve.tokens_per_second:,.0f}",
        )
    return table


def twins_figure(curves: list[Curve], path: str | Path) -> Path:
    """Validation loss against tokens."""

    def plot(axis: Any) -> None:
        for curve in curves:
            axis.plot(curve.tokens, curve.losses, label=curve.name)
        axis.set(xlabel="training tokens", ylabel="validation loss (nats a token)")
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.legend(frameon=False, fontsize=8)

    return draw(path, plot)


@dataclass
class Twins:
    """Draw runs beside each other, and tabulate what each needs to come to the first one's loss."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Directories of runs."""

    out: Path | None = None
    """Where the figure goes."""

    def __call__(self) -> None:
        curves = [read_curve(run) for run in self.runs]
        results.print(twins_table(curves))
        if self.out is not None:
            print(twins_figure(curves, self.out))


if __name__ == "__main__":
    tyro.cli(Twins)()
