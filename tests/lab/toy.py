"""A model whose circuit is known, because its weights are written by hand, and the task that it does.

The first token is A or B; after some filler, the answer is X after A and Y after B. Residual channels: 0 is +1 on A and
half of the filler and -1 on the rest, 1 is 1 on filler, 2 is 1 on A and B, 3 is what the head writes. One head: its key channel 0 reads channel 2, its
value channel 0 reads channel 0, its query channel 0 is a constant (a bias). Everything else is small noise.
"""

import torch
from torch import Tensor

from pellucid import ModelConfig, Transformer, uniform
from pellucid.core.sites import node_sites
from pellucid.tasks.task import Batch, two_way_loss

A, B, X, Y, FILLER = 0, 1, 2, 3, range(4, 12)
CIRCUIT = {"0.attn.in": [0, 2], "0.attn.q": [], "0.attn.k": [0], "0.attn.v": [0], "0.attn.out": [3]}
EDGES = {("0.attn.in:2", "0.attn.k:0"), ("0.attn.in:0", "0.attn.v:0"), ("0.attn.v:0", "0.attn.out:3")}


def toy_model(noise: float = 0.02) -> Transformer:
    config = ModelConfig(
        vocab_size=12, d_model=8, n_ctx=16, norm="none", layers=uniform(1, 2, 4, 6), activation="relu"
    )
    model = Transformer(config, device="cpu")
    draw = torch.Generator().manual_seed(0)
    attn = model.blocks[0].attn
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=draw) * noise)
        model.wte.weight[[A, B], 0] = torch.tensor([1.0, -1.0])
        model.wte.weight[[A, B], 2] = 1
        model.wte.weight[list(FILLER), 1] = 1
        model.wte.weight[list(FILLER), 0] = torch.tensor([1.0, -1.0]).repeat(
            4
        )  # so that a plain average is no answer
        attn.qkv.weight[:, :4] = 0
        attn.qkv.bias[0] = 4  # query channel 0
        attn.qkv.weight[8 + 0, 2] = 4  # key channel 0
        attn.qkv.weight[16 + 0, 0] = 2  # value channel 0
        attn.proj.weight[3, 0] = 2
        model.head.weight[X, 3], model.head.weight[Y, 3] = 0.5, -0.5
    return model


def known_circuit(model: Transformer) -> dict[str, Tensor]:
    """Masks that keep the nodes of `CIRCUIT`."""
    kept = {site: torch.zeros(w, dtype=torch.bool) for site, w in node_sites(model.config).items()}
    for site, channels in CIRCUIT.items():
        kept[site][channels] = True
    return kept


class ToyTask:
    """Which token began the sequence?"""

    name = "toy"

    def __init__(self, nonsense: bool = False):
        self.nonsense = nonsense

    def pairs(self, n: int, seed: int = 0, split: str = "train") -> Batch:
        draw = torch.Generator().manual_seed(2 * seed + (split == "test"))
        filler = torch.randint(4, 12, (n, 6), generator=draw)
        tokens = torch.stack([torch.tensor([A, B]).expand(n, 2), filler[:, :2]], dim=-1).flatten(0, 1)
        tokens = torch.cat([tokens, filler[:, 2:].repeat_interleave(2, dim=0)], dim=1)
        lengths = torch.randint(3, 7, (n,), generator=draw).repeat_interleave(2)
        answers = torch.tensor([[X, Y], [Y, X]]).repeat(n, 1)
        if self.nonsense:
            answers = answers[torch.randint(0, 2, (2 * n,), generator=draw)]
        return Batch(
            tokens=tokens,
            corrupt=tokens.unflatten(0, (-1, 2)).flip(1).flatten(0, 1),
            mask=torch.arange(tokens.shape[1]) < lengths[:, None],
            positions=lengths - 1,
            answers=answers,
        )

    def metric(self, logits: Tensor, batch: Batch) -> Tensor:
        return two_way_loss(logits, batch)
