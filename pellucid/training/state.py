"""What a run needs beside the model's weights to go on bit for bit: the optimisers' moments, and the values of what is
trained where that is not the model's own parameters. The data's order follows from the step."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import nn

from pellucid.core.checkpoint import read_file
from pellucid.training.distributed import like, whole

FILE = "train_state/optimizer.safetensors"
VALUE = "value"


def pack_state(
    model: nn.Module, trained: Mapping[str, nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, bytes]:
    """The state of what is trained as files of a checkpoint that holds `model`."""
    own = {id(p) for p in model.parameters()}
    tensors = {}
    for name, p in trained.items():
        state = {**owner(p, optimizers).state.get(p, {}), **({} if id(p) in own else {VALUE: p})}
        tensors |= {f"{name}@{key}": whole(value.detach()).cpu().contiguous() for key, value in state.items()}
    return {FILE: save(tensors)}


@torch.no_grad()
def load_state(
    path: Path, trained: Mapping[str, nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """Put the state in the checkpoint at `path` back. A damaged file is a `ValueError` that names it."""
    file = path / FILE
    tensors = load(read_file(path, FILE))
    for name, p in trained.items():
        state = {
            k.split("@")[1]: like(v.to(p.device), p) for k, v in tensors.items() if k.split("@")[0] == name
        }
        if p.requires_grad and not state:
            raise ValueError(f"{file} has no state for {name}")
        if VALUE in state:
            p.copy_(state.pop(VALUE))
        owner(p, optimizers).state[p] = state


def owner(p: nn.Parameter, optimizers: Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """The optimiser that steps `p`; the first where none does."""
    for optimizer in optimizers:
        if any(p is q for group in optimizer.param_groups for q in group["params"]):
            return optimizer
    return optimizers[0]
