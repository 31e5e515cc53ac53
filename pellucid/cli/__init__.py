"""The command line: one dataclass a command, each called when its fields are parsed."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import tyro
from rich.markup import escape
from rich.table import Table

from pellucid.cli.circuits import Demo, Prune, Report, Study, Tasks, Tune
from pellucid.cli.compiled import Bench, Compile, Programs
from pellucid.cli.training import Eval, Plan, Train
from pellucid.core.errors import unknown
from pellucid.recipes.registry import RECIPES, get_recipe
from pellucid.training.loop import Interrupted
from pellucid.training.progress import console, results

COMMANDS: dict[str, Callable[..., Any]] = {
    "prune": Prune,
    "tune": Tune,
    "tasks": Tasks,
    "study": Study,
    "report": Report,
    "demo": Demo,
    "eval": Eval,
    "programs": Programs,
    "bench": Bench,
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
  compress PROGRAM    narrow a compiled model, and say whether its ground truth still holds
  bench               score methods of interpretation on compiled programs

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
    if command == "compress":
        from pellucid.recipes.compress import Compress  # what --help need not wait for

        return tyro.cli(Compress, args=rest, prog="pellucid compress", description=Compress.__doc__)
    if command not in COMMANDS:
        raise unknown("command", command, ["train", "plan", "compile", "compress", *COMMANDS])
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
