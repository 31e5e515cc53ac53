"""Compress compiled programs, from the command line: sweeps, their tables and their figures.

As a program: `python -m pellucid.recipes.compress frac_prevs --out runs/compress`.
"""

from dataclasses import dataclass, field
from pathlib import Path

import tyro

from pellucid.compiled.batched import CompressConfig
from pellucid.recipes.compile import get_program
from pellucid.recipes.compress_report import feature_table, figures, program_table, shown, sweep_table
from pellucid.recipes.compress_sweep import sweep
from pellucid.training.progress import console, results


@dataclass
class Compress:
    """Compress compiled programs to narrower residual streams, and say how narrow they stay right and faithful.

    Goes on where it stopped; a finished sweep is not repeated. Writes results, matrices and figures to OUT.
    """

    programs: tyro.conf.Positional[tuple[str, ...]]
    """Programs of the library."""

    d: tuple[int, ...] | None = None
    """Widths; without, 2 to the compiled model's."""

    seeds: int = 5
    """Models of each width, with seeds 0, 1, ..."""

    out: Path = Path("runs/compress")
    """Directory of the results."""

    config: CompressConfig = field(default_factory=CompressConfig)
    """How."""

    def __call__(self) -> None:
        if not self.programs:
            raise ValueError("which program? `pellucid programs` lists them")
        for name in self.programs:
            get_program(name)
        found = []
        for name in self.programs:
            r = sweep(name, self.out, self.d, range(self.seeds), self.config)
            found.append(r)
            results.print(sweep_table(r))
            best, maps, labels = shown(r, self.out)
            for number, w in enumerate(maps):
                print(f"d = {best.d}, seed {best.seed}, matrix {number}")
                results.print(feature_table(w, labels))
            try:
                for path in figures(r, self.out):
                    print(path)
            except ImportError as error:
                results.print(f"no pictures: {error}", markup=False)
        results.print(program_table(found))


if __name__ == "__main__":
    try:
        tyro.cli(Compress)()
    except ValueError as error:
        console.print(str(error), style="red", highlight=False, markup=False, soft_wrap=True)
        raise SystemExit(2) from None
