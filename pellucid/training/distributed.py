"""Training over the ranks that `torchrun` starts; one process alone needs none of it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from pellucid.training.config import Parallel
from pellucid.training.objective import Objective


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Joins the other ranks if `torchrun` started this process, each with its own GPU, and leaves them at the end."""
    if "WORLD_SIZE" not in os.environ or dist.is_initialized():
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def wrap(objective: Objective, parallel: Parallel) -> nn.Module:
    """What trains over several ranks: a replica on each, with averaged gradients (`ddp`); or every layer's weights,
    gradients and optimiser state in shares, gathered as they are needed (`fsdp`). One rank alone needs neither."""
    if size() == 1:
        return objective
    if parallel == "ddp":
        return nn.parallel.DistributedDataParallel(objective)
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    model = objective.model
    for block in model.blocks:
        fully_shard(cast(nn.Module, block))
    fully_shard(model)
    register_fsdp_forward_method(model, "outputs")
    return objective


def whole(x: Tensor) -> Tensor:
    """A tensor that ranks hold in shares, gathered on each; any other as it is. All ranks must call it."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def like(x: Tensor, p: Tensor) -> Tensor:
    """A whole tensor in shares, as `p` is."""
    if isinstance(p, DTensor) and x.shape == p.shape:
        return distribute_tensor(x, p.device_mesh, p.placements)
    return x


def barrier() -> None:
    if size() > 1:
        dist.barrier()


@contextmanager
def first() -> Iterator[None]:
    """Rank 0 goes through the block alone, then all others: for work whose result the others find on disk."""
    if rank() != 0:
        barrier()
    yield
    if rank() == 0:
        barrier()


def sum_of(x: Tensor) -> Tensor:
    """The sum of `x` over ranks."""
    if size() > 1:
        dist.all_reduce(x)
    return x


def mean(x: Tensor) -> Tensor:
    """The mean of `x` over ranks."""
    return sum_of(x.clone()) / size()


def any_of(flag: bool) -> bool:
    """Whether `flag` is set on any rank."""
    return flag if size() == 1 else bool(sum_of(torch.tensor(float(flag))).item())
