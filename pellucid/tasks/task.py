"""What a model is asked: a batch of clean and corrupt sequences, and a metric on the logits."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

SPLITS = ("train", "test")
P = TypeVar("P", bound="Pairs")
B = TypeVar("B", bound="Pairs")


def swapped(x: Tensor) -> Tensor:
    """The two members of each pair of rows exchanged."""
    return x.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)


@dataclass(frozen=True)
class Pairs:
    """Pairs of sequences: rows 2i and 2i + 1 are the two members of pair i, and each other's corrupt input.

    `tokens` (b, t) are padded on the right; `corrupt` (b, t) holds the other member of each row's pair; `mask` and
    `corrupt_mask` (b, t) mark real tokens. A subclass says what is asked.
    """

    tokens: Int[Tensor, "b t"]
    corrupt: Int[Tensor, "b t"]
    mask: Bool[Tensor, "b t"]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def corrupt_mask(self) -> Bool[Tensor, "b t"]:
        """The real tokens of `corrupt`: as many as in the row itself, unless a subclass says otherwise."""
        return self.mask

    @property
    def lengths(self) -> Int[Tensor, "b"]:
        """Real tokens of each row."""
        return self.mask.sum(1)

    @property
    def only(self) -> Int[Tensor, "b"] | None:
        """The one position of each row whose logits are asked for; None for all."""
        return None

    def map(self: P, change: Callable[[Tensor], Tensor]) -> P:
        """Every tensor changed alike."""
        return replace(self, **{field.name: change(getattr(self, field.name)) for field in fields(self)})

    def to(self: P, device: torch.device | str) -> P:
        """The same batch on another device."""
        return self.map(lambda x: x.to(device))

    def select(self: P, rows: Tensor) -> P:
        """The rows that an index or a bool mask names."""
        return self.map(lambda x: x[rows])

    def select_pairs(self: P, pairs: Tensor) -> P:
        """Both rows of each pair that an index names."""
        return self.select(torch.stack([2 * pairs, 2 * pairs + 1], dim=1).flatten())

    def repeat(self: P, times: int) -> P:
        """All rows, so many times over: for as many masks stacked on the batch axis."""
        return self.select(torch.arange(len(self), device=self.tokens.device).repeat(times))

    def trimmed(self: P) -> P:
        """The same rows without the columns that are padding in all of them."""
        t = int(torch.maximum(self.lengths, self.corrupt_mask.sum(1)).max())
        return replace(self, **{name: getattr(self, name)[:, :t] for name in self.by_position()})

    def by_position(self) -> tuple[str, ...]:
        """The fields that have a token axis."""
        return "tokens", "corrupt", "mask"

    def last(self: P) -> P:
        """The batch that fits the logits that `only` asks for."""
        return self


@dataclass(frozen=True)
class Batch(Pairs):
    """Pairs with two answers: `positions` (b,) are the last real tokens; `answers` (b, 2) the right and the wrong next."""

    positions: Int[Tensor, "b"]
    answers: Int[Tensor, "b 2"]

    @property
    def only(self) -> Int[Tensor, "b"]:
        return self.positions

    def last(self) -> "Batch":
        """The batch that fits logits of each row's last token alone, (b, 1, v)."""
        return replace(self, positions=torch.zeros_like(self.positions))


@dataclass(frozen=True)
class Outputs(Pairs):
    """Pairs whose answer is an output at many positions, such as those of a program.

    `wanted` and `other` (b, t, v) are the right logits of the row and of its corrupt input, `scored` (b, t) the positions
    that count, which are real in both. In every row the two differ at some of these.
    """

    real: Bool[Tensor, "b t"]
    """`corrupt_mask`."""
    scored: Bool[Tensor, "b t"]
    wanted: Float[Tensor, "b t v"]
    other: Float[Tensor, "b t v"]

    @property
    def corrupt_mask(self) -> Bool[Tensor, "b t"]:
        return self.real

    def by_position(self) -> tuple[str, ...]:
        return *super().by_position(), "real", "scored", "wanted", "other"


@runtime_checkable
class Task(Protocol[B]):
    """A question with a name and its kind of pairs; `split` "test" holds names and literals that "train" never does."""

    @property
    def name(self) -> str: ...

    def pairs(self, n: int, seed: int = 0, split: str = "train") -> B:
        """`n` pairs (2n rows), a function of the arguments; a larger `n` only adds pairs."""
        ...

    def metric(self, logits: Float[Tensor, "b t v"], batch: B) -> Float[Tensor, "b"]:
        """How wrong each row is, such as a loss in nats: lower is better. The task's loss is its mean."""
        ...


def learning_loss(task: "Task") -> Callable[[Tensor, Any], Tensor]:
    """What masks are learned by: a task's `loss`, at least 0, where it has one beside a signed metric; else the metric."""
    return getattr(task, "loss", task.metric)


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
