"""The models of the benchmark: a program, compiled, in tiers of difficulty."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pellucid.bench.squeezed import squeezed
from pellucid.bench.task import ProgramTask
from pellucid.bench.trained import SOLVED, trained
from pellucid.bench.truth import Truth, find_truth, structure_of
from pellucid.compiled.compiler.causal import CausalWarning
from pellucid.compiled.library import PROGRAMS
from pellucid.compiled.library.case import ProgramCase
from pellucid.compiled.model import CompiledModel, compile_program
from pellucid.compiled.variants import rotated, with_distractors
from pellucid.compiled.verify import verify
from pellucid.core.checkpoint import content_hash
from pellucid.core.errors import unknown
from pellucid.core.transformer import Transformer
from pellucid.core.weights import weight_graph

SUITE = (
    "copy", "inc_mod", "token_plus_index_mod", "shift", "shift_by", "copy_first", "reverse", "length", "count", "hist",
    "frac_prevs", "frac_prevs_threshold", "sort_unique", "sort", "sort_freq", "max", "induction", "key_value_lookup",
    "detect_pattern", "pair_balance", "dyck1", "shuffle_dyck2", "pointer_2_hop",
    "distractor", "redundant_or", "and_of_two", "constant_branch",
)  # fmt: skip
"""The programs that are run unless others are named. `copy` is the null circuit: one edge, from embedding to output; with distractors,
nothing else matters."""
CHECKED = 2_000
"""Inputs on which a model is compared with its program."""
COLDNESS = 30.0


@dataclass(frozen=True)
class Subject:
    """One model, its task and what is known of it."""

    program: str
    tier: str
    compiled: CompiledModel
    """The model itself, with its ground truth; where it is trained or random, the program's raw model."""
    model: Transformer
    task: ProgramTask
    structure: Tensor
    """(readers, writers), bool: S."""
    certificate: dict[str, Any]
    """How the model was compared with its program: inputs, failures, largest error; or why its truth is void."""

    source: CompiledModel
    """An exact model of the program with the same layers, from which the values of variables are read."""
    labelled: bool = True
    """Whether the ground truth of `compiled` says where this model's variables and heads are."""
    borrowed: Truth | None = None
    """Another model's truth, that this one's scores are held against; None: its own, measured when asked for."""

    @property
    def certified(self) -> bool:
        """Whether scores on this model count: it does what its program says, by its means; or it is a control."""
        return self.tier == "randomised" or bool(self.certificate["holds"])

    @cached_property
    def truth(self) -> Truth:
        return self.borrowed or find_truth(self.model, self.task, self.structure)

    @cached_property
    def key(self) -> str:
        """The model's content hash."""
        return content_hash(self.model)


def compile_case(case: ProgramCase, **options: Any) -> CompiledModel:
    """A library program, compiled for the inputs that come with it, on the CPU."""
    made = compile_program(case.program, case.vocab, case.max_len, causal=case.causal, **options)
    made.transformer.cpu().eval().requires_grad_(False)
    return made


def certify(model: CompiledModel) -> dict[str, Any]:
    """The certificate of a compiled model."""
    found = verify(model, limit=CHECKED)
    return {
        "inputs": found.checked,
        "exhaustive": found.exhaustive,
        "failures": found.failures,
        "largest_error": found.max_error,
        "dtype": model.transformer.config.dtype,
        "holds": bool(found),
    }


def compiled_subject(name: str, tier: str, model: CompiledModel) -> Subject:
    """A tier that is a compiled model itself."""
    return Subject(
        program=name,
        tier=tier,
        compiled=model,
        source=model,
        model=model.transformer.requires_grad_(False),
        task=ProgramTask(model, name),
        structure=structure_of(model.transformer, model.truth["edges"]["component"]),
        certificate=certify(model),
    )


def raw(name: str) -> Subject:
    """The program as it compiles."""
    return compiled_subject(name, "raw", compile_case(PROGRAMS[name]))


def turned(name: str) -> Subject:
    """In a random basis of the residual stream, heads and neurons in random order: nothing can be read off coordinates."""
    return compiled_subject(name, "rotated", rotated(compile_case(PROGRAMS[name]), seed=0))


def cold(name: str) -> Subject:
    """With attention as soft as is still exact."""
    made = compile_case(PROGRAMS[name], inverse_temperature=COLDNESS)
    return compiled_subject(name, "cold", made)


def distracted(name: str) -> Subject:
    """With further s-ops that are computed and read, and change nothing."""
    case = PROGRAMS[name]
    program = with_distractors(case.program, case.vocab)
    made = compile_program(program, case.vocab, case.max_len, causal=case.causal)
    made.transformer.cpu().eval()
    return compiled_subject(name, "distractors", made)


def randomised(name: str) -> Subject:
    """A control: the raw model's shape with random weights. Its truth is the raw model's: scores should be at chance."""
    found = raw(name)
    draw = torch.Generator().manual_seed(0)
    model = compile_case(PROGRAMS[name]).transformer
    with torch.no_grad():
        for p in model.parameters():
            spread = p.std() if p.numel() > 1 else p.new_ones(())
            p.copy_(torch.randn(p.shape, generator=draw, dtype=p.dtype) * spread.clamp(min=1e-3))
    return Subject(
        program=name,
        tier="randomised",
        compiled=found.compiled,
        source=found.source,
        labelled=False,
        model=model.requires_grad_(False),
        task=found.task,
        structure=found.structure,
        certificate={"holds": False, "why": "weights are random; the truth is that of the raw model"},
        borrowed=found.truth,
    )


def sparse(name: str) -> Subject:
    """Trained weight-sparse on the program's inputs and outputs: S is what the weights have, E what cutting edges does."""
    made = compile_case(PROGRAMS[name])
    model, right = trained(made)
    return Subject(
        program=name,
        tier="sparse",
        compiled=made,
        source=made,
        labelled=False,
        model=model,
        task=ProgramTask(made, name),
        structure=weight_graph(model),
        certificate={"inputs_right": right, "holds": right >= SOLVED},
    )


def mirrored(name: str) -> Subject:
    """Causal, so that each position sees what came before only; bidirectional where the program is causal. Another function."""
    case = PROGRAMS[name]
    with warnings.catch_warnings():  # that selectors lose keys is what is asked for
        warnings.simplefilter("ignore", CausalWarning)
        made = compile_case(replace(case, causal=not case.causal))
    return compiled_subject(name, "causal", made)


def narrow(name: str) -> Subject:
    """Compressed: four fifths as wide, so that features share directions. Truth only where interchange says so."""
    made = compile_case(PROGRAMS[name])
    model, certificate = squeezed(made)
    return Subject(
        program=name,
        tier="compressed",
        compiled=model,
        source=made,
        model=model.transformer,
        task=ProgramTask(made, name),
        structure=structure_of(model.transformer, model.truth["edges"]["component"]),
        certificate=certificate,
    )


TIERS: dict[str, Callable[[str], Subject]] = {
    "raw": raw,
    "rotated": turned,
    "cold": cold,
    "distractors": distracted,
    "causal": mirrored,
    "compressed": narrow,
    "sparse": sparse,
    "randomised": randomised,
}


def make_subject(program: str, tier: str) -> Subject:
    """Build the model of a program in a tier. Raises `ValueError` for names that are not known."""
    if program not in PROGRAMS:
        raise unknown("program", program, PROGRAMS)
    if tier not in TIERS:
        raise unknown("tier", tier, TIERS)
    return TIERS[tier](program)
