"""Step 6: the blocks' weights, placed into the project's one `Transformer`. No norm, ReLU, fitted head sizes."""

from collections.abc import Sequence

import numpy as np
import torch

from pellucid.compiled.compiler.heads import HeadBlock
from pellucid.compiled.compiler.layout import BOS, Layout
from pellucid.compiled.compiler.mlp import MLPBlock
from pellucid.compiled.compiler.variables import Variable
from pellucid.compiled.rasp.values import Value
from pellucid.core.config import LayerConfig, ModelConfig
from pellucid.core.transformer import Transformer


def eraser(variable: Variable, parts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """(neuron, direction) and (direction, neuron) weights that write the negative of some of a variable's directions."""
    exact = variable.encoding == "categorical" and variable.noise == 0
    signs = [1.0] if exact else [1.0, -1.0]
    w_in = np.zeros((len(parts) * len(signs), variable.width))
    for j, (part, sign) in enumerate((p, s) for p in parts for s in signs):
        w_in[j, part] = sign
    return w_in, -w_in.T


def assemble(
    held: Sequence[Variable],
    output: Variable,
    blocks: Sequence[HeadBlock | MLPBlock],
    slots: Sequence[int],
    layout: Layout,
    *,
    vocab: Sequence[Value],
    max_len: int,
    causal: bool,
    dtype: str,
) -> Transformer:
    """The transformer of a compiled program. Token ids: the vocabulary, then BOS, then padding."""
    n_layer = (max(slots, default=-1) + 2) // 2
    heads: list[list[HeadBlock]] = [[] for _ in range(n_layer)]
    neurons: list[list[MLPBlock]] = [[] for _ in range(n_layer)]
    for block, slot in zip(blocks, slots, strict=True):
        (heads if slot % 2 == 0 else neurons)[slot // 2].append(block)  # type: ignore[arg-type]
    at = {v.node: layout.directions[v.node] for v in held}
    erasers = {
        slot // 2: [(at[v.node], *eraser(v, parts)) for v, parts in erased]
        for slot, erased in layout.erased.items()
    }
    layers = tuple(
        LayerConfig(
            heads=tuple(h.size for h in heads[i]),
            d_mlp=sum(len(m.b_in) for m in neurons[i]) + sum(len(w) for _, w, _ in erasers.get(i, [])),
        )
        for i in range(n_layer)
    )
    positions = [v for v in held if v.primitive == "indices"]
    config = ModelConfig(
        vocab_size=len(vocab) + 2,
        d_model=layout.width,
        n_ctx=max_len + 1,
        layers=layers,
        output_vocab=output.width,
        norm="none",
        positions="learned" if positions else "none",
        causal=causal,
        attention_scale=1.0,
        activation="relu",
        dtype=dtype,  # type: ignore[arg-type]
    )
    model = Transformer(config, device="cpu", seed=None)
    with torch.no_grad():
        fill(model.wte.weight, token_table(held, at, vocab, layout.width))
        if positions:
            table = np.zeros((max_len + 1, layout.width))
            # Positions that no input on which the program is defined has are not among the values.
            table[1 + np.array(positions[0].domain.values), at[positions[0].node]] = 1.0
            assert model.wpe is not None
            fill(model.wpe.weight, table)
        for i, block in enumerate(model.blocks):
            if block.attn is not None:
                place_heads(block.attn, heads[i], at, layout.width)
            if block.mlp is not None:
                place_neurons(block.mlp, neurons[i], erasers.get(i, []), at, layout.width)
        unembedding = np.zeros((output.width, layout.width))
        unembedding[np.arange(output.width), at[output.node]] = 1.0
        fill(model.unembedding, unembedding)
    return model.eval()


def fill(parameter: torch.Tensor, values: np.ndarray) -> None:
    parameter.copy_(torch.from_numpy(values))


def token_table(
    held: Sequence[Variable], at: dict[int, list[int]], vocab: Sequence[Value], width: int
) -> np.ndarray:
    """(token id, direction): what the embedding writes of each token; BOS its own direction, padding nothing."""
    table = np.zeros((len(vocab) + 2, width))
    for v in held:
        if v.primitive == "tokens":
            table[np.arange(len(vocab)), np.array(at[v.node])[v.domain.place(vocab)]] = 1.0
        elif v.block is None and v.primitive is None:
            table[: len(vocab), at[v.node]] = v.codes[0]
    table[len(vocab), BOS] = 1.0
    return table


def place_heads(attn, heads: Sequence[HeadBlock], at: dict[int, list[int]], width: int) -> None:
    total = sum(h.size for h in heads)
    qkv, bias, proj = np.zeros((3 * total, width)), np.zeros(3 * total), np.zeros((width, total))
    start = 0
    for head in heads:
        n, m = len(head.b_q), head.target.width
        q, k, v = (
            slice(start, start + n),
            slice(total + start, total + start + n),
            slice(2 * total + start, 2 * total + start + m),
        )
        for rows, variables, weights in (
            (q, head.queries, head.w_q),
            (k, head.keys, head.w_k),
            (v, head.values, head.w_v),
        ):
            for variable, w in zip(variables, weights, strict=True):
                qkv[rows, at[variable.node]] += w
        qkv[q, BOS] += head.bos_q
        qkv[k, BOS] += head.bos_k
        qkv[v, BOS] += head.bos_v
        bias[q], bias[k] = head.b_q, head.b_k
        proj[at[head.target.node], np.arange(start, start + m)] = 1.0
        start += head.size
    fill(attn.qkv.weight, qkv)
    fill(attn.qkv.bias, bias)
    fill(attn.proj.weight, proj)
    attn.proj.bias.zero_()


def place_neurons(mlp, blocks: Sequence[MLPBlock], erasers, at: dict[int, list[int]], width: int) -> None:
    total = mlp.fc.out_features
    w_in, b_in = np.zeros((total, width)), np.zeros(total)
    w_out, b_out = np.zeros((width, total)), np.zeros(width)
    start = 0
    for block in blocks:
        rows = slice(start, start + len(block.b_in))
        for variable, w in zip(block.reads, block.w_in, strict=True):
            w_in[rows, at[variable.node]] += w
        b_in[rows] = block.b_in
        w_out[at[block.target.node], rows] = block.w_out
        b_out[at[block.target.node]] += block.b_out
        start = rows.stop
    for directions, erase_in, erase_out in erasers:
        rows = slice(start, start + len(erase_in))
        w_in[rows, directions] = erase_in
        w_out[directions, rows] = erase_out
        start = rows.stop
    for parameter, values in (
        (mlp.fc.weight, w_in),
        (mlp.fc.bias, b_in),
        (mlp.proj.weight, w_out),
        (mlp.proj.bias, b_out),
    ):
        fill(parameter, values)
