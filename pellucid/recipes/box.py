"""Putting a trained model into the box that comes with the package: `python -m pellucid.recipes.box RUN NAME`."""

from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

from pellucid.core.checkpoint import (
    BOX,
    HALVE_ABOVE,
    PREFIX,
    SPARSE_BELOW,
    load_metadata,
    load_model,
    load_tokenizer,
    save_model,
)
from pellucid.recipes.recipe import prepare_data
from pellucid.recipes.workbench import Workbench
from pellucid.training.loop import evaluate


@dataclass
class Ship:
    """Put a trained run into the box."""

    run: tyro.conf.Positional[Path]
    """Directory of the run."""

    name: tyro.conf.Positional[str]
    """What it will be called, after `pellucid:`."""

    def __call__(self) -> Path:
        """Round large dense tensors to bfloat16, which halves the file, measure what that does, and store the means."""
        bench, metadata = Workbench.open(self.run, device="cpu"), load_metadata(self.run)
        model, before = load_model(self.run, device="cpu"), metadata["validation"]
        with torch.no_grad():
            for p in model.parameters():
                if p.numel() >= HALVE_ABOVE and p.count_nonzero() >= SPARSE_BELOW * p.numel():
                    p.copy_(p.bfloat16())
        shards = prepare_data(bench.recipe).validation
        metadata["validation"] = {
            name: evaluate(model, shard.tokens, bench.recipe.train) for name, shard in shards.items()
        }
        save_model(model, BOX / self.name, tokenizer=load_tokenizer(self.run), metadata=metadata)
        Workbench.open(f"{PREFIX}{self.name}", device="cpu")  # stores the means
        size = sum(file.stat().st_size for file in (BOX / self.name).rglob("*") if file.is_file())
        print(f"{PREFIX}{self.name}: {size:,} bytes; validation {before} -> {metadata['validation']}")
        return BOX / self.name


if __name__ == "__main__":
    tyro.cli(Ship)()
