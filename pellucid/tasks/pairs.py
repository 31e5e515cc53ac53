"""Tasks made of text: two prompts that differ in one respect, each with its own one-token answer."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import torch
from jaxtyping import Float
from tokenizers import Tokenizer
from torch import Tensor

from pellucid.core.errors import unknown
from pellucid.data.tokenizer import end_of_text_id
from pellucid.tasks.task import SPLITS, Batch, accuracy, two_way_loss

# Each split of a task draws its names and literals from a split of tiny-python.
WORDS = {"train": "train", "test": "validation"}
MIN_DRAWS = 100  # before a high rate of rejected draws is an error
MAX_REJECTED = 0.95


@dataclass(frozen=True)
class Question:
    """A task without a tokenizer.

    `draw(rng, words_split)` gives the text of a positive and a negative prompt; `answers` the text that follows each,
    and `after` what comes after that in real code, so that answers can be checked in context.
    """

    name: str
    description: str
    draw: Callable[[Random, str], tuple[str, str]]
    answers: tuple[str, str]
    after: tuple[str, str] = ("\n", "\n")


class PairTask:
    """A `Question` in the tokens of one tokenizer; prompts start with `END_OF_TEXT`.

    Pairs whose members differ in length are drawn again. Raises ValueError, naming the task and the answers, if an
    answer is not one token after its prompt or both are the same.
    """

    def __init__(self, question: Question, tokenizer: Tokenizer):
        self.question, self.tokenizer = question, tokenizer
        self.end_of_text = end_of_text_id(tokenizer)
        self.answers = self._answers(*question.draw(Random(question.name), WORDS["train"]))

    @property
    def name(self) -> str:
        return self.question.name

    @property
    def description(self) -> str:
        return self.question.description

    def pairs(self, n: int, seed: int = 0, split: str = "train") -> Batch:
        """`n` pairs as 2n rows; the same for the same seed and split, and a larger `n` only adds pairs.

        Raises ValueError for an unknown split, or if 95% of the draws differ in token length.
        """
        if split not in SPLITS:
            raise unknown("split", split, SPLITS)
        if n < 1:
            raise ValueError(f"task {self.name!r} needs n of at least 1, not {n}")
        rows: list[list[int]] = []
        draws = 0
        for index in range(n):
            rng = Random(f"{self.name}/{seed}/{split}/{index}")
            members: list[list[int]] = []
            while not members or len(members[0]) != len(members[1]):
                rejected = draws - index
                if draws >= MIN_DRAWS and rejected > MAX_REJECTED * draws:
                    raise ValueError(
                        f"task {self.name!r}: {rejected} of {draws} draws were rejected, because the two prompts of a"
                        " pair have different lengths in this tokenizer"
                    )
                draws += 1
                texts = self.question.draw(rng, WORDS[split])
                if self._answers(*texts) != self.answers:
                    raise ValueError(f"task {self.name!r}: the answers' tokens depend on the prompt {texts}")
                members = [self._encode(text) for text in texts]
            rows.extend(members)
        return self._batch(rows)

    def metric(self, logits: Float[Tensor, "b t v"], batch: Batch) -> Float[Tensor, "b"]:
        """Two-way cross-entropy of each row in nats (chance: ln 2); the task's loss is its mean."""
        return two_way_loss(logits, batch)

    def accuracy(self, logits: Float[Tensor, "b t v"], batch: Batch) -> Float[Tensor, "b"]:
        """1 for each row whose right answer has the larger logit, else 0."""
        return accuracy(logits, batch)

    def _encode(self, text: str) -> list[int]:
        return [self.end_of_text, *self.tokenizer.encode(text, add_special_tokens=False).ids]

    def _answers(self, *texts: str) -> tuple[int, int]:
        """The token that follows each of the two prompts in real code."""
        found: list[int] = []
        for text, answer, after in zip(texts, self.question.answers, self.question.after, strict=True):
            prompt, whole = self._encode(text), self._encode(text + answer + after)
            if self._encode(text + answer)[:-1] != prompt or whole[: len(prompt)] != prompt:
                raise self._not_a_token(text, answer, whole)
            if self.tokenizer.decode([whole[len(prompt)]]) != answer:
                raise self._not_a_token(text, answer, whole)
            found.append(whole[len(prompt)])
        if found[0] == found[1]:
            raise ValueError(f"task {self.name!r}: its answers {self.question.answers} are the same token")
        return found[0], found[1]

    def _not_a_token(self, text: str, answer: str, whole: list[int]) -> ValueError:
        pieces = [self.tokenizer.decode([token]) for token in whole[1:]]
        return ValueError(
            f"task {self.name!r}: its answers {self.question.answers} must be single tokens, but this tokenizer"
            f" splits {text!r} and {answer!r} as {pieces}"
        )

    def _batch(self, rows: list[list[int]]) -> Batch:
        lengths = torch.tensor([len(row) for row in rows])
        tokens = torch.full((len(rows), int(lengths.max())), self.end_of_text)
        for row, ids in enumerate(rows):
            tokens[row, : len(ids)] = torch.tensor(ids)
        return Batch(
            tokens=tokens,
            corrupt=tokens.unflatten(0, (-1, 2)).flip(1).flatten(0, 1),
            mask=torch.arange(tokens.shape[1]) < lengths[:, None],
            positions=lengths - 1,
            answers=torch.tensor([self.answers, self.answers[::-1]]).repeat(len(rows) // 2, 1),
        )
