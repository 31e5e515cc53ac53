"""What extraction gains: an extracted circuit beside the whole model with all else frozen at its mean, and what it costs.

128 prompts of 24 tokens, logits of one position each, on one thread.
"""

from collections.abc import Callable

import torch
from timing import medians, record
from torch import Tensor

from pellucid.core.circuit import count_edges
from pellucid.core.config import ModelConfig, uniform
from pellucid.core.sites import node_sites
from pellucid.core.transformer import Transformer
from pellucid.lab.ablate import keep_only
from pellucid.lab.extract import extract

VOCAB, ROWS, LENGTH = 768, 128, 24
Kept = dict[str, Tensor]


def make_model(density: float) -> Transformer:
    """A 4-layer model with random weights, so many of them nonzero."""
    config = ModelConfig(
        vocab_size=VOCAB,
        d_model=256,
        n_ctx=128,
        layers=uniform(4, 16, 16, 1024),
        norm_gain=False,
        bigram=True,
    )
    model = Transformer(config, device="cpu").requires_grad_(False)
    draw = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.copy_(torch.randn(p.shape, generator=draw) * (torch.rand(p.shape, generator=draw) < density))
        p.mul_(0.06 / density**0.5)
    return model


def any_nodes(model: Transformer, n: int) -> Kept:
    """`n` random nodes."""
    sites = node_sites(model.config)
    chosen = torch.zeros(sum(sites.values()), dtype=torch.bool)
    chosen[torch.randperm(len(chosen), generator=torch.Generator().manual_seed(0))[:n]] = True
    return dict(zip(sites, chosen.split(list(sites.values())), strict=True))


def paths(model: Transformer, heads: int = 4, neurons: int = 4) -> Kept:
    """A circuit of which every part works: in each layer some heads and neurons with one weight into each channel that
    they use and one out of them."""
    kept = {site: torch.zeros(width, dtype=torch.bool) for site, width in node_sites(model.config).items()}
    draw = torch.Generator().manual_seed(0)

    def keep_weight(weight: Tensor, reader: str, writer: str) -> int:
        """Keep both ends of one of the nonzero weights (reader, writer); returns the writer's channel."""
        ends = weight.nonzero()
        r, w = ends[int(torch.randint(len(ends), (), generator=draw))].tolist()
        kept[reader][r] = kept[writer][w] = True
        return w

    def row(weight: Tensor, r: int) -> Tensor:
        """The weight with only the row `r`."""
        return torch.zeros_like(weight).index_copy(0, torch.tensor([r]), weight[r][None])

    for number, block in enumerate(model.blocks):
        assert block.attn is not None
        assert block.mlp is not None
        q, k, v = block.attn.qkv.weight.split(block.attn.width)
        name = f"{number}.attn"
        for head in range(heads):
            own = torch.zeros(block.attn.width, dtype=torch.bool)
            own[16 * head : 16 * (head + 1)] = True
            value = keep_weight(block.attn.proj.weight * own, f"{name}.out", f"{name}.v")
            keep_weight(row(v, value), f"{name}.v", f"{name}.in")
            channel = int((own & (q != 0).any(1) & (k != 0).any(1)).nonzero()[0])
            keep_weight(row(q, channel), f"{name}.q", f"{name}.in")
            keep_weight(row(k, channel), f"{name}.k", f"{name}.in")
        name = f"{number}.mlp"
        for _ in range(neurons):
            neuron = keep_weight(block.mlp.proj.weight, f"{name}.out", f"{name}.act")
            keep_weight(row(block.mlp.fc.weight, neuron), f"{name}.act", f"{name}.in")
    return kept


def measure(model: Transformer, kept: Kept) -> dict[str, float]:
    """Milliseconds and ratios for one circuit."""
    draw = torch.Generator().manual_seed(1)
    words = torch.randint(VOCAB, (120,), generator=draw)
    tokens = words[torch.randint(len(words), (ROWS, LENGTH), generator=draw)]
    only = torch.randint(LENGTH // 2, LENGTH, (ROWS,), generator=draw)
    means = {site: torch.randn(len(mask), generator=draw) / 10 for site, mask in kept.items()}
    tap, some = keep_only(kept, means), {"tokens": words, "outputs": torch.arange(10)}
    small = extract(model, kept, means)
    contestants: dict[str, Callable[[], object]] = {
        "masked": lambda: model(tokens, only=only, tap=tap),
        "extracted": lambda: small(tokens, only=only),
        "extract": lambda: extract(model, kept, means),
        "extract_for_prompts": lambda: extract(model, kept, means, **some),
    }
    s = medians(contestants)
    return {
        "nodes": sum(int(mask.sum()) for mask in kept.values()),
        "edges": count_edges(model, kept),
        "largest_difference": (small(tokens, only=only) - model(tokens, only=only, tap=tap))
        .abs()
        .max()
        .item(),
        **{f"{name}_ms": round(1000 * t, 2) for name, t in s.items()},
        "times_faster": round(s["masked"] / s["extracted"], 1),
        "times_faster_with_extraction": round(s["masked"] / (s["extracted"] + s["extract_for_prompts"]), 1),
    }


def main() -> None:
    torch.set_num_threads(1)
    sparse, dense = make_model(0.02), make_model(1.0)
    record(
        "extract",
        sparse_paths=measure(sparse, paths(sparse)),
        sparse_60_nodes=measure(sparse, any_nodes(sparse, 60)),
        sparse_1000_nodes=measure(sparse, any_nodes(sparse, 1000)),
        dense_60_nodes=measure(dense, any_nodes(dense, 60)),
        dense_1000_nodes=measure(dense, any_nodes(dense, 1000)),
    )


if __name__ == "__main__":
    main()
