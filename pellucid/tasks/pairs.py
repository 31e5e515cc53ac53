"""Tasks made of text: two prompts that differ in one respect, each with its own one-token answer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import torch
from jaxtyping import Float
from tokenizers import Tokenizer
from torch import Tensor

from pellucid.core.errors import unknown
from pellucid.data.tokenizer import end_of_text_id
from pellucid.tasks.task import SPLITS, Batch, accuracy, swapped, two_way_loss

# Each split of a task draws its names and literals from a split of tiny-python.
WORDS = {"train": "train", "test": "validation"}
MIN_DRAWS = 100  # before a high rate of rejected draws is an error
MAX_REJECTED = 0.95


@dataclass(frozen=True)
class Question:
    """A task without a tokenizer.

    `draw(rng, words_split)` gives the text of a positive and a negative prompt; `answers` the text that follows each,
    or what a prompt's answer is where it depends on the prompt (then its first token is asked for); `after` what comes after that in real code, so that
    answers can be checked in context.
    """

    name: str
    description: str
    draw: Callable[[Random, str], tuple[str, str]]
    answers: tuple[str, str] | Callable[[str], str]
    after: tuple[str, str] = ("\n", "\n")


class PairTask:
    """A `Question` in the tokens of one tokenizer; prompts start with `END_OF_TEXT`.

    Pairs whose members differ in length are drawn again, and so are those whose own answers begin with the same token.
    Raises ValueError, naming the task and the answers, if an answer that is always the same is not one token after its
    prompt, or both are the same.
    """

    def __init__(self, question: Question, tokenizer: Tokenizer):
        self.question, self.tokenizer = question, tokenizer
        self.end_of_text = end_of_text_id(tokenizer)
        self.fixed = not callable(question.answers)
        if self.fixed:
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
        answers: list[tuple[int, int]] = []
        draws = 0
        for index in range(n):
            rng = Random(f"{self.name}/{seed}/{split}/{index}")
            found = None
            while found is None:
                rejected = draws - index
                if draws >= MIN_DRAWS and rejected > MAX_REJECTED * draws:
                    raise ValueError(
                        f"task {self.name!r}: {rejected} of {draws} draws were rejected, because the two prompts of a"
                        " pair have different lengths in this tokenizer"
                        + ("" if self.fixed else ", or their answers begin alike")
                    )
                draws += 1
                found = self._pair(*self.question.draw(rng, WORDS[split]))
            rows.extend(found[0])
            answers.append(found[1])
        return self._batch(rows, answers)

    def _pair(self, *texts: str) -> tuple[list[list[int]], tuple[int, int]] | None:
        """The tokens and the answers of a pair; None if its members differ in length or its answers begin alike."""
        members = [self._encode(text) for text in texts]
        if len(members[0]) != len(members[1]):
            return None
        if self.fixed:
            if (answers := self._answers(*texts)) != self.answers:
                raise ValueError(f"task {self.name!r}: the answers' tokens depend on the prompt {texts}")
            return members, answers
        try:
            return members, self._answers(*texts)
        except ValueError:
            return None

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
        told = self.question.answers
        said = [told(text) for text in texts] if callable(told) else told
        for text, answer, after in zip(texts, said, self.question.after, strict=True):
            prompt, whole = self._encode(text), self._encode(text + answer + after)
            next_token = self.tokenizer.decode(whole[len(prompt) : len(prompt) + 1])
            one = next_token == answer and self._encode(text + answer)[:-1] == prompt
            begun = not self.fixed and next_token != "" and answer.startswith(next_token)
            if whole[: len(prompt)] != prompt or not (one or begun):
                raise self._not_a_token(text, answer, said, whole)
            found.append(whole[len(prompt)])
        if found[0] == found[1]:
            raise ValueError(f"task {self.name!r}: its answers {tuple(said)} are the same token")
        return found[0], found[1]

    def _not_a_token(self, text: str, answer: str, said: Sequence[str], whole: list[int]) -> ValueError:
        pieces = [self.tokenizer.decode([token]) for token in whole[1:]]
        return ValueError(
            f"task {self.name!r}: its answers {tuple(said)} must be single tokens, but this tokenizer"
            f" splits {text!r} and {answer!r} as {pieces}"
        )

    def _batch(self, rows: list[list[int]], answers: list[tuple[int, int]]) -> Batch:
        lengths = torch.tensor([len(row) for row in rows])
        tokens = torch.full((len(rows), int(lengths.max())), self.end_of_text)
        for row, ids in enumerate(rows):
            tokens[row, : len(ids)] = torch.tensor(ids)
        return Batch(
            tokens=tokens,
            corrupt=swapped(tokens),
            mask=torch.arange(tokens.shape[1]) < lengths[:, None],
            positions=lengths - 1,
            answers=torch.tensor([both for pair in answers for both in (pair, pair[::-1])]),
        )
