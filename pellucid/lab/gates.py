"""Gates that are learned: a parameter for each node, and how it opens and closes in training."""

from typing import Protocol

import torch
from torch import Tensor

from pellucid.training.concrete import Concrete


class Heaviside(torch.autograd.Function):
    """1 where x > 0, else 0; backward as if it were sigmoid(x / temperature)."""

    @staticmethod
    def forward(ctx, x: Tensor, temperature: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.temperature = temperature
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x / ctx.temperature)
        return grads[0] * s * (1 - s) / ctx.temperature, None


class Gate(Protocol):
    """How parameters become gates in [0, 1]; a gate is open in the end where its parameter is positive."""

    def __call__(self, x: Tensor, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        """Parameters -> (gates, what each adds to the circuit's size)."""
        ...

    def bound(self, x: Tensor) -> None:
        """Keep the parameters in their range, in place."""
        ...


class StepGate:
    """Open where the parameter is positive, clamped to [-1, 1] (weight-sparse transformers, A.5)."""

    def __init__(self, temperature: float):
        self.temperature = temperature

    def __call__(self, x: Tensor, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        gates = Heaviside.apply(x, self.temperature)
        return gates, gates

    def bound(self, x: Tensor) -> None:
        x.clamp_(-1, 1)


class HardConcreteGate:
    """Random gates with mass at exactly 0 and 1; their size is the chance of being open (Louizos et al., 2018)."""

    SCALE = 10.0
    """Log odds for each unit of the parameter, so that it moves at the pace of the step gate's."""

    def __init__(self):
        self.concrete = Concrete()

    def __call__(self, x: Tensor, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        log_alpha, uniform = self.SCALE * x, torch.rand(x.shape, generator=draw).to(x)
        return self.concrete.sample(log_alpha, uniform), self.concrete.open_chance(log_alpha)

    def bound(self, x: Tensor) -> None:
        x.clamp_(-1, 1)
