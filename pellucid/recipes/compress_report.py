"""Tables and figures of sweeps of compression."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from torch import Tensor

from pellucid.compiled.batched import defined_inputs
from pellucid.compiled.compress import principal_directions
from pellucid.recipes.compress_sweep import Row, SweepResult, compile_case, load_maps

DROPPED = 0.4
"""A direction whose row of W is shorter than this is dropped."""
SHARED = 0.5
"""Directions with at least this cosine share their place."""


def sweep_table(found: SweepResult) -> Table:
    """The median and the best seed at each width."""
    table = Table(title=f"{found.program}, {found.config.variant}, compiled width {found.width}")
    for column in ("d", "accuracy", "position", "balanced", "loss", "layer loss", "cosine", "truth holds"):
        table.add_column(column, justify="right")
    for d in found.widths:
        rows = sorted(found.at(d), key=lambda r: (r.scores.balanced_accuracy, -r.scores.layer_loss))
        best, middle = rows[-1], rows[(len(rows) - 1) // 2]
        cells = [
            f"{getattr(middle.scores, n):.3f} / {getattr(best.scores, n):.3f}"
            for n in ("accuracy", "position_accuracy", "balanced_accuracy")
        ]
        cells += [f"{best.scores.output_loss:.2g}", f"{best.scores.layer_loss:.2g}", f"{cosine(best):.2f}"]
        table.add_row(str(d), *cells, f"{sum(r.faithful for r in rows)} of {len(rows)}")
    table.caption = "median / best seed; the rest of the best"
    return table


def cosine(row: Row) -> float:
    """The mean over sublayers of the cosine similarity of what they write."""
    values = list(row.scores.write_cosine.values())
    return sum(values) / len(values) if values else 1.0


def program_table(found: Sequence[SweepResult]) -> Table:
    """The least width at which each program is solved, and at which its ground truth holds."""
    table = Table("program", "compiled width")
    for column in ("variant", "solved from", "cosine there", "truth holds from"):
        table.add_column(column, justify="right")
    for r in found:
        solved, faithful = r.smallest("solved"), r.smallest("faithful")
        there = "" if solved is None else f"{max(cosine(x) for x in r.at(solved) if x.solved):.2f}"
        cells = [r.program, str(r.width), r.config.variant]
        table.add_row(*cells, *("-" if d is None else str(d) for d in (solved,)), there, str(faithful or "-"))
    return table


def feature_table(w: Tensor, labels: Sequence[str]) -> Table:
    """What became of each direction of the compiled model in W (D, d): its length, and the one that it lies nearest to.

    Dropped is what is shorter than `DROPPED`; shared what has a cosine of at least a half with another that is not dropped.
    """
    table = Table("direction", "fate")
    table.add_column("length", justify="right")
    table.add_column("nearest")
    table.add_column("cosine", justify="right")
    lengths = w.norm(dim=1)
    there = lengths >= DROPPED
    cosines = (w @ w.T) / (lengths[:, None] * lengths).clamp(min=1e-9)
    cosines = cosines.fill_diagonal_(0).masked_fill(~there, 0)
    for i, label in enumerate(labels):
        other = int(cosines[i].abs().argmax())
        cosine = float(cosines[i, other])
        fate = "dropped" if not there[i] else "shared" if abs(cosine) >= SHARED else "kept"
        near = (labels[other], f"{cosine:.2f}") if there[i] else ("", "")
        table.add_row(label, fate, f"{lengths[i]:.2f}", *near)
    return table


def sweep_figure(found: Sequence[SweepResult], path: str | Path) -> Path:
    """Losses and accuracies against d: a line through the medians, a point for each seed."""

    def plot(axes: Any) -> None:
        for axis, (name, score) in zip(axes, PANELS.items(), strict=True):
            for r in found:
                (line,) = axis.plot(
                    r.widths,
                    [middle(r, d, score) for d in r.widths],
                    label=f"{r.program}, {r.config.variant}",
                )
                axis.plot(
                    [x.d for x in r.rows], [getattr(x.scores, score) for x in r.rows],
                    ".", color=line.get_color(), markersize=4,
                )  # fmt: skip
            axis.set(xlabel="d", ylabel=name)
            if score.endswith("loss") and any(getattr(x.scores, score) > 0 for r in found for x in r.rows):
                axis.set_yscale("log")
                axis.yaxis.set_major_formatter("{x:g}")
            elif not score.endswith("loss"):
                axis.set_ylim(0, 1.03)
        axes[0].legend(frameon=False, fontsize=8)

    return draw_row(path, plot, len(PANELS))


PANELS = {
    "output loss": "output_loss",
    "layer loss": "layer_loss",
    "inputs with every value right": "accuracy",
    "values right, by value": "balanced_accuracy",
}


def middle(found: SweepResult, d: int, score: str) -> float:
    """The median over seeds."""
    values = sorted(getattr(row.scores, score) for row in found.at(d))
    return (values[(len(values) - 1) // 2] + values[len(values) // 2]) / 2


def gram_figure(maps: dict[str, Tensor], labels: Sequence[str], path: str | Path) -> Path:
    """W W^T of each named W (D, d), with the compiled model's directions as labels."""

    def plot(axes: Any) -> None:
        for i, (axis, (name, w)) in enumerate(zip(axes, maps.items(), strict=True)):
            image = axis.imshow((w @ w.T).numpy(), cmap="RdBu_r", vmin=-1, vmax=1)
            axis.set_title(name, fontsize=9)
            axis.set_xticks(range(len(labels)), labels, rotation=90)
            axis.set_yticks(range(len(labels)), labels if i == 0 else [""] * len(labels))
            axis.tick_params(length=0, labelsize=7)
        axes[0].figure.colorbar(image, ax=list(axes), shrink=0.6)

    return draw_row(path, plot, len(maps), each=(4.2, 4.4))


def layer_figure(found: Sequence[tuple[str, Row]], path: str | Path) -> Path:
    """Cosine similarity with the compiled model, sublayer by sublayer: of what is written, and of the stream."""

    def plot(axes: Any) -> None:
        for axis, (kind, name) in zip(
            axes, (("write_cosine", "what is written"), ("stream_cosine", "residual stream")), strict=True
        ):
            for label, row in found:
                values = getattr(row.scores, kind)
                axis.plot(list(values), list(values.values()), "o-", label=label, markersize=3)
            axis.set(ylim=(0, 1.03), ylabel=f"cosine similarity, {name}")
            axis.tick_params(axis="x", rotation=45)
        axes[0].legend(frameon=False, fontsize=8)

    return draw_row(path, plot, 2)


def draw_row(path: str | Path, plot: Any, panels: int, each: tuple[float, float] = (3.4, 3.2)) -> Path:
    """Write the picture that `plot` draws on so many axes side by side. Raises `ImportError` without matplotlib."""
    from pellucid.recipes.figures import draw

    def split(axis: Any) -> None:
        figure = axis.figure
        axis.remove()
        plot(figure.subplots(1, panels, squeeze=False)[0])

    return draw(path, split, (each[0] * panels, each[1]))


def shown(found: SweepResult, out: Path) -> tuple[Row, Tensor, list[str]]:
    """The best model of the least width that is faithful, else of the least that is solved, else of the largest.

    Its row, its matrices (k, D, d), and what the D directions hold in the end.
    """
    d = found.smallest("faithful") or found.smallest("solved") or max(found.widths)
    best = max(found.at(d), key=lambda r: (r.faithful, r.scores.balanced_accuracy, -r.scores.layer_loss))
    maps = load_maps(out / f"{found.program}.{found.config.variant}.json")[f"{d}.{best.seed}"]
    model = compile_case(found.program)
    return best, maps, model.labels(len(model.transformer.config.layers))


def figures(found: SweepResult, out: Path) -> list[Path]:
    """All pictures of a sweep: scores against d; W W^T and similarity by layer of the model that `shown` picks."""
    stem = f"{found.program}.{found.config.variant}"
    best, maps, labels = shown(found, out)
    named = {f"d = {best.d}" + (f", matrix {i}" if len(maps) > 1 else ""): w for i, w in enumerate(maps)}
    model = compile_case(found.program)
    principal = principal_directions(model, defined_inputs(model))[:, : best.d]
    named[f"d = {best.d}, principal directions"] = principal.to(maps)
    return [
        sweep_figure([found], out / f"{stem}.svg"),
        gram_figure(named, labels, out / f"{stem}.gram.svg"),
        layer_figure([(f"d = {best.d}", best)], out / f"{stem}.layers.svg"),
    ]
