"""The recipes by name. One function a run; each returns its full config."""

from collections.abc import Callable
from dataclasses import replace

from pellucid.core.config import ActivationSparsity, ModelConfig, uniform
from pellucid.core.errors import unknown
from pellucid.recipes.ablations import makers
from pellucid.recipes.recipe import CorpusConfig, DataConfig, Recipe
from pellucid.sparse.projection import SparsityConfig
from pellucid.training.config import TrainConfig


def demo_sparse() -> Recipe:
    """The demo's weight-sparse model: 3% nonzeros, two layers, about a minute and a half on two CPU cores."""
    return Recipe(
        name="demo-sparse",
        data=DataConfig(
            corpora=(
                CorpusConfig(name="tiny-python", weight=0.95),
                CorpusConfig(name="python-stdlib", weight=0.05),
            ),
            vocab_size=768,
        ),
        model=ModelConfig(
            vocab_size=768,
            d_model=256,
            n_ctx=256,
            layers=uniform(n_layer=2, n_head=8, d_head=16, d_mlp=512),
            norm_gain=False,
            bigram=True,
        ),
        train=TrainConfig(steps=1000, batch_size=16, seq_len=128, lr=8e-2),
        sparsity=SparsityConfig(fraction=0.03, anneal_power=3),
    )


def demo_dense() -> Recipe:
    """The demo's dense twin: the same model, data and budget without the constraint."""
    sparse = demo_sparse()
    return replace(sparse, name="demo-dense", train=replace(sparse.train, lr=3e-3), sparsity=None)


def seed_sparse() -> Recipe:
    """The weight-sparse seed's architecture (8 layers, width 2048, 1/1000 nonzeros): for a GPU, and more data."""
    return Recipe(
        name="seed-sparse",
        data=DataConfig(
            corpora=(
                CorpusConfig(name="tiny-python", weight=0.3),
                CorpusConfig(name="python-stdlib", weight=0.7),
            ),
            vocab_size=2048,
            tokens=200_000_000,
        ),
        model=ModelConfig(
            vocab_size=2048,
            d_model=2048,
            n_ctx=256,
            layers=uniform(n_layer=8, n_head=128, d_head=16, d_mlp=8192),
            norm_gain=False,
            bigram=True,
            sink=True,
            activation_sparsity=ActivationSparsity(fraction=0.25),
        ),
        train=TrainConfig(
            steps=40_000,
            batch_size=256,
            seq_len=256,
            lr=1e-1,
            validate_every=1000,
            checkpoint_every=1000,
        ),
        sparsity=SparsityConfig(fraction=0.001),
    )


RECIPES: dict[str, Callable[[], Recipe]] = {
    "demo-sparse": demo_sparse,
    "demo-dense": demo_dense,
    "seed-sparse": seed_sparse,
    **makers(),
}


def get_recipe(name: str) -> Recipe:
    """The recipe called `name`; a `ValueError` with near matches if there is none."""
    if name not in RECIPES:
        raise unknown("recipe", name, RECIPES)
    return RECIPES[name]()
