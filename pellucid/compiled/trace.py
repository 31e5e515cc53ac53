"""One run of a compiled model, read by its own labels: the residual stream by layer, as a table and as a picture."""

import io
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pellucid.compiled.rasp.values import Value, show
from pellucid.core.files import write_atomic
from pellucid.core.record import record

if TYPE_CHECKING:
    from pellucid.compiled.model import CompiledModel

ROUNDING = 1e-5
"""What is no more than this is shown as 0."""
LABELLED = 80
"""The most directions whose labels a picture shows."""
FORMATS = ("svg", "png")


@dataclass(frozen=True)
class Pattern:
    """Where a head looked."""

    layer: int
    head: int
    weights: np.ndarray
    """(query, key); position 0 is BOS."""


@dataclass(frozen=True, eq=False)
class Trace:
    """The residual stream of a compiled model on one sequence, after every sublayer. Position 0 is BOS."""

    sequence: list[Value]
    steps: list[str]
    """`embedding`, then the sublayers that exist: `layer 1 attention`, `layer 1 MLP`, ..."""
    sites: list[str]
    """The site at which each step was read. Sites count layers from 0."""
    residuals: np.ndarray
    """(step, position, direction)."""
    labels: list[list[str]]
    """For each step what each direction holds, `name:value`; empty where nothing is held."""
    outputs: list[Value]
    """The model's values, one for each position but BOS."""
    patterns: list[Pattern]
    """Every head's attention."""
    variables: list[list[dict[str, Any]]] = field(repr=False)
    """For each step the variables held then, as in the ground truth."""

    @property
    def positions(self) -> list[str]:
        """A name for each position: BOS and the tokens."""
        return ["BOS", *map(show, self.sequence)]

    def read(self, step: int, position: int) -> dict[str, str]:
        """What each variable that is held after a step says at a position; empty where it says nothing."""
        stream = self.residuals[step, position]
        return {v["name"]: decode(v, stream[v["directions"]]) for v in self.variables[self.number(step)]}

    def rows(self, step: int) -> list[tuple[str, str, float]]:
        """(position, label, value) of everything after a step that is more than rounding."""
        step = self.number(step)
        return [
            (f"{p} {name}", self.labels[step][d] or f"direction {d}", float(self.residuals[step, p, d]))
            for p, name in enumerate(self.positions)
            for d in np.flatnonzero(np.abs(self.residuals[step, p]) >= ROUNDING)
        ]

    def table(self, step: int) -> Table:
        """The directions that are not zero after a step, as a table."""
        table = Table("position", "direction", title=self.title(step), title_justify="left")
        table.add_column("value", justify="right")
        for position, label, value in self.rows(step):
            table.add_row(Text(position), Text(label), written(value))
        return table

    def number(self, step: int) -> int:
        """`step` counted from 0. Raises `ValueError` where there is none such."""
        if not -len(self.steps) <= step < len(self.steps):
            raise ValueError(f"step must be between 0 and {len(self.steps) - 1}, got {step!r}")
        return step % len(self.steps)

    def title(self, step: int) -> str:
        return f"{self.steps[self.number(step)]} ({self.sites[step]})"

    def show(self, console: Console) -> None:
        """Print what every variable says, step by step. After the embedding only what a step wrote is shown."""
        seen: list[tuple[str, list[int]]] = []
        for step in range(len(self.steps)):
            held = self.variables[step]
            new = [v for v in held if (v["name"], v["directions"]) not in seen]
            seen += [(v["name"], v["directions"]) for v in new]
            lost = [v["name"] for v in self.variables[step - 1] if v not in held] if step else []
            console.print(Text(self.title(step), style="bold"))
            for position, name in enumerate(self.positions):
                read = self.read(step, position)
                line = "  ".join(f"{v['name']}={read[v['name']]}" for v in new if read[v["name"]])
                console.print(Text(f"  {position} {name:<6} {line}".rstrip()), soft_wrap=True)
            if lost:
                console.print(Text(f"  erased: {', '.join(lost)}", style="dim"))
        console.print(Text(f"output: {' '.join(map(show, self.outputs))}", style="bold"))

    def __str__(self) -> str:
        out = io.StringIO()
        self.show(Console(file=out, width=200, color_system=None, force_terminal=False))
        return out.getvalue().rstrip("\n")

    def draw(self, path: str | os.PathLike[str]) -> Path:
        """Draw the residual stream as an SVG or PNG file: one panel a step, directions by positions.

        Directions that hold nothing after a step are grey. Colour is cut off at -1 and 1.
        Raises `ValueError` for other extensions, `ImportError` without matplotlib.
        """
        path = Path(path)
        kind = path.suffix.removeprefix(".").lower()
        if kind not in FORMATS:
            raise ValueError(f"a picture ends in .svg or .png, got {str(path)!r}")
        write_atomic(path, picture(self, kind))
        return path


def decode(variable: dict[str, Any], held: np.ndarray) -> str:
    """The value that a variable's directions hold, as text; empty where no direction is active."""
    if variable["encoding"] == "categorical":
        best = int(np.argmax(held))
        return variable["values"][best] if held[best] > 0.5 else ""
    if variable["optional"] and held[1] > 0.5:
        return "None"
    return written(float(held[0]))


def written(number: float) -> str:
    """A number with four digits; what is no more than rounding is 0."""
    return "0" if abs(number) < ROUNDING else f"{number:.4g}"


def site_after(slot: int) -> str:
    """The site of the residual stream after a slot: -1 is the embedding, then each layer's attention and MLP."""
    layer, mlp = divmod(slot, 2)
    return "embed" if slot < 0 else f"{layer}.resid.{'post' if mlp else 'mid'}"


def trace(model: "CompiledModel", sequence: Sequence[Value]) -> Trace:
    """Run `model` on one sequence and keep the residual stream after every sublayer, with labels.

    A rotated model's stream is rotated back, to the directions that the ground truth labels.
    Raises `RaspError` for a sequence that the model cannot be given.
    """
    sequence = list(sequence)
    places = [("embedding", "embed", -1)]
    for number, layer in enumerate(model.transformer.config.layers):
        if layer.heads:
            places.append((f"layer {number + 1} attention", f"{number}.resid.mid", 2 * number))
        if layer.d_mlp:
            places.append((f"layer {number + 1} MLP", f"{number}.resid.post", 2 * number + 1))
    heads = [n for n, layer in enumerate(model.transformer.config.layers) if layer.heads]
    tokens, _ = model.encode([sequence])
    found = record(
        model.transformer, tokens, [s for _, s, _ in places] + [f"{n}.attn.pattern" for n in heads]
    )
    held = [
        [
            v
            for v in model.truth["variables"]
            if v["written"] <= slot and (v["gone"] is None or slot < v["gone"])
        ]
        for _, _, slot in places
    ]
    residuals = np.stack([found[site][0].double().cpu().numpy() for _, site, _ in places])
    return Trace(
        sequence=sequence,
        steps=[name for name, _, _ in places],
        sites=[site for _, site, _ in places],
        residuals=residuals if model.basis is None else residuals @ model.basis.T,
        labels=[labels(variables, model.transformer.config.d_model) for variables in held],
        outputs=model(sequence),
        patterns=[
            Pattern(n, h, weights.double().cpu().numpy())
            for n in heads
            for h, weights in enumerate(found[f"{n}.attn.pattern"][0])
        ],
        variables=held,
    )


def labels(variables: Sequence[dict[str, Any]], width: int) -> list[str]:
    """For each of `width` directions what these variables hold there."""
    made = ["bos", *[""] * (width - 1)]
    for v in variables:
        for direction, label in zip(v["directions"], v["labels"], strict=True):
            made[direction] = label
    return made


def owners(variables: Sequence[dict[str, Any]], width: int) -> list[int]:
    """For each direction the number of the variable that holds it; -1 for none."""
    made = [-1] * width
    for number, v in enumerate(variables):
        for direction in v["directions"]:
            made[direction] = number
    return made


def picture(made: Trace, kind: str) -> bytes:
    """The bytes of a picture of a trace, the same in every process."""
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("pictures need matplotlib: pip install 'pellucid[plot]'") from None

    steps, positions, width = made.residuals.shape
    reused = any(len({step[d] for step in made.labels} - {""}) > 1 for d in range(width))
    named = width <= LABELLED
    cell = 0.3 if named else max(0.02, 24 / width)
    panel = max(1.5, 0.3 * positions) + (1.6 if reused and named else 0)
    style: Any = {
        "svg.hashsalt": "pellucid",
        "svg.fonttype": "none",
        "font.family": "DejaVu Sans",
        "text.usetex": False,
        "text.parse_math": False,
        "font.size": 8,
    }
    with matplotlib.rc_context(style):
        figure = Figure(
            figsize=(min(2.5 + panel * steps, 60), 1.3 + cell * width), dpi=100, layout="constrained"
        )
        FigureCanvasAgg(figure)
        axes = figure.subplots(1, steps, squeeze=False, sharey=not reused)[0]
        for step, axis in enumerate(axes):
            owner = owners(made.variables[step], width)
            empty = np.array([not label for label in made.labels[step]])
            stream = np.ma.array(made.residuals[step].T, mask=np.repeat(empty[:, None], positions, axis=1))
            colours = matplotlib.colormaps["RdBu_r"].with_extremes(bad="#dddddd")
            axis.imshow(stream, cmap=colours, vmin=-1, vmax=1, aspect="auto", interpolation="nearest")
            for d in range(1, width):
                if owner[d] != owner[d - 1] or d == 1:
                    axis.axhline(d - 0.5, color="black", linewidth=0.6)
            axis.set_title(made.steps[step], fontsize=8)
            axis.set_xticks(
                range(positions), made.positions, rotation=90 if max(map(len, made.positions)) > 3 else 0
            )
            axis.tick_params(length=0)
            if not named:
                axis.set_yticks([])
            elif reused or step == 0:
                axis.set_yticks(range(width), made.labels[step if reused else -1])
        figure.colorbar(
            axes[0].images[0], ax=list(axes), extend="both", shrink=min(1.0, 3 / (cell * width)), pad=0.01
        )
        out = io.BytesIO()
        figure.savefig(out, format=kind, metadata={"Date": None} if kind == "svg" else {"Software": None})
    return out.getvalue()
