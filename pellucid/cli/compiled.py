"""Commands of compiled models: programs, compiling them, and the benchmark of methods on them."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Literal

import tyro

from pellucid.training.progress import results


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
class Bench:
    """Score methods on compiled programs, whose mechanism is known. What is in OUT already is not run again.

    OUT's leaderboard is of all results there with this ablation and number of pairs, also of those of earlier calls.
    """

    out: Path = Path("runs/bench")
    """Directory of the results, one file for each model, method and seed, and of the leaderboard."""

    methods: list[str] = field(default_factory=list)
    """Which methods; all if left out. --list shows them."""

    programs: list[str] = field(default_factory=list)
    """Which programs; the whole suite if left out."""

    tiers: list[str] = field(default_factory=lambda: ["raw", "rotated"])
    """Which kinds of models."""

    seeds: int = 1
    """Data seeds: how often each method sees other pairs."""

    pairs: int = 64
    """Pairs of inputs that a method sees."""

    ablation: Literal["resample", "zero", "mean", "position"] = "resample"
    """What an ablated part is replaced by."""

    jobs: int = 1
    """Models at a time, in processes of one thread each."""

    listing: Annotated[bool, tyro.conf.arg(name="list")] = False
    """Say which methods, programs and tiers there are, and run nothing."""

    def __call__(self) -> None:
        from pellucid.bench.report import sheets, write_leaderboard  # what --help need not wait for
        from pellucid.bench.run import BenchConfig, bench, save_results, stored
        from pellucid.recipes.bench import listing, show

        if self.listing:
            for table in listing():
                results.print(table)
            return
        config = BenchConfig(
            methods=tuple(self.methods),
            programs=tuple(self.programs),
            tiers=tuple(self.tiers),
            seeds=tuple(range(self.seeds)),
            pairs=self.pairs,
            ablation=self.ablation,
        )
        cells = bench(config, self.out, jobs=self.jobs)
        show(sheets(cells), results)
        lost = [cell for cell in cells if not cell.key]  # of models that could not be built
        everything = [*stored(self.out, config), *lost]
        save_results(everything, config, self.out / "results.json")
        write_leaderboard(everything, self.out)
        print(self.out / "leaderboard.html")
