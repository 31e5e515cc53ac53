"""Computed directions: up to d^2 nearly orthogonal sign vectors in d dimensions, none of them stored.

Direction i has the sign (-1)^popcount(i & mask[k]) at coordinate k, where mask[k] = k | inv(k) << t in GF(2^t), d = 2^t:
the low t bits of i select bits of k, the high ones bits of k's inverse. By trace duality this is the Kloosterman code up
to a relabelling. The code is linear: the signs of i xor j are those of i times those of j.
Parity bottlenecks, section 3.
"""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from pellucid.kernels.parity import signs
from pellucid.parity.galois import inverses


def log2(d: int) -> int:
    """t where d = 2^t; ValueError, with the nearest right ones, unless 3 <= t <= 16."""
    if not isinstance(d, int) or d < 8 or d > 65536 or d & (d - 1):
        near = [1 << t for t in range(3, 17)]
        best = min(near, key=lambda n: abs(n - d)) if isinstance(d, int) else 8
        raise ValueError(f"d must be a power of two in 8..65536, got {d!r}; the nearest is {best}")
    return d.bit_length() - 1


@cache
def masks(d: int) -> Tensor:
    """(d,) the bits of an index that decide the sign at each coordinate; on the CPU, whatever torch's default device."""
    t = log2(d)
    return torch.from_numpy(np.arange(d) | inverses(t) << t)


def directions(d: int, indices: Tensor) -> Tensor:
    """The unit vectors phi_i of direction indices (n,), float32 (n, d). ValueError for an index outside 0..d^2 - 1."""
    indices = torch.as_tensor(indices)
    mask = masks(d).to(indices.device)
    if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < d * d:
        raise ValueError(
            f"indices must be in 0..d^2 - 1 = {d * d - 1}, got {int(indices.min())}..{int(indices.max())}"
        )
    return signs(indices.long(), mask) / d**0.5


def coherence_bound(d: int) -> float:
    """2/sqrt(d) + 1/d: no two directions have a larger |inner product| (Weil's bound on Kloosterman sums)."""
    log2(d)
    return 2 / d**0.5 + 1 / d


def walsh_hadamard(x: Tensor) -> Tensor:
    """The transform along the last axis (of 2^t entries), in natural order, not normalised."""
    n = x.shape[-1]
    h = 1
    while h < n:
        x = x.unflatten(-1, (n // (2 * h), 2, h))
        x = torch.stack([x[..., 0, :] + x[..., 1, :], x[..., 0, :] - x[..., 1, :]], dim=-2).flatten(-3)
        h *= 2
    return x


def inner_products(d: int, beta: int) -> Tensor:
    """(d,) <phi_i, phi_j> for i xor j = alpha | beta << t, all alpha at once: by linearity the mean of one sign vector."""
    high = torch.tensor(beta) << log2(d)
    return walsh_hadamard(signs(high, masks(d)).double()) / d


def coherence(d: int) -> float:
    """The largest |inner product| of two different directions, exactly.

    A Kloosterman sum K(a, b) with b != 0 depends on a b alone, so that one value of beta shows all that occur; with
    beta = 0 directions are orthogonal.
    """
    return inner_products(d, 1).abs().max().item()
