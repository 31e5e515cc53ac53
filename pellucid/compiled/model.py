"""A compiled program: the transformer, and what turns Python values into its tokens and its logits into values."""

import base64
import json
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pellucid.compiled.compiler.graph import CompileError
from pellucid.compiled.compiler.pipeline import Compilation, run_pipeline
from pellucid.compiled.compiler.truth import truth
from pellucid.compiled.rasp.language import Encoding, Expression, SOp
from pellucid.compiled.rasp.values import RaspError, Table, Value, canonical, key
from pellucid.core.checkpoint import find_checkpoint, load_metadata, load_model, read_file, save_model
from pellucid.core.transformer import Transformer

BATCH = 256


class CompiledModel:
    """A transformer that computes a RASP program exactly, on sequences of up to `max_len` values of `vocab`."""

    def __init__(
        self,
        transformer: Transformer,
        *,
        vocab: Sequence[Value],
        outputs: Sequence[Value],
        encoding: Encoding,
        max_len: int,
        causal: bool,
        bos: Value,
        pad: Value,
        error_bound: float,
        margin: float,
        truth: Callable[[], dict[str, Any]],
        program: SOp | None = None,
    ):
        self.transformer, self.vocab, self.outputs = transformer, Table(vocab), list(outputs)
        self.encoding: Encoding = encoding
        self.max_len, self.causal = max_len, causal
        self.bos, self.pad = bos, pad
        self.error_bound, self.margin = error_bound, margin
        self.find_truth, self.program = truth, program
        self.values = np.empty(len(self.outputs), dtype=object)
        self.values[:] = self.outputs

    def remade(
        self, transformer: Transformer, *, error_bound: float, truth: Callable[[], dict[str, Any]]
    ) -> "CompiledModel":
        """Another transformer for the same program, tokens and values."""
        return CompiledModel(
            transformer,
            vocab=self.vocab.values,
            outputs=self.outputs,
            encoding=self.encoding,
            max_len=self.max_len,
            causal=self.causal,
            bos=self.bos,
            pad=self.pad,
            error_bound=error_bound,
            margin=self.margin,
            truth=truth,
            program=self.program,
        )

    # Values to tokens, logits to values.

    def encode(self, sequences: Iterable[Iterable[Value]]) -> tuple[Tensor, Tensor]:
        """(tokens, mask), both (b, 1 + longest): BOS, the values' ids, padding. Raises `RaspError` for bad sequences."""
        ids = [self.ids(s) for s in sequences]
        longest = max(map(len, ids), default=0)
        tokens = np.full((len(ids), 1 + longest), len(self.vocab) + 1)
        tokens[:, 0] = len(self.vocab)
        for row, found in zip(tokens, ids, strict=True):
            row[1 : 1 + len(found)] = found
        made = torch.from_numpy(tokens).to(self.transformer.device)
        return made, made != len(self.vocab) + 1

    def ids(self, sequence: Iterable[Value]) -> list[int]:
        values = listed(sequence)
        if len(values) > self.max_len:
            raise RaspError(
                f"{values!r} has {len(values)} values; the model was compiled for at most {self.max_len}"
            )
        try:
            return [self.vocab.codes[key(v)] for v in values]
        except (KeyError, TypeError):
            return [self.id(v, values) for v in values]

    def id(self, value: Value, values: Sequence[Value]) -> int:
        try:
            return self.vocab.codes[key(canonical(value))]
        except (KeyError, ValueError):
            known = ", ".join(repr(v) for v in self.vocab.values[:20])
            raise RaspError(f"{value!r} in {values!r} is not in the vocabulary: {known}") from None

    def codes(self, logits: Tensor) -> Tensor:
        """Logits (b, t, v) -> (b, t) numbers of output values."""
        if self.encoding == "categorical":
            return logits.argmax(-1)
        none = int(bool(self.outputs) and self.outputs[0] is None)
        numbers = torch.tensor(
            [float(v) for v in self.outputs[none:]], dtype=logits.dtype, device=logits.device
        )
        if not len(numbers):
            return torch.zeros(logits.shape[:-1], dtype=torch.long, device=logits.device)
        middles = (numbers[1:] + numbers[:-1]) / 2
        codes = torch.bucketize(logits[..., 0].contiguous(), middles) + none
        return codes.where(logits[..., 1] < 0.5, 0) if none else codes

    @torch.no_grad()
    def __call__(self, sequence: Iterable[Value]) -> list[Value]:
        """The program's values on one sequence, one for each position; nothing for BOS."""
        return self.batch([sequence])[0]

    @torch.no_grad()
    def batch(self, sequences: Iterable[Iterable[Value]]) -> list[list[Value]]:
        """As `model(sequence)`, for many sequences of any lengths at once."""
        sequences = [listed(s) for s in sequences]
        order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
        out: list[list[Value]] = [[] for _ in sequences]
        for start in range(0, len(order), BATCH):
            rows = order[start : start + BATCH]
            codes, _ = self.run([sequences[i] for i in rows])
            decoded = self.values[codes]
            for row, i in enumerate(rows):
                out[i] = decoded[row, : len(sequences[i])].tolist()
        return out

    @torch.no_grad()
    def run(self, sequences: Sequence[Sequence[Value]]) -> tuple[np.ndarray, Tensor]:
        """Output codes (b, n) and logits (b, n, v) of a batch, BOS left out."""
        tokens, mask = self.encode(sequences)
        if tokens.shape[1] == 1:
            return np.zeros((len(sequences), 0), dtype=np.int64), torch.zeros(len(sequences), 0, 1)
        logits = self.transformer(tokens, mask=None if bool(mask.all()) else mask)[:, 1:]
        return self.codes(logits).cpu().numpy(), logits

    # What is inside.

    @cached_property
    def truth(self) -> dict[str, Any]:
        """The ground truth, as JSON-able data: see `compiler/truth.py`."""
        return self.find_truth()

    @cached_property
    def basis(self) -> np.ndarray | None:
        """(direction of the ground truth, direction of the residual stream): the first as vectors of the second.

        None where they are the same. Of a rotated model `stream @ basis.T` is the stream that the ground truth labels.
        """
        basis = self.truth.get("basis")
        return None if basis is None else np.array(basis)

    def labels(self, layer: int) -> list[str]:
        """What each direction of the residual stream holds after `layer` layers (0: the embedding): `name:value`.

        Raises `RaspError` for a rotated model, whose directions mix all values.
        """
        if self.basis is not None:
            raise RaspError(
                "a rotated model's directions have no labels: stream @ model.basis.T has those of the model that was rotated"
            )
        layers = len(self.transformer.config.layers)
        if not 0 <= layer <= layers:
            raise RaspError(f"layer must be between 0 (the embedding) and {layers}, got {layer!r}")
        slot, labels = 2 * layer - 1, [""] * self.transformer.config.d_model
        labels[0] = "bos"
        for v in self.truth["variables"]:
            if v["written"] <= slot and (v["gone"] is None or slot < v["gone"]):
                for direction, label in zip(v["directions"], v["labels"], strict=True):
                    labels[direction] = label
        return labels

    def trace(self, sequence: Iterable[Value]):
        """The residual stream by layer on one sequence, labelled."""
        from pellucid.compiled.trace import trace

        return trace(self, listed(sequence))

    def summary(self) -> dict[str, Any]:
        """Sizes: layers, heads and their sizes, neurons, residual width, parameters and how many are not zero."""
        config = self.transformer.config
        parameters = list(self.transformer.parameters())
        return {
            "layers": len(config.layers),
            "sublayers": sum(bool(x.heads) + bool(x.d_mlp) for x in config.layers),
            "heads": [list(x.heads) for x in config.layers],
            "neurons": [x.d_mlp for x in config.layers],
            "residual width": config.d_model,
            "parameters": sum(p.numel() for p in parameters),
            "nonzero": sum(int(p.count_nonzero()) for p in parameters),
            "dtype": config.dtype,
            "error bound": self.error_bound,
            "margin": self.margin,
        }

    # Files.

    def save(self, path: str | Path) -> None:
        """Write the model, its encoder and its ground truth to the directory `path`: safetensors and JSON."""
        metadata = {
            "kind": "compiled",
            "vocab": [to_json(v) for v in self.vocab.values],
            "outputs": [to_json(v) for v in self.outputs],
            "encoding": self.encoding,
            "max_len": self.max_len,
            "causal": self.causal,
            "bos": to_json(self.bos),
            "pad": to_json(self.pad),
            "error_bound": self.error_bound,
            "margin": self.margin,
        }
        truth = json.dumps(self.truth, ensure_ascii=False).encode()
        save_model(self.transformer, path, metadata=metadata, extra={"truth.json": truth})

    @classmethod
    def load(cls, path: str | Path, *, device: str | torch.device = "auto") -> "CompiledModel":
        """The model in the directory `path`. It has no program: `verify` needs one that was just compiled."""
        meta = load_metadata(path)
        if meta.get("kind") != "compiled":
            raise ValueError(f"{path} holds no compiled model")
        truth = json.loads(read_file(find_checkpoint(path), "truth.json"))
        return cls(
            load_model(path, device=device),
            vocab=[from_json(v) for v in meta["vocab"]],
            outputs=[from_json(v) for v in meta["outputs"]],
            encoding=meta["encoding"],
            max_len=meta["max_len"],
            causal=meta["causal"],
            bos=from_json(meta["bos"]),
            pad=from_json(meta["pad"]),
            error_bound=meta["error_bound"],
            margin=meta["margin"],
            truth=lambda: truth,
        )


def listed(sequence: Iterable[Value]) -> list[Value]:
    """The sequence as a list. Raises `RaspError` for what is no sequence."""
    try:
        return list(sequence)
    except TypeError:
        raise RaspError(f"expected a sequence of values, got {sequence!r}") from None


def to_json(value: Value) -> Any:
    """A value as JSON that `from_json` reads back with its type. Raises `RaspError` for types that cannot be stored."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return {"bool": value}
    if isinstance(value, int):
        return {"int": str(value)}
    if isinstance(value, float):
        return {"float": value.hex()}
    if isinstance(value, Fraction):
        return {"fraction": [str(value.numerator), str(value.denominator)]}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if type(value) is tuple:
        return {"tuple": [to_json(v) for v in value]}
    raise RaspError(
        f"{value!r} cannot be saved: values are None, bools, numbers, text, bytes and tuples of these"
    )


def from_json(data: Any) -> Value:
    """The value that `to_json` wrote."""
    if data is None or isinstance(data, str):
        return data
    ((kind, value),) = data.items()
    if kind == "tuple":
        return tuple(from_json(v) for v in value)
    if kind == "fraction":
        return Fraction(int(value[0]), int(value[1]))
    readers = {"bool": bool, "int": int, "float": float.fromhex, "bytes": base64.b64decode}
    if kind not in readers:
        raise ValueError(f"unknown kind of value {kind!r}")
    return readers[kind](value)


def run_checked(program: Expression, vocab: Sequence[Value], max_len: int, **options: Any) -> Compilation:
    """The pipeline, where selectors that are nested too deeply are a `CompileError` as well."""
    try:
        return run_pipeline(program, vocab, max_len, **options)
    except RecursionError:
        raise CompileError(
            "its selectors are nested too deeply: combine fewer, or in a balanced way"
        ) from None


def compile_program(
    program: Expression,
    vocab: Sequence[Value],
    max_len: int,
    causal: bool = False,
    bos: Value = "BOS",
    pad: Value = "PAD",
    schedule: str = "asap",
    reuse: bool = False,
    allow_products: bool = False,
    dtype: str = "float32",
    inverse_temperature: float | None = None,
) -> CompiledModel:
    """Compile a RASP program to a transformer that equals the interpreter on every sequence of up to `max_len` of `vocab`.

    `schedule="narrow"` moves blocks later where that narrows the residual stream; `reuse` gives the directions of dead
    variables to later ones; `allow_products` makes s-ops of pairs for selectors that no one head can attend by.
    `inverse_temperature` is by how many nats every head's selected keys exceed all others; BOS, where it is the default,
    is half as many below them. None: as cold as each head needs. What a warmer softmax leaks is part of `error_bound`.
    Raises `CompileError`, a `ValueError`, with every reason why the program cannot be compiled.
    """
    made = run_checked(
        program,
        vocab,
        max_len,
        causal=causal,
        schedule=schedule,
        reuse=reuse,
        allow_products=allow_products,
        dtype=dtype,
        inverse_temperature=inverse_temperature,
    )
    for what, value, others in (("bos", bos, made.vocab), ("pad", pad, [*made.vocab, bos])):
        if key(canonical(value)) in {key(v) for v in others}:
            raise CompileError(
                f"{what} is {value!r}, which is already {'bos' if value == bos and what == 'pad' else 'in the vocabulary'}"
            )
    output = made.output
    return CompiledModel(
        made.transformer,
        vocab=made.vocab,
        outputs=output.domain.values,
        encoding=output.encoding,
        max_len=max_len,
        causal=causal,
        bos=bos,
        pad=pad,
        error_bound=max(output.bound, output.noise),
        margin=output.margin,
        truth=lambda: truth(made),
        program=program,  # type: ignore[arg-type]
    )
