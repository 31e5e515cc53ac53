"""The search for a circuit, as data."""

import json
from dataclasses import asdict, dataclass
from typing import Literal, get_args

from pellucid.core.errors import unknown
from pellucid.training.precision import Precision

STRATA = 4
"""Each step draws equally from so many lengths of prompt, so that short ones are not padded to the longest."""

Method = Literal["learned", "hard_concrete", "attribution", "activation", "random"]
Means = Literal["all", "position"]
Ablation = Literal["mean", "stochastic"]


@dataclass(frozen=True, kw_only=True)
class PruneConfig:
    """The search for a circuit.

    The defaults suit models that train on a few CPU cores: a short search, and two tries that ask for few nodes. `TABLE_2`
    is the seed's centre for larger ones, which it tunes for each model and task.
    """

    target: float = 0.15
    """Task loss in nats that the circuit must reach."""

    method: Method = "learned"
    """What nodes are ranked by: masks learned through a step function or HardConcrete gates, attribution, the size of
    activations, or nothing (random)."""

    ablation: Ablation = "stochastic"
    """What is done to the nodes outside: all are frozen at their mean; or, in two thirds of the pairs of a step, a random
    part of them only, and a circuit must reach its target either way."""

    shift: float = 0.05
    """How far, in nats, a circuit's loss may move when only half of the nodes outside are frozen, with stochastic
    ablation."""

    means: Means = "all"
    """What a frozen node is set to: its mean over all pretraining tokens, or over those at the same position."""

    steps: int = 150
    """Optimiser steps for each try."""

    pairs: int = 32
    """Task pairs in a step."""

    k_coefs: tuple[float, ...] = (1e-3, 3e-3)
    """One try for each: the weight of the number of nodes in the loss."""

    tied_qk: bool = False
    """Whether a query channel and the key channel that it meets are kept or frozen together."""

    init_noise: float = 1e-2
    """Standard deviation of the initial mask parameters."""

    init_bias: float = 1e-1
    """Mean of the initial mask parameters."""

    lr: float = 3e-3
    """Peak learning rate; it falls linearly to 0."""

    warmup: float = 0.05
    """Fraction of the steps in which the learning rate rises."""

    weight_decay: float = 1e-3
    """AdamW's decay."""

    beta2: float = 0.95
    """AdamW's second decay."""

    clip: float = 1.0
    """Largest norm of a try's gradient."""

    temperature: float = 1.0
    """Of the sigmoid whose derivative stands in for the step function's."""

    eliminate: bool = True
    """Whether nodes that the circuit does not need are removed one after the other in the end."""

    hopeless: float = 0.5
    """A whole model with a larger loss than this cannot do the task, and nothing is searched."""

    precision: Precision = "auto"
    """Autocast while masks are learned, as in training. All measurements are in the model's own precision."""

    pool: int = 1024
    """Task pairs that steps draw from."""

    measure: int = 128
    """Pairs for each measurement of a loss."""

    def __post_init__(self):
        object.__setattr__(self, "k_coefs", tuple(self.k_coefs))
        if not self.k_coefs:
            raise ValueError("k_coefs must name at least one try")
        for name in ("target", "shift", "steps", "pairs", "lr", "temperature", "clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name, choices in (
            ("precision", Precision),
            ("method", Method),
            ("ablation", Ablation),
            ("means", Means),
        ):
            if getattr(self, name) not in get_args(choices):
                raise unknown(name, getattr(self, name), get_args(choices))
        if self.pool // STRATA < -(-self.pairs // STRATA):
            raise ValueError(f"pool must hold pairs = {self.pairs} in each of its parts, got {self.pool}")
        if self.measure < 4 * STRATA:
            raise ValueError(f"measure must be at least {4 * STRATA} pairs, got {self.measure}")

    def key(self) -> str:
        """The whole search as one line of JSON, to tell whether a stored circuit is of the same one."""
        return json.dumps(asdict(self))


TABLE_2 = PruneConfig(steps=1000, measure=256, pairs=64, k_coefs=(1e-4,), ablation="mean", eliminate=False)
"""The seed's search, and the centre of its tuning. Its other fields are the defaults."""
