"""Parameter groups, and what is done to gradients before the optimiser sees them."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from pellucid.training.config import TrainConfig


def make_optimizer(parameters: Iterable[nn.Parameter], config: TrainConfig) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices and none on vectors."""
    parameters = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], config: TrainConfig) -> Tensor:
    """Normalise or clip gradients to a root mean square of 1, in place; returns the global one before that."""
    grads = [p.grad for p in parameters if p.grad is not None]
    norms = torch.stack([g.norm() for g in grads])
    sizes = norms.new_tensor([g.numel() for g in grads])
    rms = norms.norm() / sizes.sum().sqrt()
    if config.gradient == "none":
        return rms
    each = rms.expand(len(grads)) if config.gradient_scope == "global" else norms / sizes.sqrt()
    tiny = torch.finfo(each.dtype).tiny
    factors = 1 / each.clamp(min=1.0 if config.gradient == "clip" else tiny)
    for g, factor in zip(grads, factors, strict=True):
        g.mul_(factor)
    return rms


def kurtosis(x: Tensor) -> float:
    """log of the mean over tokens of the kurtosis over channels of x (..., d): 3 for a Gaussian, inside the log.

    Weight-sparse transformers, Figure 10.
    """
    centred = x.float() - x.float().mean(-1, keepdim=True)
    ratio = centred.pow(4).mean(-1) / centred.square().mean(-1).square().clamp(min=1e-30)
    return math.log(max(ratio.mean().item(), 1e-30))
