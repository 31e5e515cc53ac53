"""What sparsity costs: the demo's sparse training step against the dense one, and tokens a second of both.

The claims: at least 25,000 tokens/s on two cores, and at most 15% over the dense step.
"""

import torch
from timing import medians, record

from pellucid import Transformer
from pellucid.recipes.registry import demo_sparse
from pellucid.sparse.projection import Projection, SparsityConfig
from pellucid.training.loop import Step


def main() -> None:
    recipe = demo_sparse()
    assert isinstance(recipe.sparsity, SparsityConfig)
    steps = {}
    for name in ("dense", "sparse"):
        model = Transformer(recipe.model, device="cpu")
        step = Step(model, recipe.train, Projection(model, recipe.sparsity) if name == "sparse" else None)
        tokens = torch.randint(
            0, recipe.model.vocab_size, (recipe.train.batch_size, recipe.train.seq_len + 1)
        )
        number = int(0.7 * recipe.train.steps)  # after annealing: the longest part of training
        steps[name] = lambda step=step, tokens=tokens, number=number: step(number, tokens)
    seconds = medians(steps, rounds=40)
    batch = recipe.train.batch_size * recipe.train.seq_len
    record(
        "training_step",
        overhead=round(seconds["sparse"] / seconds["dense"] - 1, 3),
        dense_tokens_per_second=round(batch / seconds["dense"]),
        sparse_tokens_per_second=round(batch / seconds["sparse"]),
        tokens_per_step=batch,
    )


if __name__ == "__main__":
    main()
