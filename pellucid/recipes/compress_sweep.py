"""A sweep of compression: every width and seed of a program's compiled model, and which of them are faithful."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from pydantic import BaseModel, ConfigDict, TypeAdapter
from safetensors.torch import load, save
from torch import Tensor

from pellucid.compiled.batched import CompressConfig
from pellucid.compiled.compress import check_list, compress
from pellucid.compiled.interchange import Held, interchange, truth_holds
from pellucid.compiled.model import CompiledModel, compile_program
from pellucid.compiled.scores import Scores
from pellucid.core.checkpoint import pack
from pellucid.core.files import write_atomic
from pellucid.recipes.compile import get_program
from pellucid.training.progress import StepProgress

SOLVED = 0.99
"""The least balanced accuracy of a model that has solved its task."""


class Row(BaseModel):
    """What came out for one width and seed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    d: int
    seed: int
    scores: Scores
    held: list[Held]
    """The program's variables; none where all weights were trained."""

    @property
    def solved(self) -> bool:
        return self.scores.balanced_accuracy >= SOLVED

    @property
    def faithful(self) -> bool:
        """Solved, and the compiled model's ground truth holds."""
        return self.solved and bool(self.held) and truth_holds(self.held)


class SweepResult(BaseModel):
    """A finished sweep."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    program: str
    model: str
    """Hash of the compiled model."""
    width: int
    """D."""
    config: CompressConfig
    rows: list[Row]

    def at(self, d: int) -> list[Row]:
        return [row for row in self.rows if row.d == d]

    @property
    def widths(self) -> list[int]:
        return sorted({row.d for row in self.rows})

    def smallest(self, kind: str) -> int | None:
        """The least width at which some seed is `solved` or `faithful`."""
        return min((row.d for row in self.rows if getattr(row, kind)), default=None)


def compile_case(name: str) -> CompiledModel:
    """The library's program of that name, compiled as the library says."""
    case = get_program(name)
    return compile_program(case.program, case.vocab, case.max_len, causal=case.causal)


def sweep(
    name: str,
    out: str | Path,
    d: Sequence[int] | None = None,
    seeds: Sequence[int] = range(5),
    config: CompressConfig | None = None,
) -> SweepResult:
    """Compress a program of the library to each width (2 to D unless given) with each seed: OUT/NAME.VARIANT.json.

    The matrices W are beside it as safetensors. A finished sweep is read, not repeated; one that was killed goes on.
    Raises `ValueError` where OUT has another sweep under that name.
    """
    config, out = config or CompressConfig(), Path(out)
    model = compile_case(name)
    full = model.transformer.config.d_model
    widths = check_list("d", range(min(2, full), full + 1) if d is None else d)
    file = out / f"{name}.{config.variant}.json"
    weights = hashlib.sha256(pack(model.transformer.state_dict())).hexdigest()[:16]
    wanted = [(w, s) for w in widths for s in check_list("seeds", seeds)]
    if file.exists():
        found = load_sweep(file)
        if (found.model, found.config, [(r.d, r.seed) for r in found.rows]) != (weights, config, wanted):
            raise ValueError(f"{file} is of other settings: choose another directory")
        return found
    key = hashlib.sha256(json.dumps([weights, asdict(config), wanted]).encode()).hexdigest()[:12]
    made = compress(model, widths, seeds, config, state=out / f".{name}-{key}.safetensors")
    rows = []
    with StepProgress("interchange", len(made)) as bar:
        for c in made:
            held = [] if config.variant == "all" else interchange(model, c)
            rows.append(Row(d=c.d, seed=c.seed, scores=c.scores, held=held))
            bar.step()
    result = SweepResult(program=name, model=weights, width=full, config=config, rows=rows)
    write_atomic(
        file.with_suffix(".safetensors"), save({f"{c.d}.{c.seed}": c.maps.contiguous() for c in made})
    )
    write_atomic(file, result.model_dump_json(indent=1) + "\n")
    return result


def load_sweep(file: str | Path) -> SweepResult:
    """What `sweep` wrote."""
    return TypeAdapter(SweepResult).validate_json(Path(file).read_text())


def load_maps(file: str | Path) -> dict[str, Tensor]:
    """{"d.seed": (k, D, d)}: the matrices beside a sweep's results."""
    return load(Path(file).with_suffix(".safetensors").read_bytes())
