"""The study of circuits: every task pruned out of several models, with baselines and controls, and what it adds up to.

One file for each model, task and seed, so that a stopped study goes on and more can be asked of it later.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from pellucid.core.checkpoint import boxed, content_hash, load_model
from pellucid.core.circuit import Circuit, count_edges
from pellucid.core.errors import places, unknown
from pellucid.core.files import write_atomic
from pellucid.core.processes import in_processes
from pellucid.lab.config import Method, PruneConfig
from pellucid.lab.controls import Point, curve
from pellucid.lab.controls import controls as search_controls
from pellucid.lab.discretize import Probe, discretize
from pellucid.lab.prune import cut, everything, frozen, probe_of
from pellucid.lab.rank import RANKERS
from pellucid.recipes.workbench import Workbench
from pellucid.tasks import TASKS
from pellucid.tasks.task import SPLITS
from pellucid.training.progress import StepProgress, console

CURVE = 6
"""Points of each loss-size curve."""
BASELINES: tuple[Method, ...] = ("attribution",)
CONTROLS = frozenset({"shuffled", "nonsense", "untrained"})
"""Curves of `pellucid.lab.controls.controls`."""


class TaskStudy(BaseModel):
    """One task in one model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str
    task: str
    seed: int
    validation_loss: float | None
    model: str = ""
    """The model's content hash; empty in results of older versions."""
    whole_loss: float | None = None
    """Of the whole model, recalibrated: no circuit is cut to a target below it. None in results of older versions."""
    search: str = ""
    """The search's config, as JSON."""
    circuits: dict[str, Circuit] = {}
    """By target loss."""
    refused: str | None = None
    """Why there are no circuits."""
    baselines: dict[str, int | None] = {}
    """Edges that each ranking needs to reach the target without elimination; None where it does not."""
    curves: dict[str, list[Point]] = {}
    """Loss against size with everything else frozen, for the search, baselines and controls."""

    def models(self) -> set[str]:
        """Content hashes of the models that the result says it is of: one or, in results of older versions, none."""
        return {self.model, *(circuit.model for circuit in self.circuits.values())} - {""}

    def missing(
        self, *, targets: Sequence[float], baselines: Sequence[Method], controls: bool
    ) -> dict[str, Any]:
        """What of that is not here and could be, in the same form."""
        if self.refused:
            return {}
        least = self.whole_loss or 0.0
        return {
            "targets": [t for t in targets if f"{t:g}" not in self.circuits and t >= least],
            "baselines": [method for method in baselines if method not in self.baselines],
            "controls": controls and not self.curves.keys() >= CONTROLS,
        }

    def merged(self, more: "TaskStudy") -> "TaskStudy":
        """This with the parts of `more` that it has not."""
        parts = ("circuits", "baselines", "curves")
        return more.model_copy(
            update={
                "refused": self.refused,
                **{name: {**getattr(more, name), **getattr(self, name)} for name in parts},
            }
        )

    def edges(self, target: float) -> int | None:
        """Of the circuit that reached `target`."""
        circuit = self.circuits.get(f"{target:g}")
        return int(circuit.metrics["edges"] or 0) if circuit and circuit.metrics["reached"] else None


def run_name(path: Path) -> str:
    """What a run is called in a study."""
    return boxed(path) or path.name


def study_task(
    path: Path,
    task: str,
    seed: int,
    config: PruneConfig,
    *,
    targets: Sequence[float],
    baselines: Sequence[Method] = BASELINES,
    controls: bool = False,
) -> TaskStudy:
    """Prune `task` out of the run at `path` to each of `targets`, with baselines and controls; no part depends on which
    others are made. Refused where the model cannot be asked, or its own loss is above `config.target`."""
    bench = Workbench.open(path)
    result = TaskStudy(
        run=run_name(path),
        task=task,
        seed=seed,
        validation_loss=bench.validation_loss,
        model=content_hash(bench.model),
        search=config.key(),
    )
    try:
        asked = bench.task(task)
        for split in SPLITS:
            asked.pairs(config.measure, seed=seed, split=split)
    except ValueError as error:
        return result.model_copy(update={"refused": str(error)})
    means, curves = bench.means_for(config), {}
    with frozen(bench.model) as model:

        def begin() -> tuple[Probe, float]:
            """A probe that has measured the whole model, and what it measured."""
            probe = probe_of(model, asked, means, config, seed)
            return probe, probe(everything(model)).loss

        def rank(method: Method) -> dict[str, Tensor]:
            """Scores; their loss-size curve is among `curves`."""
            scores = RANKERS[method](model, asked, means, config, seed=seed)
            alone = probe_of(model, asked, means, replace(config, ablation="mean"), seed)
            curves[method] = curve(model, scores, alone, CURVE)
            return scores

        _, whole = begin()
        if whole > config.target:
            refused = f"the whole model's loss is {whole:.3f}"
            return result.model_copy(update={"whole_loss": whole, "refused": refused})
        circuits: dict[str, Circuit] = {}
        if possible := [target for target in targets if target >= whole]:
            scores = rank(config.method)
            for target in possible:
                aimed = replace(config, target=target)
                found = cut(model, asked, means, scores, aimed, seed)
                circuits[f"{target:g}"] = bench.on_text(found, means)
        needed: dict[str, int | None] = {}
        for method in baselines:
            scores, (probe, _) = rank(method), begin()
            found = discretize({site: s[0] for site, s in scores.items()}, probe, start=256)
            needed[method] = count_edges(model, found.kept) if found.reached else None
    if controls:
        curves |= search_controls(bench.model, asked, means, bench.train.tokens, config, seed=seed)
    parts = {"circuits": circuits, "baselines": needed, "curves": curves}
    return result.model_copy(update={"whole_loss": whole, **parts})


def study(
    runs: Sequence[str | Path],
    out: str | Path,
    *,
    tasks: Iterable[str] | None = None,
    config: PruneConfig | None = None,
    seeds: Sequence[int] = (0,),
    baselines: Sequence[Method] = BASELINES,
    controls_for: Iterable[str] = (),
    targets: Sequence[float] = (),
    jobs: int = 1,
) -> list[TaskStudy]:
    """All `tasks` in all `runs`, in `jobs` processes; what is in `out` already is not done again, and what it lacks of
    the targets, baselines and controls is added to it.

    Raises ValueError for an unknown task, no runs or seeds, two runs of one name, controls for a task that is not asked,
    or if what is there is of another search or model.
    """
    out, config, runs = Path(out), config or PruneConfig(), [Path(run) for run in runs]
    if not runs or not seeds:
        raise ValueError(f"a study needs at least one run and one seed, got {len(runs)} and {len(seeds)}")
    tasks, asked = list(tasks or TASKS), set(controls_for)
    for name in {*tasks, *asked} - TASKS.keys():
        raise unknown("task", name, TASKS)
    if others := asked - set(tasks):
        raise ValueError(f"controls are asked for {', '.join(sorted(others))}, which is not among the tasks")
    if len({run_name(run) for run in runs}) < len(runs):
        raise ValueError(f"the runs of a study need names of their own, got {', '.join(map(str, runs))}")

    @cache
    def hash_of(run: Path) -> str:
        return content_hash(load_model(run, device="cpu"))

    todo = {}
    for seed in seeds:
        for task in tasks:
            for run in runs:
                wanted: dict[str, Any] = {
                    "targets": sorted({*targets, config.target}),
                    "baselines": baselines,
                    "controls": task in asked,
                }
                file = out / run_name(run) / f"{task}-{seed}.json"
                if file.exists():
                    stored = load_result(file)
                    if stored.search != config.key():
                        raise ValueError(f"{file} is of another search: choose another directory")
                    if others := stored.models() - {hash_of(run)}:
                        raise ValueError(
                            f"{file} is of the model {', '.join(others)}, but the one in {run} is {hash_of(run)}: "
                            "choose another directory"
                        )
                    wanted = stored.missing(**wanted)
                if any(wanted.values()):
                    todo[file] = partial(study_task, run, task, seed, config, **wanted)
    with StepProgress("study", max(1, len(todo))) as bar:
        threads = max(1, (os.cpu_count() or 1) // max(1, jobs))
        for file, result in in_processes(todo, jobs, threads=threads):
            if file.exists():
                result = load_result(file).merged(result)
            write_atomic(file, result.model_dump_json() + "\n")
            bar.step()
            console.print(
                f"{result.run} {result.task}: {result.refused or result.edges(config.target)}",
                highlight=False,
            )
    return load_study(out)


def load_result(file: Path) -> TaskStudy:
    """The result in `file`; a `ValueError` if it is none."""
    try:
        return TaskStudy.model_validate_json(file.read_text())
    except ValidationError as error:
        raise ValueError(f"{file} is not a result of a study: {places(error)}") from None


def load_study(out: str | Path) -> list[TaskStudy]:
    """Every result in `out`."""
    return [load_result(file) for file in sorted(Path(out).glob("*/*.json"))]
