"""Harder variants of compiled models, whose ground truth stays known: rotated ones, and programs with distractors.

The third kind, warmer attention, is `compile_program(..., inverse_temperature=30)`.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from pellucid.compiled.compiler.assemble import fill
from pellucid.compiled.compiler.graph import Graph
from pellucid.compiled.compiler.pipeline import check_vocabulary
from pellucid.compiled.library.copying import copy_first, shift_by
from pellucid.compiled.library.counting import earlier_occurrences
from pellucid.compiled.model import CompiledModel
from pellucid.compiled.rasp.language import (
    Aggregate,
    InverseWidth,
    Map,
    SOp,
    describe,
    eq,
    indices,
    leq,
    lift,
    select,
    selector_width,
    tokens,
    walk,
)
from pellucid.compiled.rasp.values import RaspError, Value, show
from pellucid.compiled.verify import ideal_logits, inputs
from pellucid.core.edges import edge_table
from pellucid.core.transformer import MLP, Attention, Transformer

# Rotated models.


def rotated(model: CompiledModel, seed: int = 0, limit: int = 2000) -> CompiledModel:
    """The same function of the tokens by other weights: no direction, channel, head or neuron is where it was.

    An orthogonal matrix turns the residual stream, others each head's queries and keys, and its values; heads of a layer
    and neurons of an MLP are permuted. `truth` numbers heads and neurons anew. Its directions are the rows of
    `truth["basis"]` (`model.basis`), so that `stream @ basis.T` is the old stream. Channel edges are None: all exist.

    Turned weights round. `error_bound` grows by twice the largest difference of the two models' logits, on all inputs
    if they are at most `limit`, else on `limit` drawn: it is measured, not proven. Raises `RaspError` where that is so
    much that outputs might decode wrongly.
    """
    rng = np.random.default_rng(seed)
    old = model.transformer
    heads = [rng.permutation(len(layer.heads)) for layer in old.config.layers]
    neurons = [rng.permutation(layer.d_mlp) for layer in old.config.layers]
    basis = orthogonal(rng, old.config.d_model)
    transformer = turned(old, basis, heads, neurons, rng)
    made = model.remade(
        transformer,
        error_bound=model.error_bound,
        truth=lambda: turned_truth(model, transformer, basis, heads, neurons),
    )
    made.error_bound += 2 * difference(model, made, limit)
    if not made.error_bound < made.margin / 2:
        raise RaspError(
            f"rotated, the output may be off by {made.error_bound:.2g}, and its nearest values are {made.margin:.2g} apart"
            + ("; compile it with dtype='float64'" if old.config.dtype == "float32" else "")
        )
    return made


def orthogonal(rng: np.random.Generator, size: int) -> np.ndarray:
    """A uniformly random orthogonal matrix."""
    q, r = np.linalg.qr(rng.standard_normal((size, size)))
    return q * np.sign(np.diag(r))


Order = Sequence[np.ndarray]
"""For each layer the old number of each new head or neuron."""


@torch.no_grad()
def turned(
    old: Transformer, basis: np.ndarray, heads: Order, neurons: Order, rng: np.random.Generator
) -> Transformer:
    """The transformer whose residual stream is `old`'s @ basis."""
    layers = [
        replace(layer, heads=tuple(layer.heads[i] for i in order))
        for layer, order in zip(old.config.layers, heads, strict=True)
    ]
    new = Transformer(replace(old.config, layers=tuple(layers)), device="cpu", seed=None)
    fill(new.wte.weight, exact(old.wte.weight) @ basis)
    if old.wpe is not None and new.wpe is not None:
        fill(new.wpe.weight, exact(old.wpe.weight) @ basis)
    for number, (before, after) in enumerate(zip(old.blocks, new.blocks, strict=True)):
        if before.attn is not None and after.attn is not None:
            turn_attention(before.attn, after.attn, basis, heads[number], rng)
        if before.mlp is not None and after.mlp is not None:
            turn_mlp(before.mlp, after.mlp, basis, neurons[number])
    fill(new.unembedding, exact(old.unembedding) @ basis)
    return new.to(old.device).eval()


def exact(weights: torch.Tensor) -> np.ndarray:
    return weights.double().cpu().numpy()


def turn_attention(
    old: Attention, new: Attention, basis: np.ndarray, order: np.ndarray, rng: np.random.Generator
) -> None:
    """Reads and writes turn with the stream; queries and keys of a head turn alike, and its values on their own."""
    cuts = np.cumsum(old.sizes)[:-1]
    q, k, v = (np.split(w @ basis, cuts) for w in np.split(exact(old.qkv.weight), 3))
    b_q, b_k, b_v = (np.split(b, cuts) for b in np.split(exact(old.qkv.bias), 3))
    out = np.split(basis.T @ exact(old.proj.weight), cuts, axis=1)
    turns = [(orthogonal(rng, m), orthogonal(rng, m)) for m in old.sizes]
    both = [(b, turns[head][0], head) for b in ((q, b_q), (k, b_k)) for head in order]
    both += [((v, b_v), turns[head][1], head) for head in order]
    fill(new.qkv.weight, np.concatenate([turn @ weights[head] for (weights, _), turn, head in both]))
    fill(new.qkv.bias, np.concatenate([turn @ bias[head] for (_, bias), turn, head in both]))
    fill(new.proj.weight, np.concatenate([out[head] @ turns[head][1].T for head in order], axis=1))
    fill(new.proj.bias, exact(old.proj.bias) @ basis)


def turn_mlp(old: MLP, new: MLP, basis: np.ndarray, order: np.ndarray) -> None:
    """Reads and writes turn with the stream."""
    fill(new.fc.weight, exact(old.fc.weight)[order] @ basis)
    fill(new.fc.bias, exact(old.fc.bias)[order])
    fill(new.proj.weight, basis.T @ exact(old.proj.weight)[:, order])
    fill(new.proj.bias, exact(old.proj.bias) @ basis)


def turned_truth(
    model: CompiledModel, transformer: Transformer, basis: np.ndarray, heads: Order, neurons: Order
) -> dict[str, Any]:
    """The ground truth of `model` for its rotation `transformer`."""
    truth = copy.deepcopy(model.truth)
    new_head, new_neuron = [np.argsort(o).tolist() for o in heads], [np.argsort(o).tolist() for o in neurons]

    def component(site: str, head: int | None) -> tuple[str, int | None]:
        return site, None if head is None else new_head[int(site.partition(".")[0])][head]

    def name(text: str) -> str:
        site, _, head = text.partition(":")
        return f"{site}:{component(site, int(head))[1]}" if head else site

    for variable in truth["variables"]:
        variable["writer"], variable["readers"] = (
            name(variable["writer"]),
            sorted(map(name, variable["readers"])),
        )
    for selector in truth["selectors"]:
        layer, head = selector["head"]
        selector["head"] = [layer, new_head[layer][head]]
    for neuron in truth["neurons"]:
        neuron["neuron"] = new_neuron[neuron["layer"]][neuron["neuron"]]
    truth["neurons"].sort(key=lambda n: (n["layer"], n["neuron"]))
    truth["nodes"] = sorted(map(name, truth["nodes"]))
    there = {(component(*e["writer"]), component(*e["reader"])) for e in truth["edges"]["component"]}
    table = edge_table(transformer.config)
    truth["edges"] = {
        "component": [
            {"writer": list(w), "reader": list(r)}
            for r in table.readers
            for w in table.writers
            if (w, r) in there
        ],
        "channel": None,
    }
    truth["basis"] = (basis if model.basis is None else model.basis @ basis).tolist()
    return truth


@torch.no_grad()
def difference(old: CompiledModel, new: CompiledModel, limit: int) -> float:
    """The largest difference of logits, wherever those of `old` say a value within its error bound."""
    sequences = list(inputs(old, limit)[0])
    ideal, worst = ideal_logits(old), 0.0
    for start in range(0, len(sequences), 256):
        part = sequences[start : start + 256]
        codes, logits = old.run(part)
        before, after = exact(logits), exact(new.run(part)[1])
        real = np.arange(codes.shape[1]) < np.array([len(s) for s in part])[:, None]
        real &= (
            np.abs(before - ideal[codes]).max(-1) <= old.error_bound
        )  # else the program is undefined there
        worst = max(worst, float(np.nan_to_num(np.abs(after - before)[real], nan=np.inf).max(initial=0.0)))
    return worst


# Distractors.


def with_distractors(program: SOp, vocab: Sequence[Value], count: int = 2, seed: int = 0) -> SOp:
    """`program`'s values, by a last map that also reads `count` other s-ops of the tokens, all of which change nothing.

    `seed` draws them from the previous token, the first one, whether this one occurred before, and the parities of how
    often each of two tokens occurred, without those that share a head with the program. Raises `ValueError` where fewer
    than `count` are left.
    """
    rng = np.random.default_rng(seed)
    values = check_vocabulary(vocab)
    program = lift(program)
    some = [values[i] for i in rng.permutation(len(values))[:2]]
    pool = [x for x in distractors(some) if is_new(x, program)]
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= len(pool):
        raise ValueError(f"count must be between 1 and {len(pool)}, got {count!r}")
    drawn = [pool[i] for i in np.sort(rng.permutation(len(pool))[:count])]
    result = Map(first_value, (program, *drawn), encoding=program.encoding)
    return result.named(f"{describe(program)} beside distractors")


def first_value(value: Value, *others: Value) -> Value:
    """The first of the values."""
    return value


def is_new(sop: SOp, program: SOp) -> bool:
    """Whether neither `sop` nor any head behind it is part of the program."""
    graph = Graph(program)
    own = {id(x) for x in graph.nodes}
    node = graph.add_sop(sop)
    return not any(id(x) in own for x in walk(node) if x is node or isinstance(x, Aggregate | InverseWidth))


def distractors(values: Sequence[Value]) -> list[SOp]:
    """S-ops with few values, any of which may go with any other. Nothing after a position changes what they say there."""
    prevs = select(indices, indices, leq)
    return [
        shift_by(1).named("previous token"),
        copy_first().named("first token"),
        (earlier_occurrences() > 0).named("seen before"),
        *((selector_width(prevs & select(tokens, v, eq)) % 2).named(f"parity of {show(v)}") for v in values),
    ]
