"""Mean ablation: what a model still does when some of its nodes are frozen at their mean.

Weight-sparse transformers, section 2.2 and Appendix E.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from pellucid.core.taps import Mask, Tap
from pellucid.core.transformer import Transformer
from pellucid.tasks.task import Pairs, Task

Kept = Mapping[str, Tensor]
"""A bool mask (width,) for every node site: the nodes of a circuit."""


def keep_only(kept: Kept, means: Mapping[str, Tensor]) -> Tap:
    """A tap that freezes every node outside the circuit at its mean."""
    return Mask(kept, means)


def remove(kept: Kept, means: Mapping[str, Tensor]) -> Tap:
    """A tap that freezes the circuit's nodes at their mean and leaves the rest running (Figure 32)."""
    return Mask({site: ~mask for site, mask in kept.items()}, means)


def last_logits(model: Transformer, batch: Pairs, tap: Tap | None = None) -> Tensor:
    """The logits that the batch asks for: (b, 1, v) at each row's last token, or (b, t, v).

    Rows are padded on the right, so a causal model needs no mask.
    """
    mask = None if model.config.causal else batch.mask
    return model(batch.tokens, mask=mask, tap=tap, only=batch.only)


def all_logits(
    model: Transformer, batch: Pairs, tap: Tap | None = None, resume: tuple[int, Tensor] | None = None
) -> Tensor:
    """Logits (b, t, v) at all positions: for taps that expect every one of them at `final.read`.

    `resume` is as in `Transformer.forward`.
    """
    mask = None if model.config.causal else batch.mask
    return model(batch.tokens, mask=mask, tap=tap, resume=resume)


def last_logits_by_length(model: Transformer, batch: Pairs, tap: Tap | None = None, rows: int = 64) -> Tensor:
    """`last_logits` for a tap that treats all rows alike: short rows together, so that little padding is computed."""
    order = batch.lengths.argsort(stable=True)
    chunks = [last_logits(model, batch.select(part).trimmed(), tap) for part in order.split(rows)]
    return torch.cat(chunks)[order.argsort()]


@torch.no_grad()
def partial_logits(
    model: Transformer,
    batch: Pairs,
    kept: Kept,
    means: Mapping[str, Tensor],
    *,
    share: float = 0.5,
    seed: int = 0,
    rows: int = 64,
) -> Tensor:
    """Logits (b, 1, v) at each row's last token, with a random `share` of the other nodes frozen in each pair.

    A row's draw depends on the seed and on the order of rows in `batch` alone.
    """
    draw = torch.Generator().manual_seed(seed)
    order = batch.lengths[::2].argsort(stable=True)
    chunks = []
    for pairs in order.split(rows // 2):
        masks = {}
        for site, mask in kept.items():
            runs = torch.rand(len(pairs), len(mask), generator=draw) >= share
            masks[site] = (mask | runs.to(mask.device)).repeat_interleave(2, 0)[:, None]
        chunks.append(last_logits(model, batch.select_pairs(pairs).trimmed(), Mask(masks, means)))
    rows_in_order = torch.stack([2 * order, 2 * order + 1], dim=1).flatten()
    return torch.cat(chunks)[rows_in_order.argsort()]


@torch.no_grad()
def task_loss(model: Transformer, task: Task, batch: Pairs, tap: Tap | None = None) -> float:
    """The task's mean loss in nats on `batch`."""
    return task.metric(last_logits_by_length(model, batch, tap), batch.last()).mean().item()


def random_others(kept: Kept, generator: torch.Generator) -> dict[str, Tensor]:
    """As many random nodes outside the circuit, site by site (all that there are where the circuit has over half)."""
    out = {}
    for site, mask in kept.items():
        score = torch.rand(len(mask), generator=generator).to(mask.device).masked_fill(mask, -1)
        n = min(int(mask.sum()), int((~mask).sum()))
        out[site] = torch.zeros_like(mask)
        out[site][score.topk(n).indices] = True
    return out
