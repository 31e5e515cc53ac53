"""How a model is trained, as data."""

from dataclasses import dataclass
from typing import Literal, get_args

from pellucid.core.errors import unknown
from pellucid.training.precision import Precision

GradientRule = Literal["normalize", "clip", "none"]
GradientScope = Literal["global", "tensor"]
Optimizer = Literal["adamw", "muon"]
Parallel = Literal["ddp", "fsdp"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One run's optimiser, schedule and bookkeeping."""

    steps: int
    """Optimiser steps."""

    batch_size: int
    """Sequences in a step, over all ranks."""

    micro_batches: int = 1
    """Parts of equal size that each rank's share of a batch is cut into, one forward and backward pass each: less memory,
    the same gradient. Where a parity bottleneck observes, each part is an observation of its own."""

    seq_len: int
    """Tokens in a sequence."""

    lr: float
    """Peak learning rate."""

    warmup: float = 0.01
    """Fraction of training in which the learning rate rises from 0."""

    final_lr: float = 0.0
    """Fraction of the peak that linear decay ends at."""

    weight_decay: float = 0.1
    """Decoupled decay of matrices; vectors have none."""

    beta1: float = 0.9
    """Decay of Adam's first moment."""

    beta2: float = 0.95
    """Decay of Adam's second moment."""

    optimizer: Optimizer = "adamw"
    """AdamW for all; or Muon for attention and MLP matrices, and AdamW for embeddings and vectors."""

    eps: float = 0.1
    """Adam's epsilon. Large, as in the weight-sparse seed: it goes with gradients of RMS 1."""

    gradient: GradientRule = "normalize"
    """What is done to the gradient's root mean square: made 1, clipped to 1 at most, or left."""

    gradient_scope: GradientScope = "global"
    """Whether that root mean square is over all parameters, or of each tensor by itself."""

    precision: Precision = "auto"
    """Autocast. "auto" is bfloat16 where the hardware has it, else float32 with medium matmul precision."""

    parallel: Parallel = "ddp"
    """What several ranks hold: a replica of the model each, or shares of it (fully sharded data parallel)."""

    compile: bool = False
    """Whether the objective is compiled."""

    seed: int = 0
    """Of the initial weights and of the data's order."""

    log_every: int = 10
    """Steps between log lines."""

    validate_every: int = 0
    """Steps between validations; 0 is only at the end."""

    validation_tokens: int = 65_536
    """Tokens of each corpus in a validation."""

    checkpoint_every: int = 0
    """Steps between checkpoints; 0 is only at the end."""

    def __post_init__(self):
        for name in ("steps", "batch_size", "micro_batches", "seq_len", "log_every", "validation_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if self.batch_size % self.micro_batches:
            raise ValueError(
                f"micro_batches must divide the batch_size {self.batch_size}, got {self.micro_batches}"
            )
        for name in ("validate_every", "checkpoint_every", "weight_decay"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        for name in ("beta1", "beta2"):
            if getattr(self, name) == 1:
                raise ValueError(f"{name} must be less than 1")
        for name in ("lr", "eps"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("warmup", "final_lr", "beta1", "beta2"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in 0..1, got {getattr(self, name)}")
        for name, choices in (
            ("gradient", get_args(GradientRule)),
            ("gradient_scope", get_args(GradientScope)),
            ("precision", get_args(Precision)),
            ("optimizer", get_args(Optimizer)),
            ("parallel", get_args(Parallel)),
        ):
            if getattr(self, name) not in choices:
                raise unknown(name, getattr(self, name), choices)

    @property
    def tokens(self) -> int:
        """Tokens that training sees."""
        return self.steps * self.batch_size * self.seq_len
