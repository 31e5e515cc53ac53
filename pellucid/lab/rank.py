"""What is worth keeping: a score for every node of a model on a task, by five methods of one signature.

Each returns scores (tries, width) for every node site. Only learned masks make several tries, one for each `k_coef`,
stacked on the batch axis. Weight-sparse transformers, A.5 and Figure 31.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from pellucid.core.sites import node_sites
from pellucid.core.taps import Mask, Recorder
from pellucid.core.transformer import Transformer
from pellucid.lab.ablate import last_logits
from pellucid.lab.config import STRATA, PruneConfig
from pellucid.lab.gates import Gate, HardConcreteGate, StepGate
from pellucid.tasks.task import Batch, Task
from pellucid.training.precision import autocast
from pellucid.training.schedules import warmup_decay

Means = Mapping[str, Tensor]
Scores = dict[str, Tensor]


class Ranker(Protocol):
    """A way to score the nodes of a model on a task."""

    def __call__(
        self,
        model: Transformer,
        task: Task,
        means: Means,
        config: PruneConfig,
        *,
        seed: int = 0,
        progress: Callable[..., None] | None = None,
    ) -> Scores: ...


def by_length(pool: Batch, n: int) -> list[Batch]:
    """The pool's pairs in `n` parts of equal size, from short prompts to long ones, each without needless padding."""
    order = pool.lengths[::2].argsort(stable=True)
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


def running(n: int, widths: Mapping[str, int], draw: torch.Generator) -> dict[str, Tensor]:
    """Which nodes outside the circuit run in each of `n` pairs, (n, width): none in about a third of the pairs, in the
    others a random part, whose share is uniform in 0..1."""
    share = (1.5 * torch.rand(n, 1, generator=draw) - 0.5).clamp(min=0)
    return {site: torch.rand(n, width, generator=draw) < share for site, width in widths.items()}


def learn_masks(
    model: Transformer,
    task: Task,
    means: Means,
    config: PruneConfig,
    *,
    seed: int = 0,
    progress: Callable[..., None] | None = None,
    gate: Gate | None = None,
) -> Scores:
    """Mask parameters (tries, width) for every node site; a node is in the circuit where its parameter is positive."""
    device, tries = model.device, len(config.k_coefs)
    gate = gate or StepGate(config.temperature)
    noise, draw, run = (torch.Generator().manual_seed(seed) for _ in range(3))
    pool = task.pairs(config.pool, seed=seed, split="train").to(device)
    widths = node_sites(model.config)
    tau = {
        site: (torch.randn(tries, width, generator=noise) * config.init_noise + config.init_bias)
        .clamp(-1, 1)
        .to(model.wte.weight)
        .requires_grad_()
        for site, width in widths.items()
        if not (config.tied_qk and site.endswith("attn.k"))
    }
    optimizer = torch.optim.AdamW(
        tau.values(), lr=config.lr, betas=(0.9, config.beta2), weight_decay=config.weight_decay
    )
    k_coef = torch.tensor(config.k_coefs, dtype=model.wte.weight.dtype, device=device)
    strata = by_length(pool, min(STRATA, config.pairs))
    for step in range(config.steps):
        drawn = {site: gate(t, run) for site, t in tau.items()}
        gates, sizes = (tied({site: both[i] for site, both in drawn.items()}, widths) for i in (0, 1))
        losses = torch.zeros_like(k_coef)
        for stratum, n in zip(strata, shares(config.pairs, len(strata)), strict=True):
            pairs = torch.randperm(len(stratum) // 2, generator=draw)[:n].to(device)
            batch = stratum.select_pairs(pairs).repeat(tries)
            masks = {site: g[:, None].expand(-1, n, -1) for site, g in gates.items()}
            if config.ablation == "stochastic":
                runs = running(n, widths, run)
                masks = {
                    site: torch.lerp(m, torch.ones_like(m), runs[site].to(m)) for site, m in masks.items()
                }
            tap = Mask(
                {site: m.flatten(0, 1).repeat_interleave(2, 0)[:, None] for site, m in masks.items()}, means
            )
            with autocast(config.precision, device):
                logits = last_logits(model, batch, tap)
            each = task.metric(logits, batch.last()).view(tries, 2 * n).mean(1)
            losses = losses + each * n / config.pairs
        size = torch.stack([s.sum(1) for s in sizes.values()]).sum(0)
        optimizer.zero_grad(set_to_none=True)
        (losses + k_coef * size).sum().backward()
        clip_tries(list(tau.values()), config.clip)
        rate = warmup_decay(step, config.steps, warmup=config.warmup, final=0.0)
        optimizer.param_groups[0]["lr"] = config.lr * rate
        optimizer.step()
        with torch.no_grad():
            for t in tau.values():
                gate.bound(t)
        if progress is not None:
            progress(loss=losses.mean().item(), nodes=size.mean().item())
    return tied({site: t.detach() for site, t in tau.items()}, widths)


def tied(values: Scores, widths: Mapping[str, int]) -> Scores:
    """`values` of every site, in the model's order: key channels that have none of their own share the queries'."""
    return {site: values[site if site in values else site.removesuffix("k") + "q"] for site in widths}


def hard_concrete(
    model: Transformer,
    task: Task,
    means: Means,
    config: PruneConfig,
    *,
    seed: int = 0,
    progress: Callable[..., None] | None = None,
) -> Scores:
    """Mask parameters learned through HardConcrete gates (weight-sparse transformers, Appendix D)."""
    return learn_masks(model, task, means, config, seed=seed, progress=progress, gate=HardConcreteGate())


def attribution(
    model: Transformer,
    task: Task,
    means: Means,
    config: PruneConfig,
    *,
    seed: int = 0,
    progress: Callable[..., None] | None = None,
) -> Scores:
    """|gradient of the loss times (activation - mean)|, summed over a row's tokens: what freezing a node does to the
    loss, to first order. The mean over rows (Figure 31)."""
    totals = {site: torch.zeros(w, device=model.device) for site, w in node_sites(model.config).items()}
    for batch in drawn_batches(model, task, config, seed):
        ones = {
            site: torch.ones(
                len(batch), 1, w, device=model.device, dtype=model.wte.weight.dtype, requires_grad=True
            )
            for site, w in node_sites(model.config).items()
        }
        with torch.enable_grad():
            loss = task.metric(last_logits(model, batch, Mask(ones, means)), batch.last()).sum()
            grads = torch.autograd.grad(loss, list(ones.values()))
        for site, grad in zip(ones, grads, strict=True):
            totals[site] += grad[:, 0].abs().sum(0).float()
    return {site: total[None] / (2 * config.measure) for site, total in totals.items()}


@torch.no_grad()
def activation(
    model: Transformer,
    task: Task,
    means: Means,
    config: PruneConfig,
    *,
    seed: int = 0,
    progress: Callable[..., None] | None = None,
) -> Scores:
    """How far nodes are from their mean on the task: root mean square over real tokens."""
    totals = {site: torch.zeros(w, device=model.device) for site, w in node_sites(model.config).items()}
    tokens = 0
    for batch in drawn_batches(model, task, config, seed):
        recorder = Recorder(totals)
        last_logits(model, batch, recorder)
        tokens += int(batch.mask.sum())
        for site, x in recorder.values.items():
            fill = means[site][: x.shape[1]] if means[site].dim() == 2 else means[site]
            totals[site] += ((x - fill).square() * batch.mask[..., None]).sum((0, 1)).float()
    return {site: (total[None] / tokens).sqrt() for site, total in totals.items()}


def at_random(
    model: Transformer,
    task: Task,
    means: Means,
    config: PruneConfig,
    *,
    seed: int = 0,
    progress: Callable[..., None] | None = None,
) -> Scores:
    """Uniform random scores: what any method must beat."""
    draw = torch.Generator().manual_seed(seed)
    return {
        site: torch.rand(1, w, generator=draw).to(model.device)
        for site, w in node_sites(model.config).items()
    }


def drawn_batches(model: Transformer, task: Task, config: PruneConfig, seed: int) -> list[Batch]:
    """`config.measure` training pairs in parts of similar length."""
    pool = task.pairs(config.measure, seed=seed, split="train").to(model.device)
    return by_length(pool, max(STRATA, config.measure // 32))


RANKERS: dict[str, Ranker] = {
    "learned": learn_masks,
    "hard_concrete": hard_concrete,
    "attribution": attribution,
    "activation": activation,
    "random": at_random,
}
