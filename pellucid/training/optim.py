"""Parameter groups, and what is done to gradients before the optimiser sees them."""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from pellucid.training.config import TrainConfig
from pellucid.training.distributed import whole


def make_optimizers(
    parameters: Mapping[str, nn.Parameter], config: TrainConfig
) -> list[torch.optim.Optimizer]:
    """AdamW with weight decay on matrices and none on vectors; with `optimizer="muon"`, Muon for the attention and MLP
    matrices and AdamW for the rest. Muon's updates are scaled to AdamW's size, so that both take one learning rate."""
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    inner = {name: p for name, p in trained.items() if config.optimizer == "muon" and is_inner(name, p)}
    rest = [p for name, p in trained.items() if name not in inner]
    groups = [
        {"params": [p for p in rest if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(
            [g for g in groups if g["params"]],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )
    ]
    if inner:
        optimizers.append(
            torch.optim.Muon(
                list(inner.values()),
                lr=config.lr,
                weight_decay=config.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    return optimizers


def is_inner(name: str, p: nn.Parameter) -> bool:
    """Whether a parameter is a matrix of a layer's attention or MLP."""
    return p.dim() == 2 and name.startswith("blocks.") and name.endswith(MATRICES)


MATRICES = ("attn.qkv.weight", "attn.proj.weight", "mlp.fc.weight", "mlp.proj.weight")


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], config: TrainConfig) -> Tensor:
    """Normalise or clip gradients to a root mean square of 1, in place; returns the global one before that."""
    grads = [p.grad for p in parameters if p.grad is not None]
    norms = torch.stack([whole(g.norm()) for g in grads])
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
