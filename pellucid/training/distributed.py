"""Data-parallel training over the ranks that `torchrun` starts; one process alone needs none of it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn


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


def wrap(module: nn.Module) -> nn.Module:
    """`module` with its gradients averaged over the ranks."""
    return nn.parallel.DistributedDataParallel(module) if size() > 1 else module


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
