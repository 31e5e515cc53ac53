"""Capability against circuit size as weights become fewer, and as models widen at equal nonzeros: Figure 3, few points.

As a program, trains the points, prunes tasks out of each, and draws them:
`python -m pellucid.recipes.sweeps --out runs/sweeps`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean

import tyro
from rich.table import Table

from pellucid.core.config import ModelConfig
from pellucid.core.errors import unknown
from pellucid.core.transformer import Transformer
from pellucid.lab.config import PruneConfig
from pellucid.recipes.ablations import topk
from pellucid.recipes.recipe import Prepared, Recipe, prepare_data, run
from pellucid.recipes.registry import demo_sparse
from pellucid.recipes.study import TaskStudy, load_study, study
from pellucid.sparse.projection import constrained
from pellucid.tasks import TASKS
from pellucid.training.loop import Interrupted
from pellucid.training.progress import console, results

FRACTIONS = (1 / 3, 10 / 3)
"""L0 fractions, over the recipe's own."""
WIDTHS = (1 / 2, 2.0)
"""Widths, over the recipe's own."""
ASKED = ("bracket_counting", "for_while", "if_equals", "lambda_func")


def points(recipe: Recipe) -> dict[str, dict[str, Recipe]]:
    """{sweep: {point: its recipe}}: both sweeps go through `recipe` itself, the point `base`."""
    fraction, base = topk(recipe).fraction, replace(recipe, name="base")
    sparser, denser = (with_fraction(base, times * fraction) for times in FRACTIONS)
    narrow, wide = (widened(base, times) for times in WIDTHS)
    return {
        "L0": {r.name: r for r in (sparser, base, denser)},
        "width": {r.name: r for r in (narrow, base, wide)},
    }


def with_fraction(recipe: Recipe, fraction: float) -> Recipe:
    """The recipe with another fraction of nonzeros."""
    return replace(recipe, name=f"l0-{fraction:.2g}", sparsity=replace(topk(recipe), fraction=fraction))


def widened(recipe: Recipe, times: float) -> Recipe:
    """The recipe with `times` the width, heads and neurons, and as many nonzeros (of the weights that are sparse).

    Raises ValueError where a width would not be whole, or more nonzeros would be asked for than there are weights.
    """
    model, config = recipe.model, topk(recipe)
    layers = tuple(
        replace(
            layer,
            heads=layer.heads[:1] * whole(len(layer.heads), times),
            d_mlp=whole(layer.d_mlp, times),
        )
        for layer in model.layers
    )
    wide = replace(model, d_model=whole(model.d_model, times), layers=layers)
    fraction = config.fraction * weights(model, config.dense) / weights(wide, config.dense)
    return replace(recipe, name=f"width-{times:g}", model=wide, sparsity=replace(config, fraction=fraction))


def whole(width: int, times: float) -> int:
    if not (scaled := times * width) >= 1 or scaled != int(scaled):
        raise ValueError(f"{times:g} times a width of {width} is not a whole number")
    return int(scaled)


def weights(model: ModelConfig, dense: Sequence[str]) -> int:
    """How many weights the L0 constraint is on."""
    return sum(p.numel() for p in constrained(Transformer(model, device="cpu"), dense).values())


def sweep(
    out: str | Path,
    *,
    recipe: Recipe | None = None,
    tasks: Iterable[str] = ASKED,
    config: PruneConfig | None = None,
    device: str = "auto",
) -> list[TaskStudy]:
    """Train each point into OUT/runs/POINT and prune `tasks` out of it into OUT/study/POINT, one file a task.

    What is there is not made again, and an interrupted run goes on. The points come in an order that fills both sweeps
    evenly, and each is pruned before the next is trained.
    """
    out, tasks = Path(out), tuple(tasks)
    for name in tasks:
        if name not in TASKS:
            raise unknown("task", name, TASKS)
    recipes = {name: r for line in points(recipe or demo_sparse()).values() for name, r in line.items()}
    prepared: Prepared | None = None
    for name in sorted(recipes, key=lambda name: name != "base"):
        where = out / "runs" / name
        prepared = prepared or prepare_data(recipes[name])
        run(recipes[name], where, device=device, resume=True, prepared=prepared)
        study([where], out / "study", tasks=tasks, config=config, baselines=())
    return load_study(out / "study")


@dataclass(frozen=True)
class Row:
    """A point of a sweep."""

    name: str
    validation_loss: float
    edges: Mapping[str, int | None]
    """By task; None where no circuit reached the target."""
    mean_edges: float
    """Geometric mean over the tasks that every point of the sweeps reached; NaN without any."""


def rows(found: Sequence[TaskStudy], target: float = 0.15) -> dict[str, Row]:
    """The points by name."""
    edges: dict[str, dict[str, int | None]] = {}
    loss: dict[str, float] = {}
    for r in found:
        edges.setdefault(r.run, {})[r.task] = r.edges(target)
        loss[r.run] = math.nan if r.validation_loss is None else r.validation_loss
    shared = common(edges.values())
    return {
        name: Row(
            name,
            loss[name],
            of,
            math.exp(fmean(math.log((of[task] or 0) + 1) for task in shared)) - 1 if shared else math.nan,
        )
        for name, of in edges.items()
    }


def common(edges: Iterable[Mapping[str, int | None]]) -> list[str]:
    """The tasks for which every point has a circuit."""
    reached = [{task for task, n in of.items() if n is not None} for of in edges]
    return sorted(set.intersection(*reached)) if reached else []


def sweep_table(
    lines: Mapping[str, Mapping[str, Recipe]], found: Sequence[TaskStudy], target: float
) -> Table:
    """The points of each sweep."""
    by_name, tasks = rows(found, target), sorted({r.task for r in found})
    table = Table("sweep", "point", "width", "fraction", "validation loss", *tasks, "geometric mean")
    for line, recipes in lines.items():
        for name, recipe in recipes.items():
            if name in by_name:
                row = by_name[name]
                table.add_row(
                    line, name, str(recipe.model.d_model), f"{100 * topk(recipe).fraction:.3g}%",
                    f"{row.validation_loss:.3f}",
                    *("none" if (n := row.edges.get(task)) is None else f"{n:,}" for task in tasks),
                    f"{row.mean_edges:.0f}",
                )  # fmt: skip
    return table


@dataclass
class Sweep:
    """Train the points of the L0 and width sweeps, prune tasks out of each, and draw them. Goes on where it stopped."""

    out: Path = Path("runs/sweeps")
    """Directory of the runs, the circuits and the figure."""

    tasks: tuple[str, ...] = ASKED
    """Which tasks."""

    recipe: Recipe = field(default_factory=demo_sparse)
    """The point that both sweeps go through."""

    search: PruneConfig = field(default_factory=PruneConfig)
    """The search, the same for every point."""

    device: str = "auto"
    """auto, cpu, cuda, ..."""

    def __call__(self) -> None:
        from pellucid.recipes.figures import sweeps_figure

        found = sweep(self.out, recipe=self.recipe, tasks=self.tasks, config=self.search, device=self.device)
        lines = points(self.recipe)
        results.print(sweep_table(lines, found, self.search.target))
        print(sweeps_figure(lines, found, self.out / "sweeps.svg", self.search.target))


if __name__ == "__main__":
    program = tyro.cli(Sweep, config=(tyro.conf.AvoidSubcommands,))
    try:
        program()
    except (ValueError, Interrupted) as error:
        console.print(str(error), style="red", highlight=False, markup=False, soft_wrap=True)
        raise SystemExit(130 if isinstance(error, Interrupted) else 2) from None
