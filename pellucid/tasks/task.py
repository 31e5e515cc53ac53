"""What a model is asked: a batch of clean and corrupt sequences, and a metric on the logits."""

from dataclasses import dataclass, fields, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

SPLITS = ("train", "test")


@dataclass(frozen=True)
class Batch:
    """Pairs of sequences with two answers: rows 2i and 2i + 1 are the positive and negative member of pair i.

    `tokens` (b, t) are padded on the right; `corrupt` (b, t) holds the other member of each row's pair; `mask` (b, t)
    marks real tokens; `positions` (b,) are the last real ones; `answers` (b, 2) are the right and the wrong next token.
    """

    tokens: Int[Tensor, "b t"]
    corrupt: Int[Tensor, "b t"]
    mask: Bool[Tensor, "b t"]
    positions: Int[Tensor, "b"]
    answers: Int[Tensor, "b 2"]

    def __len__(self) -> int:
        return len(self.tokens)

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on another device."""
        return Batch(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})

    def select(self, rows: Tensor) -> "Batch":
        """The rows that an index or a bool mask names."""
        return Batch(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    def select_pairs(self, pairs: Tensor) -> "Batch":
        """Both rows of each pair that an index names."""
        return self.select(torch.stack([2 * pairs, 2 * pairs + 1], dim=1).flatten())

    def repeat(self, times: int) -> "Batch":
        """All rows, so many times over: for as many masks stacked on the batch axis."""
        return self.select(torch.arange(len(self), device=self.tokens.device).repeat(times))

    def trimmed(self) -> "Batch":
        """The same rows without the columns that are padding in all of them."""
        t = int(self.positions.max()) + 1
        return replace(self, tokens=self.tokens[:, :t], corrupt=self.corrupt[:, :t], mask=self.mask[:, :t])

    def last(self) -> "Batch":
        """The batch that fits logits of each row's last token alone, (b, 1, v)."""
        return replace(self, positions=torch.zeros_like(self.positions))


@runtime_checkable
class Task(Protocol):
    """A question with a name; `split` "test" holds names and literals that "train" never does."""

    @property
    def name(self) -> str: ...

    def pairs(self, n: int, seed: int = 0, split: str = "train") -> Batch:
        """`n` pairs (2n rows), a function of the arguments; a larger `n` only adds pairs."""
        ...

    def metric(self, logits: Float[Tensor, "b t v"], batch: Batch) -> Float[Tensor, "b"]:
        """The loss of each row, in nats; the task's loss is its mean."""
        ...


def answer_logits(logits: Float[Tensor, "b t v"], batch: Batch) -> Float[Tensor, "b 2"]:
    """The logits of the right and the wrong answer after each row's last token, in float32 or wider."""
    at_last = logits[torch.arange(len(batch), device=logits.device), batch.positions]
    chosen = at_last.gather(1, batch.answers)
    return chosen if chosen.dtype == torch.float64 else chosen.float()


def two_way_loss(logits: Float[Tensor, "b t v"], batch: Batch) -> Float[Tensor, "b"]:
    """Cross-entropy in nats between the two answers alone; chance is ln 2."""
    right, wrong = answer_logits(logits, batch).unbind(1)
    return torch.nn.functional.softplus(wrong - right)


def accuracy(logits: Float[Tensor, "b t v"], batch: Batch) -> Float[Tensor, "b"]:
    """1 where the right answer has the larger logit, else 0."""
    right, wrong = answer_logits(logits, batch).unbind(1)
    return (right > wrong).float()
