"""Parity transformers, their dense twins, and the flat codebook in the bottleneck's place; and what is varied in one."""

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from pellucid.core.config import ModelConfig, uniform
from pellucid.parity.config import ParityConfig
from pellucid.recipes.recipe import CorpusConfig, DataConfig, Recipe
from pellucid.training.config import TrainConfig

TRAIN = {"optimizer": "muon", "eps": 1e-8, "gradient": "none", "weight_decay": 0.1}


def backbone(d_model: int, n_layer: int, n_head: int, n_ctx: int, vocab_size: int) -> ModelConfig:
    """A GPT-2-like model: tied embedding, learned positions, RMS norm, an MLP of 4 d."""
    return ModelConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        n_ctx=n_ctx,
        layers=uniform(n_layer, n_head, d_model // n_head, 4 * d_model),
        positions="learned",
        tied_embeddings=True,
    )


def tiny() -> Recipe:
    """The dense twin at 256 wide, 4 layers, on Python's standard library: some ten minutes on two CPU cores."""
    return Recipe(
        name="parity-tiny-dense",
        data=DataConfig(corpora=(CorpusConfig(name="python-stdlib"),), vocab_size=2048),
        model=backbone(256, 4, 8, 256, 2048),
        train=TrainConfig(
            steps=1600, batch_size=16, seq_len=128, lr=3e-3, validate_every=100, checkpoint_every=500, **TRAIN
        ),
    )


def small() -> Recipe:
    """The dense twin at the seed's 200M: 1024 wide, 12 layers; for GPUs."""
    data = DataConfig(corpora=(CorpusConfig(name="hf:HuggingFaceFW/fineweb-edu"),), vocab_size=50_304)
    return Recipe(
        name="parity-small-dense",
        data=data,
        model=backbone(1024, 12, 8, 1024, 50_304),
        train=TrainConfig(
            steps=20_000,
            batch_size=512,
            micro_batches=4,
            seq_len=1024,
            lr=2e-3,
            validate_every=500,
            checkpoint_every=500,
            **TRAIN,
        ),
    )


def large() -> Recipe:
    """The dense twin at the seed's 1.3B: 2048 wide, 24 layers; for GPUs."""
    base = small()
    return replace(
        base,
        name="parity-large-dense",
        model=backbone(2048, 24, 16, 1024, 50_304),
        train=replace(base.train, micro_batches=8),
    )


def with_input(base: Recipe, name: str, part: dict[str, Any]) -> Recipe:
    """`base` with a part before every MLP."""
    return replace(base, name=name, model=replace(base.model, mlp_input=part))


def bottleneck(base: Callable[[], Recipe], name: str, **fields: Any) -> Recipe:
    """The parity transformer on `base`."""
    recipe = base()
    config = asdict(ParityConfig(d=recipe.model.d_model, **fields))
    del config["d"]
    return with_input(recipe, name, {"kind": "parity", **config})


def codebook(base: Callable[[], Recipe], name: str) -> Recipe:
    """The flat twin: a learned codebook with as many features as the parity code of two levels, and as many active."""
    recipe = base()
    config = ParityConfig(d=recipe.model.d_model)
    return with_input(recipe, name, {"kind": "topk", "features": config.features, "k": config.k})


THREE_LEVELS = {
    "tiny": {"active": (16, 16, 16), "children": (16, 16)},
    "small": {"active": (16, 16, 16), "children": (32, 32)},
    "large": {"active": (16, 16, 16), "children": (32, 32)},
}
VARIED: dict[str, tuple[str, dict[str, Any]]] = {
    "flat": ("all features compete", {"routing": "flat"}),
    "aux-0": ("no reconstruction loss", {"aux_weight": 0.0}),
    "aux-10": ("ten times the reconstruction loss", {"aux_weight": 0.1}),
    "active-8-40": ("8 channels and 40 children active", {"active": (8, 40)}),
    "active-32-16": ("32 channels and 16 children active", {"active": (32, 16)}),
    "raw": ("scores not standardised", {"standardise": False}),
    "random": ("a random linear code", {"basis": "random"}),
    "gaussian": ("random Gaussian directions", {"basis": "gaussian"}),
    "learned": ("learned directions", {"basis": "learned"}),
}
"""What is varied in `parity-tiny`."""


def makers() -> dict[str, Callable[[], Recipe]]:
    """Every recipe here by name."""
    found: dict[str, Callable[[], Recipe]] = {}

    def add(name: str, what: str, make: Callable[[], Recipe]) -> None:
        make.__doc__ = what
        found[name] = make

    for size, base in (("tiny", tiny), ("small", small), ("large", large)):
        name = f"parity-{size}"
        add(name, f"The parity transformer, {size}, two levels.", partial(bottleneck, base, name))
        three = f"{name}-3-levels"
        add(
            three,
            f"The parity transformer, {size}, three levels.",
            partial(bottleneck, base, three, **THREE_LEVELS[size]),
        )
        found[f"{name}-dense"] = base
        flat = f"{name}-topk"
        add(
            flat, f"The flat twin of {name}: a learned codebook of equal size.", partial(codebook, base, flat)
        )
    for key, (what, fields) in VARIED.items():
        name = f"parity-tiny-{key}"
        add(name, f"parity-tiny, but {what}.", partial(bottleneck, tiny, name, **fields))
    return found
