"""Modules that a config names by `kind`, found through the entry-point group `pellucid.parts`.

So `core` loads any checkpoint and imports no family. An entry point names a module class. Its classmethod
`make(d_in=width, **fields)` gives a module whose `forward(x, at)` gives `(x, aux_loss)`. Its `sites`, if it has any, are
the sites of the layer where it has a value to show: there it calls `at(site, value)` and goes on with what comes back.
What it draws at random is drawn by a method `draw(generator)` of the module that holds it, from the model's seed.
"""

from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from torch import nn

from pellucid.core.errors import unknown


@cache
def find_part(kind: str) -> Any:
    """The module class that `kind` names. ValueError, with near matches, if there is none."""
    found = {point.name: point for point in entry_points(group="pellucid.parts")}
    if kind not in found:
        raise unknown("mlp_input kind", kind, found)
    return found[kind].load()


def make_part(config: Mapping[str, Any], d_in: int) -> nn.Module:
    """The module that `config["kind"]` names, of input width `d_in`. ValueError for fields that it does not have."""
    fields = dict(config)
    part = find_part(fields.pop("kind"))
    try:
        return part.make(d_in=d_in, **fields)
    except TypeError as error:
        raise ValueError(f"mlp_input: {error}") from None


def part_sites(config: Mapping[str, Any] | None) -> tuple[str, ...]:
    """The sites, without the layer's number, that the module has besides its input and output."""
    return () if config is None else getattr(find_part(config["kind"]), "sites", ())
