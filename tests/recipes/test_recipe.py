"""Runs that start from another run's weights, and recipes as they are stored."""

import json
from dataclasses import asdict, replace

import pytest
import torch
from pydantic import TypeAdapter

from pellucid import load_model
from pellucid.core.checkpoint import content_hash, load_metadata
from pellucid.recipes.ablations import ablation
from pellucid.recipes.recipe import Recipe, prepare_data, run
from pellucid.recipes.registry import RECIPES
from pellucid.sparse.projection import SparsityConfig
from tests.recipes.test_ablations import tiny


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """A trained dense run, its recipe and its data."""
    root = tmp_path_factory.mktemp("dense")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PELLUCID_CACHE", str(root / "cache"))
        recipe = ablation("dense", tiny())
        prepared = prepare_data(recipe)
        run(recipe, root / "run", device="cpu", prepared=prepared)
        yield root / "run", recipe, prepared


def test_a_dense_run_is_magnitude_pruned_and_trained_on(dense, tmp_path):
    path, recipe, prepared = dense
    pruned = SparsityConfig(fraction=0.1, anneal_start=0.0, anneal_end=0.0)
    still = replace(recipe.train, lr=1e-30)
    recipe = replace(recipe, name="pruned", start=str(path), sparsity=pruned, train=still)
    trained = run(recipe, tmp_path / "out", device="cpu", prepared=prepared)
    source = load_model(path, device="cpu").state_dict()
    for name, p in trained.model.named_parameters():
        kept = p != 0
        torch.testing.assert_close(p[kept], source[name][kept])
        if p.dim() == 2 and name != "bigram":
            assert int(kept.sum()) == round(0.1 * p.numel()), name
    again = run(recipe, tmp_path / "out", device="cpu", resume=True, prepared=prepared)
    assert again.validation == trained.validation
    assert load_metadata(tmp_path / "out")["data"]["start"] == content_hash(load_model(path, device="cpu"))


def test_a_start_of_another_kind_is_refused(dense, tmp_path):
    path, recipe, prepared = dense
    narrow = replace(recipe, start=str(path), model=replace(recipe.model, sink=True))
    with pytest.raises(ValueError, match=r"cannot start from .*: its model differs in sink \(False there\)"):
        run(narrow, tmp_path / "a", device="cpu", prepared=prepared)
    other = replace(recipe, start=str(path), data=replace(recipe.data, vocab_size=400))
    with pytest.raises(ValueError, match=r"cannot start from .*: its tokenizer is another"):
        run(other, tmp_path / "b", device="cpu", prepared=prepare_data(other))
    with pytest.raises(ValueError, match="no checkpoint at"):
        run(replace(recipe, start=str(tmp_path / "nowhere")), tmp_path / "c", device="cpu", prepared=prepared)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_comes_back_from_a_checkpoints_metadata(name):
    recipe = RECIPES[name]()
    stored = json.loads(json.dumps(asdict(recipe)))
    assert TypeAdapter(Recipe).validate_python(stored) == recipe
