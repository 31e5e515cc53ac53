"""Training of compressed models, all of a sweep at once; a run that was stopped goes on.

Axes: m model, b batch, t position.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import Tensor

from pellucid.compiled.batched import Batched, Inputs
from pellucid.core.files import write_atomic
from pellucid.core.record import record
from pellucid.training.progress import StepProgress
from pellucid.training.schedules import warmup_decay

SAVED = 500
"""Steps from one saved state to the next."""


def train(models: Batched, data: Inputs, state: Path | None = None) -> None:
    """Train `models` on `data`. A run that was stopped goes on from the file `state`, which is gone when it is done."""
    config = models.config
    parameters = list(models.trained.values())
    optimizer = torch.optim.AdamW(
        parameters, lr=config.lr, betas=(0.9, 0.99), eps=1e-6, weight_decay=config.weight_decay
    )
    start = 0 if state is None or not state.exists() else restore_state(models, state, optimizer)
    with StepProgress("compress", config.steps, start) as bar:
        for step in range(start, config.steps):
            generator = torch.Generator().manual_seed(step)
            batch = data[torch.randint(len(data), (config.batch_size,), generator=generator)]
            sites = [*models.writes, *models.streams, "logits"]
            wanted = record(models.original, batch.tokens, sites, mask=batch.real)
            strength = max(0.0, 1 - step / (config.forced * config.steps)) if config.forced else 0.0
            logits, values = models(
                batch,
                models.writes,
                weights=models.warmed(step),
                patch=models.compressed(wanted) if strength else None,
                strength=strength,
            )
            loss = models.output_loss(logits, wanted["logits"], batch.share)
            if config.layer_weight:
                loss = loss + config.layer_weight * models.layer_loss(values, wanted, batch.share)
            optimizer.param_groups[0]["lr"] = config.lr * warmup_decay(
                step, config.steps, warmup=0.02, final=0.0
            )
            optimizer.zero_grad()
            loss.sum().backward()
            clip(parameters, config.clip)
            optimizer.step()
            bar.step(loss=loss.mean().item())
            if state is not None and (step + 1) % SAVED == 0 and step + 1 < config.steps:
                save_state(models, state, optimizer, step + 1)
    if state is not None:
        state.unlink(missing_ok=True)


def save_state(models: Batched, path: Path, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write all that training goes on from."""
    tensors = {"step": torch.tensor(step)}
    for name, p in models.trained.items():
        tensors |= {name: p.detach()} | {f"{name}@{k}": v for k, v in optimizer.state[p].items()}
    write_atomic(path, save({name: t.contiguous() for name, t in tensors.items()}))


@torch.no_grad()
def restore_state(models: Batched, path: Path, optimizer: torch.optim.Optimizer) -> int:
    """Go on from what `save_state` wrote: the number of steps done."""
    tensors = load(path.read_bytes())
    for name, p in models.trained.items():
        p.copy_(tensors[name])
        optimizer.state[p] = {
            k.split("@")[1]: v for k, v in tensors.items() if k.split("@")[0] == name and "@" in k
        }
    return int(tensors["step"])


def clip(parameters: Sequence[Tensor], largest: float) -> None:
    """Shorten each model's gradient, over parameters (m, ...), to a norm of at most `largest`."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = sum((g.flatten(1).square().sum(1) for g in gradients), torch.zeros(())).sqrt()
    for g in gradients:
        g.mul_((largest / norm.clamp(min=largest)).view(-1, *[1] * (g.dim() - 1)))
