"""The study of circuits: every task pruned out of several models, with baselines and controls, and what it adds up to.

One file for each model, task and seed, so that a stopped study goes on, and several processes can share one.
"""

import os
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

import numpy as np
from pydantic import BaseModel, ConfigDict
from rich.table import Table
from torch import Tensor

from pellucid.core.checkpoint import boxed
from pellucid.core.circuit import Circuit, count_edges
from pellucid.core.files import write_atomic
from pellucid.core.processes import in_processes
from pellucid.lab.config import Method, PruneConfig
from pellucid.lab.controls import Point, controls, curve
from pellucid.lab.discretize import discretize
from pellucid.lab.prune import cut, everything, frozen, probe_of
from pellucid.lab.rank import RANKERS
from pellucid.recipes.workbench import Workbench
from pellucid.tasks import TASKS
from pellucid.training.progress import StepProgress, console

CURVE = 6
"""Points of each loss-size curve."""
BASELINES: tuple[Method, ...] = ("attribution",)


class TaskStudy(BaseModel):
    """One task in one model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str
    task: str
    seed: int
    validation_loss: float | None
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
    targets: Sequence[float] = (),
    baselines: Sequence[Method] = BASELINES,
    with_controls: bool = False,
) -> TaskStudy:
    """Prune `task` out of the run at `path` to `config.target` and to each of `targets`."""
    bench = Workbench.open(path)
    asked, means = bench.task(task), bench.means_for(config)
    facts = {
        "run": run_name(path),
        "task": task,
        "seed": seed,
        "validation_loss": bench.validation_loss,
        "search": config.key(),
    }
    with frozen(bench.model) as model:
        probe = probe_of(model, asked, means, config, seed)
        frozen_alone = probe_of(model, asked, means, replace(config, ablation="mean"), seed)
        whole = probe(everything(model))
        if whole.loss > config.target:
            return TaskStudy(**facts, refused=f"the whole model's loss is {whole.loss:.3f}")

        def rank(method: Method) -> dict[str, Tensor]:
            return RANKERS[method](model, asked, means, config, seed=seed)

        scores = rank(config.method)
        circuits = {
            f"{target:g}": cut(model, asked, means, scores, replace(config, target=target), seed)
            for target in sorted({*targets, config.target})
            if target >= whole.loss
        }
        curves = {config.method: curve(model, scores, frozen_alone, CURVE)}
        needed: dict[str, int | None] = {}
        for method in baselines:
            scores = rank(method)
            found = discretize({site: s[0] for site, s in scores.items()}, probe, start=256)
            needed[method] = count_edges(model, found.kept) if found.reached else None
            curves[method] = curve(model, scores, frozen_alone, CURVE)
    if with_controls:
        curves |= controls(bench.model, asked, means, bench.train.tokens, config, seed=seed)
    return TaskStudy(**facts, circuits=circuits, baselines=needed, curves=curves)


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
    """All `tasks` in all `runs`, in `jobs` processes; what is in `out` already is not done again.

    Raises ValueError if what is there is of another search.
    """
    out, config = Path(out), config or PruneConfig()
    todo, asked = {}, set(controls_for)
    for seed in seeds:
        for task in tasks or TASKS:
            for run in map(Path, runs):
                file = out / run_name(run) / f"{task}-{seed}.json"
                if not file.exists():
                    todo[file] = partial(
                        study_task, run, task, seed, config,
                        targets=targets, baselines=baselines, with_controls=task in asked,
                    )  # fmt: skip
                elif TaskStudy.model_validate_json(file.read_text()).search != config.key():
                    raise ValueError(f"{file} is of another search: choose another directory")
    with StepProgress("study", max(1, len(todo))) as bar:
        threads = max(1, (os.cpu_count() or 1) // max(1, jobs))
        for file, result in in_processes(todo, jobs, threads=threads):
            write_atomic(file, result.model_dump_json() + "\n")
            bar.step()
            console.print(
                f"{result.run} {result.task}: {result.refused or result.edges(config.target)}",
                highlight=False,
            )
    return load_study(out)


def load_study(out: str | Path) -> list[TaskStudy]:
    """Every result in `out`."""
    return [TaskStudy.model_validate_json(file.read_text()) for file in sorted(Path(out).glob("*/*.json"))]


def ratio(
    results: Sequence[TaskStudy], large: str, small: str, target: float = 0.15, *, draws: int = 10_000
) -> dict[str, float]:
    """The geometric mean over tasks (and seeds) of edges in the run `large` over edges in `small`, at one target.

    Only tasks that both reach count; `low` and `high` are a 95% bootstrap interval over tasks.
    """
    edges = {(r.run, r.task, r.seed): r.edges(target) for r in results}
    logs: dict[str, list[float]] = {}
    for (run, task, seed), n in edges.items():
        m = edges.get((small, task, seed))
        if run == large and n is not None and m is not None:
            logs.setdefault(task, []).append(float(np.log((n + 1) / (m + 1))))
    if not logs:
        return {"ratio": float("nan"), "low": float("nan"), "high": float("nan"), "tasks": 0}
    means = [fmean(values) for values in logs.values()]
    low, high = interval(means, fmean, draws)
    return {
        "ratio": float(np.exp(fmean(means))),
        "low": float(np.exp(low)),
        "high": float(np.exp(high)),
        "tasks": len(means),
    }


def interval(
    values: Sequence[float], statistic: Callable[[Sequence[float]], float], draws: int = 10_000
) -> tuple[float, float]:
    """A 95% bootstrap interval of `statistic`."""
    rng = random.Random(0)
    found = sorted(statistic(rng.choices(values, k=len(values))) for _ in range(draws))
    return found[int(0.025 * draws)], found[int(0.975 * draws)]


def table(results: Sequence[TaskStudy], target: float = 0.15) -> Table:
    """Edges by task and run, and what the circuits were measured to be."""
    out = Table(
        "task",
        "run",
        "edges",
        "nodes",
        "loss",
        "held out",
        "ablated",
        "half ablated",
        "other prompt's",
        "attribution",
    )
    for r in sorted(results, key=lambda r: (r.task, r.run, r.seed)):
        circuit = r.circuits.get(f"{target:g}")
        if circuit is None or r.refused:
            out.add_row(r.task, r.run, r.refused or f"the whole model's loss is above {target:g}")
            continue
        m = circuit.metrics
        numbers = (
            "full_task_loss",
            "calibrated_task_loss",
            "ablated_task_loss",
            "partial_task_loss",
            "resample_task_loss",
        )
        edges = str(m["edges"]) if m["reached"] else str(m["verdict"])
        out.add_row(
            r.task,
            r.run,
            edges,
            str(m["nodes"]),
            *(f"{m[k]:.3f}" for k in numbers),
            str(r.baselines.get("attribution", "")),
        )
    return out
