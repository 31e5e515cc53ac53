"""Two models of one tokenizer side by side: do they find the same tokens hard?"""

import torch
import torch.nn.functional as F
from torch import Tensor

from pellucid.core.transformer import Transformer
from pellucid.data.batches import TokenBatches
from pellucid.lab.faithful import correlate


@torch.no_grad()
def token_losses(
    model: Transformer, tokens, *, n_tokens: int = 65_536, seq_len: int = 128, rows: int = 32
) -> Tensor:
    """The cross-entropy (n,) in nats of each token in about `n_tokens` of a corpus, in an order that is always the same."""
    seq_len = min(seq_len, model.config.n_ctx, len(tokens) - 1)
    rows = min(rows, (len(tokens) - 1) // seq_len)
    batches = TokenBatches(tokens, rows, seq_len, seed=0)
    losses = []
    for i in range(max(1, min(n_tokens, len(tokens)) // (rows * seq_len))):
        windows = batches.at(i).to(model.device)
        logits = model(windows[:, :-1]).float().flatten(0, 1)
        losses.append(F.cross_entropy(logits, windows[:, 1:].flatten(), reduction="none").cpu())
    return torch.cat(losses)


def loss_correlation(a: Transformer, b: Transformer, tokens, **options) -> float:
    """Pearson's correlation over tokens of two models' losses (Figure 33). Raises ValueError for unequal vocabularies."""
    if a.config.vocab_size != b.config.vocab_size:
        raise ValueError(
            f"the models have different vocabularies: {a.config.vocab_size} and {b.config.vocab_size} tokens"
        )
    losses = [token_losses(model, tokens, **options)[:, None] for model in (a, b)]
    return correlate(*losses).item()


def jaccard(circuits: list[dict[str, Tensor]]) -> float:
    """The mean over pairs of circuits of nodes in both over nodes in either: how stable a search is over seeds."""
    flat = [torch.cat(list(kept.values())) for kept in circuits]
    pairs = [(x, y) for i, x in enumerate(flat) for y in flat[:i]]
    if not pairs:
        raise ValueError("stability needs two circuits at least")
    shared = [float((x & y).sum()) / max(1, int((x | y).sum())) for x, y in pairs]
    return sum(shared) / len(shared)
