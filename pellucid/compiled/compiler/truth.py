"""The ground truth of a compiled model: variables, selectors, neurons, and which edges exist, as JSON-able data.

Edges are between the writers and readers of `core.edges`: a writer is ["embed", None], ["0.attn.head", head] or
["0.mlp.out", None]; a reader ["0.attn.q.read", head] (also k and v), ["0.mlp.read", None] or ["final.read", None].
They come from the blocks and the layout; `edges_from_weights` finds them again in the weights.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from pellucid.compiled.compiler.assemble import eraser
from pellucid.compiled.compiler.heads import HeadBlock
from pellucid.compiled.compiler.layout import BOS
from pellucid.compiled.compiler.mlp import MLPBlock
from pellucid.compiled.compiler.pipeline import Compilation
from pellucid.compiled.compiler.variables import Variable
from pellucid.compiled.rasp.language import describe
from pellucid.compiled.rasp.values import show
from pellucid.core.edges import edge_table
from pellucid.core.transformer import Transformer
from pellucid.core.weights import weight_graph

Component = tuple[str, int | None]


class Places:
    """Where each block of a compilation sits in the transformer."""

    def __init__(self, made: Compilation):
        self.made = made
        self.heads: dict[int, tuple[int, int, int]] = {}
        """For a head's target its layer, its number there, and its first channel."""
        self.neurons: dict[int, tuple[int, int]] = {}
        """For an MLP block's target its layer and first neuron."""
        heads: dict[int, int] = {}
        channels: dict[int, int] = {}
        neurons: dict[int, int] = {}
        for block, slot in zip(made.blocks, made.slots, strict=True):
            layer, node = slot // 2, block.target.node
            if isinstance(block, HeadBlock):
                self.heads[node] = (layer, heads.get(layer, 0), channels.get(layer, 0))
                heads[layer] = heads.get(layer, 0) + 1
                channels[layer] = channels.get(layer, 0) + block.size
            else:
                self.neurons[node] = (layer, neurons.get(layer, 0))
                neurons[layer] = neurons.get(layer, 0) + len(block.b_in)
        self.erasers: list[tuple[int, int, Variable, list[int]]] = []
        """(layer, first neuron, variable, which of its directions)."""
        for slot, erased in sorted(made.layout.erased.items()):
            for variable, parts in erased:
                layer = slot // 2
                self.erasers.append((layer, neurons.get(layer, 0), variable, parts))
                neurons[layer] = neurons.get(layer, 0) + len(eraser(variable, parts)[0])

    def writer(self, variable: Variable) -> Component:
        """The component that writes a variable."""
        if variable.node in self.heads:
            layer, head, _ = self.heads[variable.node]
            return f"{layer}.attn.head", head
        if variable.node in self.neurons:
            return f"{self.neurons[variable.node][0]}.mlp.out", None
        return "embed", None


def truth(made: Compilation) -> dict[str, Any]:
    """Everything that is known of a compiled model."""
    places = Places(made)
    reads, writes = component_reads(made, places), component_writes(made, places)
    last = max(made.slots, default=-1)
    return {
        "program": describe(made.program, 20),
        "vocab": [show(v) for v in made.vocab],
        "max_len": made.max_len,
        "causal": made.causal,
        "output": made.output.name,
        "bos": {"directions": [BOS]},
        "variables": [variable_truth(made, places, v, last) for v in made.held],
        "selectors": [selector_truth(places, b) for b in made.blocks if isinstance(b, HeadBlock)],
        "neurons": neuron_truth(made, places),
        "nodes": sorted({*map(name, writes), *map(name, reads)}),
        "edges": {
            "component": component_edges(made, reads, writes),
            "channel": {k: sorted(map(list, v)) for k, v in channel_edges(made, places).items()},
        },
    }


def name(component: Component) -> str:
    """A component in one word: `0.attn.head:1`, `embed`."""
    site, head = component
    return site if head is None else f"{site}:{head}"


def variable_truth(made: Compilation, places: Places, v: Variable, last: int) -> dict[str, Any]:
    gone = made.layout.gone[v.node]
    readers = []
    for block in made.blocks:
        if isinstance(block, MLPBlock) and any(r is v for r in block.reads):
            readers.append(f"{places.neurons[block.target.node][0]}.mlp.read")
        if isinstance(block, HeadBlock):
            layer, head, _ = places.heads[block.target.node]
            for side, group in (("q", block.queries), ("k", block.keys), ("v", block.values)):
                readers += [f"{layer}.attn.{side}.read:{head}" for r in group if r is v]
    if v is made.output:
        readers.append("final.read")
    return {
        "name": v.name,
        "encoding": v.encoding,
        "values": [show(x) for x in v.domain.values],
        "optional": v.encoding == "numerical" and v.domain.optional,
        "labels": v.labels,
        "directions": list(made.layout.directions[v.node]),
        "written": made.layout.born[v.node],
        "gone": gone if gone <= last else None,
        "writer": name(places.writer(v)),
        "readers": sorted(set(readers)),
        "error_bound": v.bound,
    }


def selector_truth(places: Places, block: HeadBlock) -> dict[str, Any]:
    layer, head, _ = places.heads[block.target.node]
    return {
        "selector": describe(block.selector),
        "head": [layer, head],
        "computes": block.target.name,
        "queries": [v.name for v in block.queries],
        "keys": [v.name for v in block.keys],
        "values": [v.name for v in block.values],
        "bos": "always" if block.always_bos else "default",
        "inverse_temperature": block.inverse_temperature,
    }


def neuron_truth(made: Compilation, places: Places) -> list[dict[str, Any]]:
    """What every neuron stands for, in the order of the layers."""
    out = []
    for block in made.blocks:
        if isinstance(block, MLPBlock):
            layer, start = places.neurons[block.target.node]
            out += [
                {"layer": layer, "neuron": start + i, "computes": block.target.name, "case": label}
                for i, label in enumerate(block.labels)
            ]
    for layer, start, variable, parts in places.erasers:
        count = len(eraser(variable, parts)[0])
        labels = [variable.labels[p] for p in parts for _ in range(count // len(parts))]
        out += [{"layer": layer, "neuron": start + i, "erases": label} for i, label in enumerate(labels)]
    return sorted(out, key=lambda n: (n["layer"], n["neuron"]))


# Edges.


def global_(made: Compilation, variable: Variable, used: np.ndarray) -> set[int]:
    """The directions of the residual stream behind those of a variable's own that are `used`."""
    directions = made.layout.directions[variable.node]
    return {directions[i] for i in np.flatnonzero(used)}


def component_reads(made: Compilation, places: Places) -> dict[Component, set[int]]:
    """For each reader the directions that it reads."""
    out: dict[Component, set[int]] = {("final.read", None): set(made.layout.directions[made.output.node])}
    for matrix, pairs in channel_edges(made, places).items():
        layer, part, side = matrix.split(".")
        if part == "mlp" and side == "in":
            out[f"{layer}.mlp.read", None] = {d for _, d in pairs}
    for block in made.blocks:
        if isinstance(block, HeadBlock):
            layer, head, _ = places.heads[block.target.node]
            for side, group, weights, bos in head_sides(block):
                read = out.setdefault((f"{layer}.attn.{side}.read", head), set())
                for v, w in zip(group, weights, strict=True):
                    read |= global_(made, v, np.asarray(w.any(0)))
                if bos.any():
                    read.add(BOS)
    return out


def component_writes(made: Compilation, places: Places) -> dict[Component, set[int]]:
    """For each writer the directions that it writes."""
    out: dict[Component, set[int]] = {("embed", None): {BOS}}
    for v in made.held:
        if v.block is None:
            fixed = v.primitive is None
            used = np.array([bool(x) for x in v.codes[0]]) if fixed else np.ones(v.width, dtype=bool)
            out["embed", None] |= global_(made, v, used)
    for block in made.blocks:
        if isinstance(block, HeadBlock):
            out[places.writer(block.target)] = set(made.layout.directions[block.target.node])
    for matrix, pairs in channel_edges(made, places).items():
        layer, part, side = matrix.split(".")
        if part == "mlp" and side == "out":
            out[f"{layer}.mlp.out", None] = {d for d, _ in pairs}
    return out


def component_edges(
    made: Compilation, reads: dict[Component, set[int]], writes: dict[Component, set[int]]
) -> list[dict[str, Any]]:
    """Every writer and later reader with a direction in common."""
    table = edge_table(made.transformer.config)
    edges = []
    for r, reader in enumerate(table.readers):
        for w, writer in enumerate(table.writers):
            if table.exists[r, w] and writes.get(writer, set()) & reads.get(reader, set()):
                edges.append({"writer": list(writer), "reader": list(reader)})
    return edges


def head_sides(block: HeadBlock) -> Iterator[tuple[str, list[Variable], list[np.ndarray], np.ndarray]]:
    yield "q", block.queries, block.w_q, block.bos_q
    yield "k", block.keys, block.w_k, block.bos_k
    yield "v", block.values, block.w_v, block.bos_v


def channel_edges(made: Compilation, places: Places) -> dict[str, set[tuple[int, int]]]:
    """The nonzero weights, (row, column), of each matrix: `0.attn.q`, k, v, out, `0.mlp.in`, out."""
    out: dict[str, set[tuple[int, int]]] = {}

    def note(matrix: str, rows: np.ndarray, columns: np.ndarray) -> None:
        out.setdefault(matrix, set()).update(zip(rows.tolist(), columns.tolist(), strict=True))

    at = {v.node: np.array(d) for v, d in ((v, made.layout.directions[v.node]) for v in made.held)}
    for block in made.blocks:
        target = at[block.target.node]
        if isinstance(block, HeadBlock):
            layer, _, start = places.heads[block.target.node]
            for side, group, weights, bos in head_sides(block):
                for v, w in zip(group, weights, strict=True):
                    rows, columns = np.nonzero(w)
                    note(f"{layer}.attn.{side}", start + rows, at[v.node][columns])
                rows = np.flatnonzero(bos)
                note(f"{layer}.attn.{side}", start + rows, np.full(len(rows), BOS))
            note(f"{layer}.attn.out", target, start + np.arange(len(target)))
        else:
            layer, start = places.neurons[block.target.node]
            for v, w in zip(block.reads, block.w_in, strict=True):
                rows, columns = np.nonzero(w)
                note(f"{layer}.mlp.in", start + rows, at[v.node][columns])
            rows, columns = np.nonzero(block.w_out)
            note(f"{layer}.mlp.out", target[rows], start + columns)
    for layer, start, variable, parts in places.erasers:
        w_in, w_out = eraser(variable, parts)
        rows, columns = np.nonzero(w_in)
        note(f"{layer}.mlp.in", start + rows, at[variable.node][columns])
        rows, columns = np.nonzero(w_out)
        note(f"{layer}.mlp.out", at[variable.node][rows], start + columns)
    return out


def edges_from_weights(model: Transformer, tolerance: float = 0.0) -> list[dict[str, Any]]:
    """The edges of `core.weights.weight_graph`, written as in the truth. A rotated model needs a tolerance in float32."""
    table = edge_table(model.config)
    return [
        {"writer": list(table.writers[w]), "reader": list(table.readers[r])}
        for r, w in weight_graph(model, tolerance).nonzero().tolist()
    ]
