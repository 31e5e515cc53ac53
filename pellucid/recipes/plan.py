"""What a run would take, from its recipe alone: parameters, memory for each device, and work for each token, by part.

The model is built on the meta device, which has shapes and no memory.
"""

from dataclasses import dataclass

import torch
from rich.table import Table
from torch import Tensor

from pellucid.core.transformer import Transformer
from pellucid.parity.bottleneck import ParityBottleneck
from pellucid.parity.codebook import TopKCodebook
from pellucid.recipes.recipe import Recipe
from pellucid.training.config import TrainConfig
from pellucid.training.objective import Objective
from pellucid.training.optim import is_inner

PARTS: tuple[str, ...] = ("embedding", "attention", "bottleneck", "MLP", "unembedding")


@dataclass(frozen=True)
class Plan:
    """What a run takes. Bytes are for one device, of `devices`; work is in floating-point operations."""

    devices: int
    parameters: dict[str, int]
    flops: dict[str, float]
    """For each token of a forward pass, by part; training takes three times as much."""
    weights: int
    gradients: int
    optimizer: int
    activations: int
    """What the backward pass keeps of one device's share of a micro-batch."""
    train: TrainConfig

    @property
    def memory(self) -> int:
        """Bytes on one device."""
        return self.weights + self.gradients + self.optimizer + self.activations

    def table(self) -> Table:
        """The plan as a table."""
        table = Table("part", "parameters", "FLOPs a token (forward)", "share")
        total = sum(self.flops.values())
        for part in PARTS:
            if self.parameters[part] or self.flops[part]:
                table.add_row(
                    part,
                    f"{self.parameters[part]:,}",
                    f"{self.flops[part]:,.0f}",
                    f"{self.flops[part] / total:.1%}",
                )
        table.add_section()
        table.add_row("all", f"{sum(self.parameters.values()):,}", f"{total:,.0f}", "")
        table.add_section()
        rows = self.train.batch_size // self.devices // self.train.micro_batches
        table.add_row("sequences at a time, a device", str(rows), "", "")
        for name in ("weights", "gradients", "optimizer", "activations", "memory"):
            table.add_row(f"{name}, GB a device", f"{getattr(self, name) / 1e9:.2f}", "", "")
        table.add_row(
            "training",
            f"{self.train.tokens:,} tokens",
            f"{3 * total * self.train.tokens:.2e} FLOPs in all",
            f"{self.devices} devices",
        )
        return table


def plan(recipe: Recipe, devices: int = 1) -> Plan:
    """What `recipe` takes on `devices`. Raises ValueError where these do not divide its batch or micro-batches."""
    batch, parts = recipe.train.batch_size, recipe.train.micro_batches
    if devices < 1 or batch % devices:
        raise ValueError(f"{devices} devices do not divide the batch of {batch} sequences")
    if batch // devices % parts:
        raise ValueError(
            f"micro_batches = {parts} do not divide the {batch // devices} sequences of a device"
        )
    with torch.device("meta"):
        model = Transformer(recipe.model, seed=None, device="meta")
    shares = devices if recipe.train.parallel == "fsdp" else 1
    named = dict(model.named_parameters())
    parameters = dict.fromkeys(PARTS, 0)
    for name, p in named.items():
        parameters[part_of(name)] += p.numel()
    sizes = {name: p.numel() * p.element_size() for name, p in named.items()}
    moments = sum(
        size * (1 if recipe.train.optimizer == "muon" and is_inner(name, named[name]) else 2)
        for name, size in sizes.items()
    )
    weights = sum(sizes.values())
    return Plan(
        devices=devices,
        parameters=parameters,
        flops=flops_per_token(model, recipe.train.seq_len),
        weights=weights // shares,
        gradients=weights // shares,
        optimizer=moments // shares,
        activations=saved_bytes(model, recipe.train) * (batch // devices // parts),
        train=recipe.train,
    )


def part_of(name: str) -> str:
    """Which part a parameter belongs to."""
    if ".attn." in name:
        return "attention"
    if ".mlp.input." in name:
        return "bottleneck"
    if ".mlp." in name:
        return "MLP"
    return "embedding" if name.startswith(("wte", "wpe")) else "unembedding"


def flops_per_token(model: Transformer, seq_len: int) -> dict[str, float]:
    """Operations of a forward pass for each token, by part: two for each weight that is read, and attention over half of
    the sequence, or all of it where the model is not causal."""
    config = model.config
    flops = dict.fromkeys(PARTS, 0.0)
    flops["unembedding"] = 2.0 * config.d_model * config.d_vocab_out
    for name, p in model.named_parameters():
        part = part_of(name)
        if p.dim() == 2 and part in ("attention", "MLP"):
            flops[part] += 2.0 * p.numel()
    for layer in config.layers:
        flops["attention"] += 4.0 * layer.d_attn * seq_len / (2 if config.causal else 1)
    flops["bottleneck"] = sum(
        bottleneck_flops(block.mlp.input)
        for block in model.blocks
        if block.mlp is not None and block.mlp.input is not None
    )
    return flops


def bottleneck_flops(part: torch.nn.Module) -> float:
    """Of scoring and decoding: by buckets and a Walsh-Hadamard transform for each parent, or for each child where all
    features compete; of a codebook, the product with all entries."""
    if isinstance(part, TopKCodebook):
        m, d = part.basis.vectors.shape
        return 2.0 * m * d + 2.0 * part.k * d
    if not isinstance(part, ParityBottleneck):
        return float("nan")
    c = part.config
    t = c.d.bit_length() - 1
    if c.routing == "flat":
        return float(c.children[0] * c.d * (t + 1) + 2 * c.k * c.d)
    work = 0.0
    for parents, children, k in zip(c.active, c.children, c.active[1:], strict=False):
        work += parents * (2 * c.d + children * (children.bit_length() - 1)) + 2 * k * c.d
    return work


def saved_bytes(model: Transformer, config: TrainConfig) -> int:
    """Bytes that the backward pass keeps of one sequence in float32 (bfloat16 takes about half), counted on the meta
    device, without the weights."""
    own = {p.untyped_storage()._cdata for p in model.parameters()} | {
        b.untyped_storage()._cdata for b in model.buffers()
    }
    seen: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        if x.untyped_storage()._cdata not in own:
            seen[x.untyped_storage()._cdata] = x
        return x

    windows = torch.zeros(1, config.seq_len + 1, dtype=torch.int64, device="meta")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        Objective(model)(windows)
    return sum(x.untyped_storage().nbytes() for x in seen.values())
