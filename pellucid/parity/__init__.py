"""Transformers whose MLPs read a sparse code over computed directions (parity bottlenecks)."""

from pellucid.parity.bottleneck import ParityBottleneck, ParityCode, unfold
from pellucid.parity.code import coherence, coherence_bound, directions
from pellucid.parity.config import ParityConfig

__all__ = [
    "ParityBottleneck",
    "ParityCode",
    "ParityConfig",
    "coherence",
    "coherence_bound",
    "directions",
    "unfold",
]
