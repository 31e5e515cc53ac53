"""Where nodes are strongly on and off: the snippets of text with a node's highest and lowest activations."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pellucid.core.circuit import Node
from pellucid.core.taps import Recorder
from pellucid.core.transformer import Transformer
from pellucid.data.batches import TokenBatches


@dataclass(frozen=True)
class Example:
    """Tokens around one place, the node's activation on each, and which of them the place is."""

    tokens: tuple[int, ...]
    activations: tuple[float, ...]
    focus: int


@torch.no_grad()
def record_nodes(model: Transformer, tokens: Tensor, nodes: Sequence[Node]) -> Tensor:
    """The activation of each of `nodes` on tokens (b, t): (nodes, b, t). Rows may be padded on the right."""
    recorder = Recorder({node.site for node in nodes})
    model(tokens.to(model.device), tap=recorder)
    return torch.stack([recorder.values[node.site][..., node.channel].float().cpu() for node in nodes])


@torch.no_grad()
def extreme_examples(
    model: Transformer,
    tokens,
    nodes: Sequence[Node],
    *,
    n: int = 4,
    sequences: int = 256,
    seq_len: int = 96,
    window: int = 12,
) -> tuple[list[list[Example]], list[list[Example]]]:
    """For each node its `n` highest and its `n` lowest activations on corpus `tokens`, one a sequence at most."""
    if not nodes:
        return [], []
    seq_len = min(seq_len, model.config.n_ctx, (len(tokens) - 1) // n)
    window = min(window, seq_len // 2)
    rows = max(n, min(sequences, (len(tokens) - 1) // seq_len))
    windows = TokenBatches(tokens, rows, seq_len, seed=0).at(0)[:, :-1]
    chunks = [record_nodes(model, part, nodes) for part in windows.split(64)]
    values = torch.cat(chunks, dim=1)

    def around(node: int, row: int, focus: int) -> Example:
        start = max(0, min(focus - window, seq_len - 2 * window))
        part = slice(start, start + 2 * window)
        return Example(
            tuple(windows[row, part].tolist()), tuple(values[node, row, part].tolist()), focus - start
        )

    def extremes(sign: int) -> list[list[Example]]:
        best, where = (sign * values).max(-1)
        order = best.topk(n, dim=1).indices
        return [[around(i, row, int(where[i, row])) for row in rows] for i, rows in enumerate(order.tolist())]

    return extremes(1), extremes(-1)
