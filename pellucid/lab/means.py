"""The mean of every node over the pretraining distribution: computed once a model, and kept with it."""

import hashlib
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from pellucid.core.checkpoint import content_hash, find_checkpoint
from pellucid.core.files import write_atomic
from pellucid.core.sites import node_sites
from pellucid.core.taps import Recorder
from pellucid.core.transformer import Transformer
from pellucid.data.batches import TokenBatches


@torch.no_grad()
def node_means(
    model: Transformer,
    tokens,
    *,
    n_tokens: int = 262_144,
    seq_len: int = 128,
    by_position: bool = False,
) -> dict[str, Tensor]:
    """The mean of every node over pretraining `tokens`: (width,) for each node site, over tokens and positions.

    `by_position` gives one mean for each position, (seq_len, width). A node's value is what leaves its site, after
    AbsTopK. Weight-sparse transformers, section 2.2.
    """
    seq_len = min(seq_len, model.config.n_ctx, len(tokens) - 1)
    rows = min(32, (len(tokens) - 1) // seq_len)
    batches = TokenBatches(tokens, rows, seq_len, seed=0)
    recorder = Recorder(node_sites(model.config))
    n = max(1, min(n_tokens, len(tokens)) // (rows * seq_len))
    over = (0,) if by_position else (0, 1)
    sums = {site: torch.zeros((), dtype=torch.float64) for site in node_sites(model.config)}
    for i in range(n):
        model(batches.at(i)[:, :-1].to(model.device), tap=recorder)
        for site, x in recorder.values.items():
            sums[site] = sums[site] + x.double().mean(over).cpu()
    return {site: (total / n).to(model.wte.weight) for site, total in sums.items()}


def stored_means(path: str | Path, model: Transformer, tokens, **options) -> dict[str, Tensor]:
    """`node_means`, read from the checkpoint at `path` if it holds those of this very model, else added to it."""
    file, model_hash = find_checkpoint(path) / "means.safetensors", content_hash(model)
    try:
        with safe_open(file, "pt") as stored:
            kept = {site: stored.get_tensor(site) for site in stored.keys()}  # noqa: SIM118  a file, no dictionary
            if (stored.metadata() or {}) == {"model": model_hash, "sha256": digest(kept)}:
                return {site: mean.to(model.device) for site, mean in kept.items()}
    except (OSError, SafetensorError):
        pass  # absent or damaged: they are computed anew
    means = node_means(model, tokens, **options)
    kept = {site: mean.cpu().contiguous() for site, mean in means.items()}
    write_atomic(file, save(kept, metadata={"model": model_hash, "sha256": digest(kept)}))
    return means


def digest(means: dict[str, Tensor]) -> str:
    """A hash of the means, to tell damage by."""
    return hashlib.sha256(save(dict(sorted(means.items())))).hexdigest()
