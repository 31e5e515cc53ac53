"""Dictionary learning: do the directions that a sparse autoencoder finds equal those that the model uses?

A TopK autoencoder (Gao et al., 2024): code = the k largest of relu(encoder (x - centre)), x = centre + code @ decoder.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from pellucid.core.errors import unknown
from pellucid.core.record import record
from pellucid.core.transformer import Transformer
from pellucid.lab.fills import real
from pellucid.tasks.task import Task

Frozen = Literal["nothing", "decoder", "encoder"]
SALT = 20_000
"""Added to the seed: directions must not start as the known ones that the same seed drew."""


class SparseCoder(ABC):
    """n features over a d-dimensional stream, few of them active at a time."""

    decoder: Tensor
    """(n, d): what each feature writes."""

    @abstractmethod
    def encode(self, x: Tensor) -> Tensor:
        """(..., d) -> (..., n)."""

    @abstractmethod
    def decode(self, code: Tensor) -> Tensor:
        """(..., n) -> (..., d)."""

    def explained(self, x: Tensor) -> float:
        """The share of the variance about the mean of rows (r, d) that is reconstructed; predicting the mean scores 0."""
        error = (self.decode(self.encode(x)) - x).square().sum()
        return float(1 - error / (x - x.mean(0)).square().sum())


@dataclass(frozen=True, eq=False)
class Dictionary(SparseCoder):
    """Each feature is a unit direction to write and one to read by."""

    encoder: Tensor
    """(n, d)."""
    decoder: Tensor
    """(n, d), unit length."""
    centre: Tensor
    """(d,)."""
    k: int
    """Active features."""

    def encode(self, x: Tensor) -> Tensor:
        """(..., d) -> (..., n), at most k not zero."""
        return top_k((x - self.centre) @ self.encoder.T, self.k)

    def decode(self, code: Tensor) -> Tensor:
        """(..., n) -> (..., d)."""
        return self.centre + code @ self.decoder


@dataclass(frozen=True, eq=False)
class Recovery:
    """How many known directions a dictionary has, each matched to a feature of its own."""

    cosines: Tensor
    """(m,): cosine similarity of each direction and its feature; 0 without one."""
    features: Tensor
    """(m,): which feature; -1 for none."""
    threshold: float

    @property
    def recall(self) -> float:
        """The share of directions whose cosine is at least the threshold."""
        return float((self.cosines >= self.threshold).float().mean())


def learn_dictionary(
    model: Transformer, task: Task, *, site: str = "final", pairs: int = 512, seed: int = 0, **options
) -> Dictionary:
    """A dictionary of the stream at `site`, at all real tokens of the task's inputs. `options` as in `fit`."""
    return fit(stream(model, task, site, pairs, seed), seed=seed, **options)


def stream(model: Transformer, task: Task, site: str, pairs: int, seed: int) -> Tensor:
    """Rows (r, d): what passes `site` at all real tokens of the task's inputs."""
    batch = task.pairs(pairs, seed=seed).to(model.device)
    return record(model, batch.tokens, [site], mask=real(model, batch.mask))[site][batch.mask]


def fit(
    x: Tensor,
    *,
    size: int,
    k: int,
    steps: int = 1500,
    batch_size: int = 256,
    lr: float = 1e-2,
    seed: int = 0,
    frozen: Frozen = "nothing",
) -> Dictionary:
    """Learn `size` features, `k` active at a time, that reconstruct rows (r, d).

    `frozen` is the baseline in which random directions are kept in the decoder, or in the encoder, and the other learned.
    Every 100 steps up to half of the way, features that were never active in these get the direction of a row that is
    reconstructed badly. Raises `ValueError` for sizes that make no dictionary, and rows that are not finite.
    """
    check(x, size, k, frozen)
    draw = torch.Generator().manual_seed(seed + SALT)
    x = x.detach().float()
    centre = x.mean(0)
    scale = (x - centre).norm(dim=1).mean().clamp(min=1e-12)
    rows = (x - centre) / scale
    start = torch.nn.functional.normalize(torch.randn(size, x.shape[1], generator=draw).to(x), dim=1)
    encoder, decoder = start.clone().requires_grad_(), start.clone().requires_grad_()
    learned = [w for w, name in ((encoder, "encoder"), (decoder, "decoder")) if name != frozen]
    optimizer = torch.optim.Adam(learned, lr=lr)
    active = torch.zeros(size, dtype=torch.bool, device=x.device)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * min(1.0, 2 * (1 - step / steps))
        some = rows[torch.randint(len(rows), (batch_size,), generator=draw).to(x.device)]
        code = top_k(some @ encoder.T, k)
        missed = some - code @ decoder
        gradients = torch.autograd.grad(missed.square().sum(1).mean(), learned)
        for w, gradient in zip(learned, gradients, strict=True):
            w.grad = gradient
        optimizer.step()
        active |= (code > 0).any(0)
        with torch.no_grad():
            if frozen != "decoder":
                decoder.div_(decoder.norm(dim=1, keepdim=True).clamp(min=1e-12))
            if step % 100 == 99:
                if frozen == "nothing" and step < steps // 2:
                    revive(encoder, decoder, ~active, missed, draw)
                active.zero_()
    return Dictionary(encoder.detach(), decoder.detach(), centre, k)


def check(x: Tensor, size: int, k: int, frozen: str) -> None:
    """Raise `ValueError` for what no dictionary can be learned from."""
    if x.dim() != 2 or not len(x) or not bool(torch.isfinite(x).all()):
        raise ValueError(f"a dictionary is learned from finite rows (r, d), got shape {tuple(x.shape)}")
    if not 1 <= k <= size:
        raise ValueError(f"k must be between 1 and size = {size}, got {k}")
    if frozen not in get_args(Frozen):
        raise unknown("frozen part", frozen, get_args(Frozen))


def top_k(code: Tensor, k: int) -> Tensor:
    """The k largest of the last axis where they are positive, and 0 elsewhere."""
    top = code.topk(k, dim=-1)
    return torch.zeros_like(code).scatter(-1, top.indices, top.values.relu())


def revive(encoder: Tensor, decoder: Tensor, dead: Tensor, missed: Tensor, draw: torch.Generator) -> None:
    """Point dead features at what rows drawn by their squared error miss, in place."""
    weight = missed.square().sum(1)
    count = int(dead.sum())
    if not count or not bool(weight.sum() > 0):
        return
    rows = torch.multinomial(weight.cpu().double(), count, replacement=True, generator=draw)
    towards = torch.nn.functional.normalize(missed[rows.to(missed.device)], dim=1)
    encoder[dead], decoder[dead] = towards, towards


def recovery(dictionary: SparseCoder, directions: Tensor, *, threshold: float = 0.9) -> Recovery:
    """Match known directions (m, d) to features one to one, by the largest total cosine similarity of what is written.

    Directions of length zero have cosine 0. Raises `ValueError` for directions of another width.
    """
    m, d = directions.shape
    if d != dictionary.decoder.shape[1]:
        raise ValueError(f"directions have width {d}, the dictionary {dictionary.decoder.shape[1]}")
    known = torch.nn.functional.normalize(directions.to(dictionary.decoder), dim=1)
    cosine = (known @ torch.nn.functional.normalize(dictionary.decoder, dim=1).T).cpu()
    rows, columns = map(torch.from_numpy, linear_sum_assignment(cosine.numpy(), maximize=True))
    cosines, features = torch.zeros(m), torch.full((m,), -1)
    cosines[rows], features[rows] = cosine[rows, columns], columns
    return Recovery(cosines, features, threshold)
