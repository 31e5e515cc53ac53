"""The demo: a weight-sparse model and its dense twin, one task's circuit in each, and a page that shows them."""

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from pellucid.core.checkpoint import content_hash, load_metadata, load_model, save_model
from pellucid.core.files import write_atomic
from pellucid.lab.config import PruneConfig
from pellucid.recipes.recipe import Prepared, Recipe, prepare_data, run
from pellucid.recipes.registry import demo_dense, demo_sparse
from pellucid.recipes.workbench import Workbench
from pellucid.sparse.projection import Projection, SparsityConfig
from pellucid.training.loop import evaluate
from pellucid.training.progress import StepProgress, console, results
from pellucid.viewer.compare import compare
from pellucid.viewer.export import write_report
from pellucid.viewer.schema import ModelView, Report

TASK = "single_double_quote"
SEARCH = PruneConfig(target=0.1, steps=250, pairs=48, k_coefs=(1e-3, 3e-3))
"""The same for every model. Its target is below 0.15, so that the loss on held-out pairs is too."""
SUMMARY = {
    "val_loss": "validation_loss",
    **{
        key: key
        for key in (
            "nonzero_fraction", "parameters", "nonzeros", "dense_apart_parameters", "tokens", "full_task_loss",
            "circuit_task_loss", "calibrated_task_loss", "nodes", "edges", "token_edges", "ablated_task_loss",
            "random_ablated_task_loss", "reached",
        )
    },
}  # fmt: skip


def demo(out: str | Path, *, seed: int = 0, smoke: bool = False, device: str = "auto") -> dict[str, Any]:
    """Train, prune and report into the directory `out`; returns what is written to `summary.json`.

    Parts that are there already, of the same recipe, are not made again. `smoke` runs every part for a few steps only:
    it shows that all works, and its numbers mean nothing.
    """
    out, began = Path(out), time.perf_counter()
    sparse, dense = (sized(recipe, seed, smoke) for recipe in (demo_sparse(), demo_dense()))
    search = (
        replace(SEARCH, target=10.0, hopeless=10.0, steps=4, pairs=4, pool=16, measure=16)
        if smoke
        else SEARCH
    )
    prepared = prepare(sparse)
    for recipe, name in ((sparse, "sparse"), (dense, "dense")):
        run(recipe, out / name, device=device, resume=True, prepared=prepared)
    magnitude_prune(out / "dense", out / "magnitude", sparse, prepared, device)
    views = [prune_run(out / name, name, search, seed, device) for name in ("sparse", "dense", "magnitude")]
    summary = {
        **{
            view.name: {"task": TASK, **{key: view.metrics.get(source) for key, source in SUMMARY.items()},
                        "validation": load_metadata(out / view.name)["validation"]}
            for view in views
        },
        "seed": seed,
        "smoke": smoke,
        "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip
    report = make_report(views, seed, smoke)
    write_report(report, out / "report.html")
    write_atomic(out / "summary.json", json.dumps(summary, indent=1) + "\n")
    show(report)
    console.print(f"{summary['seconds']:.0f} s. The circuits, drawn: [bold]{out / 'report.html'}[/bold]")
    return summary


def sized(recipe: Recipe, seed: int, smoke: bool) -> Recipe:
    """The recipe with the demo's seed, and a few steps only where it is a smoke run."""
    train = replace(recipe.train, seed=seed)
    if not smoke:
        return replace(recipe, train=train)
    return replace(
        recipe,
        train=replace(train, steps=6, batch_size=4, log_every=2, validation_tokens=2048),
        data=replace(recipe.data, tokenizer_characters=200_000, tokens=4096),
    )


def prepare(recipe: Recipe) -> Prepared:
    """The demo's data, with a bar while it is made."""
    total = recipe.data.tokens or recipe.train.tokens
    with StepProgress("data, in tokens", total) as bar:
        return prepare_data(recipe, progress=lambda done, _: bar.reach(done))


def magnitude_prune(source: Path, out: Path, sparse: Recipe, prepared: Prepared, device: str) -> None:
    """The model in `source` with all but its largest weights zeroed, as few as `sparse` keeps, untrained, in `out`."""
    model, metadata = load_model(source, device=device), load_metadata(source)
    assert isinstance(sparse.sparsity, SparsityConfig)
    Projection(model, sparse.sparsity).apply(progress=1.0)
    try:
        if content_hash(load_model(out, device=device)) == content_hash(model):
            return
    except ValueError:
        pass
    metadata["validation"] = {
        name: evaluate(model, shard.tokens, sparse.train) for name, shard in prepared.validation.items()
    }
    metadata["recipe"]["name"] = f"{metadata['recipe']['name']}, magnitude-pruned"
    save_model(model, out / "checkpoint", tokenizer=prepared.tokenizer, metadata=metadata)


def prune_run(path: Path, name: str, search: PruneConfig, seed: int, device: str) -> ModelView:
    """The run at `path` pruned for the demo's task, as a view."""
    bench = Workbench.open(path, device=device)
    task = bench.task(TASK)
    with StepProgress(f"prune {name}", search.steps) as bar:
        circuit = bench.prune(task, search, seed=seed, progress=bar.step)
    return bench.view(name, task, circuit)


def make_report(views: Sequence[ModelView], seed: int, smoke: bool) -> Report:
    """The demo's page."""
    by_name = {view.name: view for view in views}
    sparse, dense = by_name["sparse"].metrics, by_name["dense"].metrics
    headline = (
        f"The weight-sparse model closes strings with the right quote through {sparse['edges']:,} edges; "
        f"its dense twin needs {dense['edges']:,}."
    )
    necessity = (
        f"Freezing the sparse model's circuit takes its task loss from {sparse['full_task_loss']:.3f} to "
        f"{sparse['ablated_task_loss']:.3f} nats (chance: 0.693); freezing as many random other nodes leaves it at "
        f"{sparse['random_ablated_task_loss']:.3f}."
    )
    summary = [headline, necessity]
    if not by_name["sparse"].circuit or not by_name["dense"].circuit:
        summary = ["Not every model has a circuit that meets the target; the table says which."]
    if smoke:
        summary = [
            "A smoke run: every part ran for a few steps only, and the numbers mean nothing.",
            *summary,
        ]
    return compare(
        views,
        task=TASK,
        title="How a transformer closes a string",
        summary=summary,
        reproduce=(f"pellucid demo --out runs/demo --seed {seed}" + (" --smoke" if smoke else ""),),
    )


def show(report: Report) -> None:
    """The report's table, on the terminal."""
    table = Table(title=escape(report.title), caption=escape("; ".join(report.summary[:1])))
    table.add_column("")
    for column in report.columns:
        table.add_column(escape(column), justify="right")
    for row in report.rows:
        cells = [f"[bold]{v}[/bold]" if i == row.best else v for i, v in enumerate(map(escape, row.values))]
        table.add_row(escape(row.label), *cells)
    results.print(table)
