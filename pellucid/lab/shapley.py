"""Which tokens does an output depend on? Gradient times input, against exact Shapley values (Shapley, 1953)."""

import itertools
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pellucid.core.record import record
from pellucid.core.taps import Tap
from pellucid.core.transformer import Transformer
from pellucid.lab.ablate import last_logits
from pellucid.lab.fills import real
from pellucid.lab.patch import TOKENS
from pellucid.tasks.task import Outputs, Pairs, Task

EXACT = 10
"""The most tokens whose subsets are all tried."""
NOTHING = 1e-9
"""Shares no larger than this are rounding."""


@dataclass(frozen=True, eq=False)
class TokenShares:
    """By how much each token, put in place of its corrupt one, makes the metric better; two answers to that."""

    players: Tensor
    """(b, t): the tokens that differ from their corrupt ones. The others' shares are 0."""
    shapley: Tensor
    """(b, t): averaged over all orders in which tokens may be put in. They sum to corrupt less clean metric."""
    gradient: Tensor
    """(b, t): gradient at the clean embedding times what the corrupt one would change."""
    exact: bool
    """Whether all orders were counted, or some drawn."""
    passes: float
    """What it cost in forward passes of one batch; a backward pass counts as two."""

    @property
    def correlation(self) -> float:
        """Pearson's, over all tokens that differ, of all rows: 0 where the gradient never varies, NaN where no share does."""
        both = torch.stack([self.shapley[self.players], self.gradient[self.players]]).double()
        both = both - both.mean(1, keepdim=True)
        sizes = both.norm(dim=1)
        if sizes[0] <= NOTHING:
            return math.nan
        return float(both[0] @ both[1] / sizes.prod()) if sizes[1] > NOTHING else 0.0

    @property
    def same_top(self) -> float:
        """The share of rows with two tokens or more in which both name the same one as the most important."""
        rows = self.players.sum(1) > 1
        exact, gradient = (
            x[rows].abs().where(self.players[rows], -1).max(1) for x in (self.shapley, self.gradient)
        )
        same = (exact.indices == gradient.indices) & (gradient.values > NOTHING)
        return float(same.float().mean()) if len(same) else math.nan


def shapley(
    model: Transformer, task: Task, *, pairs: int = 8, seed: int = 0, permutations: int = 256
) -> TokenShares:
    """Shapley values and gradient times input of every token, for the metric at one position of each row.

    Where no row has more than `EXACT` tokens that differ, all their subsets are run; else `permutations` orders and
    their reverses are drawn. Of tasks with outputs at many positions, each row's is drawn among those that differ.
    Raises `ValueError` where no token differs.
    """
    draw = torch.Generator().manual_seed(seed)
    batch = one_position(task.pairs(pairs, seed=seed), draw).to(model.device)
    players = (batch.tokens != batch.corrupt) & batch.mask & batch.corrupt_mask
    n = int(players.sum(1).max())
    if n == 0:
        raise ValueError(f"{task.name}: no token differs from its corrupt one")
    subsets, weights = all_subsets(n) if n <= EXACT else drawn_orders(n, permutations, draw)
    worth = -metrics(model, task, batch, players, subsets.to(model.device))
    shares = worth.T @ weights.to(worth)
    slot = (players.cumsum(1) - 1).clamp(min=0)
    exact = torch.where(players, shares.gather(1, slot), 0.0)
    gradient = torch.where(players, gradient_times_input(model, task, batch, players), 0.0)
    found = (x.cpu() for x in (players, exact, gradient))
    return TokenShares(*found, exact=n <= EXACT, passes=len(subsets) + 4.0)


def one_position(batch: Pairs, draw: torch.Generator) -> Pairs:
    """The batch with one scored position a row, drawn among those where the two outputs differ."""
    if not isinstance(batch, Outputs):
        return batch
    differ = batch.scored & (batch.wanted != batch.other).any(-1)
    chosen = torch.rand(differ.shape, generator=draw).masked_fill(~differ, -1).argmax(1)
    return replace(batch, scored=torch.nn.functional.one_hot(chosen, differ.shape[1]).bool() & differ)


def all_subsets(n: int) -> tuple[Tensor, Tensor]:
    """All subsets of n tokens (2^n, n), and the weights (2^n, n) that make Shapley values of their worths."""
    subsets = torch.tensor(list(itertools.product([False, True], repeat=n)))
    size = subsets.sum(1)
    orders = torch.tensor([math.factorial(k) * math.factorial(n - 1 - k) for k in range(n)])
    share = orders.double() / math.factorial(n)
    with_it, without = share[(size - 1).clamp(min=0)], share[size.clamp(max=n - 1)]
    return subsets, torch.where(subsets, with_it[:, None], -without[:, None])


def drawn_orders(n: int, count: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """The growing subsets (2 count (n + 1), n) of drawn orders and their reverses, and the weights as above."""
    orders = torch.rand(count, n, generator=draw).argsort(1)
    rank = torch.cat([orders, orders.flip(1)]).argsort(1)
    step = torch.arange(n + 1)[:, None]
    subsets = rank[:, None] < step
    weights = (rank[:, None] == step - 1).double() - (rank[:, None] == step).double()
    return subsets.flatten(0, 1), weights.flatten(0, 1) / len(rank)


@torch.no_grad()
def metrics(model: Transformer, task: Task, batch: Pairs, players: Tensor, subsets: Tensor) -> Tensor:
    """(subset, b): the metric with the players outside each subset replaced by their corrupt tokens."""
    slot = (players.cumsum(1) - 1).clamp(min=0)
    found = []
    for part in subsets.split(max(1, TOKENS // batch.tokens.numel())):
        corrupt = (players & ~part[:, slot]).flatten(0, 1)
        copies = batch.repeat(len(part))
        mixed = replace(copies, tokens=copies.corrupt.where(corrupt, copies.tokens))
        value = task.metric(last_logits(model, mixed), mixed.last())
        found.append(value.unflatten(0, (len(part), -1)))
    return torch.cat(found)


def gradient_times_input(model: Transformer, task: Task, batch: Pairs, players: Tensor) -> Tensor:
    """(b, t): the gradient of the metric at the clean embedding times (corrupt - clean embedding)."""
    mask, swapped = real(model, batch.mask), batch.corrupt.where(players, batch.tokens)
    clean, corrupt = (record(model, x, ["embed"], mask=mask)["embed"] for x in (batch.tokens, swapped))
    start = clean.detach().requires_grad_()
    logits = last_logits(model, batch, Tap.at(lambda _, x: start, ["embed"]))
    (gradient,) = torch.autograd.grad(task.metric(logits, batch.last()).sum(), start)
    return (gradient * (corrupt - clean)).sum(-1)
