"""What a bottleneck before every MLP costs in training: parity against dense, and against a flat codebook.

Forward and backward passes of the training objective. The optimiser is left out: its share falls with the batch, and a
batch that fits this benchmark is a thousand times smaller than one that trains a large model.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from timing import medians, record
from torch import Tensor

from pellucid.core.transformer import Transformer
from pellucid.recipes.parity import backbone, bottleneck, codebook, tiny
from pellucid.recipes.recipe import Recipe
from pellucid.training.objective import Objective
from pellucid.training.precision import autocast, matmul_precision


def wide() -> Recipe:
    """Two layers of the seed's small model, with tiny's vocabulary."""
    base = tiny()
    return replace(base, model=backbone(1024, 2, 8, 256, 2048))


def passes(objective: Objective, windows: Tensor) -> None:
    """Forward and backward."""
    with autocast("auto", windows.device):
        loss, _ = objective(windows)
    loss.backward()
    objective.zero_grad(set_to_none=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=4)
    args = parser.parse_args()
    found = {}
    for d, base in ((256, tiny), (1024, wide)):
        recipes = {"dense": base(), "parity": bottleneck(base, "parity"), "topk": codebook(base, "topk")}
        objectives = {
            name: Objective(Transformer(recipe.model, seed=0, device="cpu"))
            for name, recipe in recipes.items()
        }
        windows = torch.randint(0, 2048, (args.batch, 129))
        calls: dict[str, Callable[[], object]] = {
            name: partial(passes, objective, windows) for name, objective in objectives.items()
        }
        with matmul_precision("auto", torch.device("cpu")):
            times = medians(calls, rounds=args.rounds)
        tokens = args.batch * 128
        found[f"d={d}"] = {
            "tokens_per_second": {name: round(tokens / t) for name, t in times.items()},
            "parity_over_dense": round(times["parity"] / times["dense"], 2),
            "topk_over_dense": round(times["topk"] / times["dense"], 2),
            "topk_over_parity": round(times["topk"] / times["parity"], 2),
        }
    record("parity_step", **found)


if __name__ == "__main__":
    main()
