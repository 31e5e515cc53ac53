"""Binarization: how well a circuit does its task when every node can say only one of two things.

Weight-sparse transformers, Appendix C and Figure 34. Each kept node gets two levels; what passes it becomes the one
that is nearer. The levels are trained through a mixture of the identity and a sigmoid that sharpens to that step.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from pellucid.core.checkpoint import content_hash
from pellucid.core.circuit import Circuit, Frozen, Node, kept_masks
from pellucid.core.errors import unknown
from pellucid.core.sites import node_sites
from pellucid.core.taps import Recorder, Tap, chain
from pellucid.core.transformer import Transformer
from pellucid.lab.ablate import Kept, keep_only, last_logits, last_logits_by_length
from pellucid.lab.discretize import calibrate
from pellucid.lab.prune import frozen
from pellucid.tasks.task import Batch, Task, accuracy
from pellucid.training.schedules import warmup_decay

AT_ONCE = 16
"""Candidates that are stacked on the batch axis in one forward pass."""
SHARPEST = 1e-6
"""The least temperature of the sigmoid: below it the slope at the threshold is of no use."""

Objective = Literal["task", "circuit"]

Levels = Mapping[str, tuple[Tensor, Tensor, Tensor]]
"""For each site the channels (n,) that are binarised, their low and their high level (n,)."""


@dataclass(frozen=True, kw_only=True)
class BinarizeConfig:
    """How levels are found. The seed gives the grid and the annealing; the rest is ours."""

    objective: Objective = "task"
    """What levels are trained for: the task's loss, as in the seed, or the least KL divergence from the circuit's own
    next-token distribution, which cannot do the task better than the circuit by being another one."""

    steps: int = 400
    """Optimiser steps; 0 leaves the levels as the grid search found them."""

    pairs: int = 32
    """Task pairs in a step."""

    lr: float = 3e-3
    """Peak learning rate of Adam, in units of each node's first gap between its levels; it falls linearly to 0."""

    clip: float = 1.0
    """Largest norm of the gradient, in the same units."""

    power: float = 5.0
    """The weight of the identity and the temperature are (1 - progress) ** power."""

    bounded: bool = True
    """Whether levels stay within the activations observed; free ones run off, and act as a larger scale of logits."""

    thresholds: tuple[float, ...] = (0.25, 0.5, 0.75)
    """Places between a node's least and greatest activation at which the grid search splits."""

    exclude: tuple[str, ...] = ()
    """Sites that stay as they are: `3.attn.k`, or `attn.k` for that of every layer."""

    search: int = 32
    """Pairs that activations are observed on and the grid search is scored by."""

    pool: int = 512
    """Pairs that steps draw from and calibrations are fitted on."""

    measure: int = 256
    """Held-out pairs that the losses are measured on."""

    def __post_init__(self):
        object.__setattr__(self, "thresholds", tuple(self.thresholds))
        object.__setattr__(self, "exclude", tuple(self.exclude))
        if self.objective not in get_args(Objective):
            raise unknown("objective", self.objective, get_args(Objective))
        for name in ("pairs", "lr", "clip", "power", "search", "pool", "measure"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.steps < 0:
            raise ValueError(f"steps must not be negative, got {self.steps}")
        if not self.thresholds or not all(0 < place < 1 for place in self.thresholds):
            raise ValueError(f"thresholds must lie between 0 and 1, got {self.thresholds}")
        if self.pool < self.pairs:
            raise ValueError(f"pool must hold pairs = {self.pairs}, got {self.pool}")


class TwoLevels(Frozen):
    """A node that says `low` below the middle of the two, else `high`; equal for one that is constant on the task."""

    node: Node
    low: float
    high: float
    explained: float | None
    """The share of the variance of its activations in the circuit that the two levels explain; None if constant.
    Near 1 the node was all but binary; below 0 it was moved elsewhere."""


class TaskLosses(Frozen):
    """On held-out pairs, in nats: the task's loss as it is and with recalibrated logits; and the share answered right."""

    task_loss: float
    calibrated_task_loss: float
    accuracy: float


class Binarized(Frozen):
    """A circuit whose nodes are step functions, and its loss before and after."""

    task: str
    model: str
    """The model's content hash."""
    levels: tuple[TwoLevels, ...]
    grid: tuple[TwoLevels, ...]
    """The levels that the grid search chose, untrained."""
    excluded: tuple[Node, ...]
    """The circuit's nodes that were left as they are."""
    circuit: TaskLosses
    """Of the circuit before."""
    start: TaskLosses
    """Of the step functions that the grid search chose, untrained."""
    binarized: TaskLosses
    """Of the step functions in the end."""
    config: str
    """The `BinarizeConfig`, as JSON."""
    seed: int

    def tap(self) -> Tap:
        """The step functions alone; `chain(keep_only(kept, means), binarized.tap())` is the binarised circuit."""
        return steps_of(self.levels)


def soft_step(x: Tensor, low: Tensor, high: Tensor, t: float) -> Tensor:
    """The seed's psi: `t` parts x and 1 - t parts a sigmoid of temperature `t` (times the gap) around the middle.

    The sigmoid is scaled so that `low` and `high` map to themselves at any `t`. At 1 it is x, at 0 the nearer level.
    """
    middle, half = (low + high) / 2, (high - low) / 2
    if t == 0:
        return torch.where(x < middle, torch.minimum(low, high), torch.maximum(low, high))
    sharpness = 1 / (4 * max(t, SHARPEST))  # sigmoid(z) is tanh(z / 2), and the gap is twice `half`
    place = (x - middle) / torch.where(half.abs() < 1e-12, 1e-12, half)
    return t * x + (1 - t) * (middle + half * torch.tanh(sharpness * place) / math.tanh(sharpness))


class Steps(Tap):
    """Puts the channels of `levels` through `soft_step`."""

    def __init__(self, levels: Levels, t: float = 0.0):
        super().__init__(levels)
        self.levels, self.t = dict(levels), t

    def __call__(self, site: str, x: Tensor) -> Tensor:
        channels, low, high = self.levels[site]
        channels = channels.to(x.device)
        stepped = soft_step(x.index_select(-1, channels), low.to(x), high.to(x), self.t)
        return x.index_copy(-1, channels, stepped)


def steps_of(levels: Iterable[TwoLevels]) -> Steps:
    """The step functions of `levels`."""
    by_site: dict[str, list[TwoLevels]] = {}
    for level in levels:
        by_site.setdefault(level.node.site, []).append(level)
    return Steps(
        {
            site: (
                torch.tensor([level.node.channel for level in some]),
                torch.tensor([level.low for level in some], dtype=torch.float64),
                torch.tensor([level.high for level in some], dtype=torch.float64),
            )
            for site, some in by_site.items()
        }
    )


def binarize(
    model: Transformer,
    task: Task,
    circuit: Circuit | Kept,
    means: Mapping[str, Tensor],
    *,
    config: BinarizeConfig | None = None,
    seed: int = 0,
    progress: Callable[..., None] | None = None,
) -> Binarized:
    """The circuit with a step function at every node, all else frozen at its mean; only the levels are trained.

    `progress(loss=..., t=...)` is called once a step. Raises `ValueError` for a circuit of another model or with no
    node to binarise, and for an unknown site in `config.exclude`.
    """
    config = config or BinarizeConfig()
    with frozen(model) as model:
        kept = kept_masks(circuit, model) if isinstance(circuit, Circuit) else circuit
        chosen = included(model, kept, config.exclude)
        ablated = keep_only(kept, means)
        pool = task.pairs(config.pool, seed=seed, split="train").to(model.device)
        test = task.pairs(config.measure, seed=seed, split="test").to(model.device)

        def losses(tap: Tap) -> TaskLosses:
            return measured(model, task, tap, pool, test)

        few = pool.select(torch.arange(2 * min(config.search, config.pool), device=model.device)).trimmed()
        values = observed(model, ablated, chosen, few)
        start = grid_search(model, task, ablated, values, few, config.thresholds)
        bounds = {site: x.aminmax(dim=0) for site, (_, x) in values.items()} if config.bounded else None
        end = train_levels(model, task, ablated, start, bounds, pool, config, seed=seed, progress=progress)
        return Binarized(
            task=task.name,
            model=content_hash(model),
            levels=two_levels(end, values),
            grid=two_levels(start, values),
            excluded=tuple(
                Node(site=site, channel=c)
                for site, mask in kept.items()
                if site not in chosen
                for c in mask.nonzero()[:, 0].tolist()
            ),
            circuit=losses(ablated),
            start=losses(chain(ablated, Steps(start))),
            binarized=losses(chain(ablated, Steps(end))),
            config=json.dumps(asdict(config)),
            seed=seed,
        )


def included(model: Transformer, kept: Kept, exclude: Sequence[str]) -> dict[str, Tensor]:
    """The kept channels (n,) of every site that is to be binarised."""
    sites = node_sites(model.config)
    kinds = {site.split(".", 1)[1] for site in sites}
    for name in exclude:
        if name not in sites and name not in kinds:
            raise unknown("site to exclude", name, {*sites, *kinds})
    chosen = {
        site: mask.nonzero()[:, 0]
        for site, mask in kept.items()
        if mask.any() and site not in exclude and site.split(".", 1)[1] not in exclude
    }
    if not chosen:
        raise ValueError("the circuit has no node to binarise")
    return chosen


@torch.no_grad()
def observed(
    model: Transformer, ablated: Tap, chosen: Mapping[str, Tensor], batch: Batch
) -> dict[str, tuple[Tensor, Tensor]]:
    """For each site its channels (n,) and their activations in the circuit (tokens, n) on the batch's real tokens."""
    recorder = Recorder(chosen)
    last_logits(model, batch, chain(ablated, recorder))
    seen = {site: recorder.values[site][batch.mask][:, c] for site, c in chosen.items()}
    return {
        site: (chosen[site], x.to(torch.promote_types(x.dtype, torch.float32))) for site, x in seen.items()
    }


@torch.no_grad()
def grid_search(
    model: Transformer,
    task: Task,
    ablated: Tap,
    values: Mapping[str, tuple[Tensor, Tensor]],
    batch: Batch,
    thresholds: Sequence[float],
) -> Levels:
    """Levels at which each node, binarised alone, leaves the task's loss on `batch` lowest.

    Each threshold splits a node's observed `values`; their means on either side are the levels.
    """
    grid = {site: torch.stack([split_means(x, p) for p in thresholds]) for site, (_, x) in values.items()}
    candidates = [
        (site, int(channel), low, high)
        for site, (channels, _) in values.items()
        for levels in grid[site].unbind()
        for channel, low, high in zip(channels, *levels, strict=True)
    ]
    loss = torch.cat(
        [
            alone_losses(model, task, ablated, candidates[i : i + AT_ONCE], batch)
            for i in range(0, len(candidates), AT_ONCE)
        ]
    )
    best = {}
    parts = loss.split([len(thresholds) * len(c) for c, _ in values.values()])
    for (site, (channels, _)), part in zip(values.items(), parts, strict=True):
        pick = part.view(len(thresholds), -1).argmin(0)
        low, high = grid[site][pick, :, torch.arange(len(channels), device=pick.device)].unbind(1)
        best[site] = (channels, low, high)
    return best


def split_means(x: Tensor, place: float) -> Tensor:
    """The means (2, n) of the values x (tokens, n) below and above the place between the least and the greatest."""
    least, most = x.amin(0), x.amax(0)
    below = x < torch.lerp(least, most, place)

    def mean(side: Tensor, otherwise: Tensor) -> Tensor:
        n = side.sum(0)
        return torch.where(n > 0, (x * side).sum(0) / n.clamp(min=1), otherwise)

    low, high = mean(below, least), mean(~below, most)
    constant = least == most
    return torch.stack([torch.where(constant, least, low), torch.where(constant, least, high)])


def alone_losses(
    model: Transformer,
    task: Task,
    ablated: Tap,
    candidates: Sequence[tuple[str, int, Tensor, Tensor]],
    batch: Batch,
) -> Tensor:
    """The circuit's loss with each of `candidates` (site, channel, low, high) as its only step function."""

    def one_each(site: str, x: Tensor) -> Tensor:
        x = x.unflatten(0, (len(candidates), -1)).clone()
        for i, (at, channel, low, high) in enumerate(candidates):
            if at == site:
                x[i, ..., channel] = soft_step(x[i, ..., channel], low, high, 0.0)
        return x.flatten(0, 1)

    many = batch.repeat(len(candidates))
    logits = last_logits(model, many, chain(ablated, Tap.at(one_each, {site for site, *_ in candidates})))
    return task.metric(logits, many.last()).view(len(candidates), -1).mean(1)


def train_levels(
    model: Transformer,
    task: Task,
    ablated: Tap,
    start: Levels,
    bounds: Mapping[str, tuple[Tensor, Tensor]] | None,
    pool: Batch,
    config: BinarizeConfig,
    *,
    seed: int,
    progress: Callable[..., None] | None,
) -> Levels:
    """The levels after training through `soft_step`, annealed from the identity to the step, within `bounds` (n,)."""
    draw = torch.Generator().manual_seed(seed)
    gaps = {site: high - low for site, (_, low, high) in start.items()}
    shifts = {site: gap.new_zeros(2, len(gap)).requires_grad_() for site, gap in gaps.items()}
    optimizer = torch.optim.Adam(shifts.values(), lr=config.lr)

    def levels() -> Levels:
        return {
            site: (channels, low + gaps[site] * shifts[site][0], high + gaps[site] * shifts[site][1])
            for site, (channels, low, high) in start.items()
        }

    for step in range(config.steps):
        t = (1 - step / config.steps) ** config.power
        pairs = torch.randperm(len(pool) // 2, generator=draw)[: config.pairs].to(model.device)
        batch = pool.select_pairs(pairs).trimmed()
        logits = last_logits(model, batch, chain(ablated, Steps(levels(), t)))
        if config.objective == "task":
            loss = task.metric(logits, batch.last()).mean()
        else:
            with torch.no_grad():
                own = last_logits(model, batch, ablated)
            loss = kl(own, logits).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(shifts.values(), config.clip)
        optimizer.param_groups[0]["lr"] = config.lr * warmup_decay(step, config.steps, warmup=0.0, final=0.0)
        optimizer.step()
        for site, (least, most) in (bounds or {}).items():
            first, unit = torch.stack(start[site][1:]), gaps[site].clamp(min=1e-12)
            shifts[site].data.clamp_((least - first) / unit, (most - first) / unit)
        if progress is not None:
            progress(loss=loss.item(), t=t)
    return {site: tuple(x.detach() for x in some) for site, some in levels().items()}  # type: ignore[misc]


def kl(p: Tensor, q: Tensor) -> Tensor:
    """The KL divergence in nats of softmax(q) from softmax(p), over the last axis."""
    p, q = F.log_softmax(p, dim=-1), F.log_softmax(q, dim=-1)
    return (p.exp() * (p - q)).sum(-1)


@torch.no_grad()
def two_levels(levels: Levels, values: Mapping[str, tuple[Tensor, Tensor]]) -> tuple[TwoLevels, ...]:
    """The levels as data, with how well they fit the observed `values`."""
    out = []
    for site, (channels, low, high) in levels.items():
        x = values[site][1].double()
        error = (x - soft_step(x, low.double(), high.double(), 0.0)).square().mean(0)
        variance, moves = x.var(0, correction=0), x.amin(0) < x.amax(0)
        rows = zip(*(v.tolist() for v in (channels, low, high, error, variance, moves)), strict=True)
        for c, a, b, e, v, m in rows:
            explained = 1 - e / v if m else None
            out.append(
                TwoLevels(node=Node(site=site, channel=c), low=min(a, b), high=max(a, b), explained=explained)
            )
    return tuple(out)


@torch.no_grad()
def measured(model: Transformer, task: Task, tap: Tap, fit: Batch, test: Batch) -> TaskLosses:
    """The losses on `test`, with the calibration fitted on `fit`."""
    calibration = calibrate(task, last_logits_by_length(model, fit, tap), fit.last())
    logits, at = last_logits_by_length(model, test, tap), test.last()
    return TaskLosses(
        task_loss=task.metric(logits, at).mean().item(),
        calibrated_task_loss=task.metric(calibration(logits), at).mean().item(),
        accuracy=accuracy(logits, at).mean().item(),
    )
