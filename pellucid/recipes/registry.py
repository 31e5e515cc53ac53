"""The recipes by name. One function a run; each returns its full config."""

from collections.abc import Callable
from dataclasses import replace

from pellucid.core.config import ActivationSparsity, ModelConfig, uniform
from pellucid.core.errors import unknown
from pellucid.recipes import ablations, parity
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


def sparse_python_4l() -> Recipe:
    """The sparse model in the box, `pellucid:sparse-python-4l`: four layers, 2% nonzeros, 20 minutes on two CPU cores."""
    return Recipe(
        name="sparse-python-4l",
        data=DataConfig(
            corpora=(
                CorpusConfig(name="tiny-python", weight=0.9),
                CorpusConfig(name="python-stdlib", weight=0.1),
            ),
            vocab_size=768,
            tokens=12_400_000,
        ),
        model=ModelConfig(
            vocab_size=768,
            d_model=256,
            n_ctx=256,
            layers=uniform(n_layer=4, n_head=16, d_head=16, d_mlp=1024),
            norm_gain=False,
            bigram=True,
        ),
        train=TrainConfig(
            steps=5000, batch_size=16, seq_len=128, lr=8e-2, validate_every=500, checkpoint_every=250
        ),
        sparsity=SparsityConfig(fraction=0.02, anneal_power=3),
    )


def sparse_python_4l_wide() -> Recipe:
    """A wider sparse model with as many nonzeros as `sparse-python-4l`: about 45 minutes on two CPU cores."""
    narrow = sparse_python_4l()
    layers = uniform(n_layer=4, n_head=24, d_head=16, d_mlp=1536)
    return replace(
        narrow,
        name="sparse-python-4l-wide",
        model=replace(narrow.model, d_model=384, layers=layers),
        sparsity=SparsityConfig(fraction=0.00925, anneal_power=3),
    )


def dense_python_4l() -> Recipe:
    """The dense twin of `sparse-python-4l`, stopped at its pretraining loss."""
    sparse = sparse_python_4l()
    train = replace(sparse.train, steps=800, lr=3e-3, validate_every=100)
    return replace(sparse, name="dense-python-4l", train=train, sparsity=None)


def dense_python_4l_small() -> Recipe:
    """A small dense model trained to convergence at the pretraining loss of `sparse-python-4l`."""
    dense = dense_python_4l()
    return replace(
        dense,
        name="dense-python-4l-small",
        model=replace(dense.model, d_model=64, layers=uniform(n_layer=4, n_head=4, d_head=16, d_mlp=256)),
        train=replace(dense.train, steps=5000),
    )


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
    "sparse-python-4l": sparse_python_4l,
    "sparse-python-4l-wide": sparse_python_4l_wide,
    "dense-python-4l": dense_python_4l,
    "dense-python-4l-small": dense_python_4l_small,
    "seed-sparse": seed_sparse,
    **ablations.makers(),
    **parity.makers(),
}


def get_recipe(name: str) -> Recipe:
    """The recipe called `name`; a `ValueError` with near matches if there is none."""
    if name not in RECIPES:
        raise unknown("recipe", name, RECIPES)
    return RECIPES[name]()
