"""Circuits as data: nodes, edges, and the model that they belong to.

In the `channel` universe a node is one channel of a node site and an edge is a nonzero weight between two kept
nodes (weight-sparse transformers, section 2). In the `component` universe edges are residual paths.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from pellucid.core.checkpoint import content_hash
from pellucid.core.errors import places
from pellucid.core.files import write_atomic
from pellucid.core.sites import node_sites
from pellucid.core.transformer import Transformer


class Frozen(BaseModel):
    """Immutable data that goes to JSON and back unchanged."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Node(Frozen):
    """One channel (or component) of a site."""

    site: str
    channel: int

    def __str__(self) -> str:
        return f"{self.site}:{self.channel}"


class Edge(Frozen):
    """A weight from a writer to a reader."""

    writer: Node
    reader: Node
    weight: float


class Circuit(Frozen):
    """The kept part of a model, and what was measured of it."""

    universe: Literal["channel", "component"] = "channel"
    task: str
    model: str
    """The model's content hash."""
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    token_edges: int = 0
    """Nonzero entries of the task's tokens' embedding and unembedding rows at kept nodes; not among `edges`."""
    metrics: dict[str, float | int | str | bool | None] = {}

    def save(self, path: str | Path) -> None:
        """Write the circuit as JSON, atomically."""
        write_atomic(path, self.model_dump_json(indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "Circuit":
        """The circuit in a JSON file. A `ValueError` names the file and the field that is wrong."""
        try:
            return cls.model_validate_json(Path(path).read_text())
        except ValidationError as error:
            raise ValueError(f"{path} is not a circuit: {places(error)}") from None


def matrices(model: Transformer) -> list[tuple[str, str, Tensor]]:
    """(writer site, reader site, weight (reader, writer)) of every attention and MLP matrix.

    An attention output matrix reads the mix, whose channels are averages of the value channels.
    """
    out = []
    for number, block in enumerate(model.blocks):
        if block.attn is not None:
            name = f"{number}.attn"
            q, k, v = block.attn.qkv.weight.split(block.attn.width)
            out += [
                (f"{name}.in", f"{name}.q", q),
                (f"{name}.in", f"{name}.k", k),
                (f"{name}.in", f"{name}.v", v),
            ]
            out.append((f"{name}.v", f"{name}.out", block.attn.proj.weight))
        if block.mlp is not None:
            name = f"{number}.mlp"
            out.append((f"{name}.in", f"{name}.act", block.mlp.fc.weight))
            out.append((f"{name}.act", f"{name}.out", block.mlp.proj.weight))
    return out


def count_edges(model: Transformer, kept: Mapping[str, Tensor]) -> int:
    """The number of nonzero weights between kept nodes; `kept[site]` is a bool mask (width,)."""
    return sum(int((w[kept[reader]][:, kept[writer]] != 0).sum()) for writer, reader, w in matrices(model))


def channel_circuit(
    model: Transformer, kept: Mapping[str, Tensor], *, task: str, model_hash: str, **fields
) -> Circuit:
    """The circuit of the kept channels: `kept[site]` is a bool mask (width,) for every node site."""
    nodes = tuple(
        Node(site=site, channel=c)
        for site in node_sites(model.config)
        for c in kept[site].nonzero()[:, 0].tolist()
    )
    edges = []
    for writer, reader, weight in matrices(model):
        between = (weight != 0) & kept[reader][:, None] & kept[writer][None]
        edges += [
            Edge(
                writer=Node(site=writer, channel=w),
                reader=Node(site=reader, channel=r),
                weight=weight[r, w].item(),
            )
            for r, w in between.nonzero().tolist()
        ]
    return Circuit(task=task, model=model_hash, nodes=nodes, edges=tuple(edges), **fields)


def kept_masks(circuit: Circuit, model: Transformer) -> dict[str, Tensor]:
    """The bool mask (width,) of every node site that the circuit's nodes make.

    Raises `ValueError` for a circuit of other nodes than channels, of another model, and of nodes that there are not.
    """
    if circuit.universe != "channel":
        raise ValueError(f"the circuit's nodes must be channels, not of the universe {circuit.universe!r}")
    if circuit.model != (own := content_hash(model)):
        raise ValueError(f"the circuit is of model {circuit.model}, this is model {own}")
    masks = {
        site: torch.zeros(width, dtype=torch.bool, device=model.device)
        for site, width in node_sites(model.config).items()
    }
    for node in circuit.nodes:
        if node.site not in masks or not 0 <= node.channel < len(masks[node.site]):
            raise ValueError(f"the model has no node {node}")
        masks[node.site][node.channel] = True
    return masks
