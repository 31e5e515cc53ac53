"""What a bottleneck before every MLP costs in a training step: parity against dense, and against a flat codebook."""

import argparse
from dataclasses import replace

import torch
from timing import medians, record

from pellucid.core.transformer import Transformer
from pellucid.recipes.parity import backbone, bottleneck, codebook, tiny
from pellucid.recipes.recipe import Recipe
from pellucid.training.loop import Step
from pellucid.training.precision import matmul_precision


def wide() -> Recipe:
    """Two layers of the seed's small model, with tiny's vocabulary."""
    base = tiny()
    return replace(base, model=backbone(1024, 2, 8, 256, 2048))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args()
    found = {}
    for d, base in ((256, tiny), (1024, wide)):
        recipes = {"dense": base(), "parity": bottleneck(base, "parity"), "topk": codebook(base, "topk")}
        steps = {
            name: Step(Transformer(recipe.model, seed=0, device="cpu"), recipe.train)
            for name, recipe in recipes.items()
        }
        windows = torch.randint(0, 2048, (args.batch, 129))
        with matmul_precision("auto", torch.device("cpu")):
            times = medians(
                {name: lambda s=s, w=windows: s(100, w) for name, s in steps.items()}, rounds=args.rounds
            )
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
