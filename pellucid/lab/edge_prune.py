"""Edge pruning inside a node circuit: the fewest of its edges that still do the task, the others frozen at their mean.

Weight-sparse transformers count a circuit's edges and prune its nodes; this prunes the edges too, with the same gates
(A.5). A cut edge sends its weight times its writer's mean, through the reader's bias, so that a model with cut edges is
an ordinary Transformer. Attention's output reads the mix, whose mean is taken to be that of the values: of a sink's
share of the attention, which makes the mix smaller, this knows nothing. All losses are measured on the cut model.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.func import functional_call

from pellucid.core.circuit import Circuit, kept_masks, matrices
from pellucid.core.sites import node_sites
from pellucid.core.taps import Tap
from pellucid.core.transformer import Transformer
from pellucid.lab.ablate import Kept, keep_only
from pellucid.lab.config import STRATA, PruneConfig
from pellucid.lab.discretize import Discretized, Probe, discretize
from pellucid.lab.extract import ExtractedCircuit, can_extract, check_fit, extract
from pellucid.lab.extracted import CutAttention, CutMLP
from pellucid.lab.gates import StepGate
from pellucid.lab.prune import frozen, measure, probe_of
from pellucid.lab.rank import by_length, clip_tries, shares
from pellucid.tasks.task import Task
from pellucid.training.precision import autocast
from pellucid.training.schedules import warmup_decay

Edges = Mapping[tuple[str, str], Tensor]
"""A bool mask (readers, writers) for every matrix, by its (writer site, reader site)."""


def prune_edges(
    model: Transformer,
    task: Task,
    circuit: Circuit,
    means: Mapping[str, Tensor],
    *,
    config: PruneConfig | None = None,
    seed: int = 0,
    progress: Callable[..., None] | None = None,
) -> Circuit:
    """The circuit with the fewest edges found, over all tries; its `metrics` are of `edge_model`, on held-out data.

    Nodes with no edge left are dropped, and neurons and value channels that have none on one side: what they held is
    frozen at its mean, and the loss measured so. `metrics["node_circuit_edges"]` is the number of edges before. Under
    partial ablation the loss may shift as far as the given circuit's does. A circuit that misses the target comes back
    as it is, with the verdict "unreachable". Raises `ValueError` for a
    circuit of another model or task, and for a model and means that `edge_model` does not take.
    """
    config = config or PruneConfig()
    if circuit.task != task.name:
        raise ValueError(f"the circuit is of task {circuit.task!r}, this is task {task.name!r}")
    with frozen(model) as model:
        kept, edges = kept_masks(circuit, model), circuit_edges(model, circuit)
        probe = EdgeProbe(model, edges, means, probe_of(model, task, means, config, seed))
        own = probe.measure(kept, edges)
        own = replace(own, reached=own.loss <= config.target)
        probe.base.shift = max(config.shift, own.shift)
        options = [(own, kept, edges)]
        if own.reached:
            module, probe.places = gated_circuit(model, kept, edges, means)
            tap = None if isinstance(module, ExtractedCircuit) else keep_only(kept, means)
            scores = learn_edges(module, probe.places, task, config, tap=tap, seed=seed, progress=progress)
            found = [discretize({"edges": s}, probe) for s in scores]
            options += [(f, *probe.cut(f.kept["edges"])) for f in found]
        best, kept, edges = min(options, key=lambda option: (not option[0].reached, count(option[2])))
        tries = [count(option[2]) for option in options[1:] or options]
        cut = edge_model(model, around(kept, edges), means)
        found = replace(best, kept=kept)
        pruned = measure(model, task, means, found, config, seed=seed, tries=tries, cut=cut)
    metrics = {**circuit.metrics, **pruned.metrics, "node_circuit_edges": len(circuit.edges)}
    return pruned.model_copy(update={"metrics": metrics})


@torch.no_grad()
def edge_model(model: Transformer, kept_edges: Circuit | Edges, means: Mapping[str, Tensor]) -> Transformer:
    """The model with all edges frozen at their mean that are not kept: W' = W * kept, b' = b + (W * ~kept) @ mean.

    Of a circuit the missing edges between its own nodes are cut; nodes outside are left to `keep_only` or `extract`,
    which apply to the result. It has biases, also where the model has none. Raises `ValueError` for a circuit of
    another model, means by position, and a model whose MLPs read through a module (`mlp_input`).
    """
    check_fit("mean", means, model.config)
    if model.config.mlp_input is not None:
        raise ValueError(
            "edges of a model with mlp_input cannot be cut: its MLPs do not read the nodes themselves"
        )
    if isinstance(kept_edges, Circuit):
        kept_edges = around(kept_masks(kept_edges, model), circuit_edges(model, kept_edges))
    cut_model = with_biases(model)
    state = cut_model.state_dict()
    for (writer, reader, weight), (name, row) in zip(matrices(model), addresses(model), strict=True):
        rows, cut = slice(row, row + len(weight)), weight.masked_fill(kept_edges[writer, reader], 0)
        state[f"{name}.weight"][rows] -= cut
        state[f"{name}.bias"][rows] += cut @ means[writer].to(cut)
    return cut_model


def with_biases(model: Transformer) -> Transformer:
    """A copy of the model whose matrices have biases, 0 where it has none."""
    if model.config.linear_bias:
        return deepcopy(model)
    config = replace(model.config, linear_bias=True)
    copied = Transformer(config, seed=None, device=model.device).to(model.wte.weight.dtype)
    state = {name: torch.zeros_like(x) for name, x in copied.state_dict().items()} | model.state_dict()
    copied.load_state_dict(state)
    return copied.train(model.training).requires_grad_(model.wte.weight.requires_grad)


def addresses(model: Transformer) -> list[tuple[str, int]]:
    """The module that holds each of `matrices`, and the matrix's first row in it."""
    out = []
    for number, block in enumerate(model.blocks):
        if block.attn is not None:
            out += [(f"blocks.{number}.attn.qkv", i * block.attn.width) for i in range(3)]
            out.append((f"blocks.{number}.attn.proj", 0))
        if block.mlp is not None:
            out += [(f"blocks.{number}.mlp.fc", 0), (f"blocks.{number}.mlp.proj", 0)]
    return out


def circuit_edges(model: Transformer, circuit: Circuit) -> dict[tuple[str, str], Tensor]:
    """A circuit's edges as masks."""
    edges = {(w, r): torch.zeros_like(weight, dtype=torch.bool) for w, r, weight in matrices(model)}
    for edge in circuit.edges:
        mask = edges.get((edge.writer.site, edge.reader.site))
        if mask is None or edge.reader.channel >= mask.shape[0] or edge.writer.channel >= mask.shape[1]:
            raise ValueError(f"the model has no edge {edge.writer} -> {edge.reader}")
        mask[edge.reader.channel, edge.writer.channel] = True
    return edges


def around(kept: Kept, edges: Edges) -> Edges:
    """The circuit's `edges` and all that do not join two of its nodes."""
    return {(w, r): e | ~(kept[r][:, None] & kept[w]) for (w, r), e in edges.items()}


def count(edges: Edges) -> int:
    """How many edges there are in the masks."""
    return sum(int(mask.sum()) for mask in edges.values())


def joined(model: Transformer, edges: Edges) -> tuple[dict[str, Tensor], Edges]:
    """The nodes that edges join, and the edges, less those of a neuron or value channel with none on its other side."""
    edges = dict(edges)
    for source, inner in list(edges):
        if inner.endswith((".v", ".act")):
            into, out = (source, inner), (inner, inner.replace(".v", ".out").replace(".act", ".out"))
            live = edges[into].any(1) & edges[out].any(0)
            edges[into], edges[out] = edges[into] & live[:, None], edges[out] & live
    nodes = {
        site: torch.zeros(width, dtype=torch.bool, device=model.device)
        for site, width in node_sites(model.config).items()
    }
    for (writer, reader), mask in edges.items():
        nodes[writer] |= mask.any(0)
        nodes[reader] |= mask.any(1)
    return nodes, edges


class EdgeProbe(Probe):
    """Measures the circuits that some of a node circuit's edges make: a mask over `places`, under the name "edges"."""

    places: Sequence["Place"] = ()

    def __init__(self, model: Transformer, edges: Edges, means: Mapping[str, Tensor], base: Probe):
        self.model, self.edges, self.means, self.base = model, edges, means, base

    def __call__(self, kept: Kept) -> Discretized:
        return replace(self.measure(*self.cut(kept["edges"])), kept=dict(kept))

    def cut(self, chosen: Tensor) -> tuple[dict[str, Tensor], Edges]:
        """The nodes and edges of a mask over the places."""
        edges = {site: torch.zeros_like(mask) for site, mask in self.edges.items()}
        for place, mask in zip(self.places, chosen.split([len(p) for p in self.places]), strict=True):
            edges[place.writer, place.reader][place.to[mask], place.of[mask]] = True
        return joined(self.model, edges)

    def measure(self, kept: Kept, edges: Edges) -> Discretized:
        """What a probe of the cut model says of the nodes."""
        probe = copy(self.base)
        probe.model = edge_model(self.model, around(kept, edges), self.means)
        return probe(kept)


@dataclass(frozen=True)
class Place:
    """n edges of one matrix, in the model and in a module that computes with them; all tensors are (n,)."""

    writer: str
    reader: str
    of: Tensor
    """The writers' channels."""
    to: Tensor
    """The readers' channels."""
    name: str
    """What goes before `weight` and `bias` in the module."""
    rows: Tensor
    columns: Tensor
    mean: Tensor
    """The writers' means."""

    def __len__(self) -> int:
        return len(self.of)


def gated_circuit(
    model: Transformer, kept: Kept, edges: Edges, means: Mapping[str, Tensor]
) -> tuple[Transformer | ExtractedCircuit, list[Place]]:
    """The extracted circuit, which is quick, or where there is none the whole model; and where its edges are in it."""
    module = edge_model(model, around(kept, edges), means)
    if can_extract(model.config, means):
        module = extract(module, kept, means)
    state, places = module.state_dict(), []
    for writer, reader, name, rows, columns, to, of in parts(module):
        weight = state[f"{name}weight"][rows][:, columns]
        r, c = (edges[writer, reader][to][:, of] & (weight != 0)).nonzero().T
        places.append(
            Place(writer, reader, of[c], to[r], name, rows[r], columns[c], means[writer][of[c]].to(weight))
        )
    return module, places


Part = tuple[str, str, str, Tensor, Tensor, Tensor, Tensor]


def parts(module: Transformer | ExtractedCircuit) -> Iterator[Part]:
    """(writer, reader, name, rows, columns, reader's channels, writer's channels) of every matrix of nodes."""
    if isinstance(module, Transformer):
        for (writer, reader, weight), (name, row) in zip(matrices(module), addresses(module), strict=True):
            to, of = (torch.arange(n, device=weight.device) for n in weight.shape)
            yield writer, reader, f"{name}.", row + to, of, to, of
        return
    for number, part in enumerate(module.sublayers):
        name = f"sublayers.{number}."
        if isinstance(part, CutAttention):
            nodes = part.nodes
            source, *readers, out = nodes
            columns = torch.arange(part.weight.shape[1], device=part.weight.device)
            slots = (part.query_slots, part.key_slots, part.value_slots)
            for reader, rows in zip(readers, slots, strict=True):
                yield source, reader, name, rows, columns, nodes[reader], nodes[source]
            columns, value = part.value_slots - 2 * part.out_weight.shape[1], readers[2]
            yield value, out, f"{name}out_", part.writes, columns, nodes[out], nodes[value]
        elif isinstance(part, CutMLP):
            nodes = part.nodes
            source, act, out = nodes
            neurons, columns = (torch.arange(n, device=part.weight.device) for n in part.weight.shape)
            yield source, act, name, neurons, columns, nodes[act], nodes[source]
            yield act, out, f"{name}out_", part.writes, neurons, nodes[out], nodes[act]


def gated(state: Mapping[str, Tensor], places: Sequence[Place], gates: Tensor) -> dict[str, Tensor]:
    """A module's weights and biases with gates (n,) in [0, 1] on its edges."""
    out = dict(state)
    for p, gate in zip(places, gates.split([len(p) for p in places]), strict=True):
        weight, bias = f"{p.name}weight", f"{p.name}bias"
        sent = state[weight][p.rows, p.columns]
        out[weight] = out[weight].index_put((p.rows, p.columns), sent * gate)
        out[bias] = out[bias].index_add(0, p.rows, sent * (1 - gate) * p.mean)
    return out


def learn_edges(
    module: Transformer | ExtractedCircuit,
    places: Sequence[Place],
    task: Task,
    config: PruneConfig,
    *,
    tap: Tap | None = None,
    seed: int = 0,
    progress: Callable[..., None] | None = None,
) -> Tensor:
    """Parameters (tries, n) of the edges at `places` of `module`, as `learn_masks` has for nodes; all nodes outside are
    frozen. An edge is in the circuit where its parameter is positive."""
    state, device, causal = module.state_dict(), module.unembedding.device, module.config.causal
    noise, draw, run = (torch.Generator().manual_seed(seed) for _ in range(3))
    pool = task.pairs(config.pool, seed=seed, split="train").to(device)
    gate, size = StepGate(config.temperature), (len(config.k_coefs), sum(len(p) for p in places))
    start = torch.randn(size, generator=noise) * config.init_noise + config.init_bias
    tau = start.clamp(-1, 1).to(module.unembedding).requires_grad_()
    optimizer = torch.optim.AdamW(
        [tau], lr=config.lr, betas=(0.9, config.beta2), weight_decay=config.weight_decay
    )
    k_coef = tau.new_tensor(config.k_coefs)
    strata = by_length(pool, min(STRATA, config.pairs))
    for step in range(config.steps):
        gates, sizes = gate(tau, run)
        tensors = [gated(state, places, g) for g in gates]
        losses = torch.zeros_like(k_coef)
        for stratum, n in zip(strata, shares(config.pairs, len(strata)), strict=True):
            batch = stratum.select_pairs(torch.randperm(len(stratum) // 2, generator=draw)[:n].to(device))
            options = {"mask": None if causal else batch.mask, "only": batch.only}
            options |= {} if tap is None else {"tap": tap}
            with autocast(config.precision, device):
                logits = [functional_call(module, t, (batch.tokens,), options) for t in tensors]
            each = torch.stack([task.metric(x, batch.last()).mean() for x in logits])
            losses = losses + each * n / config.pairs
        optimizer.zero_grad(set_to_none=True)
        (losses + k_coef * sizes.sum(1)).sum().backward()
        clip_tries([tau], config.clip)
        rate = warmup_decay(step, config.steps, warmup=config.warmup, final=0.0)
        optimizer.param_groups[0]["lr"] = config.lr * rate
        optimizer.step()
        with torch.no_grad():
            gate.bound(tau)
        if progress is not None:
            progress(loss=losses.mean().item(), edges=sizes.sum(1).mean().item())
    return tau.detach()
