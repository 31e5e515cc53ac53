"""What the study measures beside circuits: how far they can be binarised (Figure 34), kurtosis (Figure 10), and
whether two models find the same tokens hard (Figure 33).

As a program: `python -m pellucid.recipes.measures binarize RUN --study runs/study`,
`python -m pellucid.recipes.measures kurtosis RUN ...` and `python -m pellucid.recipes.measures losses RUN RUN ...`.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

import torch
import tyro
from pydantic import TypeAdapter
from rich.table import Table
from torch import Tensor

from pellucid.core.circuit import Frozen, kept_masks
from pellucid.core.files import write_atomic
from pellucid.core.taps import Recorder, chain
from pellucid.core.transformer import Transformer
from pellucid.lab.ablate import Kept, keep_only
from pellucid.lab.binarize import (
    BinarizeConfig,
    Binarized,
    binarize,
    measured,
    steps_of,
)
from pellucid.lab.compare import loss_correlation
from pellucid.lab.config import PruneConfig
from pellucid.lab.examples import fitted, stream
from pellucid.lab.prune import frozen
from pellucid.lab.quality import Moments
from pellucid.recipes.study import load_study, run_name
from pellucid.recipes.workbench import Workbench
from pellucid.tasks.task import Task
from pellucid.training.optim import kurtosis
from pellucid.training.progress import StepProgress, console, results

SHARES = tuple(i / 10 for i in range(1, 11))
"""Shares of a circuit's nodes that are binarised."""


class BinaryTask(Frozen):
    """A circuit of a study, binarised."""

    run: str
    task: str
    seed: int
    target: float
    """The task loss that the circuit was pruned to."""
    binarized: Binarized
    """All nodes, trained."""
    shares: tuple[tuple[float, float], ...]
    """(share of nodes, recalibrated task loss) with the nodes that two levels explain best binarised, untrained."""

    @property
    def binary_share(self) -> float:
        """The largest of these shares that leaves the loss within the target; 0 if none does."""
        return max((share for share, loss in self.shares if loss <= self.target), default=0.0)


def binarize_study(
    runs: Sequence[str | Path],
    study: str | Path,
    out: str | Path,
    *,
    target: float = 0.15,
    config: BinarizeConfig | None = None,
) -> list[BinaryTask]:
    """Binarise each circuit that `study` found in `runs` at `target`; what is in `out` already is not done again.

    Raises ValueError where a run is no longer the model that was studied, or `out` is of another config.
    """
    out, config, named = Path(out), config or BinarizeConfig(), {run_name(Path(r)): Path(r) for r in runs}
    todo = [
        r
        for r in load_study(study)
        if r.run in named and r.edges(target) is not None and r.circuits[f"{target:g}"].nodes
    ]
    benches: dict[str, Workbench] = {}
    with StepProgress("binarize", max(1, len(todo))) as bar:
        for r in todo:
            file = out / r.run / f"{r.task}-{r.seed}.json"
            if not file.exists():
                if r.run not in benches:
                    benches[r.run] = Workbench.open(named[r.run])
                bench, circuit = benches[r.run], r.circuits[f"{target:g}"]
                task, means = bench.task(r.task), bench.means_for(PruneConfig(**json.loads(r.search)))
                binarized = binarize(bench.model, task, circuit, means, config=config, seed=r.seed)
                found = BinaryTask(
                    run=r.run,
                    task=r.task,
                    seed=r.seed,
                    target=target,
                    binarized=binarized,
                    shares=share_losses(
                        bench.model, task, kept_masks(circuit, bench.model), means, binarized, config
                    ),
                )
                write_atomic(file, found.model_dump_json() + "\n")
            elif load_binary(file).binarized.config != json.dumps(asdict(config)):
                raise ValueError(f"{file} is of another config: choose another directory")
            bar.step()
    return load_binarized(out)


def load_binary(file: Path) -> BinaryTask:
    """The result in `file`."""
    return BinaryTask.model_validate_json(file.read_text())


def load_binarized(out: str | Path) -> list[BinaryTask]:
    """Every result in `out`."""
    return [load_binary(file) for file in sorted(Path(out).glob("*/*.json"))]


@torch.no_grad()
def share_losses(
    model: Transformer,
    task: Task,
    kept: Kept,
    means: Mapping[str, Tensor],
    binarized: Binarized,
    config: BinarizeConfig,
) -> tuple[tuple[float, float], ...]:
    """(share, recalibrated task loss on held-out pairs) of the circuit with `SHARES` of its nodes as step functions.

    Their levels are those of the grid. Nodes whose variance these explain best come first; those that are constant on
    the task are binary as they are.
    """
    order = sorted(binarized.grid, key=lambda node: -1.0 if node.explained is None else -node.explained)
    with frozen(model) as model:
        ablated = keep_only(kept, means)
        pool = task.pairs(config.pool, seed=binarized.seed, split="train").to(model.device)
        test = task.pairs(config.measure, seed=binarized.seed, split="test").to(model.device)

        def loss(share: float) -> float:
            some = steps_of(order[: math.ceil(share * len(order))])
            return measured(model, task, chain(ablated, some), pool, test).calibrated_task_loss

        return tuple((share, loss(share)) for share in SHARES)


def binary_table(found: Sequence[BinaryTask]) -> Table:
    """Recalibrated losses on held-out pairs, and how many nodes two levels suffice for."""
    table = Table("run", "task", "nodes", "circuit", "grid", "trained", "explained", "share within target")
    for r in found:
        b = r.binarized
        explained = [level.explained for level in b.grid if level.explained is not None]
        table.add_row(
            r.run,
            r.task,
            str(len(b.grid)),
            *(f"{losses.calibrated_task_loss:.3f}" for losses in (b.circuit, b.start, b.binarized)),
            f"{median(explained):.2f}" if explained else "",
            f"{100 * r.binary_share:.0f}%",
        )
    return table


class Kurtosis(Frozen):
    """log of the mean kurtosis of a model's final residual stream, not in excess: log 3 for a Gaussian."""

    run: str
    validation_loss: float | None
    of_tokens: float
    """Over the channels of a token, averaged over tokens: Figure 10's."""
    of_channels: float
    """Over the tokens of a channel, averaged over the channels that vary."""


@torch.no_grad()
def final_kurtosis(
    model: Transformer, tokens, *, sequences: int = 512, seq_len: int = 96
) -> tuple[float, float]:
    """`Kurtosis.of_tokens` and `Kurtosis.of_channels` on a corpus."""
    seq_len = fitted(model, tokens, 1, seq_len, 1)[0]
    moments, recorder = Moments(model.config.d_model), Recorder(["final"])
    total = count = 0.0
    for part in stream(tokens, sequences=sequences, seq_len=seq_len):
        model(part.to(model.device), tap=recorder)
        final = recorder.values["final"].flatten(0, 1).float().cpu()
        total += math.exp(kurtosis(final)) * len(final)
        count += len(final)
        moments.see(final.T)
    channels = [k for i in range(model.config.d_model) if (k := moments.kurtosis(i)) is not None]
    return math.log(total / count), math.log(sum(channels) / len(channels))


def kurtosis_of(runs: Sequence[str | Path], out: str | Path, *, sequences: int = 512) -> list[Kurtosis]:
    """The kurtosis of each run on its own held-out text, also written to `out`, beside what is there of other runs."""
    out = Path(out)
    found = {k.run: k for k in load_kurtosis(out)} if out.exists() else {}
    for run in map(Path, runs):
        bench = Workbench.open(run)
        of_tokens, of_channels = final_kurtosis(bench.model, bench.text.tokens, sequences=sequences)
        found[run_name(run)] = Kurtosis(
            run=run_name(run),
            validation_loss=bench.validation_loss,
            of_tokens=of_tokens,
            of_channels=of_channels,
        )
        write_atomic(out, json.dumps([k.model_dump() for k in found.values()], indent=1) + "\n")
    return list(found.values())


def load_kurtosis(out: str | Path) -> list[Kurtosis]:
    """What `kurtosis_of` wrote."""
    return TypeAdapter(list[Kurtosis]).validate_json(Path(out).read_text())


@dataclass
class Binarize:
    """Binarise the circuits of a study, and tabulate and draw them into OUT. Goes on where it stopped."""

    runs: tyro.conf.Positional[list[str]]
    """Runs of the study."""

    study: Path
    """Directory of the study's results."""

    out: Path = Path("runs/binarized")
    """Directory of the results and the figure."""

    target: float = 0.15
    """Which circuits: those pruned to this task loss."""

    config: BinarizeConfig = field(default_factory=BinarizeConfig)
    """How levels are found."""

    def __call__(self) -> None:
        from pellucid.recipes.figures import binarized_figure, shares_figure

        found = binarize_study(self.runs, self.study, self.out, target=self.target, config=self.config)
        results.print(binary_table(found))
        print(binarized_figure(found, self.out / "binarized.svg"))
        print(shares_figure(found, self.out / "shares.svg"))


@dataclass
class MeasureKurtosis:
    """Measure the kurtosis of runs' final residual streams, and draw it."""

    runs: tyro.conf.Positional[list[str]]
    """Directories of runs, or models in the box."""

    out: Path = Path("runs/kurtosis.json")
    """The results; those of other runs stay in it."""

    def __call__(self) -> None:
        from pellucid.recipes.figures import kurtosis_figure

        print(kurtosis_figure(kurtosis_of(self.runs, self.out), self.out.with_suffix(".svg")))


@dataclass
class CorrelateLosses:
    """Correlate the token losses of runs with those of the first, on its held-out text."""

    runs: tyro.conf.Positional[list[str]]
    """Directories of runs, or models in the box, of one tokenizer."""

    tokens: int = 65_536
    """How many are compared."""

    def __call__(self) -> None:
        if len(self.runs) < 2:
            raise ValueError("a correlation needs two runs at least")
        first = Workbench.open(self.runs[0])
        table = Table("run", f"correlation with {run_name(Path(self.runs[0]))}")
        for run in self.runs[1:]:
            other = Workbench.open(run)
            if other.tokenizer.get_vocab() != first.tokenizer.get_vocab():
                raise ValueError(f"{run} has another tokenizer than {self.runs[0]}")
            found = loss_correlation(first.model, other.model, first.text.tokens, n_tokens=self.tokens)
            table.add_row(run_name(Path(run)), f"{found:.3f}")
        results.print(table)


if __name__ == "__main__":
    commands = {"binarize": Binarize, "kurtosis": MeasureKurtosis, "losses": CorrelateLosses}
    try:
        tyro.extras.subcommand_cli_from_dict(commands)()
    except ValueError as error:
        console.print(str(error), style="red", highlight=False, markup=False, soft_wrap=True)
        raise SystemExit(2) from None
