"""Modules that a config names by `kind`, found through the entry-point group `pellucid.parts`.

So `core` loads any checkpoint and imports no family. An entry point's object is called as
`make(d_in=width, **fields)` and returns a module whose `forward(x)` gives `(x, aux_loss)`.
"""

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from torch import nn

from pellucid.core.errors import unknown


def make_part(config: Mapping[str, Any], d_in: int) -> nn.Module:
    """The module that `config["kind"]` names, of input width `d_in`."""
    fields = dict(config)
    kind = fields.pop("kind")
    found = {point.name: point for point in entry_points(group="pellucid.parts")}
    if kind not in found:
        raise unknown("mlp_input kind", kind, found)
    return found[kind].load()(d_in=d_in, **fields)
