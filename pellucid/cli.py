"""The command line: `pellucid train | plan | prune | tune | study | tasks | report | demo | programs | compile | eval`."""

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.markup import escape
from rich.table import Table

from pellucid.core.circuit import Circuit
from pellucid.core.errors import unknown
from pellucid.core.files import write_atomic
from pellucid.lab.ablate import last_logits
from pellucid.lab.config import PruneConfig
from pellucid.lab.controls import loss_at
from pellucid.recipes.demo import demo, show
from pellucid.recipes.perplexity import TOKENS, measure, perplexity_table
from pellucid.recipes.recipe import Recipe, run
from pellucid.recipes.registry import RECIPES, get_recipe
from pellucid.recipes.tune import CENTRE, tune
from pellucid.recipes.workbench import Workbench, load_view
from pellucid.tasks import TASKS
from pellucid.tasks.task import Task, accuracy
from pellucid.training.loop import Interrupted
from pellucid.training.progress import StepProgress, console, results
from pellucid.viewer.compare import compare
from pellucid.viewer.export import write_report


@dataclass
class Train:
    """Train a recipe. Every field of it can be changed: --recipe.train.steps 100."""

    recipe: Recipe
    """What is trained, and how."""

    out: Path
    """Directory of the run: checkpoint/ and log.jsonl."""

    resume: bool = False
    """Go on where an interrupted run in OUT stood."""

    device: str = "auto"
    """auto, cpu, cuda, ..."""

    tensorboard: bool = False
    """Log for TensorBoard too."""

    def __call__(self) -> None:
        trained = run(
            self.recipe, self.out, device=self.device, resume=self.resume, tensorboard=self.tensorboard
        )
        for corpus, loss in trained.validation.items():
            print(f"validation loss on {corpus}: {loss:.4f} nats a token")
        print(f"{trained.tokens:,} tokens in {trained.seconds:.0f} s: {self.out / 'checkpoint'}")


@dataclass
class Plan:
    """Say what a run would take: parameters, memory for each device, and work for each token, by part. Nothing is trained."""

    recipe: Recipe
    """What would be trained, and how."""

    devices: int = 1
    """How many would share it (--recipe.train.parallel fsdp: the weights too)."""

    def __call__(self) -> None:
        from pellucid.recipes.plan import plan

        results.print(plan(self.recipe, self.devices).table())


@dataclass
class Prune:
    """Find the smallest circuit of a trained model that still does a task."""

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
        if (said := str(circuit.metrics["verdict"])).startswith("the whole model's loss"):
            raise ValueError(f"{said}: choose a larger --search.target")
        show_circuit(bench, task, circuit)
        if self.controls:
            with StepProgress("controls", 3 * self.search.steps) as bar:
                found = bench.controls(task, self.search, seed=self.seed, progress=bar.step)
            edges = int(circuit.metrics["edges"] or 0)
            table = Table(
                "control", f"least loss at {edges} edges or fewer (the task: {self.search.target:g})"
            )
            for name, points in found.items():
                table.add_row(name, f"{loss_at(points, edges):.3f}")
            results.print(table)
        print(bench.path / "circuits" / self.task / "circuit.json")


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
        print(bench.path / "circuits" / self.task / "circuit.json")


def show_circuit(bench: Workbench, task: Task, circuit: Circuit) -> None:
    """Print the numbers of a circuit that was found; its view is written beside it."""
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
    except ValueError as error:
        return str(error), ""
    batch = task.pairs(pairs, seed=0, split="test").to(bench.model.device)
    logits = last_logits(bench.model, batch)
    loss = task.metric(logits, batch.last()).mean().item()
    return f"{loss:.3f}", f"{100 * accuracy(logits, batch.last()).mean().item():.1f}%"


@dataclass
class Study:
    """Prune every task out of several models, with baselines and controls; goes on where it stopped."""

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
        from pellucid.recipes.study import study, table  # what --help need not wait for

        for name in {*self.tasks, *self.controls} - set(TASKS):
            raise unknown("task", name, TASKS)
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
        results.print(table(found, self.search.target))
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
    """Runs that were pruned, or view.json files."""

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


@dataclass
class Programs:
    """List the programs that can be compiled."""

    def __call__(self) -> None:
        from pellucid.recipes.compile import program_table  # what --help need not wait for

        results.print(program_table())


@dataclass
class Compile:
    """Compile a program of the library to a transformer, and check it against its interpreter."""

    program: tyro.conf.Suppress[str]
    """Which program."""

    max_len: int
    """The most tokens in a sequence."""

    causal: bool
    """Whether positions see only those at or before them."""

    vocab: str | None = None
    """The tokens, separated by spaces, instead of the library's."""

    schedule: Literal["asap", "narrow"] = "asap"
    """narrow: move blocks later where that narrows the residual stream."""

    reuse: bool = False
    """Give the directions of dead variables to later ones."""

    dtype: Literal["float32", "float64"] = "float32"
    """Of the weights."""

    out: Path | None = None
    """Directory for the model and a picture of its residual stream."""

    trace: str | None = None
    """A sequence to show the residual stream on, separated by spaces: "3 1 2"."""

    def __call__(self) -> None:
        from pellucid.recipes.compile import compile_named  # what --help need not wait for

        options = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "program"}
        if not compile_named(self.program, results, **options):
            raise SystemExit(1)


@dataclass
class Eval:
    """Measure a model: its perplexity on held-out text, or tasks of the LM Evaluation Harness."""

    run: tyro.conf.Positional[Path]
    """Directory of a run, or pellucid:NAME."""

    tasks: list[str] = field(default_factory=list)
    """Tasks by the harness' names, or by those in INCLUDE-PATH. Needs the extra `eval`."""

    perplexity: list[str] | None = None
    """Text files, or corpora, of which held-out text is taken. Without any: the run's own corpora."""

    include_path: Path | None = None
    """Directory of task files in the harness' format."""

    limit: int | None = None
    """The most items of each task."""

    num_fewshot: int | None = None
    """Worked examples before each item; as the task says if left out."""

    tokens: int = TOKENS
    """About how many tokens of each corpus perplexity is over, in whole documents."""

    batch_size: int = 16
    """Sequences at once."""

    out: Path | None = None
    """File for the results, as JSON."""

    device: str = "auto"
    """auto, cpu, cuda, ..."""

    def __call__(self) -> None:
        found: dict[str, Any] = {"model": str(self.run)}
        how: Any = {"batch_size": self.batch_size, "device": self.device}
        if self.tasks:
            from pellucid.interop.lm_eval import evaluate, task_table  # slow to import, and an extra

            found |= evaluate(
                self.run,
                self.tasks,
                limit=self.limit,
                num_fewshot=self.num_fewshot,
                include_path=self.include_path,
                **how,
            )
            results.print(task_table(found))
        if self.perplexity is not None or not self.tasks:
            measured = measure(self.run, self.perplexity or (), tokens=self.tokens, **how)
            found["perplexity"] = {source: p.as_dict() for source, p in measured.items()}
            results.print(perplexity_table(measured))
        if self.out is not None:
            write_atomic(self.out, json.dumps(found, indent=1) + "\n")
            print(self.out)


COMMANDS: dict[str, Callable[..., Any]] = {
    "prune": Prune,
    "tune": Tune,
    "tasks": Tasks,
    "study": Study,
    "report": Report,
    "demo": Demo,
    "eval": Eval,
    "programs": Programs,
}
USAGE = """usage: pellucid COMMAND ...

Transformers whose mechanisms can be read.

  train RECIPE        train a model (recipes: {recipes})
  plan RECIPE         say what a run would take, without training
  prune RUN           find the smallest circuit that does a task
  tune RUN            find a smaller one, with many settings of the search
  study RUN ...       prune every task out of several models
  tasks               list the tasks, or measure a model on them
  eval RUN            measure perplexity, or tasks of the LM Evaluation Harness
  report RUN ...      draw pruned circuits as one HTML page
  demo                all of it, on a small model: six to ten minutes on two CPU cores
  programs            list the programs that can be compiled
  compile PROGRAM     compile a program to a transformer, and check it

pellucid COMMAND --help says more."""


def recipe_table() -> Table:
    """The recipes, the ablations apart."""
    table = Table("recipe", "what it is")
    for name, make in sorted(RECIPES.items(), key=lambda item: item[0].startswith("ablate-")):
        if name == "ablate-base":
            table.add_section()
        table.add_row(name, (make.__doc__ or "").splitlines()[0])
    return table


def parse(args: Sequence[str]) -> Callable[[], None]:
    """The command that `args` name, ready to be called. Raises `ValueError` for an unknown command or recipe."""
    command, *rest = args
    if command in ("train", "plan"):
        if not rest or rest[0] in ("-h", "--help"):
            print(f"usage: pellucid {command} RECIPE {'--out DIR ' * (command == 'train')}...\n")
            results.print(recipe_table())
            raise SystemExit(0)
        recipe = get_recipe(rest[0])
        default = Train(recipe=recipe, out=tyro.MISSING) if command == "train" else Plan(recipe=recipe)
        return tyro.cli(
            type(default),
            default=default,
            args=rest[1:],
            prog=f"pellucid {command} {rest[0]}",
            config=(tyro.conf.AvoidSubcommands,),
        )
    if command == "compile":
        from pellucid.recipes.compile import get_program, program_table

        if not rest or rest[0] in ("-h", "--help"):
            print("usage: pellucid compile PROGRAM ...")
            results.print(program_table())
            raise SystemExit(0)
        case = get_program(rest[0])
        return tyro.cli(
            Compile,
            default=Compile(program=rest[0], max_len=case.max_len, causal=case.causal),
            args=rest[1:],
            prog=f"pellucid compile {rest[0]}",
            description=f"{Compile.__doc__}\n\n{rest[0]}: {case.meaning}",
        )
    if command not in COMMANDS:
        raise unknown("command", command, ["train", "plan", "compile", *COMMANDS])
    return tyro.cli(
        COMMANDS[command], args=rest, prog=f"pellucid {command}", description=COMMANDS[command].__doc__
    )


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line. Errors of the user's are one line, without a traceback."""
    args = list(sys.argv[1:] if args is None else args)
    if not args or args[0] in ("-h", "--help"):
        names = [name for name in RECIPES if not name.startswith(("ablate-", "parity-"))]
        print(USAGE.format(recipes=", ".join((*names, "parity-...", "ablate-..."))))
        return
    try:
        parse(args)()
    except BrokenPipeError:
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except (ValueError, OSError, ImportError) as error:
        console.print(f"[bold red]error:[/bold red] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise SystemExit(2) from None
    except Interrupted as stop:
        console.print(str(stop), highlight=False, markup=False)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
