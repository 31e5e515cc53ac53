"""Commands that look for circuits in a model."""

import shlex
from dataclasses import dataclass, field
from pathlib import Path

import tyro
from rich.table import Table

from pellucid.core.circuit import Circuit
from pellucid.lab.ablate import last_logits
from pellucid.lab.config import PruneConfig
from pellucid.recipes.demo import demo, show
from pellucid.recipes.tune import CENTRE, tune
from pellucid.recipes.workbench import Workbench, load_view
from pellucid.tasks import TASKS
from pellucid.tasks.task import Task, accuracy
from pellucid.training.progress import StepProgress, console, results
from pellucid.viewer.compare import compare
from pellucid.viewer.export import write_report


@dataclass
class Prune:
    """Find the smallest circuit of a trained model that still does a task. Circuits of earlier searches stay beside it."""

    checkpoint: tyro.conf.Positional[Path]
    """Directory of a run."""

    task: str
    """Which task: see `pellucid tasks`."""

    search: PruneConfig = field(default_factory=PruneConfig)
    """The search."""

    seed: int = 0
    """Of the search and of the task's examples."""

    controls: bool = False
    """Search a shuffled and a nonsense version of the task and an untrained model too: four times the work."""

    device: str = "auto"
    """auto, cpu, cuda, ..."""

    def __call__(self) -> None:
        bench = Workbench.open(self.checkpoint, device=self.device)
        task = bench.task(self.task)
        with StepProgress(f"prune {self.task}", self.search.steps) as bar:
            circuit = bench.prune(task, self.search, seed=self.seed, progress=bar.step)
        if self.controls and circuit.metrics["reached"] and circuit.metrics["searched"]:
            with StepProgress("controls", 3 * self.search.steps) as bar:
                bench.controls(task, self.search, seed=self.seed, progress=bar.step)
        show_circuit(bench, task, circuit)


@dataclass
class Tune:
    """Prune for a task with many settings of the search, and keep the smallest circuit. A stopped one goes on."""

    checkpoint: tyro.conf.Positional[Path]
    """Directory of a run."""

    task: str
    """Which task: see `pellucid tasks`."""

    trials: int = 32
    """How many settings are tried, with those that were before."""

    jobs: int = 1
    """How many are tried at once, each in a process of its own."""

    storage: str | None = None
    """Where the study lies, for several processes or machines: a file on a shared disk, or the URL of a database."""

    search: PruneConfig = CENTRE
    """The search that is tried first, in the middle of the others."""

    seed: int = 0
    """Of the settings, the searches and the task's examples."""

    device: str = "auto"
    """auto, cpu, cuda, ..."""

    def __call__(self) -> None:
        circuit = tune(
            self.checkpoint,
            self.task,
            config=self.search,
            trials=self.trials,
            jobs=self.jobs,
            storage=self.storage,
            seed=self.seed,
            device=self.device,
        )
        bench = Workbench.open(self.checkpoint, device=self.device)
        show_circuit(bench, bench.task(self.task), circuit)
        print(f"its search: {circuit.metrics['search']}")


def show_circuit(bench: Workbench, task: Task, circuit: Circuit) -> None:
    """Print the numbers of a circuit that was found, and where it is; its view is written beside it.

    Raises ValueError where nothing was searched because the whole model misses the target.
    """
    if (said := str(circuit.metrics["verdict"])).startswith("the whole model's loss"):
        raise ValueError(f"{said}: choose a larger --search.target")
    view = bench.view(bench.path.name, task, circuit)
    show(
        compare(
            [view],
            task=task.name,
            title=f"{task.name} in {bench.path}",
            summary=[view.note or ""],
            reproduce=[],
        )
    )
    if circuit.metrics["searched"]:
        print(bench.path / "circuits" / task.name / "circuit.json")


@dataclass
class Tasks:
    """List the tasks; with a model, its loss and accuracy on each."""

    model: Path | None = None
    """Directory of a run."""

    pairs: int = 256
    """Held-out pairs that are measured."""

    device: str = "auto"
    """auto, cpu, cuda, ..."""

    def __call__(self) -> None:
        table = Table("task", "question")
        bench = None if self.model is None else Workbench.open(self.model, device=self.device)
        if bench is not None:
            table.add_column("loss (chance 0.693)", justify="right")
            table.add_column("accuracy", justify="right")
        for name, question in TASKS.items():
            table.add_row(name, question.description, *(measured(bench, name, self.pairs) if bench else ()))
        results.print(table)


def measured(bench: Workbench, name: str, pairs: int) -> tuple[str, str]:
    """A model's loss and accuracy on a task, or why it cannot be asked."""
    try:
        task = bench.task(name)
        batch = task.pairs(pairs, seed=0, split="test").to(bench.model.device)
    except ValueError as error:
        return str(error), ""
    logits = last_logits(bench.model, batch)
    loss = task.metric(logits, batch.last()).mean().item()
    return f"{loss:.3f}", f"{100 * accuracy(logits, batch.last()).mean().item():.1f}%"


@dataclass
class Study:
    """Prune every task out of several models, with baselines and controls; goes on where it stopped, adds what is missing."""

    runs: tyro.conf.Positional[list[str]]
    """Directories of runs, or models in the box."""

    out: Path
    """Directory of the results, one file for each model, task and seed, and of the figures."""

    tasks: list[str] = field(default_factory=lambda: list(TASKS))
    """Which tasks."""

    search: PruneConfig = field(default_factory=PruneConfig)
    """The search, the same for every model."""

    seeds: int = 1
    """Searches for each task, on its own examples each."""

    targets: list[float] = field(default_factory=list)
    """More target losses, for more circuits from the same masks."""

    controls: list[str] = field(default_factory=list)
    """Tasks for which the controls are searched too."""

    jobs: int = 1
    """Searches at a time, in processes of their own."""

    def __call__(self) -> None:
        from pellucid.recipes.study import study  # what --help need not wait for
        from pellucid.recipes.study_report import report

        found = study(
            self.runs,
            self.out,
            tasks=self.tasks,
            config=self.search,
            seeds=range(self.seeds),
            controls_for=self.controls,
            targets=self.targets,
            jobs=self.jobs,
        )
        for table in report(found, self.search.target):
            results.print(table)
        try:
            from pellucid.recipes.figures import edges_figure, necessity_figure, size_figure

            for figure in (size_figure, edges_figure, necessity_figure):
                name = figure.__name__.removesuffix("_figure")
                print(figure(found, self.out / f"{name}.svg"))
        except ImportError as error:
            console.print(f"no pictures: {error}", style="yellow", markup=False)


@dataclass
class Report:
    """Draw pruned circuits of one task as one self-contained HTML page."""

    circuits: tyro.conf.Positional[list[Path]]
    """Runs that were pruned, folders of earlier searches under their circuits/TASK/, or view.json files."""

    out: Path
    """The page."""

    def __call__(self) -> None:
        views = [load_view(path) for path in self.circuits]
        names = [view.name for view in views]
        if len(set(names)) < len(names):
            views = [
                view.model_copy(update={"name": str(path)})
                for view, path in zip(views, self.circuits, strict=True)
            ]
        tasks = {str(view.metrics["task"]) for view in views}
        if len(tasks) > 1:
            raise ValueError(f"one page shows one task, got {', '.join(sorted(tasks))}")
        (task,) = tasks
        command = shlex.join(["pellucid", "report", *map(str, self.circuits), "--out", str(self.out)])
        page = compare(views, task=task, title=f"Circuits of {task}", summary=[], reproduce=[command])
        print(write_report(page, self.out))


@dataclass
class Demo:
    """Train a weight-sparse model and its dense twin, prune a circuit out of both, and draw them."""

    out: Path = Path("runs/demo")
    """Directory for everything: models, circuits, summary.json, report.html."""

    seed: int = 0
    """Of weights, data and search."""

    smoke: bool = False
    """Run every part for a few steps only: the numbers mean nothing."""

    device: str = "auto"
    """auto, cpu, cuda, ..."""

    def __call__(self) -> None:
        demo(self.out, seed=self.seed, smoke=self.smoke, device=self.device)
