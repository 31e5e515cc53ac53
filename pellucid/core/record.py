"""Activations of one run, as a dictionary."""

from collections.abc import Iterable

import torch
from torch import Tensor

from pellucid.core.taps import Recorder
from pellucid.core.transformer import Transformer


@torch.no_grad()
def record(
    model: Transformer, tokens: Tensor, sites: Iterable[str] | None = None, *, mask: Tensor | None = None
) -> dict[str, Tensor]:
    """What passes each of `sites` (None: all cheap ones) on tokens (b, t), without gradients."""
    recorder = Recorder(sites)
    model(tokens, mask=mask, tap=recorder)
    return recorder.values
