"""The methods of the benchmark, by name. One function and one line each; other packages add theirs by the entry-point group
`pellucid.methods`."""

import hashlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from pellucid.core.errors import unknown
from pellucid.lab.acdc import acdc
from pellucid.lab.attribute import atp, eap, eap_ig_activations, eap_ig_inputs, eap_query_key
from pellucid.lab.baselines import activation_norm, degree, random, reachability
from pellucid.lab.edge_masks import edge_masks
from pellucid.lab.node_masks import node_masks
from pellucid.lab.patch import patch_edges, patch_nodes
from pellucid.lab.scores import Scores
from pellucid.lab.trace import trace

GROUP = "pellucid.methods"


@dataclass(frozen=True)
class Method:
    """A function `(model, task, *, pairs, seed, ablation, **options) -> Scores`, and how the benchmark calls it."""

    name: str
    function: Callable[..., Scores]
    options: Mapping[str, Any] = field(default_factory=dict)
    trained: bool = False
    """Whether it learns something, so that more steps might change its answer."""

    @cached_property
    def version(self) -> str:
        """A hash of the file that the function is in, and of the options: other results under the same name are stale."""
        source = inspect.getsourcefile(inspect.unwrap(self.function))
        code = Path(source).read_bytes() if source else repr(self.function).encode()
        return hashlib.sha256(code + repr(sorted(self.options.items())).encode()).hexdigest()[:16]

    @property
    def meaning(self) -> str:
        """The first line of the function's docstring."""
        return (inspect.getdoc(self.function) or "").partition("\n")[0]


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
    Method("edge-masks", edge_masks, trained=True),
    Method("random-nodes", random, {"universe": "node"}),
    Method("degree-nodes", degree, {"universe": "node"}),
    Method("activation-norm", activation_norm),
    Method("patch-nodes", patch_nodes),
    Method("atp", atp),
    Method("trace", trace),
    Method("node-masks", node_masks, trained=True),
)


def find_methods() -> dict[str, Method]:
    """Our methods and those of installed packages. Raises `ValueError` for two of one name."""
    found = {method.name: method for method in OWN}
    for point in entry_points(group=GROUP):
        if point.name in found:
            raise ValueError(
                f"two methods are called {point.name!r}: {point.value} and one of Pellucid's own"
            )
        found[point.name] = Method(point.name, point.load())
    return found


def pick_methods(names: tuple[str, ...]) -> tuple[Method, ...]:
    """The methods of these names, all if there are none. Raises `ValueError` for an unknown name."""
    known = find_methods()
    for name in names:
        if name not in known:
            raise unknown("method", name, known)
    return tuple(known[name] for name in names or known)
