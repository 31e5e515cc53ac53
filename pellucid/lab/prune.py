"""Learned pruning: the smallest set of nodes that still does a task, all else frozen at its mean.

Weight-sparse transformers, A.5. Masks of several tries are learned at once, stacked on the batch axis.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import get_args

import torch
from torch import Tensor

from pellucid.core.checkpoint import content_hash
from pellucid.core.circuit import Circuit, channel_circuit, count_edges
from pellucid.core.errors import unknown
from pellucid.core.sites import node_sites
from pellucid.core.taps import Mask
from pellucid.core.transformer import Transformer
from pellucid.lab.ablate import (
    keep_only,
    last_logits,
    last_logits_by_length,
    random_others,
    remove,
    task_loss,
)
from pellucid.lab.discretize import Discretized, Probe, discretize
from pellucid.lab.eliminate import eliminate
from pellucid.tasks.task import Batch, Task, accuracy
from pellucid.training.precision import Precision, autocast
from pellucid.training.schedules import warmup_decay

STRATA = 4
"""Each step draws equally from so many lengths of prompt, so that short ones are not padded to the longest."""


@dataclass(frozen=True, kw_only=True)
class PruneConfig:
    """The search for a circuit. Defaults are the seed's table of centres (Table 2)."""

    target: float = 0.15
    """Task loss in nats that the circuit must reach."""

    steps: int = 1000
    """Optimiser steps for each try."""

    pairs: int = 64
    """Task pairs in a step."""

    k_coefs: tuple[float, ...] = (1e-4,)
    """One try for each: the weight of the number of nodes in the loss."""

    init_noise: float = 1e-2
    """Standard deviation of the initial mask parameters."""

    init_bias: float = 1e-1
    """Mean of the initial mask parameters."""

    lr: float = 3e-3
    """Peak learning rate; it falls linearly to 0."""

    warmup: float = 0.05
    """Fraction of the steps in which the learning rate rises."""

    weight_decay: float = 1e-3
    """AdamW's decay."""

    beta2: float = 0.95
    """AdamW's second decay."""

    clip: float = 1.0
    """Largest norm of a try's gradient."""

    temperature: float = 1.0
    """Of the sigmoid whose derivative stands in for the step function's."""

    eliminate: bool = True
    """Whether nodes that the circuit does not need are removed one after the other in the end."""

    hopeless: float = 0.5
    """A whole model with a larger loss than this cannot do the task, and nothing is searched."""

    precision: Precision = "auto"
    """Autocast while masks are learned, as in training. All measurements are in the model's own precision."""

    pool: int = 1024
    """Task pairs that steps draw from."""

    measure: int = 256
    """Pairs for each measurement of a loss."""

    def __post_init__(self):
        object.__setattr__(self, "k_coefs", tuple(self.k_coefs))
        if not self.k_coefs:
            raise ValueError("k_coefs must name at least one try")
        for name in ("target", "steps", "pairs", "lr", "temperature", "clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.precision not in get_args(Precision):
            raise unknown("precision", self.precision, get_args(Precision))
        if self.pool // STRATA < -(-self.pairs // STRATA):
            raise ValueError(f"pool must hold pairs = {self.pairs} in each of its parts, got {self.pool}")
        if self.measure < 4 * STRATA:
            raise ValueError(f"measure must be at least {4 * STRATA} pairs, got {self.measure}")

    def key(self) -> str:
        """The whole search as one line of JSON, to tell whether a stored circuit is of the same one."""
        return json.dumps(asdict(self))


class Heaviside(torch.autograd.Function):
    """1 where x > 0, else 0; backward as if it were sigmoid(x / temperature)."""

    @staticmethod
    def forward(ctx, x: Tensor, temperature: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.temperature = temperature
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x / ctx.temperature)
        return grads[0] * s * (1 - s) / ctx.temperature, None


def learn_masks(
    model: Transformer,
    task: Task,
    means: Mapping[str, Tensor],
    config: PruneConfig,
    *,
    seed: int = 0,
    progress: Callable[..., None] | None = None,
) -> dict[str, Tensor]:
    """Mask parameters (tries, width) for every node site; a node is in the circuit where its parameter is positive."""
    device, tries = model.device, len(config.k_coefs)
    noise, draw = (torch.Generator().manual_seed(seed) for _ in range(2))
    pool = task.pairs(config.pool, seed=seed, split="train").to(device)
    tau = {
        site: (torch.randn(tries, width, generator=noise) * config.init_noise + config.init_bias)
        .clamp(-1, 1)
        .to(model.wte.weight)
        .requires_grad_()
        for site, width in node_sites(model.config).items()
    }
    optimizer = torch.optim.AdamW(
        tau.values(), lr=config.lr, betas=(0.9, config.beta2), weight_decay=config.weight_decay
    )
    k_coef = torch.tensor(config.k_coefs, dtype=model.wte.weight.dtype, device=device)
    strata = by_length(pool, min(STRATA, config.pairs))
    for step in range(config.steps):
        gates = {site: Heaviside.apply(t, config.temperature) for site, t in tau.items()}
        losses = torch.zeros_like(k_coef)
        for stratum, n in zip(strata, shares(config.pairs, len(strata)), strict=True):
            pairs = torch.randperm(len(stratum) // 2, generator=draw)[:n].to(device)
            batch = stratum.select_pairs(pairs).repeat(tries)
            tap = Mask({site: g.repeat_interleave(2 * n, dim=0)[:, None] for site, g in gates.items()}, means)
            with autocast(config.precision, device):
                logits = last_logits(model, batch, tap)
            each = task.metric(logits, batch.last()).view(tries, 2 * n).mean(1)
            losses = losses + each * n / config.pairs
        size = torch.stack([g.sum(1) for g in gates.values()]).sum(0)
        optimizer.zero_grad(set_to_none=True)
        (losses + k_coef * size).sum().backward()
        clip_tries(list(tau.values()), config.clip)
        rate = warmup_decay(step, config.steps, warmup=config.warmup, final=0.0)
        optimizer.param_groups[0]["lr"] = config.lr * rate
        optimizer.step()
        with torch.no_grad():
            for t in tau.values():
                t.clamp_(-1, 1)
        if progress is not None:
            progress(loss=losses.mean().item(), nodes=size.mean().item())
    return {site: t.detach() for site, t in tau.items()}


def by_length(pool: Batch, n: int) -> list[Batch]:
    """The pool's pairs in `n` parts of equal size, from short prompts to long ones, each without needless padding."""
    order = pool.positions[::2].argsort(stable=True)
    parts = order[: len(order) // n * n].chunk(n)
    return [pool.select_pairs(part).trimmed() for part in parts]


def shares(total: int, n: int) -> list[int]:
    """`total` in `n` whole parts that differ by one at most."""
    return [total // n + (i < total % n) for i in range(n)]


@torch.no_grad()
def clip_tries(parameters: list[Tensor], most: float) -> None:
    """Shrink the gradient of each try (the leading axis) to a norm of at most `most`."""
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = torch.stack([g.square().sum(1) for g in grads]).sum(0).sqrt()
    factor = (most / norm.clamp(min=1e-12)).clamp(max=1)
    for g in grads:
        g.mul_(factor[:, None])


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

    If no try reaches the target, the one of least loss is returned with `metrics["reached"] = False`; so is the whole
    model where it cannot do the task itself.
    """
    config = config or PruneConfig()
    with frozen(model) as model:
        return search(model, task, means, config, seed, progress)


def search(
    model: Transformer,
    task: Task,
    means: Mapping[str, Tensor],
    config: PruneConfig,
    seed: int,
    progress: Callable[..., None] | None,
) -> Circuit:
    """`prune`, of a model whose weights want no gradients."""
    probe = Probe(model, task, means, config.target, pairs=config.measure, seed=seed + 1)
    whole = probe(
        {
            site: torch.ones(w, dtype=torch.bool, device=model.device)
            for site, w in node_sites(model.config).items()
        }
    )
    if whole.loss > config.hopeless:
        return measure(model, task, means, whole, config, seed=seed, tries=[])
    taus = learn_masks(model, task, means, config, seed=seed, progress=progress)
    found = [discretize({site: t[i] for site, t in taus.items()}, probe) for i in range(len(config.k_coefs))]
    edges = [count_edges(model, d.kept) for d in found]
    best = min(
        range(len(found)),
        key=lambda i: (not found[i].reached, edges[i] if found[i].reached else found[i].loss),
    )
    chosen = found[best]
    if config.eliminate:
        strata = by_length(
            task.pairs(config.measure // 4, seed=seed + 2, split="train").to(model.device), STRATA
        )
        chosen = eliminate(model, task, means, chosen, probe, strata)
    return measure(model, task, means, chosen, config, seed=seed, tries=edges)


def measure(
    model: Transformer,
    task: Task,
    means: Mapping[str, Tensor],
    found: Discretized,
    config: PruneConfig,
    *,
    seed: int,
    tries: list[int],
) -> Circuit:
    """The circuit of `found` with its held-out losses: sufficient alone, necessary to the rest, against random nodes."""
    batch = task.pairs(config.measure, seed=seed, split="test").to(model.device)
    draw = torch.Generator().manual_seed(seed)
    kept = found.kept
    controls = [task_loss(model, task, batch, remove(random_others(kept, draw), means)) for _ in range(8)]
    everything = {site: torch.ones_like(mask) for site, mask in kept.items()}
    with torch.no_grad():
        logits = last_logits_by_length(model, batch, keep_only(kept, means))
    metrics = {
        "reached": found.reached,
        "searched": bool(tries),
        "target": config.target,
        "full_task_loss": task_loss(model, task, batch),
        "circuit_task_loss": task.metric(logits, batch.last()).mean().item(),
        "circuit_accuracy": accuracy(logits, batch.last()).mean().item(),
        "calibrated_task_loss": task.metric(found.calibration(logits), batch.last()).mean().item(),
        "ablated_task_loss": task_loss(model, task, batch, remove(kept, means)),
        "random_ablated_task_loss": sum(controls) / len(controls),
        "nothing_task_loss": task_loss(model, task, batch, remove(everything, means)),
        "nodes": int(sum(mask.sum() for mask in kept.values())),
        "edges": count_edges(model, kept),
        "total_nodes": sum(len(mask) for mask in kept.values()),
        "total_edges": count_edges(model, everything),
        "edges_by_try": ", ".join(map(str, tries)),
        "seed": seed,
        "search": config.key(),
    }
    return channel_circuit(
        model,
        kept,
        task=task.name,
        model_hash=content_hash(model),
        token_edges=token_edges(model, kept, batch.tokens[batch.mask].unique(), batch.answers.unique()),
        metrics=metrics,
    )


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
