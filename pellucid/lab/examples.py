"""What nodes respond to: snippets of text where a node is strongly on, strongly off, or anywhere between."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pellucid.core.circuit import Node
from pellucid.core.taps import Recorder
from pellucid.core.transformer import Transformer
from pellucid.data.batches import TokenBatches

ROWS = 64
"""Sequences in one forward pass."""


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


def stream(tokens, *, sequences: int, seq_len: int) -> Iterator[Tensor]:
    """Up to `sequences` different windows of corpus `tokens`, in random order: (b, seq_len) at a time."""
    rows = min(sequences, (len(tokens) - 1) // max(1, seq_len))
    batches = TokenBatches(tokens, min(ROWS, max(1, rows)), seq_len, seed=0)
    for i in range(-(-rows // batches.batch_size)):
        yield batches.at(i)[: rows - i * batches.batch_size, :-1]


class Nearest:
    """For each node and target, the examples whose activation is nearest to it, one a sequence at most.

    `targets` (nodes, q): inf asks for the highest activations, -inf for the lowest. Fed batch by batch, it keeps `n`
    examples of 2 * `window` tokens each. Among equal activations the place is random, the sequence the first seen.
    """

    def __init__(self, targets: Tensor, n: int, window: int):
        self.targets, self.n, self.window = targets, n, window
        shape = (*targets.shape, n)
        self.score = torch.full(shape, -torch.inf)
        self.focus = torch.zeros(shape, dtype=torch.int64)
        self.tokens = torch.zeros(*shape, 2 * window, dtype=torch.int64)
        self.values = torch.zeros(*shape, 2 * window)
        self.draw = torch.Generator().manual_seed(0)

    def see(self, tokens: Tensor, values: Tensor) -> None:
        """Take in tokens (b, t) and the nodes' activations on them (nodes, b, t)."""
        lottery = torch.rand(tokens.shape, generator=self.draw)
        for q, target in enumerate(self.targets.unbind(1)):
            target = target[:, None, None]
            near = torch.where(target.isinf(), target.sign() * values, -(values - target).abs())
            score = near.amax(-1)
            place = torch.where(near == score[..., None], lottery, -1).argmax(-1)
            start = (place - self.window).clamp(0, tokens.shape[1] - 2 * self.window)
            span = start[..., None] + torch.arange(2 * self.window)
            self.keep(
                q,
                score,
                place - start,
                tokens.expand(*values.shape).gather(-1, span),
                values.gather(-1, span),
            )

    def keep(self, q: int, score: Tensor, focus: Tensor, tokens: Tensor, values: Tensor) -> None:
        """Merge one example a sequence, (nodes, b) and (nodes, b, 2 * window), into the best of target `q`."""
        scores = torch.cat([self.score[:, q], score], dim=1)
        order = scores.argsort(dim=1, descending=True, stable=True)[:, : self.n]
        self.score[:, q] = scores.gather(1, order)
        self.focus[:, q] = torch.cat([self.focus[:, q], focus], dim=1).gather(1, order)
        order = order[..., None].expand(-1, -1, 2 * self.window)
        self.tokens[:, q] = torch.cat([self.tokens[:, q], tokens], dim=1).gather(1, order)
        self.values[:, q] = torch.cat([self.values[:, q], values], dim=1).gather(1, order)

    def examples(self) -> list[list[tuple[Example, ...]]]:
        """For each node and target its examples, the nearest first; fewer than `n` where fewer sequences were seen."""

        def best(node: int, q: int) -> tuple[Example, ...]:
            seen = int(self.score[node, q].isfinite().sum())
            rows = zip(
                self.tokens[node, q, :seen].tolist(),
                self.values[node, q, :seen].tolist(),
                self.focus[node, q, :seen].tolist(),
                strict=True,
            )
            return tuple(Example(tuple(t), tuple(v), focus) for t, v, focus in rows)

        nodes, targets = self.targets.shape
        return [[best(node, q) for q in range(targets)] for node in range(nodes)]


def fitted(model: Transformer, tokens, n: int, seq_len: int, window: int) -> tuple[int, int]:
    """`seq_len` and `window`, shortened where the model's context or a corpus of under `n` sequences asks for it."""
    seq_len = min(seq_len, model.config.n_ctx, (len(tokens) - 1) // n)
    if seq_len < 2:
        raise ValueError(f"{len(tokens)} tokens are too few for {n} examples")
    return seq_len, min(window, seq_len // 2)


def extreme_examples(
    model: Transformer,
    tokens,
    nodes: Sequence[Node],
    *,
    n: int = 4,
    sequences: int = 256,
    seq_len: int = 96,
    window: int = 12,
) -> tuple[list[tuple[Example, ...]], list[tuple[Example, ...]]]:
    """For each node its `n` highest and its `n` lowest activations on corpus `tokens`, one a sequence at most."""
    if not nodes:
        return [], []
    seq_len, window = fitted(model, tokens, n, seq_len, window)
    found = Nearest(torch.tensor([torch.inf, -torch.inf]).expand(len(nodes), 2), n, window)
    for windows in stream(tokens, sequences=max(n, sequences), seq_len=seq_len):
        found.see(windows, record_nodes(model, windows, nodes))
    top, bottom = zip(*found.examples(), strict=True)
    return list(top), list(bottom)
