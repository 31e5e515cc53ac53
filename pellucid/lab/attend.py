"""Attention patterns against selectors: which head attends as which rule says?"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from pellucid.core.record import record
from pellucid.core.transformer import Transformer
from pellucid.lab.fills import real
from pellucid.tasks.task import Pairs, Task

Candidates = Callable[[Any], dict[str, Tensor]]
"""A batch -> for each rule which keys it selects, bool (b, query, key)."""


@dataclass(frozen=True, eq=False)
class Attention:
    """How near each head's pattern is to each rule's selection."""

    heads: tuple[tuple[int, int], ...]
    """(layer, head)."""
    rules: tuple[str, ...]
    agreement: Tensor
    """(head, rule): 1 less the mean total variation distance to equal attention to the selected keys. 1 is the same
    pattern, 0 attention to other keys alone; NaN for a rule that selects nothing in the data."""
    match: dict[tuple[int, int], str]
    """One rule for each head and one head for each rule, as long as there are both, of the largest total agreement."""


@torch.no_grad()
def attend(
    model: Transformer, task: Task, candidates: Candidates, *, pairs: int = 64, seed: int = 0
) -> Attention:
    """Compare every head's attention pattern with every candidate, at real queries where it selects any real key.

    A causal model's candidates select no later keys. Raises `ValueError` for a model without heads, for no candidates,
    and for candidates of another shape than (b, query, key).
    """
    batch = task.pairs(pairs, seed=seed).to(model.device)
    layers = [number for number, layer in enumerate(model.config.layers) if layer.heads]
    if not layers:
        raise ValueError("the model has no attention heads")
    sites = [f"{number}.attn.pattern" for number in layers]
    patterns = record(model, batch.tokens, sites, mask=real(model, batch.mask))
    stacked = torch.cat([patterns[site] for site in sites], dim=1).float()
    rules = allowed(candidates(batch), batch, model.config.causal)
    agreement = torch.stack([agree(stacked, rule) for rule in rules.values()], dim=1).cpu()
    heads = tuple((n, head) for n in layers for head in range(len(model.config.layers[n].heads)))
    names = tuple(rules)
    rows, columns = linear_sum_assignment(agreement.nan_to_num(-1.0).numpy(), maximize=True)
    match = {heads[row]: names[column] for row, column in zip(rows, columns, strict=True)}
    return Attention(heads, names, agreement, match)


def allowed(rules: dict[str, Tensor], batch: Pairs, causal: bool) -> dict[str, Tensor]:
    """The rules' selections among real queries and the keys that these can see."""
    b, t = batch.tokens.shape
    if not rules:
        raise ValueError("there must be one candidate or more")
    for name, rule in rules.items():
        if tuple(rule.shape) != (b, t, t):
            raise ValueError(f"candidate {name!r} must have shape {(b, t, t)}, got {tuple(rule.shape)}")
    seen = batch.mask[:, :, None] & batch.mask[:, None]
    seen = seen.tril() if causal else seen
    return {name: rule.to(seen.device) & seen for name, rule in rules.items()}


def agree(patterns: Tensor, rule: Tensor) -> Tensor:
    """(h,): agreement of patterns (b, h, q, k) with a rule (b, q, k)."""
    count = rule.sum(-1)
    counted = (count > 0)[:, None].float()
    wanted = (rule / count.clamp(min=1)[..., None])[:, None]
    shared = torch.minimum(patterns, wanted).sum(-1)
    return (shared * counted).sum((0, 2)) / counted.sum()


def common_rules(batch: Pairs) -> dict[str, Tensor]:
    """Rules that heads of any model may follow: all tokens, the first, itself, the previous, the same token."""
    place = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    query, key = place[:, None], place[None]
    by_place = {
        "all tokens": key >= 0,
        "first token": key == 0,
        "itself": key == query,
        "previous token": key == query - 1,
    }
    shape = (*batch.tokens.shape, len(place))
    same = batch.tokens[:, :, None] == batch.tokens[:, None]
    return {name: (rule & (query >= 0)).expand(shape) for name, rule in by_place.items()} | {
        "same token": same
    }
