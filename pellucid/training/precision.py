"""In which precision training computes: bfloat16 autocast where the hardware is fast at it."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

import torch

Precision = Literal["auto", "float32", "bfloat16"]


def use_bfloat16(precision: Precision, device: torch.device) -> bool:
    """Whether to compute in bfloat16: as said, or under "auto" where the hardware is fast at it."""
    if precision != "auto":
        return precision == "bfloat16"
    if device.type == "cpu":
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return device.type == "cuda" and torch.cuda.is_bf16_supported()


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager:
    """bfloat16 autocast, or nothing."""
    return torch.autocast(device.type, torch.bfloat16) if use_bfloat16(precision, device) else nullcontext()


@contextmanager
def matmul_precision(precision: Precision, device: torch.device) -> Iterator[None]:
    """Medium float32 matmul precision under "auto" where there is no bfloat16; as it was afterwards."""
    before = torch.get_float32_matmul_precision()
    if precision == "auto" and not use_bfloat16(precision, device):
        torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
