"""Controls for pruning: would the same search have found a circuit where there is none?

The same budget goes to tasks that mean nothing and to a model that has learned nothing. A method whose losses on
controls come down to those on the task, at the same number of edges, finds what it is asked for, not what is there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from pellucid.core.circuit import count_edges
from pellucid.core.transformer import Transformer
from pellucid.lab.config import PruneConfig
from pellucid.lab.discretize import Probe, top_nodes
from pellucid.lab.means import node_means
from pellucid.lab.prune import frozen, probe_of
from pellucid.lab.rank import RANKERS
from pellucid.tasks.task import Batch, Task


@dataclass(frozen=True)
class Shuffled:
    """A task whose two answers are exchanged in a random half of its pairs: nothing predicts which."""

    task: Task

    @property
    def name(self) -> str:
        return f"{self.task.name}, shuffled"

    def pairs(self, n: int, seed: int = 0, split: str = "train") -> Batch:
        """The task's pairs, some with exchanged answers."""
        batch = self.task.pairs(n, seed=seed, split=split)
        draw = torch.Generator().manual_seed(seed + (split == "test"))
        exchanged = (torch.rand(n, generator=draw) < 0.5).repeat_interleave(2)[:, None]
        return replace(batch, answers=torch.where(exchanged, batch.answers.flip(1), batch.answers))

    def metric(self, logits: Tensor, batch: Batch) -> Tensor:
        """The task's."""
        return self.task.metric(logits, batch)


@dataclass(frozen=True)
class Nonsense:
    """A task whose answers are two unrelated tokens: what a prompt has is learnable, but the model never says them."""

    task: Task
    vocab_size: int
    seed: int = 0

    @property
    def name(self) -> str:
        return f"{self.task.name}, nonsense"

    @cached_property
    def answers(self) -> Tensor:
        """Two tokens that are not the task's."""
        own = self.task.pairs(64, split="train").answers.unique()
        draw = torch.Generator().manual_seed(self.seed)
        others = torch.ones(self.vocab_size).index_fill(0, own, 0)
        return others.multinomial(2, generator=draw)

    def pairs(self, n: int, seed: int = 0, split: str = "train") -> Batch:
        """The task's prompts, the first of each pair with one token as its right answer, the second with the other."""
        batch = self.task.pairs(n, seed=seed, split=split)
        return replace(batch, answers=torch.stack([self.answers, self.answers.flip(0)]).repeat(n, 1))

    def metric(self, logits: Tensor, batch: Batch) -> Tensor:
        """The task's."""
        return self.task.metric(logits, batch)


@dataclass(frozen=True)
class Point:
    """A circuit of top nodes: its size, and its loss with calibrated and with its own logits."""

    nodes: int
    edges: int
    loss: float
    uncalibrated: float


@torch.no_grad()
def curve(model: Transformer, scores: Mapping[str, Tensor], probe: Probe, sizes: int = 12) -> list[Point]:
    """Loss against size of the top nodes by `scores` (tries, width): `sizes` numbers of nodes in each try, in equal
    ratios up to all of the model and, for learned masks, at what they keep."""
    points = []
    total = sum(s.shape[1] for s in scores.values())
    for i in range(len(next(iter(scores.values())))):
        one = {site: s[i] for site, s in scores.items()}
        kept = sum(int((s > 0).sum()) for s in one.values())
        steps = {round(4 * (total / 4) ** (j / (sizes - 1))) for j in range(sizes)} | ({kept} - {0, total})
        for k in sorted(steps):
            found = probe(top_nodes(one, k))
            points.append(Point(k, count_edges(model, found.kept), found.loss, found.uncalibrated))
    return points


def loss_at(points: list[Point], edges: int, *, calibrated: bool = True) -> float:
    """The least loss of circuits of at most so many edges; that of guessing where there is none."""
    losses = [p.loss if calibrated else p.uncalibrated for p in points if p.edges <= edges]
    return min(losses, default=float(torch.tensor(2.0).log()))


def untrained(model: Transformer, seed: int = 0) -> Transformer:
    """A model of the same config with the weights that training began with, cut to as many nonzeros where it is sparse."""
    fresh = Transformer(model.config, seed=seed, device=model.device)
    theirs = dict(model.named_parameters())
    with torch.no_grad():
        for name, p in fresh.named_parameters():
            k = int(theirs[name].count_nonzero())
            if 0 < k < p.numel():
                least = p.abs().flatten().kthvalue(p.numel() - k + 1).values
                p.mul_(p.abs() >= least)
    return fresh.eval()


def controls(
    model: Transformer,
    task: Task,
    means: Mapping[str, Tensor],
    tokens,
    config: PruneConfig,
    *,
    seed: int = 0,
    progress: Callable[..., None] | None = None,
) -> dict[str, list[Point]]:
    """Loss-size curves of the same search on the task with shuffled answers, on a nonsense task, and on an untrained model.

    `tokens` are pretraining tokens: for the untrained model's own means. Losses are on training words, unseen pairs, with
    all other nodes frozen: a control fails by being low in any way.
    """
    with frozen(model) as model:
        fresh = untrained(model, seed)
        means_of_fresh = node_means(fresh, tokens, n_tokens=65_536)
        nonsense = Nonsense(task, model.config.d_vocab_out, seed)
        out = {}
        for name, subject, asked, fill in (
            ("shuffled", model, Shuffled(task), means),
            ("nonsense", model, nonsense, means),
            ("untrained", fresh, task, means_of_fresh),
        ):
            with frozen(subject) as subject:
                scores = RANKERS[config.method](subject, asked, fill, config, seed=seed, progress=progress)
                alone = probe_of(subject, asked, fill, replace(config, ablation="mean"), seed)
                out[name] = curve(subject, scores, alone)
    return out
