"""From a model and its circuit to the views that a page shows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from pellucid.core.circuit import Circuit, Node, kept_masks
from pellucid.core.transformer import Transformer
from pellucid.lab.ablate import keep_only, task_loss
from pellucid.lab.discretize import Calibration
from pellucid.lab.eliminate import removal_losses
from pellucid.lab.examples import Example, extreme_examples, record_nodes
from pellucid.tasks.task import Batch, Task
from pellucid.viewer.schema import TOKEN, CircuitView, Curve, EdgeView, ModelView, NodeView, Snippet

MOST_DETAILED = 160
"""Nodes of a circuit that get snippets and an importance; in larger ones those with the most edges."""
MOST_EDGES = 4000
"""Weights of a circuit that go into the page; of more, the largest."""


@dataclass(frozen=True)
class Subject:
    """What a circuit is shown with: its model, tokenizer and means, the task, and held-out tokens for snippets."""

    model: Transformer
    tokenizer: Tokenizer
    means: Mapping[str, Tensor]
    task: Task
    tokens: object


def model_view(
    name: str,
    description: str,
    subject: Subject,
    circuit: Circuit,
    metrics: Mapping[str, float | int | str | None],
    curves: Mapping[str, Sequence[tuple[float, float]]],
) -> ModelView:
    """One model of a report. A circuit that missed its target is not drawn, and the view's note says so."""
    reached = bool(circuit.metrics.get("reached"))
    return ModelView(
        name=name,
        description=description,
        metrics={k: int(v) if isinstance(v, bool) else v for k, v in metrics.items()},
        circuit=circuit_view(subject, circuit) if reached else None,
        note=verdict(circuit),
        curves=tuple(
            Curve(name=key, x=tuple(x for x, _ in points), y=tuple(y for _, y in points))
            for key, points in curves.items()
        ),
    )


def verdict(circuit: Circuit) -> str | None:
    """What must be said of a circuit that fell short: of the task, of the target, or of it on held-out data."""
    m = circuit.metrics
    loss = f"{m['calibrated_task_loss']:.3f} nats"
    if not m.get("searched"):
        if (said := str(m.get("verdict", ""))).startswith("the whole model's loss"):
            return f"{said}; nothing was searched"
        return f"cannot do the task: the whole model's loss, recalibrated, is {loss}; nothing was searched"
    if not m.get("reached"):
        return (
            f"unreachable: no circuit met the target of {m['target']} nats; the best one had {loss} on held-out "
            f"data at {len(circuit.edges):,} edges"
        )
    if float(m["calibrated_task_loss"] or 0) > float(m["target"] or 0):
        return (
            f"met its target of {m['target']} nats on the pairs of the search; on held-out ones it has {loss}"
        )
    return None


def circuit_view(subject: Subject, circuit: Circuit) -> CircuitView:
    """The circuit with what a reader wants to know of each node."""
    reads, writes = count_by(e.reader for e in circuit.edges), count_by(e.writer for e in circuit.edges)
    degree = {node: reads.get(node, 0) + writes.get(node, 0) for node in circuit.nodes}
    detailed = sorted(circuit.nodes, key=lambda node: -degree[node])[:MOST_DETAILED]
    batch = subject.task.pairs(64, seed=7, split="test").to(subject.model.device)
    importance = dict(zip(detailed, node_importance(subject, circuit, detailed, batch), strict=True))
    top, bottom = extreme_examples(subject.model, subject.tokens, detailed)
    snippets = {
        node: {"top": top[i], "bottom": bottom[i]} for i, node in enumerate(detailed)
    }  # fmt: skip
    tasks = task_snippets(subject, detailed, batch.select(torch.arange(6, device=batch.tokens.device)))

    def shown(examples: Sequence[Example]) -> tuple[Snippet, ...]:
        return tuple(
            Snippet(
                tokens=words(subject.tokenizer, e.tokens), activations=rounded(e.activations), focus=e.focus
            )
            for e in examples
        )

    nodes = tuple(
        NodeView(
            id=str(node),
            site=node.site,
            channel=node.channel,
            layer=int(node.site.split(".")[0]),
            mean=subject.means[node.site][node.channel].item(),
            top=shown(snippets[node]["top"]) if node in snippets else (),
            bottom=shown(snippets[node]["bottom"]) if node in snippets else (),
            task=tasks.get(node, ()),
            importance=importance.get(node),
            in_edges=reads.get(node, 0),
            out_edges=writes.get(node, 0),
        )
        for node in circuit.nodes
    )
    strongest = sorted(circuit.edges, key=lambda e: -abs(e.weight))[:MOST_EDGES]
    weights = [
        EdgeView(writer=str(e.writer), reader=str(e.reader), weight=e.weight, kind="weight")
        for e in strongest
    ]
    return CircuitView(
        task=circuit.task,
        nodes=nodes,
        edges=(*weights, *token_views(subject, circuit, batch)),
        total_edges=len(circuit.edges),
        token_edges=circuit.token_edges,
    )


def count_by(nodes) -> dict[Node, int]:
    """How often each node occurs."""
    counts: dict[Node, int] = {}
    for node in nodes:
        counts[node] = counts.get(node, 0) + 1
    return counts


def node_importance(subject: Subject, circuit: Circuit, nodes: Sequence[Node], batch: Batch) -> list[float]:
    """How much the task loss rises when each node alone is frozen at its mean too."""
    model, kept = subject.model, kept_masks(circuit, subject.model)
    as_is = Calibration(torch.ones((), device=model.device), torch.zeros((), device=model.device))
    places = [(node.site, node.channel) for node in nodes]
    without = removal_losses(model, subject.task, subject.means, kept, as_is, places, [batch])
    return (without - task_loss(model, subject.task, batch, keep_only(kept, subject.means))).tolist()


def task_snippets(subject: Subject, nodes: Sequence[Node], batch: Batch) -> dict[Node, tuple[Snippet, ...]]:
    """Each node's activations on a few pairs of the task."""
    values = record_nodes(subject.model, batch.tokens, nodes) if nodes else []
    lengths = (batch.positions + 1).tolist()
    return {
        node: tuple(
            Snippet(
                tokens=words(subject.tokenizer, batch.tokens[row, :n].tolist()),
                activations=rounded(values[i][row, :n].tolist()),
                focus=n - 1,
                label="positive" if row % 2 == 0 else "negative",
            )
            for row, n in enumerate(lengths)
        )
        for i, node in enumerate(nodes)
    }


def token_views(subject: Subject, circuit: Circuit, batch: Batch, most: int = 12) -> list[EdgeView]:
    """Embedding rows of the tokens that differ within pairs, at the first node that reads each channel; and the
    answers' unembedding rows, at the last node that writes it."""
    model, tokenizer = subject.model, subject.tokenizer
    d = model.config.d_model
    first = {n.channel: n for n in reversed(circuit.nodes) if n.site.endswith(".in") and n.channel < d}
    last = {n.channel: n for n in circuit.nodes if n.site.endswith(".out")}
    different = batch.tokens[(batch.tokens != batch.corrupt) & batch.mask].unique().tolist()[:most]
    views = []
    for token in different:
        row, text = model.wte.weight[token], TOKEN + tokenizer.decode([token], skip_special_tokens=False)
        views += [
            EdgeView(writer=text, reader=str(node), weight=row[c].item(), kind="embed")
            for c, node in first.items()
            if row[c] != 0
        ]
    for token in batch.answers.unique().tolist():
        row, text = model.unembedding[token], TOKEN + tokenizer.decode([token], skip_special_tokens=False)
        views += [
            EdgeView(writer=str(node), reader=text, weight=row[c].item(), kind="unembed")
            for c, node in last.items()
            if row[c] != 0
        ]
    return views


def words(tokenizer: Tokenizer, tokens: Sequence[int]) -> tuple[str, ...]:
    """The text of each token."""
    return tuple(tokenizer.decode([token], skip_special_tokens=False) for token in tokens)


def rounded(values: Sequence[float]) -> tuple[float, ...]:
    """Three significant digits: enough for a page, and a third of its size."""
    return tuple(float(f"{value:.3g}") for value in values)
