"""Distributed alignment search (Geiger et al., 2023): which directions of a site carry a variable?

A subspace is learned such that a swap of what two inputs hold in it makes the output that a swap of the variable would.
A high score is no proof: a swap may also drive directions that never move by themselves (Makelov et al., 2024).

Axes: r tries, b batch, t position, d residual width, k dimensions of the subspace, v output.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from pellucid.core.record import record
from pellucid.core.taps import Tap
from pellucid.core.transformer import Transformer
from pellucid.lab.ablate import last_logits
from pellucid.lab.fills import real
from pellucid.tasks.task import Outputs, Task

STILL = 1e-6
"""Directions along which data varies by no more than this share of the most are dormant."""
ROWS = 64
"""Rows in a step."""


class Judged(Task[Outputs], Protocol):
    """A task with outputs at many positions that says which rows of logits are not `batch.wanted`."""

    def wrong(self, logits: Tensor, batch: Outputs) -> Tensor:
        """Bool (b,)."""
        ...


Counterfactual = Callable[[Outputs, Tensor, Tensor], Outputs]
"""A batch, positions (b,) and positions (b,) of the corrupt inputs -> the batch with `wanted` as it were if the variable
had, at the first, the value that it has at the second; positions where that is not known are not `scored`."""


class NothingToSwap(ValueError):
    """The variable changes no output, so that no subspace can be told from another."""


@dataclass(frozen=True, eq=False)
class Alignment:
    """A subspace, and how often its swap makes the output that it should: shares of rows that are right throughout."""

    subspace: Tensor
    """(d, k), orthonormal columns."""
    train: float
    test: float
    idle: float
    """On test rows, with nothing swapped."""
    control: float
    """On test rows, of a subspace learned for outputs of other rows, drawn at random."""
    active: float
    """On test rows, where the swap writes only along directions that move in the data."""
    dormant: float
    """The share of the subspace along directions that do not."""
    variance: float
    """The share of the data's variance at the site that is in the subspace."""

    @property
    def score(self) -> float:
        """`test`, where doing nothing scores 0."""
        return (self.test - self.idle) / (1 - self.idle)

    @property
    def active_score(self) -> float:
        """`active` likewise. Less than `score` says that the swap leaves what occurs: it drives dormant directions, or the
        variable is a linear function of what else is in the stream, so that neither can move without the other."""
        return (self.active - self.idle) / (1 - self.idle)


def das(
    model: Transformer,
    task: Judged,
    counterfactual: Counterfactual,
    *,
    site: str,
    k: int,
    pairs: int = 128,
    seed: int = 0,
    steps: int = 200,
    lr: float = 0.05,
    tries: int = 4,
) -> Alignment:
    """Learn the `k` directions of `site` in which to swap one position of an input with one of its corrupt input.

    Both are drawn among the scored positions. `tries` random subspaces are trained at once by the squared distance of the logits from what is wanted; the best on
    the train inputs is kept. Raises `ValueError` for a `k` that is no dimension, and where no swap would change anything.
    """
    if not 1 <= k <= model.config.d_model:
        raise ValueError(f"k must be between 1 and {model.config.d_model}, got {k}")
    train, test = (
        Swaps.draw(model, task, counterfactual, site, pairs, seed, split) for split in ("train", "test")
    )
    if test.idle == 1 or train.idle == 1:
        raise NothingToSwap(f"{task.name}: swapping the variable at {site!r} changes no output")
    options = {"k": k, "seed": seed, "steps": steps, "lr": lr, "tries": tries}
    subspace = learn(train, **options)
    draw = torch.Generator().manual_seed(seed)
    random, unseen = train.shuffled(draw), test.shuffled(draw)
    spread, moving = train.spread()
    span = subspace @ subspace.T
    return Alignment(
        subspace=subspace.cpu(),
        train=train.accuracy(span),
        test=test.accuracy(span),
        idle=test.idle,
        control=unseen.accuracy(project(learn(random, **options))),
        active=test.accuracy(span @ moving),
        dormant=1 - float(torch.trace(span @ moving)) / k,
        variance=float(torch.trace(span @ spread) / torch.trace(spread)),
    )


class Swaps:
    """Rows in which the stream at a site is moved, at one position, towards that of the corrupt input at another."""

    def __init__(self, model: Transformer, task: Judged, site: str, batch: Outputs, towards: Tensor):
        """`towards` (b, t, d) is the whole way."""
        self.model, self.task, self.site, self.batch, self.towards = model, task, site, batch, towards
        self.clean = record(model, batch.tokens, [site], mask=real(model, batch.mask))[site]
        d = self.clean.shape[-1]
        self.idle = self.accuracy(self.clean.new_zeros(d, d)) if len(batch) else 1.0

    @classmethod
    def draw(
        cls,
        model: Transformer,
        task: Judged,
        counterfactual: Counterfactual,
        site: str,
        pairs: int,
        seed: int,
        split: str,
    ) -> "Swaps":
        """Swaps of positions that are drawn, with the outputs that are wanted then."""
        batch = task.pairs(pairs, seed=seed, split=split)
        generator = torch.Generator().manual_seed(seed)
        chance = torch.rand(2, *batch.scored.shape, generator=generator).masked_fill(~batch.scored, -1)
        here, there = chance.argmax(-1).to(model.device)
        batch = batch.to(model.device)
        clean = record(model, batch.tokens, [site], mask=real(model, batch.mask))[site]
        corrupt = record(model, batch.corrupt, [site], mask=real(model, batch.real))[site]
        rows = torch.arange(len(batch), device=model.device)
        towards = torch.zeros_like(clean)
        towards[rows, here] = corrupt[rows, there] - clean[rows, here]
        batch = counterfactual(batch, here, there)
        known = batch.scored.any(1)
        return cls(model, task, site, batch.select(known), towards[known])

    def shuffled(self, draw: torch.Generator) -> "Swaps":
        """The same swaps with outputs of other rows as what is wanted."""
        rows = torch.randperm(len(self.batch), generator=draw).to(self.batch.tokens.device)
        scored = self.batch.scored & self.batch.scored[rows]
        batch, known = replace(self.batch, wanted=self.batch.wanted[rows], scored=scored), scored.any(1)
        return Swaps(self.model, self.task, self.site, batch.select(known), self.towards[known])

    def logits(self, span: Tensor, rows: Tensor | None = None) -> Tensor:
        """(r, b, t, v) of rows swapped through maps (r, d, d) at once."""
        rows = torch.arange(len(self.batch)) if rows is None else rows
        moved = self.clean[rows] + self.towards[rows] @ span[:, None]
        batch = self.batch.select(rows).repeat(len(span))
        tap = Tap.at(lambda _, x: moved.flatten(0, 1), [self.site])
        return last_logits(self.model, batch, tap).unflatten(0, (len(span), -1))

    def distance(self, span: Tensor, rows: Tensor | None = None) -> Tensor:
        """(r,): squared distance of the logits from what is wanted, over all scored positions."""
        batch = self.batch if rows is None else self.batch.select(rows)
        far = (self.logits(span, rows) - batch.wanted).square() * batch.scored[..., None]
        return far.sum((1, 2, 3)) / batch.scored.sum()

    @torch.no_grad()
    def accuracy(self, span: Tensor) -> float:
        """The share of rows that are right throughout when swapped through a map (d, d)."""
        return 1 - self.task.wrong(self.logits(span[None])[0], self.batch).float().mean().item()

    def spread(self) -> tuple[Tensor, Tensor]:
        """(d, d): the covariance of the stream at real positions, and the projection on the directions in which it moves."""
        x = self.clean[self.batch.mask].double()
        covariance = torch.cov(x.T, correction=0).reshape(x.shape[1], -1)
        sizes, directions = torch.linalg.eigh(covariance)
        moving = directions[:, sizes > STILL * sizes[-1]]
        return covariance.to(self.clean), (moving @ moving.T).to(self.clean)


def learn(swaps: Swaps, *, k: int, seed: int, steps: int, lr: float, tries: int) -> Tensor:
    """(d, k): the best of the subspaces that are trained at once."""
    draw = torch.Generator().manual_seed(seed)
    d, device = swaps.clean.shape[-1], swaps.clean.device
    start = torch.linalg.qr(torch.randn(tries, d, k, generator=draw, dtype=swaps.clean.dtype))[0]
    raw = start.to(device).requires_grad_()
    optimizer = torch.optim.Adam([raw], lr=lr)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * min(1.0, 2 * (1 - step / steps))
        rows = torch.randperm(len(swaps.batch), generator=draw)[:ROWS].to(device)
        loss = swaps.distance(project(torch.linalg.qr(raw)[0]), rows).sum()
        (raw.grad,) = torch.autograd.grad(loss, raw)
        optimizer.step()
    with torch.no_grad():
        found = torch.linalg.qr(raw)[0]
        return found[swaps.distance(project(found)).argmin()]


def project(subspace: Tensor) -> Tensor:
    """(..., d, k) -> (..., d, d): the projection on it."""
    return subspace @ subspace.mT


def overlap(subspace: Tensor, directions: Tensor) -> float:
    """How much of the smaller of two subspaces is in the other: (d, k) and the span of known directions (n, d).

    The mean squared cosine of their principal angles: 1 where one holds the other, k / d on average by chance.
    """
    u, sizes, _ = torch.linalg.svd(directions.double().T, full_matrices=False)
    known = u[:, sizes > 1e-9 * sizes.max()]
    smaller = min(known.shape[1], subspace.shape[1])
    return float((known.T @ subspace.double()).square().sum() / smaller)
