"""The study's figures: loss against size, edges by task, necessity, sweeps, binarisation, kurtosis."""

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from pellucid.core.files import write_atomic
from pellucid.lab.controls import loss_at
from pellucid.recipes.ablations import topk
from pellucid.recipes.measures import BinaryTask, Kurtosis
from pellucid.recipes.recipe import Recipe
from pellucid.recipes.study import TaskStudy
from pellucid.recipes.sweeps import rows

STYLE: Any = {
    "svg.hashsalt": "pellucid",
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "text.usetex": False,
    "text.parse_math": False,
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
CHANCE = float(np.log(2))


def draw(path: str | Path, plot: Callable[[Any], None], size: tuple[float, float] = (6.5, 4)) -> Path:
    """Write the picture that `plot` draws on an axis. Raises `ImportError` without matplotlib."""
    try:
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("pictures need matplotlib: pip install 'pellucid[plot]'") from None
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasSVG(figure)
        plot(figure.subplots())
        out = io.BytesIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    write_atomic(path, out.getvalue().decode())
    return Path(path)


def size_figure(results: Sequence[TaskStudy], path: str | Path) -> Path:
    """Task loss against edges (Figures 2 and 31): the mean over tasks of the least loss of circuits no larger.

    All lines are of the same tasks: those that were searched in every run, by every method that is drawn.
    """
    edges = np.geomspace(5, 100_000, 50)
    lines: dict[tuple[str, str], dict[str, list[list[float]]]] = {}
    for r in results:
        for method, points in r.curves.items():
            if r.circuits:
                tasks = lines.setdefault((r.run, method), {})
                tasks.setdefault(r.task, []).append([loss_at(points, int(e)) for e in edges])
    shared = set[str].intersection(*map(set, lines.values())) if lines else set()

    def plot(axis: Any) -> None:
        if shared:
            for (run, method), tasks in sorted(lines.items()):
                losses = [np.mean(tasks[task], axis=0) for task in sorted(shared)]
                axis.plot(edges, np.mean(losses, axis=0), label=f"{run}, {method} ({len(shared)} tasks)")
            axis.legend(frameon=False, fontsize=8, loc="lower left")
        axis.axhline(0.15, color="grey", linewidth=0.8, linestyle=":")
        axis.axhline(CHANCE, color="grey", linewidth=0.8, linestyle="--")
        axis.set(xscale="log", xlabel="edges", ylabel="task loss (nats)", ylim=(0, None))
        axis.xaxis.set_major_formatter("{x:,.0f}")

    return draw(path, plot)


def by_task(
    results: Sequence[TaskStudy], value: Callable[[TaskStudy], float | None]
) -> dict[str, dict[str, float]]:
    """{run: {task: mean over seeds}} of a number that not every result has."""
    found: dict[str, dict[str, list[float]]] = {}
    for r in results:
        if (number := value(r)) is not None:
            found.setdefault(r.run, {}).setdefault(r.task, []).append(number)
    return {run: {task: fmean(v) for task, v in tasks.items()} for run, tasks in sorted(found.items())}


def edges_figure(results: Sequence[TaskStudy], path: str | Path, target: float = 0.15) -> Path:
    """Edges of each task's circuit, by run."""
    edges = by_task(results, lambda r: r.edges(target))
    return bars(path, edges, "edges", log=True)


def necessity_figure(results: Sequence[TaskStudy], path: str | Path, target: float = 0.15) -> Path:
    """Task loss with the circuit frozen and all else running, by run (Figure 32)."""

    def ablated(r: TaskStudy) -> float | None:
        circuit = r.circuits.get(f"{target:g}")
        return (
            float(circuit.metrics["ablated_task_loss"] or 0)
            if circuit and circuit.metrics["reached"]
            else None
        )

    return bars(path, by_task(results, ablated), "task loss, circuit frozen (nats)", line=CHANCE)


def sweeps_figure(
    lines: Mapping[str, Mapping[str, Recipe]],
    results: Sequence[TaskStudy],
    path: str | Path,
    target: float = 0.15,
) -> Path:
    """Circuit edges against pretraining loss, a line for each sweep (Figure 3). Down and to the left is better.

    `lines` are the sweeps' points, as `sweeps.points` gives them.
    """
    found = rows(results, target)

    def plot(axis: Any) -> None:
        for line, recipes in lines.items():
            there = [found[name] for name in recipes if name in found]
            axis.plot(
                [r.validation_loss for r in there], [r.mean_edges for r in there], marker="o", label=line
            )
            for row in there:
                place = (row.validation_loss, row.mean_edges)
                below = -12 if line == "width" else 6
                axis.annotate(
                    point_label(line, recipes[row.name]), place, (4, below), textcoords="offset points"
                )
        axis.set(
            yscale="log", xlabel="validation loss (nats a token)", ylabel="edges, geometric mean over tasks"
        )
        axis.yaxis.set_major_formatter("{x:,.0f}")
        axis.yaxis.set_minor_formatter("{x:,.0f}")
        axis.margins(x=0.15, y=0.15)
        axis.legend(frameon=False, fontsize=8)

    return draw(path, plot)


def point_label(line: str, recipe: Recipe) -> str:
    """What differs along a sweep."""
    return f"width {recipe.model.d_model}" if line == "width" else f"{100 * topk(recipe).fraction:.3g}%"


def binarized_figure(found: Sequence[BinaryTask], path: str | Path) -> Path:
    """Task loss of circuits and of the same with two-valued nodes, recalibrated, for each run and task (Figure 34)."""
    values: dict[str, dict[str, float]] = {}
    for name, r in named(found).items():
        for label, losses in (
            ("the circuit", r.binarized.circuit),
            ("two levels, from the grid", r.binarized.start),
            ("two levels, trained", r.binarized.binarized),
        ):
            values.setdefault(label, {})[name] = losses.calibrated_task_loss
    return bars(path, values, "task loss (nats)", line=CHANCE)


def named(found: Sequence[BinaryTask]) -> dict[str, BinaryTask]:
    """By task, with the run and the seed where they tell results apart."""
    several = len({r.run for r in found}) > 1
    return {
        r.task + (f", {r.run}" if several else "") + (f", seed {r.seed}" if r.seed else ""): r for r in found
    }


def shares_figure(found: Sequence[BinaryTask], path: str | Path) -> Path:
    """Task loss against the share of a circuit's nodes that are two-valued, untrained, a line for each circuit."""

    def plot(axis: Any) -> None:
        for name, r in named(found).items():
            axis.plot(*zip(*r.shares, strict=True), marker=".", linewidth=1, label=name)
        axis.axhline(0.15, color="grey", linewidth=0.8, linestyle=":")
        axis.axhline(CHANCE, color="grey", linewidth=0.8, linestyle="--")
        axis.set(
            xlabel="share of the circuit's nodes with two levels", ylabel="task loss (nats)", ylim=(0, None)
        )
        axis.legend(frameon=False, fontsize=8)

    return draw(path, plot)


def kurtosis_figure(found: Sequence[Kurtosis], path: str | Path) -> Path:
    """log mean kurtosis of the final residual stream, by run (Figure 10); the line is a Gaussian's."""
    values = {
        "over a token's channels": {k.run: k.of_tokens for k in found},
        "over a channel's tokens": {k.run: k.of_channels for k in found},
    }
    return bars(path, values, "log of the mean kurtosis", line=float(np.log(3)))


def bars(
    path: str | Path,
    values: dict[str, dict[str, float]],
    label: str,
    *,
    log: bool = False,
    line: float | None = None,
) -> Path:
    """Horizontal bars for each task, one a run."""
    tasks = sorted({task for v in values.values() for task in v}, reverse=True)
    height = 0.8 / max(1, len(values))

    def plot(axis: Any) -> None:
        for i, (run, v) in enumerate(values.items()):
            places = [tasks.index(task) + i * height for task in v]
            axis.barh(places, list(v.values()), height=height, label=run)
        axis.set_yticks([i + 0.4 - height / 2 for i in range(len(tasks))], tasks)
        axis.set(xlabel=label, xscale="log" if log else "linear")
        axis.xaxis.set_major_formatter("{x:,.0f}" if log else "{x:g}")
        if line is not None:
            axis.axvline(line, color="grey", linewidth=0.8, linestyle="--")
        axis.legend(frameon=False, fontsize=7, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(values))

    return draw(path, plot, (6.5, 1 + 0.28 * len(tasks)))
