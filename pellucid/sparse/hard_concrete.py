"""L0 by smooth gates: each weight has a gate whose chance to be open is learned, and pays for being open.

Louizos et al. (2018), with the two changes of Weight-sparse transformers, appendix D.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pellucid.sparse.projection import DENSE, constrained, dead_fraction, nonzero_fraction
from pellucid.training.concrete import Concrete
from pellucid.training.constraint import Constraint


@dataclass(frozen=True, kw_only=True)
class HardConcreteConfig(Concrete):
    """What gates are, what they cost, and where they start. Made for Adam with a small epsilon: gates have small gradients."""

    floor: float
    """Expected fraction of open gates below which they cost nothing: where they end if they cost enough."""

    cost: float = 20.0
    """Nats that all gates open cost more than none open."""

    initial: float = 0.2
    """Fraction of gates that begin open (a draw each)."""

    log_alpha: float = 3.0
    """Where gates begin: log alpha is this for the open ones and minus this for the others."""

    speed: float = 20.0
    """How much faster than a weight a log alpha moves: the parameter that is trained is log alpha / speed."""

    dense: tuple[str, ...] = DENSE
    """Parameters (patterns of names) without gates."""

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "dense", tuple(self.dense))
        if not 0 <= self.floor <= 1:
            raise ValueError(f"floor must be in 0..1, got {self.floor}")
        if not 0 < self.initial <= 1:
            raise ValueError(f"initial must be in (0, 1], got {self.initial}")
        if not self.cost >= 0:
            raise ValueError(f"cost must be 0 or more, got {self.cost}")
        if not self.speed > 0:
            raise ValueError(f"speed must be positive, got {self.speed}")


class HardConcrete(Constraint):
    """Trains a weight and a log alpha for each constrained weight of a model; the model has weight times gate.

    In a step's forward pass gates are sampled, the same on every rank; between steps the model is the ordinary
    transformer of the settled gates, so that this is what is validated and saved.
    """

    def __init__(self, model: nn.Module, config: HardConcreteConfig, *, seed: int = 0):
        self.config, self.seed = config, seed
        self.parameters = constrained(model, config.dense)
        self.weights = {name: nn.Parameter(p.detach().clone()) for name, p in self.parameters.items()}
        generator = torch.Generator().manual_seed(seed)
        start = config.log_alpha / config.speed
        self.gates = {
            name: nn.Parameter(
                torch.where(torch.rand(p.numel(), generator=generator) < config.initial, start, -start).to(p)
            )
            for name, p in self.parameters.items()
        }

    def trained(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """The model's parameters, ungated; and flat log alphas, as `log_alpha.NAME`."""
        gates = {f"log_alpha.{name}": gate for name, gate in self.gates.items()}
        return {**dict(model.named_parameters()), **self.weights, **gates}

    def log_alpha(self, name: str) -> Tensor:
        return (self.gates[name] * self.config.speed).view_as(self.weights[name])

    def begin(self) -> None:
        """Put the gated weights into the model."""
        self.apply(0.0)

    def before(self, step: int) -> None:
        """Put weights times sampled gates into the model."""
        device = next(iter(self.gates.values())).device
        noise = torch.Generator(device).manual_seed(self.seed * 1_000_003 + step)
        self.sampled = {}
        for name, p in self.parameters.items():
            uniform = torch.empty_like(p).uniform_(generator=noise)
            self.sampled[name] = self.weights[name] * self.config.sample(self.log_alpha(name), uniform)
            p.data.copy_(self.sampled[name].detach())

    def backward(self) -> None:
        """The gradients of the loss, through the gates, and those of the gates' cost."""
        gradients = [p.grad for p in self.parameters.values()]
        torch.autograd.backward([*self.sampled.values(), self.cost()], [*gradients, None])
        for p in self.parameters.values():
            p.grad = None

    def cost(self) -> Tensor:
        """What open gates cost, in nats; constant below the floor."""
        return self.config.cost * self.expected().clamp(min=self.config.floor)

    def expected(self) -> Tensor:
        """The expected fraction of open gates."""
        total = sum(gate.numel() for gate in self.gates.values())
        chances = [self.config.open_chance(self.log_alpha(name)).sum() for name in self.gates]
        return torch.stack(chances).sum() / total

    @torch.no_grad()
    def apply(self, progress: float) -> None:
        """Put weights times settled gates into the model."""
        for name, p in self.parameters.items():
            p.copy_(self.weights[name] * self.config.settled(self.log_alpha(name)))

    @torch.no_grad()
    def metrics(self) -> dict[str, float]:
        """Share of nonzero weights, of gates expected to be open, and of neurons and channels without any weight."""
        return {
            "nonzero": nonzero_fraction(self.parameters),
            "expected_nonzero": self.expected().item(),
            "dead": dead_fraction(self.parameters),
        }
