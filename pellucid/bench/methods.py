"""The methods of the benchmark, by name. One function and one line each; other packages add theirs by the entry-point group
`pellucid.methods`."""

import copy
import inspect
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

from pellucid.bench.cache import code_of, digest
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
from pellucid.lab.attribute import atp, eap, eap_ig_activations, eap_ig_inputs, eap_query_key
from pellucid.lab.baselines import activation_norm, degree, random, reachability
from pellucid.lab.edge_masks import edge_masks
from pellucid.lab.fills import Ablation
from pellucid.lab.node_masks import node_masks
from pellucid.lab.patch import patch_edges, patch_nodes
from pellucid.lab.scores import Scores, check_scores
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
        """A hash of its code and options, and of the code that scores it: other results under the same name are stale."""
        return digest(code_of(self.function, measure), repr(sorted(self.options.items())))

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

    @cached_property
    def version(self) -> str:
        """A hash of its code: other results under the same name are stale."""
        return code_of(self.function)

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
    Reading("logit-lens", logit_lens),
    Reading("probes", linear_probes),
    Reading("attention-patterns", attention_patterns),
    Reading("gradient-times-input", gradient_times_input),
    Reading("das", alignment),
    Reading("dictionary", dictionary),
)


def find_methods() -> dict[str, AnyMethod]:
    """Our methods and those of installed packages. Raises `ValueError` for two of one name."""
    found: dict[str, AnyMethod] = {method.name: method for method in OWN}
    places = dict.fromkeys(found, "one of Pellucid's own")
    for point in entry_points(group=GROUP):
        if point.name in found:
            raise ValueError(f"two methods are called {point.name!r}: {point.value} and {places[point.name]}")
        places[point.name] = point.value
        found[point.name] = load_method(point)
    return found


def load_method(point: EntryPoint) -> AnyMethod:
    """What a package calls a method: a `Method`, a `Reading`, or a function that scores. One that cannot be loaded fails
    with the reason when it is run, so that the others go on."""
    try:
        made: Any = point.load()
        if isinstance(made, Method | Reading):
            return replace(made, name=point.name)
        if not callable(made):
            raise TypeError(f"{made!r} is no function")
        return Method(point.name, cast("Callable[..., Scores]", made))
    except Exception as error:  # whatever a package raises when it is imported
        why = f"cannot be loaded from {point.value}: {error}"

    def fails(*args: Any, **options: Any) -> Scores:
        raise ImportError(why)

    fails.__doc__ = why
    return Method(point.name, fails)


def pick_methods(names: tuple[str, ...]) -> tuple[AnyMethod, ...]:
    """The methods of these names, all if there are none. Raises `ValueError` for an unknown name."""
    known = find_methods()
    for name in names:
        if name not in known:
            raise unknown("method", name, known)
    return tuple(known[name] for name in names or known)
