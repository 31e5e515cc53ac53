"""One method on one model: its scores against every truth."""

import torch
from torch import Tensor

from pellucid.bench.metrics import (
    Number,
    auroc,
    average_precision,
    calibration,
    curve_areas,
    grid,
    nearest,
    precision_at_size,
    recall_precision,
    top,
)
from pellucid.bench.subject import Subject
from pellucid.bench.truth import THRESHOLD, kept_only
from pellucid.lab.ablate import last_logits
from pellucid.lab.fills import Ablation
from pellucid.lab.scores import Scores


def flat(scores: Scores, values: Tensor, exists: Tensor) -> Tensor:
    """The values of the parts that exist, in a row."""
    values = values.detach().cpu()
    return values if scores.universe == "node" else values[exists]


def measure(subject: Subject, scores: Scores, ablation: Ablation) -> dict[str, Number]:
    """Every number of the benchmark, by name. See docs/bench.md for what each means.

    S is the structure; E the parts that matter under `ablation`; the circuit is the method's own (`kept`), or its top |E| parts.
    """
    truth, exists = subject.truth, subject.truth.table.exists
    values = flat(scores, scores.values, exists).double()
    structure = flat(scores, truth.used if scores.universe == "node" else truth.structure, exists)
    effects = truth.effects[ablation]
    effective = flat(scores, effects.effective(scores.universe), exists)
    exact = flat(scores, effects.edges if scores.universe == "edge" else effects.nodes, exists).double()
    size = int(effective.sum())
    circuit = top(values, size) if scores.kept is None else flat(scores, scores.kept, exists)
    found: dict[str, Number] = {
        "auroc_S": auroc(values, structure),
        "ap_S": average_precision(values, structure),
        "auroc_E": auroc(values, effective),
        "ap_E": average_precision(values, effective),
        "precision_E": precision_at_size(values, effective),
    }
    total = total_effect(subject, ablation)
    if scores.effects is not None:
        estimated = flat(scores, scores.effects, exists).double()
        large = estimated.abs() > THRESHOLD * abs(total)
        found["recall_1pc"], found["precision_1pc"] = recall_precision(large, effective)
        found |= calibration(estimated, exact, THRESHOLD * abs(total))
    found["circuit_recall"], found["circuit_precision"] = recall_precision(circuit, effective)
    if scores.universe == "edge" and truth.circuits and ablation == "resample":
        found["jaccard"] = nearest(circuit, [c[exists] for c in truth.circuits])
    return found | behaviour(subject, scores, values, circuit, ablation, total)


def total_effect(subject: Subject, ablation: Ablation) -> float:
    """What ablating every edge does to the metric."""
    truth = subject.truth
    nothing = torch.zeros(1, *truth.table.exists.shape)
    return float(excess(subject, nothing, ablation)[0])


def excess(subject: Subject, keep: Tensor, ablation: Ablation) -> Tensor:
    """(circuits,): the mean metric with only these edges, less that of the whole model."""
    truth, task = subject.truth, subject.task
    with torch.no_grad():
        whole = task.metric(last_logits(subject.model, truth.batch), truth.batch)
        each = kept_only(subject.model, truth.batch, truth.replaced[ablation], keep, task.metric)
    return (each - whole).mean(1).double().cpu()


def behaviour(
    subject: Subject, scores: Scores, values: Tensor, circuit: Tensor, ablation: Ablation, total: float
) -> dict[str, Number]:
    """What the ranked parts and the circuit do when the others, or they, are cut."""
    exists = subject.truth.table.exists

    def masks(parts: Tensor) -> Tensor:
        """(circuits, parts) -> (circuits, readers, writers); parts that do not exist are kept."""
        keep = torch.ones(len(parts), *exists.shape, dtype=torch.bool)
        if scores.universe == "node":
            return keep & parts[:, None, :]
        keep[:, exists] = parts
        return keep

    sizes = grid(len(values))
    n = int(circuit.sum())
    smaller = circuit.repeat(n, 1)
    smaller[torch.arange(n), circuit.nonzero()[:, 0]] = False
    parts = torch.cat([torch.stack([top(values, k) for k in sizes]), ~circuit[None], circuit[None], smaller])
    if abs(total) < 1e-6:
        return {"size": float(n)}
    shift = excess(subject, masks(parts), ablation) / total
    faithfulness = (1 - shift[: len(sizes)]).tolist()
    without, alone, less = shift[len(sizes)], shift[len(sizes) + 1], shift[len(sizes) + 2 :]
    return {
        **curve_areas(sizes, faithfulness),
        "size": float(n),
        "sufficiency": 1 - float(alone),
        "necessity": float(without),
        "minimality": float(((less - alone).abs() > THRESHOLD).double().mean()) if n else None,
    }
