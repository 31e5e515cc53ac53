"""Recipes of parity models, what they take, and what is said of runs beside each other."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from pellucid import ModelConfig, Transformer, uniform
from pellucid.recipes.features import coherence_figure, firings, firings_figure, signs_figure, telling, usage
from pellucid.recipes.parity import VARIED
from pellucid.recipes.plan import flops_per_token, plan
from pellucid.recipes.registry import RECIPES, get_recipe
from pellucid.recipes.twins import Curve, read_curve, twins_figure, twins_table
from pellucid.training.config import TrainConfig
from pellucid.training.loop import train

PARITY = [name for name in RECIPES if name.startswith("parity-")]


@pytest.mark.parametrize("name", PARITY)
def test_every_recipe_builds_with_a_part_of_its_kind_unless_it_is_dense(name):
    recipe = get_recipe(name)
    assert recipe.name == name
    with torch.device("meta"):
        model = Transformer(recipe.model, seed=None, device="meta")
    part = model.blocks[0].mlp.input
    assert (part is None) == name.endswith("-dense")


def test_sizes_are_those_of_the_paper():
    for size, millions in (("small", (180, 220)), ("large", (1250, 1400))):
        n = sum(plan(get_recipe(f"parity-{size}")).parameters.values()) / 1e6
        assert millions[0] < n < millions[1]
    active, children = (get_recipe("parity-small").model.mlp_input[k] for k in ("active", "children"))
    assert (sum(active), children) == (48, [32])


def test_what_varies_is_one_thing_at_a_time():
    base = get_recipe("parity-tiny")
    for key, (_, fields) in VARIED.items():
        varied = get_recipe(f"parity-tiny-{key}")
        assert replace(varied, name=base.name, model=base.model) == base
        different = {k for k, v in varied.model.mlp_input.items() if base.model.mlp_input[k] != v}
        assert different == set(fields)


def test_a_run_too_short_to_log_its_speed_has_a_curve_all_the_same(tmp_path):
    config = ModelConfig(vocab_size=11, d_model=8, n_ctx=8, layers=uniform(1, 2, 4, 8))
    tokens = np.arange(600, dtype=np.uint16) % 11
    settings = TrainConfig(
        steps=2, batch_size=2, seq_len=8, lr=1e-2, validate_every=1, log_every=50, validation_tokens=64
    )
    train(Transformer(config, device="cpu"), settings, tokens, tmp_path / "run", validation={"own": tokens})
    log = tmp_path / "run" / "log.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    log.write_text(
        "".join(
            json.dumps({k: v for k, v in line.items() if k != "tokens_per_second"}) + "\n" for line in lines
        )
    )
    curve = read_curve(tmp_path / "run")
    assert (curve.tokens[-1], curve.tokens_per_second) == (32, None)
    assert list(twins_table([curve]).columns[-1].cells) == [""]


def test_a_plan_counts_what_the_model_has_and_shares_it():
    recipe = get_recipe("parity-tiny")
    one = plan(recipe)
    model = Transformer(recipe.model, seed=0, device="cpu")
    assert sum(one.parameters.values()) == sum(p.numel() for p in model.parameters())
    assert one.weights == 4 * sum(one.parameters.values())
    assert one.gradients < one.optimizer + one.gradients < 3 * one.weights
    four = plan(replace(recipe, train=replace(recipe.train, parallel="fsdp")), devices=4)
    assert (four.weights, four.activations) == (one.weights // 4, one.activations // 4)
    parts = plan(replace(recipe, train=replace(recipe.train, micro_batches=4)), devices=2)
    assert (parts.weights, parts.activations) == (one.weights, one.activations // 8)
    flat = plan(get_recipe("parity-tiny-topk"))
    assert flat.flops["bottleneck"] > 20 * one.flops["bottleneck"] > 0
    assert plan(get_recipe("parity-tiny-dense")).flops["bottleneck"] == 0
    with pytest.raises(ValueError, match="3 devices do not divide the batch of 16"):
        plan(recipe, devices=3)
    with pytest.raises(ValueError, match="micro_batches = 4 do not divide the 2 sequences of a device"):
        plan(replace(recipe, train=replace(recipe.train, micro_batches=4)), devices=8)


def test_large_models_train_on_eight_gpus_of_80_gigabytes():
    for size in ("small", "large"):
        recipe = get_recipe(f"parity-{size}")
        assert plan(replace(recipe, train=replace(recipe.train, parallel="fsdp")), devices=8).memory < 70e9


def test_work_of_matrices_is_twice_their_size():
    recipe = get_recipe("parity-tiny-dense")
    model = Transformer(replace(recipe.model, layers=uniform(1, 1, 8, 32)), seed=0, device="cpu")
    assert flops_per_token(model, 10)["MLP"] == 2 * 2 * 32 * 256


def test_the_token_budget_is_read_between_validations():
    slow = Curve("slow", (100, 200, 300), (4.0, 3.5, 3.0), 10.0)
    fast = Curve("fast", (100, 200, 300), (4.0, 2.0, 1.5), 20.0)
    assert slow.tokens_to(3.0) == 300
    assert fast.tokens_to(3.0) == 150
    assert slow.tokens_to(1.0) is None
    assert twins_table([slow, fast]).row_count == 2


def test_figures_are_drawn(tmp_path):
    curve = Curve("one", (1, 2), (2.0, 1.0), 1.0)
    for file in (
        twins_figure([curve], tmp_path / "twins.svg"),
        signs_figure(tmp_path / "signs.svg"),
        coherence_figure(tmp_path / "coherence.svg", d=16),
    ):
        assert file.read_text().lstrip().startswith("<?xml")


@pytest.fixture(scope="module")
def model():
    recipe = get_recipe("parity-tiny")
    config = replace(
        recipe.model,
        vocab_size=50,
        d_model=16,
        n_ctx=16,
        layers=uniform(2, 2, 8, 32),
        mlp_input={"kind": "parity", "active": [4, 8], "children": [8]},
    )
    return Transformer(config, seed=0, device="cpu").eval()


def test_usage_counts_every_active_feature_once_a_token(model):
    tokens = torch.randint(0, 50, (400,), generator=torch.Generator().manual_seed(0)).numpy()
    counts = usage(model, tokens, 400, rows=3)
    assert counts.shape == (2, 16 + 128)
    assert counts.sum(1).tolist() == [400 * 12] * 2
    assert usage(model, tokens, 100).sum(1).tolist() == [96 * 12] * 2


def test_telling_features_are_directions_and_fire_where_it_is_said(model, tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer = Tokenizer(WordLevel({f"t{i}": i for i in range(50)}, unk_token="t0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokens = torch.randint(0, 50, (8, 16), generator=torch.Generator().manual_seed(0))
    chosen = telling(model, tokens, 1, n=3, least=2)
    assert all(feature >= 16 for feature in chosen)
    every = telling(model, tokens, 1, n=200, least=2)
    assert every[:3] == chosen
    assert all(feature >= 16 for feature in every)
    picture = firings_figure(
        tmp_path / "firings.svg", model, tokenizer, "t3 t4 t3 t9", layer=1, n=2
    ).read_text()
    assert picture.count("channel") >= 4
    assert picture.count(": channel") == 2
    assert all(f">t{i}<" in picture for i in (3, 4, 9))
    for firing in firings(model, tokenizer, tokens, 1, chosen, top=2):
        assert 0 < firing.share <= 1
        assert all(score != 0 and token.startswith("t") for score, _, token in firing.places)
