"""What a study adds up to: tables of circuits, how many times larger one run's are than another's, controls, stability."""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby, permutations
from statistics import fmean
from typing import NamedTuple

import torch
from rich.table import Table

from pellucid.bench.metrics import bootstrap
from pellucid.core.circuit import Circuit
from pellucid.lab.compare import jaccard
from pellucid.lab.controls import loss_at
from pellucid.recipes.study import CONTROLS, TaskStudy

LOW = 0.5
"""A control's task loss, in nats, below which a circuit of that size means little."""


class Ratio(NamedTuple):
    """A geometric mean of ratios of edges over tasks, with a 95% bootstrap interval over tasks; NaN of none."""

    times: float
    low: float
    high: float
    tasks: int


def ratio(results: Sequence[TaskStudy], large: str, small: str, target: float = 0.15) -> Ratio:
    """Edges in the run `large` over edges in `small`. Only tasks that both reach at that target count."""
    edges = {(r.run, r.task, r.seed): r.edges(target) for r in results}
    pairs: dict[str, list[tuple[int, int]]] = {}
    for (run, task, seed), n in edges.items():
        m = edges.get((small, task, seed))
        if run == large and n is not None and m is not None:
            pairs.setdefault(task, []).append((n, m))
    return mean_ratio(pairs)


def baseline_ratio(results: Sequence[TaskStudy], run: str, method: str, target: float = 0.15) -> Ratio:
    """Edges that a baseline needs over those of the circuits, in the same run."""
    pairs: dict[str, list[tuple[int, int]]] = {}
    for r in results:
        n, m = r.baselines.get(method), r.edges(target)
        if r.run == run and n is not None and m is not None:
            pairs.setdefault(r.task, []).append((n, m))
    return mean_ratio(pairs)


def mean_ratio(pairs: Mapping[str, Sequence[tuple[int, int]]]) -> Ratio:
    """The geometric mean over tasks (and over the seeds of each) of n + 1 over m + 1 edges."""
    logs = [fmean(math.log((n + 1) / (m + 1)) for n, m in of) for of in pairs.values()]
    if not logs:
        return Ratio(math.nan, math.nan, math.nan, 0)
    low, high = bootstrap(logs, draws=10_000)
    return Ratio(math.exp(fmean(logs)), math.exp(low), math.exp(high), len(logs))


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


def stability(results: Sequence[TaskStudy], target: float = 0.15) -> Table:
    """The mean pairwise Jaccard index of the nodes of circuits of different seeds, for each task and run that has several."""
    out = Table("task", "run", "seeds", "nodes shared over seeds (Jaccard)")
    cells = sorted((r for r in results if r.edges(target) is not None), key=lambda r: (r.task, r.run, r.seed))
    for (task, run), group in groupby(cells, key=lambda r: (r.task, r.run)):
        found = list(group)
        if len(found) > 1:
            seeds = ", ".join(str(r.seed) for r in found)
            out.add_row(task, run, seeds, f"{shared_nodes([r.circuits[f'{target:g}'] for r in found]):.2f}")
    return out


def shared_nodes(circuits: Sequence[Circuit]) -> float:
    """The mean pairwise Jaccard index of circuits' nodes."""
    nodes = [set(circuit.nodes) for circuit in circuits]
    union = list(set().union(*nodes))
    return jaccard([{"nodes": torch.tensor([n in own for n in union], dtype=torch.bool)} for own in nodes])


def comparisons(results: Sequence[TaskStudy], target: float = 0.15) -> Table:
    """Whose circuits are how many times larger: each run over each with smaller ones, and baselines over the search."""
    out = Table("edges of", "over those of")
    for column in ("times", "95% interval", "tasks"):
        out.add_column(column, justify="right")
    runs = sorted({r.run for r in results})
    found = [(large, small, ratio(results, large, small, target)) for large, small in permutations(runs, 2)]
    found = [(large, small, r) for large, small, r in found if r.times >= 1]
    for run in runs:
        for method in sorted({m for r in results if r.run == run for m in r.baselines}):
            found.append(
                (f"{run}, {method}", f"{run}, as searched", baseline_ratio(results, run, method, target))
            )
    for large, small, r in found:
        if r.tasks:
            out.add_row(large, small, f"{r.times:.1f}", f"{r.low:.1f} to {r.high:.1f}", str(r.tasks))
    return out


def controls_table(results: Sequence[TaskStudy], target: float = 0.15) -> Table:
    """The least loss that the same search reaches on each control within the circuit's edges, marked where it is low."""
    names = sorted(CONTROLS)
    out = Table("task", "run", "seed")
    for column in ("edges", *names):
        out.add_column(column, justify="right")
    for r in sorted(results, key=lambda r: (r.task, r.run, r.seed)):
        edges = r.edges(target)
        if edges is not None and r.curves.keys() >= CONTROLS:
            losses = [loss_at(r.curves[name], edges) for name in names]
            cells = [f"{loss:.3f}" if loss >= LOW else f"[bold red]{loss:.3f}![/]" for loss in losses]
            out.add_row(r.task, r.run, str(r.seed), f"{edges:,}", *cells)
    out.caption = f"least loss within the circuit's edges; ! below {LOW:g}: as small a circuit is found where there is nothing to find"
    return out


def report(results: Sequence[TaskStudy], target: float = 0.15) -> list[Table]:
    """All tables that have rows."""
    made = [make(results, target) for make in (table, comparisons, controls_table, stability)]
    return [t for t in made if t.row_count]
