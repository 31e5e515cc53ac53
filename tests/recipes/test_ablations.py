"""The ablations: each changes what it says and nothing else, trains, and is tabulated over seeds."""

import json
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
import torch
from rich.console import Console

from pellucid import Transformer
from pellucid.recipes import ablations
from pellucid.recipes.ablations import ABLATIONS, ablation, base, loss_table, run_ablations, tabulate
from pellucid.recipes.recipe import make_constraint
from pellucid.recipes.registry import RECIPES
from pellucid.sparse.projection import Projection
from pellucid.training.loop import Interrupted, Step

SAYS = {
    "base": {},
    "no-warmup": {"train.warmup": 0.0},
    "warmup-5": {"train.warmup": 0.05},
    "warmup-10": {"train.warmup": 0.1},
    "no-lr-decay": {"train.final_lr": 1.0},
    "clip": {"train.gradient": "clip"},
    "no-clip": {"train.gradient": "none"},
    "no-clip-small-eps": {"train.gradient": "none", "train.eps": 1e-8},
    "tensor-rms": {"train.gradient_scope": "tensor"},
    "anneal-20": {"sparsity.anneal_end": 0.2},
    "anneal-80": {"sparsity.anneal_end": 0.8},
    "sink": {"model.sink": True},
    "dense-biases": {"sparsity.dense": ("bigram", "*.sink", "*norm*", "wpe.*", "*.bias")},
    "dense-embeddings": {"sparsity.dense": ("bigram", "*.sink", "*norm*", "wpe.*", "wte.*", "head.*")},
    "head-32": {"model.layers": ({"heads": (32,) * 4, "d_mlp": 512},) * 2},
    "head-64": {"model.layers": ({"heads": (64,) * 2, "d_mlp": 512},) * 2},
    "legacy-schedule": {"sparsity.legacy_embed_schedule": True},
    "alive-0": {"sparsity.alive": 0},
    "alive-1": {"sparsity.alive": 1},
    "alive-2": {"sparsity.alive": 2},
    "no-anneal": {"sparsity.anneal_start": 0.0, "sparsity.anneal_end": 0.0},
    "no-bigram": {"model.bigram": False},
    "no-sharkfin": {"sparsity.sharkfin": False},
    "positions": {"model.positions": "learned"},
    "positions-beside": {"model.positions": "learned", "model.d_position": 16},
    "beta1-0.8": {"train.beta1": 0.8},
    "beta1-0.95": {"train.beta1": 0.95},
    "beta2-0.99": {"train.beta2": 0.99},
    "beta2-0.999": {"train.beta2": 0.999},
    "weight-decay-0.03": {"train.weight_decay": 0.03},
    "weight-decay-0.3": {"train.weight_decay": 0.3},
    "eps-1": {"train.eps": 1.0},
    "eps-0.01": {"train.eps": 0.01},
    "eps-0.001": {"train.eps": 0.001},
    "hard-concrete": {"train.lr": 1e-2, "train.eps": 1e-8, "train.gradient": "none", "sparsity.floor": 0.05},
    "activations-dense": {"model.activation_sparsity": None},
    "activations-half": {"model.activation_sparsity.fraction": 0.5},
    "activations-eighth": {"model.activation_sparsity.fraction": 0.125},
    "tokens-half": {"train.steps": 250},
    "tokens-double": {"train.steps": 1000},
    "tokens-four": {"train.steps": 2000},
    "dense": {"sparsity": None},
    "magnitude": {"sparsity.anneal_start": 1.0, "sparsity.anneal_end": 1.0},
    "magnitude-tuned": {"sparsity.anneal_start": 0.5},
    "magnitude-gradual": {
        "sparsity.anneal_start": 0.25,
        "sparsity.anneal_end": 0.75,
        "sparsity.anneal_power": 3,
    },
    "every-16": {"sparsity.every": 16},
}


def leaves(value, path=""):
    """A recipe's fields by dotted path; a part that is None is itself a leaf."""
    if not isinstance(value, dict):
        return {path: value}
    return {k: v for key in value for k, v in leaves(value[key], f"{path}.{key}".lstrip(".")).items()}


def tiny():
    """The base in seconds: the same model, a few short steps, little text."""
    recipe = base()
    return replace(
        recipe,
        train=replace(recipe.train, steps=4, batch_size=2, seq_len=16, log_every=2, validation_tokens=256),
        data=replace(recipe.data, tokenizer_characters=50_000, tokens=2000),
    )


def test_every_ablation_is_in_the_table_and_in_the_registry_with_what_it_says():
    assert SAYS.keys() == ABLATIONS.keys()
    for name, a in ABLATIONS.items():
        make = RECIPES[f"ablate-{name}"]
        assert make() == ablation(name)
        assert make().name == f"ablate-{name}"
        assert make.__doc__.startswith(a.meaning)
        assert a.figure is None or make.__doc__.endswith(f"(Figure {a.figure})")
    assert {a.figure for a in ABLATIONS.values()} >= {*range(13, 31), 35, 37}


@pytest.mark.parametrize("name", ABLATIONS)
def test_an_ablation_changes_what_it_says_and_nothing_else(name):
    before, after = leaves(asdict(base())), leaves(asdict(ablation(name)))
    before.pop("name")
    after.pop("name")
    changed = {key: after[key] for key in after if key not in before or after[key] != before[key]}
    if name == "hard-concrete":  # all fields of the other config
        changed = {k: v for k, v in changed.items() if not k.startswith("sparsity.") or k.endswith("floor")}
    assert changed == SAYS[name]


@pytest.mark.parametrize("name", ABLATIONS)
def test_its_model_takes_its_last_step_and_has_the_nonzeros_it_should(name):
    recipe = ablation(name)
    model = Transformer(recipe.model, seed=0, device="cpu")
    constraint = make_constraint(model, recipe)
    step = Step(model, recipe.train, constraint)
    nll, _ = step(recipe.train.steps - 1, torch.arange(34).view(2, 17))
    assert nll.isfinite()
    if isinstance(constraint, Projection):
        for key, p in model.named_parameters():
            if key in constraint.parameters:
                assert int(p.count_nonzero()) == round(0.05 * p.numel()), key
            else:
                assert int(p.count_nonzero()) > 0.9 * p.numel() or key in ("bigram", "blocks.0.attn.sink"), (
                    key
                )
    elif recipe.sparsity is None:
        assert all(p.count_nonzero() > 0.9 * p.numel() for p in model.parameters() if p is not model.bigram)


def test_ablations_are_trained_over_seeds_and_not_again(tmp_path, monkeypatch):
    monkeypatch.setenv("PELLUCID_CACHE", str(tmp_path / "cache"))
    out, names = tmp_path / "out", ["dense", "magnitude"]
    rows = run_ablations(names, out, seeds=2, lr_factors=(1.0, 0.5), recipe=tiny(), device="cpu")
    assert rows == tabulate(out) == json.loads((out / "ablations.json").read_text())
    assert [(r["name"], r["lr_factor"], r["seeds"]) for r in rows] == [
        ("dense", 0.5, 2), ("dense", 1.0, 2), ("magnitude", 0.5, 2), ("magnitude", 1.0, 2),
    ]  # fmt: skip
    for row in rows:
        seeds = [
            json.loads((out / row["name"] / f"lr{row['lr_factor']:g}" / f"seed{s}/checkpoint/config.json").read_text())
            ["metadata"]["validation"]["tiny-python"]
            for s in (0, 1)
        ]  # fmt: skip
        assert row["loss"] == pytest.approx(sum(seeds) / 2)
        assert row["spread"] == pytest.approx(abs(seeds[0] - seeds[1]) / 2**0.5)
    assert {r["name"]: round(r["nonzero"], 3) for r in rows} == {"dense": 1.0, "magnitude": 0.05}

    def time():
        return {f: f.stat().st_mtime_ns for f in out.rglob("*.safetensors")}

    before = time()
    run_ablations(["dense"], out, seeds=2, recipe=tiny(), device="cpu")
    assert time() == before

    console = Console(record=True, width=160)
    console.print(loss_table(rows))
    best = min((r for r in rows if r["name"] == "dense"), key=lambda r: r["loss"])
    assert f"{best['loss']:.3f} ± {best['spread']:.3f}" in console.export_text()


def test_a_sweep_that_was_stopped_goes_on_where_it_was(tmp_path, monkeypatch):
    monkeypatch.setenv("PELLUCID_CACHE", str(tmp_path / "cache"))
    run = ablations.run
    calls = []

    def stopping(recipe, out, **options):
        calls.append(recipe.name)
        if len(calls) == 2:
            raise Interrupted("stopped")
        return run(recipe, out, **options)

    monkeypatch.setattr(ablations, "run", stopping)
    with pytest.raises(Interrupted):
        run_ablations(["base", "sink"], tmp_path / "out", recipe=tiny(), device="cpu")
    assert [row["name"] for row in json.loads((tmp_path / "out" / "ablations.json").read_text())] == ["base"]
    rows = run_ablations(["base", "sink"], tmp_path / "out", recipe=tiny(), device="cpu")
    assert [row["name"] for row in rows] == ["base", "sink"]


def test_losses_that_are_not_finite_are_null_and_said(tmp_path, monkeypatch):
    monkeypatch.setenv("PELLUCID_CACHE", str(tmp_path / "cache"))
    wild = replace(tiny(), train=replace(tiny().train, lr=1e30))
    (row,) = run_ablations(["dense"], tmp_path / "out", recipe=wild, device="cpu")
    assert row["loss"] is None
    assert "NaN" not in (tmp_path / "out" / "ablations.json").read_text()
    console = Console(record=True, width=160)
    console.print(loss_table([row]))
    assert "diverged" in console.export_text()


def test_the_program_names_what_it_does_not_know(tmp_path):
    command = [sys.executable, "-m", "pellucid.recipes.ablations", "no-warmpu", "--out", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "unknown ablation 'no-warmpu'; did you mean 'no-warmup'" in done.stderr
    assert "Traceback" not in done.stderr


def test_ablations_need_a_recipe_with_top_k_sparsity():
    with pytest.raises(ValueError, match="ablations change a recipe with a SparsityConfig, not None"):
        ablation("no-sharkfin", replace(base(), sparsity=None))
