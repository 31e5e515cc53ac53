"""The HardConcrete distribution: random gates with mass at exactly 0 and 1, differentiable in their log odds.

Louizos et al. (2018).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Concrete:
    """A sigmoid of noisy log odds, stretched beyond 0..1 and cut off there."""

    temperature: float = 2 / 3
    """Towards 0, gates are open or closed and nothing between."""

    low: float = -0.1
    """Where 0 is stretched to: below 0, so that gates close entirely."""

    high: float = 1.1
    """Where 1 is stretched to: above 1, so that gates open entirely."""

    def __post_init__(self):
        if not self.temperature > 0:
            raise ValueError(f"temperature must be positive, got {self.temperature}")
        if not (self.low < 0 and self.high > 1):
            raise ValueError(f"need low < 0 and high > 1, got {self.low} and {self.high}")

    def sample(self, log_alpha: Tensor, uniform: Tensor) -> Tensor:
        """Gates in 0..1, drawn with `uniform` noise in (0, 1) of the same shape; differentiable in `log_alpha`."""
        return self.stretched(torch.sigmoid((torch.logit(uniform, eps=1e-6) + log_alpha) / self.temperature))

    def settled(self, log_alpha: Tensor) -> Tensor:
        """Gates without noise, for evaluation: exactly 0 where log alpha is low enough."""
        return self.stretched(torch.sigmoid(log_alpha))

    def open_chance(self, log_alpha: Tensor) -> Tensor:
        """The chance that a sampled gate is not 0."""
        return torch.sigmoid(log_alpha - self.temperature * math.log(-self.low / self.high))

    def stretched(self, s: Tensor) -> Tensor:
        return (s * (self.high - self.low) + self.low).clamp(0, 1)
