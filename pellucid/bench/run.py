"""Run methods on models: one cell for each program, tier, method and data seed, kept on disk by what went into it."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from pellucid.bench.cache import code_of, digest
from pellucid.bench.labels import presence, unread
from pellucid.bench.methods import AnyMethod, find_methods, pick_methods
from pellucid.bench.metrics import Number
from pellucid.bench.readings import DoesNotApply
from pellucid.bench.subject import SUITE, TIERS, Subject, make_subject
from pellucid.bench.truth import Truth, find_truth
from pellucid.compiled.library import PROGRAMS
from pellucid.core.errors import unknown
from pellucid.core.files import write_atomic
from pellucid.core.processes import in_processes
from pellucid.lab.fills import ABLATIONS, Ablation
from pellucid.training.progress import StepProgress


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """What is run. Empty tuples mean all: every method, the suite's programs. What is named twice is run once."""

    methods: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    tiers: tuple[str, ...] = ("raw", "rotated")
    seeds: tuple[int, ...] = (0,)
    """Data seeds: which pairs a method sees."""
    pairs: int = 64
    ablation: Ablation = "resample"
    """What an ablated part is replaced by, for methods and scores alike."""

    def __post_init__(self) -> None:
        for what, names, known in (
            ("program", self.programs, PROGRAMS),
            ("tier", self.tiers, TIERS),
            ("ablation", (self.ablation,), ABLATIONS),
        ):
            for name in names:
                if name not in known:
                    raise unknown(what, name, known)
        pick_methods(self.methods)
        for name in ("methods", "programs", "tiers", "seeds"):
            object.__setattr__(self, name, tuple(dict.fromkeys(getattr(self, name))))
            if name in ("tiers", "seeds") and not getattr(self, name):
                raise ValueError(f"no {name}: at least one is needed")
        if self.pairs < 1 or min(self.seeds) < 0:
            raise ValueError(
                f"pairs must be at least 1 and seeds at least 0, got {self.pairs} and {self.seeds}"
            )

    @property
    def group(self) -> str:
        """What cells of one leaderboard have in common, as a folder's name."""
        return f"{self.ablation}-{self.pairs}"


class Cell(BaseModel):
    """One method on one model with one data seed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    program: str
    tier: str
    method: str
    seed: int
    key: str
    """A hash of the code that makes the model and of the method, code and options; a dash; and one of these, the model and
    the configuration."""
    universe: str | None = None
    failed: str | None = None
    """What was raised, where there are no numbers."""
    skipped: str | None = None
    """Why the method does not apply to this model."""
    certified: bool = True
    """Whether the model's truth holds; means are over cells where it does."""
    seconds: float | None = None
    passes: float | None = None
    metrics: dict[str, Number] = {}
    values: list[float] = []
    """The scores of all parts that exist, in the edge table's order."""
    circuit: list[int] | None = None
    """Which of these parts the method's own circuit has."""


def bench(config: BenchConfig, out: str | Path, *, jobs: int = 1) -> list[Cell]:
    """Every cell; those that are in `out` already, of the same model, code and configuration, are not run again."""
    out = Path(out)
    names = tuple(m.name for m in pick_methods(config.methods))
    programs = config.programs or SUITE
    todo = {
        (tier, program): partial(run_subject, program, tier, config, names, out)
        for tier in config.tiers
        for program in programs
    }
    cells: list[Cell] = []
    with StepProgress("bench", len(todo)) as progress:
        for _, found in in_processes(todo, jobs):
            cells += found
            progress.step(failed=float(sum(c.failed is not None for c in cells)))
    return in_order(cells)


def run_subject(
    program: str, tier: str, config: BenchConfig, names: tuple[str, ...], out: Path
) -> list[Cell]:
    """All cells of one model. What a method raises is kept as the reason why a cell has no numbers."""
    methods, place = pick_methods(names), out / tier / program
    codes = code_behind(methods)  # before the source can change under a long run
    try:
        subject = make_subject(program, tier)
        truth = None if read_key(place / "truth.json") == truth_key(subject) else describe(subject)
    except Exception as error:  # whatever a model raises when it is built or measured, the others go on
        return [failure(program, tier, m.name, seed, "", error) for m in methods for seed in config.seeds]
    if truth is not None:
        write_atomic(place / "truth.json", json.dumps(truth, indent=1) + "\n")
    cells = []
    for method in methods:
        for seed in config.seeds:
            file = place / config.group / f"{method.name}-{seed}.json"
            key = cell_key(subject, method.name, codes[method.name], config, seed)
            cell = read_cell(file, key)
            if cell is None or cell.failed is not None:
                cell = run_cell(subject, method, config, seed, key)
                write_atomic(file, cell.model_dump_json() + "\n")
            cells.append(cell)
    return cells


def cell_key(subject: Subject, method: str, code: str, config: BenchConfig, seed: int) -> str:
    """What a cell's numbers depend on, hashed: first the code alone, then everything."""
    all_of = digest(subject.key, subject.tier, method, code, config.pairs, config.ablation, seed)
    return f"{code}-{all_of}"


def code_behind(methods: Iterable[AnyMethod]) -> dict[str, str]:
    """By method a hash of the code behind its cells: the models' and its own."""
    models = code_of(make_subject)
    return {method.name: digest(models, method.version) for method in methods}


def stored(out: str | Path, config: BenchConfig) -> list[Cell]:
    """All cells in `out` with this number of pairs and ablation that were made by the present code, by tier, program,
    method and seed: what a leaderboard is of, whichever calls made them."""
    current = code_behind(find_methods().values())
    found = (
        load_cell(file)
        for tier in TIERS
        for program in PROGRAMS
        for file in (Path(out) / tier / program / config.group).glob("*.json")
    )
    return in_order(c for c in found if c and c.key.partition("-")[0] == current.get(c.method))


def in_order(cells: Iterable[Cell]) -> list[Cell]:
    """By tier, program, method and seed."""
    tiers, programs, methods = (
        {name: i for i, name in enumerate(dict.fromkeys(names))}
        for names in (TIERS, (*SUITE, *PROGRAMS), find_methods())
    )
    return sorted(cells, key=lambda c: (tiers[c.tier], programs[c.program], methods[c.method], c.seed))


def load_cell(file: Path) -> Cell | None:
    """The cell in a file, if it is there and whole."""
    try:
        return Cell.model_validate_json(file.read_text())
    except (OSError, ValidationError):
        return None


def read_cell(file: Path, key: str) -> Cell | None:
    """The cell in a file, if it is there, whole, and of this key."""
    cell = load_cell(file)
    return cell if cell and cell.key == key else None


def truth_key(subject: Subject) -> str:
    """What a model's truth depends on, hashed."""
    return digest(subject.key, code_of(find_truth, presence))


def read_key(file: Path) -> str | None:
    """The key of the truth in a file; None if it is not there or not whole."""
    try:
        return json.loads(file.read_text())["key"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def failure(program: str, tier: str, method: str, seed: int, key: str, error: BaseException) -> Cell:
    """A cell without numbers."""
    reason = f"{type(error).__name__}: {error}"
    return Cell(program=program, tier=tier, method=method, seed=seed, key=key, failed=reason)


def run_cell(subject: Subject, method: AnyMethod, config: BenchConfig, seed: int, key: str) -> Cell:
    """One method on one model."""
    try:
        found = method.run(subject, pairs=config.pairs, seed=seed, ablation=config.ablation)
    except DoesNotApply as why:
        return Cell(
            program=subject.program,
            tier=subject.tier,
            method=method.name,
            seed=seed,
            key=key,
            skipped=str(why),
        )
    except (Exception, SystemExit) as error:  # whatever a method raises, the others go on
        return failure(subject.program, subject.tier, method.name, seed, key, error)
    return Cell(
        program=subject.program,
        tier=subject.tier,
        method=method.name,
        seed=seed,
        key=key,
        universe=found.universe,
        certified=subject.certified,
        seconds=found.seconds,
        passes=finite(found.passes),
        metrics={name: finite(x) for name, x in found.metrics.items()},
        values=list(found.values),
        circuit=None if found.circuit is None else list(found.circuit),
    )


def finite(x: Number) -> Number:
    """The number, or None for NaN and infinity, which JSON does not have."""
    return x if x is not None and math.isfinite(x) else None


def describe(subject: Subject) -> dict[str, Any]:
    """A model's truth as JSON."""
    truth: Truth = subject.truth
    readers, writers = (
        ["".join(name_of(x)) for x in parts] for parts in (truth.table.readers, truth.table.writers)
    )

    def listed(mask: torch.Tensor) -> list[list[str]]:
        return [[writers[w], readers[r]] for r, w in mask.nonzero().tolist()]

    return {
        "program": subject.program,
        "tier": subject.tier,
        "key": truth_key(subject),
        "model": subject.key,
        "truth": truth.digest(),
        "certificate": subject.certificate,
        "varies_length": subject.task.varies_length,
        "nodes": writers,
        "structure": listed(truth.structure),
        "effective": {a: listed(e.effective("edge")) for a, e in truth.effects.items()},
        "effects": {
            a: {
                f"{writers[w]} -> {readers[r]}": [
                    round(float(e.edges[r, w]), 6),
                    round(float(e.edge_moves[r, w]), 6),
                ]
                for r, w in truth.table.exists.nonzero().tolist()
                if float(e.edge_moves[r, w]) > 1e-6
            }
            for a, e in truth.effects.items()
        },
        "circuits": None if truth.circuits is None else [listed(c) for c in truth.circuits],
        **(features(subject) if subject.labelled else {}),
    }


def features(subject: Subject) -> dict[str, Any]:
    """Where each variable of the program is, which head attends by which selector, which neuron computes what, and which
    directions nothing reads."""
    known, truth = presence(subject.compiled, subject.truth.batch), subject.compiled.truth
    return {
        **{name: truth[name] for name in ("variables", "selectors", "neurons")},
        "unread": unread(subject.compiled),
        "presence": {
            feature: dict(zip(known.sites, row, strict=True))
            for feature, row in zip(known.features, known.states, strict=True)
        },
    }


def name_of(part: tuple[str, int | None]) -> tuple[str, str]:
    """A writer or reader in one word: `0.attn.head:1`."""
    return part[0], "" if part[1] is None else f":{part[1]}"


def save_results(cells: Sequence[Cell], config: BenchConfig, path: str | Path) -> None:
    """All cells in one file, with the configuration that they share."""
    data = {"pairs": config.pairs, "ablation": config.ablation, "cells": [c.model_dump() for c in cells]}
    write_atomic(Path(path), json.dumps(data) + "\n")
