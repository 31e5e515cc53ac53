"""Commands that train a model, say what that would take, and measure it."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro

from pellucid.core.files import write_atomic
from pellucid.recipes.perplexity import TOKENS, measure, perplexity_table
from pellucid.recipes.recipe import Recipe, run
from pellucid.training.progress import results


@dataclass
class Train:
    """Train a recipe. Every field of it can be changed: --recipe.train.steps 100."""

    recipe: Recipe
    """What is trained, and how."""

    out: Path
    """Directory of the run: checkpoint/ and log.jsonl."""

    resume: bool = False
    """Go on where an interrupted run in OUT stood."""

    device: str = "auto"
    """auto, cpu, cuda, ..."""

    tensorboard: bool = False
    """Log for TensorBoard too."""

    def __call__(self) -> None:
        trained = run(
            self.recipe, self.out, device=self.device, resume=self.resume, tensorboard=self.tensorboard
        )
        for corpus, loss in trained.validation.items():
            print(f"validation loss on {corpus}: {loss:.4f} nats a token")
        print(f"{trained.tokens:,} tokens in {trained.seconds:.0f} s: {self.out / 'checkpoint'}")


@dataclass
class Plan:
    """Say what a run would take: parameters, memory for each device, and work for each token, by part. Nothing is trained."""

    recipe: Recipe
    """What would be trained, and how."""

    devices: int = 1
    """How many would share it (--recipe.train.parallel fsdp: the weights too)."""

    def __call__(self) -> None:
        from pellucid.recipes.plan import plan

        results.print(plan(self.recipe, self.devices).table())


@dataclass
class Eval:
    """Measure a model: its perplexity on held-out text, or tasks of the LM Evaluation Harness."""

    run: tyro.conf.Positional[Path]
    """Directory of a run, or pellucid:NAME."""

    tasks: list[str] = field(default_factory=list)
    """Tasks by the harness' names, or by those in INCLUDE-PATH. Needs the extra `eval`."""

    perplexity: list[str] | None = None
    """Text files, or corpora, of which held-out text is taken. Without any: the run's own corpora."""

    include_path: Path | None = None
    """Directory of task files in the harness' format."""

    limit: int | None = None
    """The most items of each task."""

    num_fewshot: int | None = None
    """Worked examples before each item; as the task says if left out."""

    tokens: int = TOKENS
    """About how many tokens of each corpus perplexity is over, in whole documents."""

    batch_size: int = 16
    """Sequences at once."""

    out: Path | None = None
    """File for the results, as JSON."""

    device: str = "auto"
    """auto, cpu, cuda, ..."""

    def __call__(self) -> None:
        found: dict[str, Any] = {"model": str(self.run)}
        how: Any = {"batch_size": self.batch_size, "device": self.device}
        if self.tasks:
            from pellucid.interop.lm_eval import evaluate, task_table  # slow to import, and an extra

            found |= evaluate(
                self.run,
                self.tasks,
                limit=self.limit,
                num_fewshot=self.num_fewshot,
                include_path=self.include_path,
                **how,
            )
            results.print(task_table(found))
        if self.perplexity is not None or not self.tasks:
            measured = measure(self.run, self.perplexity or (), tokens=self.tokens, **how)
            found["perplexity"] = {source: p.as_dict() for source, p in measured.items()}
            results.print(perplexity_table(measured))
        if self.out is not None:
            write_atomic(self.out, json.dumps(found, indent=1) + "\n")
            print(self.out)
