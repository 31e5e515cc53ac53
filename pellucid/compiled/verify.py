"""Is a compiled model its program? Run both on all inputs, or on many."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pellucid.compiled.model import CompiledModel
from pellucid.compiled.rasp.interpreter import Interpreter
from pellucid.compiled.rasp.values import RaspError, Value, key

CELLS = 4_000_000


@dataclass(frozen=True)
class Verification:
    """What came out of comparing a model with its program's interpreter."""

    checked: int
    """Inputs on which the program is defined, all of which were compared."""
    exhaustive: bool
    """Whether these are all inputs."""
    failures: int
    """Inputs on which any position's value differs."""
    first_failure: tuple[list[Value], list[Value], list[Value]] | None
    """(input, the program's values, the model's values)."""
    max_error: float
    """The largest deviation of a logit from what it should be."""
    undefined: int = 0
    """Inputs left out, for a categorical aggregate selects different values there."""

    def __bool__(self) -> bool:
        return self.failures == 0 and self.checked > 0


def verify(
    model: CompiledModel, limit: int = 20_000, lengths: Iterable[int] | None = None, seed: int = 0
) -> Verification:
    """Compare a compiled model with its program: on all inputs of `lengths` if they are at most `limit`, else on `limit` drawn.

    Lengths are 1 to `max_len` unless given. Raises `RaspError` for a model without its program (one that was loaded).
    """
    sequences, exhaustive = inputs(model, limit, lengths, seed)
    return compare(model, sequences, exhaustive)


def inputs(
    model: CompiledModel, limit: int, lengths: Iterable[int] | None = None, seed: int = 0
) -> tuple[Iterator[list[Value]], bool]:
    """All inputs of `lengths` (1 to `max_len` unless given) if they are at most `limit`, else so many drawn; and which."""
    wanted = sorted(set(range(1, model.max_len + 1) if lengths is None else lengths))
    if any(not 1 <= n <= model.max_len for n in wanted) or not wanted:
        raise RaspError(f"lengths must be between 1 and {model.max_len}, got {wanted}")
    if limit < 1:
        raise RaspError(f"limit must be at least 1, got {limit}")
    vocab = model.vocab.values
    if sum(len(vocab) ** n for n in wanted) <= limit:
        return (list(s) for n in wanted for s in itertools.product(vocab, repeat=n)), True
    rng = np.random.default_rng(seed)
    drawn = np.sort(rng.choice(wanted, size=limit))
    return ([vocab[i] for i in rng.integers(len(vocab), size=n)] for n in drawn), False


def compare(
    model: CompiledModel, sequences: Iterable[Sequence[Value]], exhaustive: bool = False
) -> Verification:
    """Compare model and program on these sequences."""
    if model.program is None:
        raise RaspError("this model has no program: verify it when it is compiled, before it is saved")
    interpreter = Interpreter(model.program, causal=model.causal)
    place = {key(v): i for i, v in enumerate(model.outputs)}
    ideal = ideal_logits(model)
    checked = failures = undefined = 0
    first, worst = None, 0.0
    for chunk in chunks(sequences):
        for part, (expected,), why in interpreter.chunks(chunk):
            codes, logits = model.run(part)
            values = interpreter.tables[id(model.program)].values
            lookup = np.array([place.get(key(v), -1) for v in values] or [0])
            right = lookup[expected]
            real = np.arange(codes.shape[1]) < np.array([len(s) for s in part])[:, None]
            defined = np.array([w is None for w in why])
            real &= defined[:, None]
            undefined += int((~defined).sum())
            checked += int(defined.sum())
            wrong = ((codes != right) & real).any(1)
            failures += int(wrong.sum())
            if wrong.any() and first is None:
                row = int(np.argmax(wrong))
                n = len(part[row])
                first = (
                    list(part[row]),
                    [values[c] for c in expected[row, :n]],
                    [model.outputs[c] for c in codes[row, :n]],
                )
            if real.any():
                error = np.abs(logits.double().cpu().numpy() - ideal[right]).max(-1)
                worst = max(worst, float(np.nan_to_num(error[real], nan=np.inf).max()))
    return Verification(checked, exhaustive, failures, first, worst, undefined)


def ideal_logits(model: CompiledModel) -> np.ndarray:
    """(output value, logit): what the model should say for each value."""
    if model.encoding == "categorical":
        return np.eye(len(model.outputs))
    numbers = np.array([[0.0 if v is None else float(v)] for v in model.outputs])
    if model.outputs and model.outputs[0] is None:
        return np.concatenate([numbers, [[float(v is None)] for v in model.outputs]], axis=1)
    return numbers


def chunks(sequences: Iterable[Sequence[Value]]) -> Iterator[list[Sequence[Value]]]:
    """Consecutive sequences in lists that take about equal memory."""
    part: list[Sequence[Value]] = []
    cells = 0
    for s in sequences:
        part.append(s)
        cells += (len(s) + 1) ** 2
        if cells > CELLS or len(part) >= 2048:
            yield part
            part, cells = [], 0
    if part:
        yield part
