"""What a run needs beside the weights to go on bit for bit: Adam's moments. The data's order follows from the step."""

from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import nn

from pellucid.core.checkpoint import read_file

FILE = "train_state/optimizer.safetensors"


def pack_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, bytes]:
    """The optimiser's state as files of a checkpoint."""
    tensors = {
        f"{name}@{key}": value.detach().cpu().contiguous()
        for name, p in model.named_parameters()
        for key, value in optimizer.state.get(p, {}).items()
    }
    return {FILE: save(tensors)}


def load_state(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put the state in the checkpoint at `path` back into `optimizer`. A damaged file is a `ValueError` that names it."""
    file = path / FILE
    tensors = load(read_file(path, FILE))
    for name, p in model.named_parameters():
        state = {k.split("@")[1]: v for k, v in tensors.items() if k.split("@")[0] == name}
        if p.requires_grad and not state:
            raise ValueError(f"{file} has no state for {name}")
        optimizer.state[p] = {k: v.to(p.device) for k, v in state.items()}
