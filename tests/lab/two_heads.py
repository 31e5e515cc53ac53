"""Two heads with weights written by hand, whose effects are worked out on paper; and plain tasks for any model.

Residual channels: 0 is 1 on token 0, 1 is 1 on token 1, 2 is what the heads write. Both heads attend to all positions
alike. Head 0 moves channel 0 twice over into channel 2, head 1 moves channel 1 three times over. The only logit is
channel 2. Sequences are token 0 three times, or token 1; the corrupt of each is the other. On token 0 the logit is 2, on
token 1 it is 3.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from pellucid import LayerConfig, ModelConfig, Transformer
from pellucid.core.edges import edge_table
from pellucid.tasks.task import Pairs

READERS = ("q0", "q1", "k0", "k1", "v0", "v1", "out")
WRITERS = ("embed", "head 0", "head 1")
EDGE_EFFECTS = {("v0", "embed"): -2.0, ("v1", "embed"): 3.0, ("out", "head 0"): -2.0, ("out", "head 1"): 3.0}
"""On token 0: by how much the logit rises if an edge has what it has on token 1. On token 1 it is the negative."""
NODE_EFFECTS = [1.0, -2.0, 3.0]


def two_heads() -> Transformer:
    config = ModelConfig(
        vocab_size=2, d_model=3, n_ctx=3, layers=(LayerConfig(heads=(1, 1)),), norm="none", causal=False,
        output_vocab=1, linear_bias=False, dtype="float64",
    )  # fmt: skip
    model = Transformer(config, device="cpu")
    attn = model.blocks[0].attn
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        model.wte.weight[0, 0] = model.wte.weight[1, 1] = 1
        attn.qkv.weight[4, 0] = attn.qkv.weight[5, 1] = 1
        attn.proj.weight[2] = torch.tensor([2.0, 3.0])
        model.head.weight[0, 2] = 1
    return model


def edge_effects() -> Tensor:
    effects = torch.zeros(len(READERS), len(WRITERS))
    for (reader, writer), effect in EDGE_EFFECTS.items():
        effects[READERS.index(reader), WRITERS.index(writer)] = effect
    return effects


class TwoTokens:
    """The last logit of `two_heads`, with its sign turned on token 1, so that both rows of a pair say the same."""

    name = "two tokens"

    def pairs(self, n: int, seed: int = 0, split: str = "train") -> Pairs:
        tokens = torch.tensor([[0, 0, 0], [1, 1, 1]]).repeat(n, 1)
        return Pairs(tokens=tokens, corrupt=1 - tokens, mask=torch.ones_like(tokens, dtype=torch.bool))

    def metric(self, logits: Tensor, batch: Pairs) -> Tensor:
        return logits[:, -1, 0] * (1 - 2 * batch.tokens[:, 0])

    def loss(self, logits: Tensor, batch: Pairs) -> Tensor:
        return (logits[:, -1, 0] - 2 - batch.tokens[:, 0]).square()


class Anything:
    """Random sequences of several lengths, and a linear metric of the logits at their real tokens.

    With `same`, the two members of each pair but the first are equal, and the metric is 0 on that one.
    """

    name = "anything"

    def __init__(
        self, vocab: int = 11, positions: int = 6, same: bool = False, change: Callable | None = None
    ):
        self.vocab, self.positions, self.same = vocab, positions, same
        self.change = change or (lambda batch: batch)

    def pairs(self, n: int, seed: int = 0, split: str = "train") -> Pairs:
        draw = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, self.vocab, (2 * n, self.positions), generator=draw)
        lengths = torch.randint(2, self.positions + 1, (n,), generator=draw).repeat_interleave(2)
        if self.same:
            tokens[2::2] = tokens[3::2]
        corrupt = tokens.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)
        return self.change(Pairs(tokens, corrupt, torch.arange(self.positions) < lengths[:, None]))

    def metric(self, logits: Tensor, batch: Pairs) -> Tensor:
        draw = torch.Generator().manual_seed(0)
        weight = torch.randn(logits.shape[1:], generator=draw).to(logits)
        counted = (batch.tokens == batch.corrupt).all(1) if self.same else True
        return (logits * weight * batch.mask[..., None]).sum((1, 2)) * counted

    def loss(self, logits: Tensor, batch: Pairs) -> Tensor:
        return self.metric(logits, batch).square()


def exists(model: Transformer) -> Tensor:
    return edge_table(model.config).exists
