"""Is a circuit what the model does? Tests that a low task loss alone does not pass.

A search may choose which nodes to freeze so that their absence cancels something, and so find small circuits that the
model does not use. Here the nodes outside a circuit are frozen in part, or filled from the other prompt of a pair; and
what the circuit computes, its logits, its attention and its nodes' activations, is compared with the whole model.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from pellucid.core.sites import node_sites
from pellucid.core.taps import Mask, Recorder, chain
from pellucid.core.transformer import Transformer
from pellucid.data.batches import TokenBatches
from pellucid.lab.ablate import Kept, keep_only, last_logits, last_logits_by_length, partial_logits
from pellucid.lab.discretize import Calibration
from pellucid.tasks.task import Batch, Task

DRAWS = 20
FEW = 32
"""Pairs for the draws and for similarity."""
CHUNK = 64
"""Rows at a time, where all of a model's nodes are recorded."""


@torch.no_grad()
def faithfulness(
    model: Transformer,
    task: Task,
    batch: Batch,
    kept: Kept,
    means: Mapping[str, Tensor],
    calibration: Calibration,
    *,
    seed: int = 0,
    cut: Transformer | None = None,
) -> dict[str, float]:
    """The tests by name, on a task's pairs. The circuit runs in `cut`, the model without some edges, if that is given.

    partial_task_loss, partial_shift: the calibrated loss with a random half of the other nodes frozen, over `DRAWS`
    draws, and its mean distance from the circuit's own. resample_task_loss: the loss with the other nodes filled from
    the other prompt of the pair. kl: from the model's next-token distribution to the circuit's, in nats.
    pattern_distance: total variation between attention of model and circuit, over the circuit's heads.
    activation_correlation: of kept nodes' activations in circuit and model, over real tokens; the mean over nodes.
    """

    def loss(logits: Tensor, part: Batch) -> float:
        return task.metric(calibration(logits), part.last()).mean().item()

    cut = model if cut is None else cut
    own = last_logits_by_length(cut, batch, keep_only(kept, means))
    full = last_logits_by_length(model, batch)
    few = batch.select_pairs(torch.arange(min(len(batch) // 2, FEW), device=batch.tokens.device))
    partial = [loss(partial_logits(cut, few, kept, means, seed=seed + i), few) for i in range(DRAWS)]
    own_few = loss(own[: len(few)], few)
    return {
        "partial_task_loss": sum(partial) / DRAWS,
        "partial_shift": sum(abs(p - own_few) for p in partial) / DRAWS,
        "resample_task_loss": loss(resampled_logits(model, batch, kept, cut), batch),
        "kl": kl(full, own),
        **similarity(model, few, kept, means, cut),
    }


def kl(full: Tensor, other: Tensor) -> float:
    """The mean Kullback-Leibler divergence from the distribution of logits `full` to that of `other`, in nats."""
    p, q = full.log_softmax(-1), other.log_softmax(-1)
    return F.kl_div(q, p, log_target=True, reduction="none").sum(-1).mean().item()


@torch.no_grad()
def text_kl(
    model: Transformer,
    kept: Kept,
    means: Mapping[str, Tensor],
    tokens,
    *,
    sequences: int = 64,
    seq_len: int = 128,
) -> float:
    """`kl` of a circuit on `sequences` windows of a corpus: what else the model does that the circuit does not, in nats
    a token."""
    seq_len, rows = min(seq_len, model.config.n_ctx, len(tokens) - 1), min(8, sequences)
    batches, tap = TokenBatches(tokens, rows, seq_len, seed=0), keep_only(kept, means)
    found = []
    for i in range(sequences // rows):
        windows = batches.at(i)[:, :-1].to(model.device)
        found.append(kl(model(windows), model(windows, tap=tap)))
    return sum(found) / len(found)


@torch.no_grad()
def resampled_logits(model: Transformer, batch: Batch, kept: Kept, cut: Transformer) -> Tensor:
    """Logits (b, 1, v) of `cut` with every node outside the circuit at the model's value in the other prompt of the pair."""
    chunks = []
    for rows in torch.arange(len(batch), device=batch.tokens.device).split(CHUNK):
        part, recorder = batch.select(rows).trimmed(), Recorder(kept)
        model(part.corrupt, mask=None if model.config.causal else part.mask, tap=recorder)
        chunks.append(last_logits(cut, part, Mask(kept, recorder.values)))
    return torch.cat(chunks)


@torch.no_grad()
def similarity(
    model: Transformer, batch: Batch, kept: Kept, means: Mapping[str, Tensor], cut: Transformer
) -> dict[str, float]:
    """How alike attention and activations are in the circuit, run in `cut`, and the model."""
    widths = {i: layer.heads for i, layer in enumerate(model.config.layers) if layer.heads}
    patterns = frozenset(f"{i}.attn.pattern" for i in widths)
    sites = frozenset(site for site in node_sites(model.config) if bool(kept[site].any()))
    mask = None if model.config.causal else batch.mask
    runs = []
    for run, tap in ((model, None), (cut, keep_only(kept, means))):
        recorder = Recorder(patterns | sites)
        run(batch.tokens, mask=mask, tap=recorder if tap is None else chain(tap, recorder))
        runs.append(recorder.values)
    full, own = runs
    correlations = torch.cat(
        [torch.zeros(0)]
        + [
            correlate(full[site][batch.mask][:, kept[site]], own[site][batch.mask][:, kept[site]]).cpu()
            for site in sites
        ]
    )
    distances = []
    for i, sizes in widths.items():
        distance = 0.5 * (full[f"{i}.attn.pattern"] - own[f"{i}.attn.pattern"]).abs().sum(-1)  # (b, h, t)
        values = kept[f"{i}.attn.v"].split(sizes)
        used = torch.tensor([bool(v.any()) for v in values], device=distance.device)
        distances.append(distance.transpose(1, 2)[batch.mask][:, used].flatten())
    return {
        "pattern_distance": mean(torch.cat(distances)) if distances else 0.0,
        "activation_correlation": mean(correlations),
    }


def correlate(a: Tensor, b: Tensor) -> Tensor:
    """Pearson's correlation of the columns of two (n, width); those that are constant in either are left out."""
    a, b = a.double() - a.double().mean(0), b.double() - b.double().mean(0)
    scale = a.norm(dim=0) * b.norm(dim=0)
    varies = scale > 1e-12
    return ((a * b).sum(0)[varies] / scale[varies]).float()


def mean(x: Tensor) -> float:
    """The mean; 0 of nothing."""
    return x.mean().item() if x.numel() else 0.0
