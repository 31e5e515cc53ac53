"""The methods of the benchmark, by name. One function and one line each; other packages add theirs by the entry-point group
`pellucid.methods`."""

import copy
import hashlib
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, cast

from pellucid.bench.metrics import Number
from pellucid.bench.readings import (
    alignment,
    attention_patterns,
    dictionary,
    gradient_times_input,
    linear_probes,
    logit_lens,
)
from pellucid.bench.score import flat, measure
from pellucid.bench.subject import Subject
from pellucid.core.errors import unknown
from pellucid.lab.acdc import acdc
from pellucid.lab.attend import attend
from pellucid.lab.attribute import atp, eap, eap_ig_activations, eap_ig_inputs, eap_query_key
from pellucid.lab.baselines import activation_norm, degree, random, reachability
from pellucid.lab.das import das
from pellucid.lab.dictionary import learn_dictionary
from pellucid.lab.edge_masks import edge_masks
from pellucid.lab.fills import Ablation
from pellucid.lab.lens import lens
from pellucid.lab.node_masks import node_masks
from pellucid.lab.patch import patch_edges, patch_nodes
from pellucid.lab.probe import probe
from pellucid.lab.scores import Scores, check_scores
from pellucid.lab.shapley import shapley
from pellucid.lab.trace import trace

GROUP = "pellucid.methods"


@dataclass(frozen=True)
class Outcome:
    """What came of one method on one model."""

    universe: str
    """node, edge, or reading."""
    metrics: Mapping[str, Number]
    seconds: float
    passes: Number = None
    values: tuple[float, ...] = ()
    """The scores of all parts that exist, in the edge table's order."""
    circuit: tuple[int, ...] | None = None
    """Which of these parts the method's own circuit has."""


def fingerprint(functions: Sequence[Callable[..., Any]], options: Mapping[str, Any]) -> str:
    """A hash of the files that functions are in, and of options: other results under the same name are stale."""
    files = [source(function) for function in functions]
    code = b"".join(Path(file).read_bytes() if file else b"" for file in files)
    return hashlib.sha256(code + repr(sorted(options.items())).encode()).hexdigest()[:16]


def source(function: Callable[..., Any]) -> str | None:
    """The file that a function, a partial one, or the class of a callable object is in; None where there is none."""
    function = inspect.unwrap(function.func if isinstance(function, partial) else function)
    try:
        return inspect.getsourcefile(function if inspect.isroutine(function) else type(function))
    except TypeError:  # written in C
        return None


def first_line(function: Callable[..., Any]) -> str:
    """The first line of a function's docstring."""
    return (inspect.getdoc(function) or "").partition("\n")[0]


@dataclass(frozen=True)
class Method:
    """A function `(model, task, *, pairs, seed, ablation, **options) -> Scores`, and how the benchmark calls it."""

    name: str
    function: Callable[..., Scores]
    options: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def version(self) -> str:
        return fingerprint((self.function,), self.options)

    @property
    def meaning(self) -> str:
        return first_line(self.function)

    def run(self, subject: Subject, *, pairs: int, seed: int, ablation: Ablation) -> Outcome:
        """Score the parts of a model, and the scores against its truth. Raises whatever the method raises, and `ValueError`
        for scores that do not fit the model. The method gets a copy of the model: what it does to it harms no other."""
        model = copy.deepcopy(subject.model)
        began = time.perf_counter()
        scores = self.function(model, subject.task, pairs=pairs, seed=seed, ablation=ablation, **self.options)
        seconds = time.perf_counter() - began
        check_scores(scores, subject.model)
        exists = subject.truth.table.exists
        kept = None if scores.kept is None else flat(scores, scores.kept, exists).nonzero()[:, 0]
        return Outcome(
            universe=scores.universe,
            metrics=measure(subject, scores, ablation),
            seconds=seconds,
            passes=scores.passes,
            values=tuple(flat(scores, scores.values, exists).double().tolist()),
            circuit=None if kept is None else tuple(kept.tolist()),
        )


@dataclass(frozen=True)
class Reading:
    """A function `(subject, *, pairs, seed) -> numbers` of a method that reads representations; no part is ablated."""

    name: str
    function: Callable[..., Mapping[str, Number]]
    uses: Callable[..., Any]
    """The lab's method that it calls."""

    @cached_property
    def version(self) -> str:
        return fingerprint((self.function, self.uses), {})

    @property
    def meaning(self) -> str:
        return first_line(self.function)

    def run(self, subject: Subject, *, pairs: int, seed: int, ablation: Ablation) -> Outcome:
        """What the method reads, against what the program holds."""
        began = time.perf_counter()
        metrics = self.function(subject, pairs=pairs, seed=seed)
        return Outcome("reading", metrics, time.perf_counter() - began)


AnyMethod = Method | Reading

OWN = (
    Method("random", random),
    Method("degree", degree),
    Method("reachability", reachability),
    Method("patch-edges", patch_edges),
    Method("eap", eap),
    Method("eap-query-key", eap_query_key),
    Method("eap-ig-inputs", eap_ig_inputs, {"steps": 20}),
    Method("eap-ig-activations", eap_ig_activations, {"steps": 5}),
    Method("acdc", acdc),
    Method("edge-masks", edge_masks),
    Method("random-nodes", random, {"universe": "node"}),
    Method("degree-nodes", degree, {"universe": "node"}),
    Method("activation-norm", activation_norm),
    Method("patch-nodes", patch_nodes),
    Method("atp", atp),
    Method("trace", trace),
    Method("node-masks", node_masks),
    Reading("logit-lens", logit_lens, lens),
    Reading("probes", linear_probes, probe),
    Reading("attention-patterns", attention_patterns, attend),
    Reading("gradient-times-input", gradient_times_input, shapley),
    Reading("das", alignment, das),
    Reading("dictionary", dictionary, learn_dictionary),
)


def find_methods() -> dict[str, AnyMethod]:
    """Our methods and those of installed packages. Raises `ValueError` for two of one name, and what is no function."""
    found: dict[str, AnyMethod] = {method.name: method for method in OWN}
    for point in entry_points(group=GROUP):
        if point.name in found:
            raise ValueError(
                f"two methods are called {point.name!r}: {point.value} and one of Pellucid's own"
            )
        try:
            function: Any = point.load()
        except Exception as error:  # whatever a package raises when it is imported
            raise ValueError(f"method {point.name!r} cannot be loaded from {point.value}: {error}") from error
        if not callable(function):
            raise ValueError(f"method {point.name!r} is no function: {point.value} is {function!r}")
        found[point.name] = Method(point.name, cast("Callable[..., Scores]", function))
    return found


def pick_methods(names: tuple[str, ...]) -> tuple[AnyMethod, ...]:
    """The methods of these names, all if there are none. Raises `ValueError` for an unknown name."""
    known = find_methods()
    for name in names:
        if name not in known:
            raise unknown("method", name, known)
    return tuple(known[name] for name in names or known)
