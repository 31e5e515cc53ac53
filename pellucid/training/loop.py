"""One step and one loop for every family: dense, sparse and parity."""

import json
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from pellucid.core.checkpoint import find_checkpoint, load_metadata, load_model, save_model
from pellucid.core.taps import Recorder
from pellucid.core.transformer import Transformer
from pellucid.data.batches import TokenBatches
from pellucid.training import distributed
from pellucid.training.config import TrainConfig
from pellucid.training.constraint import Constraint
from pellucid.training.log import RunLog
from pellucid.training.objective import Objective
from pellucid.training.optim import kurtosis, make_optimizers, scale_gradients
from pellucid.training.precision import autocast, matmul_precision
from pellucid.training.progress import StepProgress
from pellucid.training.schedules import warmup_decay
from pellucid.training.state import load_state, pack_state


class Interrupted(Exception):
    """Training was stopped by a signal, after it had written a checkpoint."""


@dataclass(frozen=True)
class Trained:
    """What a finished run gives: the model in eval mode, its validation loss in nats per corpus, and how fast it went."""

    model: Transformer
    validation: dict[str, float]
    tokens: int
    seconds: float


class Step:
    """One optimiser step: forward, backward, gradient rule, optimisers, constraint."""

    def __init__(self, model: Transformer, config: TrainConfig, constraint: Constraint | None = None):
        self.config, self.constraint = config, constraint or Constraint()
        share = config.batch_size // distributed.size()
        if share % config.micro_batches:
            raise ValueError(
                f"micro_batches = {config.micro_batches} do not divide the {share} sequences of each rank"
            )
        if type(self.constraint) is not Constraint and config.parallel == "fsdp" and distributed.size() > 1:
            raise ValueError(
                "parallel='fsdp' cannot hold weights sparse, which needs whole matrices: use 'ddp'"
            )
        objective = distributed.wrap(Objective(model), config.parallel)
        self.trained = self.constraint.trained(model)
        self.optimizers = make_optimizers(self.trained, config)
        self.objective = torch.compile(objective) if config.compile else objective

    def learning_rate(self, step: int) -> float:
        """Peak times schedule times the constraint's factor."""
        c = self.config
        lr = c.lr * warmup_decay(step, c.steps, warmup=c.warmup, final=c.final_lr)
        return lr * self.constraint.lr_factor((step + 1) / c.steps)

    def __call__(self, step: int, windows: Tensor) -> tuple[Tensor, Tensor]:
        """Train on token windows (b, t + 1); returns (cross-entropy, gradient RMS before it was scaled)."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rate(step)
        self.constraint.before(step)
        nlls = []
        for part in windows.chunk(self.config.micro_batches):
            with autocast(self.config.precision, windows.device):
                loss, nll = self.objective(part)
            (loss / self.config.micro_batches).backward()
            nlls.append(nll.detach())
        self.constraint.backward()
        rms = scale_gradients(self.trained.values(), self.config)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.constraint.apply((step + 1) / self.config.steps)
        return torch.stack(nlls).mean(), rms


def train(
    model: Transformer,
    config: TrainConfig,
    data: Any,
    out: str | Path,
    *,
    constraint: Constraint | None = None,
    validation: Mapping[str, Any] | None = None,
    tokenizer: Tokenizer | None = None,
    recipe: Mapping[str, Any] | None = None,
    made_from: Mapping[str, Any] | None = None,
    resume: bool = False,
    tensorboard: bool = False,
    label: str = "train",
    stop_after: int | None = None,
) -> Trained:
    """Train `model` on `data` (token ids, memory-mapped or not) and leave `out/checkpoint` and `out/log.jsonl`.

    `validation` maps a corpus' name to its token ids. With `resume`, a run in `out` goes on where its last checkpoint
    stood, and ends bit for bit as if it had not stopped (on a CPU). An interrupt or termination signal, or reaching
    `stop_after` steps, writes a checkpoint and raises `Interrupted`. Under `torchrun` all ranks share each batch.
    `made_from` identifies the data: a resumed run must have the same.
    Raises `ValueError` if `out` holds a run and `resume` is off, or another run's.
    """
    out, validation = Path(out), dict(validation or {})
    description = {"train": asdict(config), "recipe": dict(recipe or {}), "data": dict(made_from or {})}
    with distributed.process_group(model.device):
        start, seconds = begin(model.train(), out, description, resume)
        step = Step(model, config, constraint)
        if start:
            load_state(find_checkpoint(out), step.trained, step.optimizers)
        step.constraint.begin()
        batches = TokenBatches(
            data,
            config.batch_size,
            config.seq_len,
            seed=config.seed,
            rank=distributed.rank(),
            world_size=distributed.size(),
        )
        log = RunLog(out, start, tensorboard=tensorboard)
        losses: dict[str, float] = {}
        tokens_a_step = config.batch_size * config.seq_len

        def save(done: int) -> None:
            metadata = {**description, "step": done, "tokens": done * tokens_a_step,
                        "seconds": seconds, "validation": losses}  # fmt: skip
            state = pack_state(model, step.trained, step.optimizers)
            tensors = {name: distributed.whole(t) for name, t in model.state_dict().items()}
            if distributed.rank() == 0:
                save_model(model, out / "checkpoint", tokenizer=tokenizer, metadata=metadata,
                           tensors=tensors, extra=state)  # fmt: skip
            distributed.barrier()

        with (
            stop_signals() as stopped,
            StepProgress(label, config.steps, start) as bar,
            matmul_precision(config.precision, model.device),
        ):
            for number in range(start, config.steps):
                began = time.perf_counter()
                nll, rms = step(number, batches.at(number).to(model.device))
                seconds += time.perf_counter() - began
                done, last = number + 1, number + 1 == config.steps
                if done % config.log_every == 0 or last:
                    loss = distributed.mean(nll).item()
                    rate = tokens_a_step / (time.perf_counter() - began)
                    log.write(done, tokens=done * tokens_a_step, loss=loss, lr=step.learning_rate(number),
                              gradient_rms=rms.item(), tokens_per_second=round(rate),
                              **({"clipped": int(rms > 1)} if config.gradient == "clip" else {}),
                              **step.constraint.metrics())  # fmt: skip
                    bar.show(loss=loss)
                bar.advance(tokens_a_step)
                if validation and (last or (config.validate_every and done % config.validate_every == 0)):
                    losses = {name: evaluate(model, tokens, config) for name, tokens in validation.items()}
                    log.write(done, **{f"validation/{name}": loss for name, loss in losses.items()},
                              **residual_kurtosis(model, next(iter(validation.values())), config))  # fmt: skip
                    bar.show(validation=sum(losses.values()) / len(losses))
                halt = distributed.any_of(stopped.is_set()) or done == stop_after
                if last or halt or (config.checkpoint_every and done % config.checkpoint_every == 0):
                    save(done)
                if halt and not last:
                    raise Interrupted(
                        f"stopped at step {done} of {config.steps}; {out / 'checkpoint'} can be resumed"
                    )
    if start >= config.steps:
        losses = load_metadata(out)["validation"]
    return Trained(model.eval(), losses, config.tokens, seconds)


def begin(model: Transformer, out: Path, description: dict[str, Any], resume: bool) -> tuple[int, float]:
    """The step that a run in `out` starts at and the seconds it has taken; loads the weights of a resumed one."""
    try:
        found = find_checkpoint(out)
    except ValueError:
        return 0, 0.0
    if not resume:
        raise ValueError(f"{out} already holds a run; resume it, or choose another directory")
    metadata = load_metadata(found)
    before, now = (identity({k: d.get(k) for k in description}) for d in (metadata, description))
    if before != now:
        different = sorted(
            f"{part}.{key}"
            for part in now
            for key in {*(before[part] or {}), *now[part]}
            if (before[part] or {}).get(key) != now[part].get(key)
        )
        raise ValueError(f"{out} holds another run: {', '.join(different)} differ")
    model.load_state_dict(load_model(found, device=model.device).state_dict())
    return metadata["step"], metadata["seconds"]


def identity(description: dict[str, Any]) -> dict[str, Any]:
    """What a resumed run must have in common with its beginning; how batches are cut in parts may change."""

    def without(fields: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in fields.items() if key != "micro_batches"}

    return json.loads(json.dumps(description), object_hook=without)


@torch.no_grad()
def evaluate(model: Transformer, tokens: Any, config: TrainConfig) -> float:
    """Mean cross-entropy in nats on about `validation_tokens` of `tokens`, always the same, in float32; ranks share."""
    rows = max(1, min(config.validation_tokens, len(tokens) - 1) // config.seq_len)
    batches = TokenBatches(tokens, min(rows, config.batch_size), config.seq_len, seed=0)
    n = max(1, rows // batches.batch_size)
    objective, total = Objective(model), torch.zeros((), device=model.device, dtype=torch.float64)
    with eval_mode(model):
        # All ranks make as many passes: under FSDP each one gathers weights.
        for i in range(distributed.rank(), n + -n % distributed.size(), distributed.size()):
            nll = objective(batches.at(min(i, n - 1)).to(model.device))[1]
            total += nll if i < n else 0
    return (distributed.sum_of(total) / n).item()


@torch.no_grad()
def residual_kurtosis(model: Transformer, tokens: Any, config: TrainConfig) -> dict[str, float]:
    """Figure 10's statistic of the final residual stream on a few sequences: over channels, and over tokens."""
    recorder = Recorder({"final"})
    windows = TokenBatches(tokens, 4, config.seq_len, seed=0).at(0)
    with eval_mode(model):
        model(windows[:, :-1].to(model.device), tap=recorder)
    final = recorder.values["final"]
    return {"kurtosis": kurtosis(final), "kurtosis_of_channels": kurtosis(final.flatten(0, 1).T)}


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """The model in eval mode; as it was afterwards."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """An event that interrupt and termination signals set, instead of ending the process in mid-step."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    old = {s: signal.signal(s, lambda *_: event.set()) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield event
    finally:
        for s, handler in old.items():
            signal.signal(s, handler)
