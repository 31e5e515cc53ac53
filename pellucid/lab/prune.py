"""Pruning: the smallest set of nodes that still does a task, all else frozen at its mean.

Weight-sparse transformers, A.5: rank the nodes, keep the fewest that meet a target loss, remove what is not needed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from pellucid.core.checkpoint import content_hash
from pellucid.core.circuit import Circuit, channel_circuit, count_edges
from pellucid.core.sites import node_sites
from pellucid.core.transformer import Transformer
from pellucid.lab.ablate import (
    keep_only,
    last_logits_by_length,
    random_others,
    remove,
    task_loss,
)
from pellucid.lab.config import STRATA, PruneConfig
from pellucid.lab.discretize import Discretized, Probe, discretize
from pellucid.lab.eliminate import eliminate
from pellucid.lab.faithful import faithfulness
from pellucid.lab.rank import RANKERS, by_length
from pellucid.tasks.task import Task, accuracy


def prune(
    model: Transformer,
    task: Task,
    means: Mapping[str, Tensor],
    *,
    config: PruneConfig | None = None,
    seed: int = 0,
    progress: Callable[..., None] | None = None,
) -> Circuit:
    """The smallest circuit found, by edges, over all tries; its `metrics` say what was measured on held-out data.

    `metrics["verdict"]` is "reached"; or "unreachable", with the circuit of least loss; or, with the whole model, that it
    cannot do the task, or that its own loss is above the target: then nothing is searched.
    """
    config = config or PruneConfig()
    return sweep(model, task, means, (config.target,), config=config, seed=seed, progress=progress)[0]


def sweep(
    model: Transformer,
    task: Task,
    means: Mapping[str, Tensor],
    targets: Sequence[float],
    *,
    config: PruneConfig | None = None,
    seed: int = 0,
    progress: Callable[..., None] | None = None,
) -> list[Circuit]:
    """`prune` to several target losses with one ranking of the nodes: points of the loss-size curve (Figure 2)."""
    config = config or PruneConfig()
    with frozen(model) as model:
        configs = [replace(config, target=target) for target in targets]
        whole = probe_of(model, task, means, config, seed)(everything(model))
        possible = {c.target: whole.loss <= min(c.hopeless, c.target) for c in configs}
        scores = {}
        if any(possible.values()):
            scores = RANKERS[config.method](model, task, means, config, seed=seed, progress=progress)
        return [
            cut(model, task, means, scores, c, seed)
            if possible[c.target]
            else measure(model, task, means, whole, c, seed=seed, tries=[])
            for c in configs
        ]


def cut(
    model: Transformer,
    task: Task,
    means: Mapping[str, Tensor],
    scores: Mapping[str, Tensor],
    config: PruneConfig,
    seed: int,
) -> Circuit:
    """The smallest circuit of top nodes, over all tries of `scores` (tries, width), that meets the target."""
    probe = probe_of(model, task, means, config, seed)
    start = None if config.method in ("learned", "hard_concrete") else 64
    found = [
        discretize({site: s[i] for site, s in scores.items()}, probe, start=start)
        for i in range(len(next(iter(scores.values()))))
    ]
    edges = [count_edges(model, d.kept) for d in found]
    best = min(
        range(len(found)),
        key=lambda i: (not found[i].reached, edges[i] if found[i].reached else found[i].loss),
    )
    chosen = found[best]
    if config.eliminate:
        pool = task.pairs(config.measure // 4, seed=seed + 2, split="train").to(model.device)
        chosen = eliminate(model, task, means, chosen, probe, by_length(pool, STRATA))
    return measure(model, task, means, chosen, config, seed=seed, tries=edges)


def probe_of(
    model: Transformer, task: Task, means: Mapping[str, Tensor], config: PruneConfig, seed: int
) -> Probe:
    """What measures circuits in a search with this seed."""
    return Probe(
        model,
        task,
        means,
        config.target,
        ablation=config.ablation,
        shift=config.shift,
        pairs=config.measure,
        seed=seed + 1,
    )


def everything(model: Transformer) -> dict[str, Tensor]:
    """Masks that keep all nodes."""
    return {
        site: torch.ones(width, dtype=torch.bool, device=model.device)
        for site, width in node_sites(model.config).items()
    }


def measure(
    model: Transformer,
    task: Task,
    means: Mapping[str, Tensor],
    found: Discretized,
    config: PruneConfig,
    *,
    seed: int,
    tries: list[int],
    cut: Transformer | None = None,
) -> Circuit:
    """The circuit of `found` with its held-out losses: sufficient alone, necessary to the rest, against random nodes,
    and how faithful it is to the whole model. It runs in `cut`, the model without some edges, if that is given."""
    cut = model if cut is None else cut
    batch = task.pairs(config.measure, seed=seed, split="test").to(model.device)
    draw = torch.Generator().manual_seed(seed)
    kept = found.kept
    controls = [task_loss(model, task, batch, remove(random_others(kept, draw), means)) for _ in range(8)]
    with torch.no_grad():
        logits = last_logits_by_length(cut, batch, keep_only(kept, means))
    metrics = {
        "verdict": verdict(found, config, bool(tries)),
        "reached": found.reached,
        "searched": bool(tries),
        "target": config.target,
        "full_task_loss": task_loss(model, task, batch),
        "circuit_task_loss": task.metric(logits, batch.last()).mean().item(),
        "circuit_accuracy": accuracy(logits, batch.last()).mean().item(),
        "calibrated_task_loss": task.metric(found.calibration(logits), batch.last()).mean().item(),
        "calibration_scale": found.calibration.scale.item(),
        "ablated_task_loss": task_loss(model, task, batch, remove(kept, means)),
        "random_ablated_task_loss": sum(controls) / len(controls),
        "nothing_task_loss": task_loss(model, task, batch, remove(everything(model), means)),
        **faithfulness(model, task, batch, kept, means, found.calibration, seed=seed, cut=cut),
        "nodes": int(sum(mask.sum() for mask in kept.values())),
        "edges": count_edges(cut, kept),
        "total_nodes": sum(len(mask) for mask in kept.values()),
        "total_edges": count_edges(model, everything(model)),
        "edges_by_try": ", ".join(map(str, tries)),
        "seed": seed,
        "search": config.key(),
    }
    return channel_circuit(
        cut,
        kept,
        task=task.name,
        model_hash=content_hash(model),
        token_edges=token_edges(model, kept, batch.tokens[batch.mask].unique(), batch.answers.unique()),
        metrics=metrics,
    )


def verdict(found: Discretized, config: PruneConfig, searched: bool) -> str:
    """What came of a search, in words."""
    if searched:
        return "reached" if found.reached else "unreachable"
    if found.loss > config.hopeless:
        return "the model cannot do the task"
    return f"the whole model's loss of {found.loss:.3f} is above the target of {config.target:g}"


def token_edges(model: Transformer, kept: Mapping[str, Tensor], read: Tensor, answers: Tensor) -> int:
    """Nonzero entries of the task's tokens' embedding rows at channels that kept nodes read, and of the answers'
    unembedding rows at channels that kept nodes write."""
    d = model.config.d_model
    reads = torch.stack([m[:d] for site, m in kept.items() if site.endswith(".in")]).any(0)
    writes = torch.stack([m for site, m in kept.items() if site.endswith(".out")]).any(0)
    return int(
        (model.wte.weight[read][:, reads] != 0).sum() + (model.unembedding[answers][:, writes] != 0).sum()
    )


@contextmanager
def frozen(model: Transformer) -> Iterator[Transformer]:
    """The model uncompiled, in eval mode and with no gradients for its weights; as it was afterwards."""
    model = getattr(model, "_orig_mod", model)
    training, wanted = model.training, {p: p.requires_grad for p in model.parameters()}
    model.eval().requires_grad_(False)
    try:
        yield model
    finally:
        model.train(training)
        for p, wants in wanted.items():
            p.requires_grad_(wants)
