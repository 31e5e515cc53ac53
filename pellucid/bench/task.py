"""A compiled program as a task: pairs of inputs on which its outputs differ, at every position."""

import numpy as np
import torch
from torch import Tensor

from pellucid.compiled.model import CompiledModel
from pellucid.compiled.rasp.interpreter import Interpreter
from pellucid.compiled.rasp.values import Value
from pellucid.compiled.verify import ideal_logits
from pellucid.core.errors import unknown
from pellucid.tasks.task import SPLITS, Outputs, swapped

ROUNDS, AT_ONCE = 40, 8
"""Rounds of so many draws for each pair, before the program's outputs count as always equal."""


class ProgramTask:
    """The outputs of a compiled program at every position but BOS, on random inputs of all lengths.

    The two inputs of a pair have the same length, unless the program's outputs are then always equal (such as the
    length itself); so what depends on length alone is hidden in the others. `varies_length` says which.
    Raises `ValueError` for a program whose outputs never differ.
    """

    def __init__(self, compiled: CompiledModel, name: str):
        self.compiled, self.name = compiled, name
        self.ideal = torch.from_numpy(ideal_logits(compiled)).to(compiled.transformer.wte.weight.dtype)
        self.interpreter = (
            Interpreter(compiled.program, causal=compiled.causal) if compiled.program is not None else None
        )
        self.varies_length = False
        try:
            self.draw([np.random.default_rng(0)])
        except ValueError:
            self.varies_length = True
            self.draw([np.random.default_rng(0)])

    def pairs(self, n: int, seed: int = 0, split: str = "train") -> Outputs:
        """`n` pairs, a function of the arguments; a larger `n` only adds pairs."""
        if n < 1:
            raise ValueError(f"{self.name} needs n of at least 1, got {n}")
        if split not in SPLITS:
            raise unknown("split", split, SPLITS)
        draws = [np.random.default_rng([seed, SPLITS.index(split), index]) for index in range(n)]
        return self.batch([row for pair in self.draw(draws) for row in pair])

    def draw(self, draws: list[np.random.Generator]) -> list[list[list[Value]]]:
        """For each generator two inputs whose outputs differ at some position that both have.

        Raises `ValueError` where none are found.
        """
        found: list[list[list[Value]] | None] = [None] * len(draws)
        for _ in range(ROUNDS):
            missing = [index for index, pair in enumerate(found) if pair is None]
            if not missing:
                break
            tries = [(index, self.candidate(draws[index])) for index in missing for _ in range(AT_ONCE)]
            for (index, pair), good in zip(tries, self.differ([pair for _, pair in tries]), strict=True):
                if good and found[index] is None:
                    found[index] = pair
        if None in found:
            raise ValueError(f"{self.name}: the outputs of clean and corrupt inputs are always equal")
        return [pair for pair in found if pair is not None]

    def candidate(self, rng: np.random.Generator) -> list[list[Value]]:
        """Two random inputs."""
        vocab, longest = self.compiled.vocab.values, self.compiled.max_len
        lengths = rng.integers(1, longest + 1, size=2)
        if not self.varies_length:
            lengths[1] = lengths[0]
        return [[vocab[i] for i in rng.integers(len(vocab), size=m)] for m in lengths]

    def differ(self, pairs: list[list[list[Value]]]) -> list[bool]:
        """For each pair whether the program is defined on both inputs, and says different things."""
        rows = [row for pair in pairs for row in pair]
        outputs = self.compiled.batch(rows)
        defined = [True] * len(rows)
        if self.interpreter is not None:
            order = iter(range(len(rows)))
            for part, _, why in self.interpreter.chunks(rows):
                for _, reason in zip(part, why, strict=True):
                    defined[next(order)] = reason is None
        return [
            defined[i] and defined[i + 1] and any(a != b for a, b in zip(*outputs[i : i + 2], strict=False))
            for i in range(0, len(rows), 2)
        ]

    def batch(self, rows: list[list[Value]]) -> Outputs:
        """Rows 2i and 2i + 1 as each other's corrupt inputs."""
        tokens, mask = (x.cpu() for x in self.compiled.encode(rows))
        codes = np.zeros(tokens.shape, dtype=np.int64)
        codes[:, 1:], _ = self.compiled.run(rows)
        wanted = self.ideal[torch.from_numpy(codes)]
        scored = mask & swapped(mask)
        scored[:, 0] = False
        return Outputs(
            tokens=tokens,
            corrupt=swapped(tokens),
            mask=mask,
            real=swapped(mask),
            scored=scored,
            wanted=wanted,
            other=swapped(wanted),
        )

    def metric(self, logits: Tensor, batch: Outputs) -> Tensor:
        """How far each row's logits are from its own outputs towards those of its corrupt input: 0 there, 1 here.

        Linear in the logits, so that its gradient does not vanish at the clean run.
        """
        towards = (batch.other - batch.wanted) * batch.scored[..., None]
        return ((logits - batch.wanted) * towards).sum((1, 2)) / towards.square().sum((1, 2))

    def loss(self, logits: Tensor, batch: Outputs) -> Tensor:
        """The squared distance of each row's logits from its own outputs, in units of that to its corrupt input's."""
        scored = batch.scored[..., None]
        far = ((batch.other - batch.wanted) * scored).square().sum((1, 2))
        return ((logits - batch.wanted) * scored).square().sum((1, 2)) / far

    def wrong(self, logits: Tensor, batch: Outputs) -> Tensor:
        """Whether any scored position of each row decodes to another value than it should, bool (b,)."""
        ideal = self.ideal.to(logits)
        said, right = (
            (x[..., None, :] - ideal).square().sum(-1).argmin(-1) for x in (logits, batch.wanted.to(logits))
        )
        return ((said != right) & batch.scored).any(1)
