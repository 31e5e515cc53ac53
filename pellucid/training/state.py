"""What a run needs beside the weights to go on bit for bit: Adam's moments. The data's order follows from the step."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import nn


def pack_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, bytes]:
    """The optimiser's state as files of a checkpoint."""
    tensors = {
        f"{name}@{key}": value.detach().cpu().contiguous()
        for name, p in model.named_parameters()
        for key, value in optimizer.state.get(p, {}).items()
    }
    return {"train_state/optimizer.safetensors": save(tensors)}


def load_state(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put the state that `pack_state` wrote back into `optimizer`. A damaged file is a `ValueError` that names it."""
    file = path / "optimizer.safetensors"
    try:
        tensors = load(file.read_bytes())
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file} is missing or damaged, so the run cannot be resumed: {error}") from None
    for name, p in model.named_parameters():
        state = {k.split("@")[1]: v for k, v in tensors.items() if k.split("@")[0] == name}
        if p.requires_grad and not state:
            raise ValueError(f"{file} has no state for {name}")
        optimizer.state[p] = {k: v if k == "step" else v.to(p.device) for k, v in state.items()}
