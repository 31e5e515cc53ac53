"""Compressed models: the fold is exact, sweeps train at once, interchange tells truth from void."""

import json
from dataclasses import replace

import pytest
import torch

from pellucid.compiled.batched import Batched, CompressConfig, defined_inputs, map_places, write_sites
from pellucid.compiled.compress import compress, orthonormal
from pellucid.compiled.interchange import as_model, interchange, truth_holds
from pellucid.compiled.library import PROGRAMS
from pellucid.compiled.model import CompiledModel, compile_program
from pellucid.compiled.scores import measure
from pellucid.compiled.verify import verify
from pellucid.core.transformer import Run
from pellucid.recipes.compress import Compress
from pellucid.recipes.compress_report import feature_table, sweep_table
from pellucid.recipes.compress_sweep import load_sweep, sweep

SMALL = CompressConfig(steps=3, batch_size=8, warm=(0.5,))
VARIANTS = ("shared", "per-layer", "ends", "all", "pca")


def compiled(name):
    case = PROGRAMS[name]
    return compile_program(case.program, case.vocab, case.max_len, causal=case.causal)


def random_models(model, widths, variant, seed=0):
    layers, full = len(model.transformer.config.layers), model.transformer.config.d_model
    generator = torch.Generator().manual_seed(seed)
    count = max(map_places(variant, layers)) + 1
    maps = torch.randn(len(widths), count, full, max(widths), generator=generator) / full**0.5
    return Batched(model, widths, maps, CompressConfig(variant=variant))


def stream_by_hand(model, maps, places, tokens):
    """The definition: the compiled sublayers unchanged, W before every write and W transposed before every read."""
    t = model.transformer
    w = [maps[p] for p in places]
    x = t.embed(tokens, t.positions(None, 0, tokens.shape[1])) @ w[0]
    run = Run()
    for n, block in enumerate(t.blocks):
        if block.attn is not None:
            x = x + block.attn(x @ w[n + 1].T, run) @ w[n + 1]
        if block.mlp is not None:
            x = x + block.mlp(x @ w[n + 1].T, run)[0] @ w[n + 1]
    return t.unembed(x @ w[-1].T)


@pytest.mark.parametrize("name", ["frac_prevs", "sort_unique", "running_max", "copy"])
@pytest.mark.parametrize("variant", ["shared", "per-layer", "ends"])
@torch.no_grad()
def test_the_folded_transformer_is_the_compiled_one_with_w_at_every_read_and_write(name, variant):
    model = compiled(name)
    full = model.transformer.config.d_model
    batched = random_models(model, [2, full, 3], variant)
    data = defined_inputs(model)
    data = data[data.real.all(1)][:50]
    together = batched(data)[0]
    for i, d in enumerate([2, full, 3]):
        alone = batched.transformer(i)
        assert alone.config.d_model == d
        logits = alone(data.tokens, mask=data.real)
        torch.testing.assert_close(logits, together[i], atol=1e-5, rtol=1e-5)
        by_hand = stream_by_hand(model, batched.maps[i, ..., :d], batched.places, data.tokens)
        torch.testing.assert_close(by_hand, logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["frac_prevs", "hist", "running_max", "copy"])
@torch.no_grad()
def test_an_orthogonal_w_of_full_width_changes_nothing_and_keeps_the_truth(name):
    model = compiled(name)
    full = model.transformer.config.d_model
    maps = orthonormal(full, full, seed=3).float()[None, None]
    batched = Batched(model, [full], maps, CompressConfig())
    (scores,) = measure(batched, defined_inputs(model))
    assert scores.accuracy == scores.position_accuracy == scores.balanced_accuracy == 1
    assert scores.layer_loss < 1e-6
    assert min([*scores.write_cosine.values(), *scores.stream_cosine.values()]) > 0.999
    (made,) = compress(model, full, 0, CompressConfig(variant="pca"))
    held = interchange(model, made, pairs=200)
    assert truth_holds(held)
    assert all(h.decoded == 1 for h in held)
    assert any(h.interchange == 1.0 for h in held)


@torch.no_grad()
def test_the_truth_is_void_where_a_variable_was_dropped():
    """A W without `is_token`: the model still has `tokens`, but what was computed from them is lost."""
    model = compiled("frac_prevs")
    (made,) = compress(model, 12, 0, CompressConfig(variant="pca"))
    (dropped,) = next(v for v in model.truth["variables"] if v["name"] == "is_token")["directions"]
    w = torch.eye(12)[None, None]
    w[:, :, dropped] = 0.1 * torch.eye(12)[model.truth["variables"][0]["directions"][0]]
    broken = Batched(model, [12], w, CompressConfig()).transformer(0)
    held = interchange(model, replace(made, transformer=broken, maps=w[0]))
    assert not truth_holds(held)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_trains_and_seeds_do_not_depend_on_the_sweep(variant):
    model = compiled("count")
    config = replace(SMALL, variant=variant)
    together = compress(model, [3, 5], [0, 7], config)
    assert [(c.d, c.seed) for c in together] == [(3, 0), (3, 7), (5, 0), (5, 7)]
    (alone,) = compress(model, 3, 7, config)
    data = defined_inputs(model)[-20:]
    with torch.no_grad():
        for name, w in alone.transformer.state_dict().items():
            torch.testing.assert_close(w, together[1].transformer.state_dict()[name], atol=1e-5, rtol=1e-4)
        assert alone.transformer(data.tokens).isfinite().all()
    assert alone.maps.shape == (max(alone.places) + 1, 12, 3)


def test_training_lowers_the_loss_to_that_of_the_compiled_model():
    model = compiled("copy")
    start, end = (
        compress(model, 3, 0, replace(SMALL, steps=steps, batch_size=32))[0].scores for steps in (1, 200)
    )
    assert end.accuracy == 1
    assert end.output_loss + end.layer_loss < (start.output_loss + start.layer_loss) / 2


def test_without_the_layer_loss_only_outputs_count():
    model = compiled("count")
    config = replace(SMALL, steps=60, batch_size=32)
    full = compress(model, 6, 0, config)[0].scores.layer_loss
    assert compress(model, 6, 0, replace(config, layer_weight=0.0))[0].scores.layer_loss > full


def test_of_two_starts_the_better_is_kept():
    model, config = compiled("count"), CompressConfig(steps=30, batch_size=16)
    single = [compress(model, [4, 6], [0, 1], replace(config, warm=(w,))) for w in (1.0, 0.05)]
    for i, c in enumerate(compress(model, [4, 6], [0, 1], config)):
        losses = [made[i].scores.output_loss + made[i].scores.layer_loss for made in single]
        assert c.scores.output_loss + c.scores.layer_loss == pytest.approx(min(losses), rel=0.02)


def test_a_compressed_model_is_a_compiled_one_that_says_whether_its_truth_holds(tmp_path):
    model = compiled("frac_prevs")
    for d, holds in ((12, True), (2, False)):
        (made,) = compress(model, d, 0, CompressConfig(variant="pca"))
        small = as_model(model, made, interchange(model, made))
        assert small.truth["holds"] is holds
        small.save(tmp_path / str(d))
        loaded = CompiledModel.load(tmp_path / str(d), device="cpu")
        assert loaded.transformer.config.d_model == d
        assert loaded.basis.shape == (12, d)
        if holds:
            assert verify(small).failures == 0
            assert loaded("axxbx") == model("axxbx")
            assert small.trace("ax").read(0, 2)["tokens"] == "x"
    (made,) = compress(model, 2, 0, replace(SMALL, variant="ends"))
    with pytest.raises(ValueError, match="variant 'ends' has no one W"):
        as_model(model, made, [])


def test_a_killed_training_goes_on_to_the_same_weights(tmp_path, monkeypatch):
    import pellucid.compiled.fit as module

    model, config = compiled("count"), replace(SMALL, steps=7)
    (whole,) = compress(model, 4, 0, config)
    monkeypatch.setattr(module, "SAVED", 2)
    real, calls = module.clip, []

    def stops(*args):
        calls.append(1)
        if len(calls) == 6:
            raise KeyboardInterrupt
        real(*args)

    monkeypatch.setattr(module, "clip", stops)
    state = tmp_path / "state.safetensors"
    with pytest.raises(KeyboardInterrupt):
        compress(model, 4, 0, config, state=state)
    assert state.exists()
    (resumed,) = compress(model, 4, 0, config, state=state)
    assert len(calls) == 6 + 3
    assert not state.exists()
    assert torch.equal(whole.maps, resumed.maps)


def test_a_finished_sweep_is_read_and_another_one_is_refused(tmp_path):
    made = sweep("count", tmp_path, [2, 12], [0, 1], SMALL)
    file = tmp_path / "count.shared.json"
    assert load_sweep(file) == made
    before = file.read_bytes()
    assert sweep("count", tmp_path, [2, 12], [0, 1], SMALL) == made
    assert file.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["count.shared.json", "count.shared.safetensors"]
    assert sweep_table(made).row_count == 2
    assert json.loads(before)["width"] == 12
    with pytest.raises(ValueError, match=r"count\.shared\.json is of other settings"):
        sweep("count", tmp_path, [2], [0, 1], SMALL)


def test_the_program_draws_its_figures(tmp_path, capsys):
    command = Compress(programs=("count",), d=(3, 12), seeds=1, out=tmp_path, config=SMALL)
    command()
    pictures = {"count.shared.svg", "count.shared.gram.svg", "count.shared.layers.svg"}
    assert pictures <= {p.name for p in tmp_path.iterdir()}
    said = capsys.readouterr().out
    assert "tokens:a" in said
    assert "tokens:a" in (tmp_path / "count.shared.gram.svg").read_text()


def test_the_fate_of_each_direction_is_read_off_w():
    w = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.9, 0.1], [0.1, 0.0, 0.0], [0.0, 0.1, 1.0]])
    table = feature_table(w, ["alone", "left", "right", "gone", "other"])
    fates = dict(zip(table.columns[0].cells, table.columns[1].cells, strict=True))
    assert fates == {"alone": "kept", "left": "shared", "right": "shared", "gone": "dropped", "other": "kept"}
    nearest = dict(zip(table.columns[0].cells, table.columns[3].cells, strict=True))
    assert (nearest["left"], nearest["gone"]) == ("right", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"d": 0}, "d must be between 1 and 12, the model's width, got 0"),
        ({"d": [3, 13]}, "d must be between 1 and 12, the model's width, got 13"),
        ({"d": []}, "d must be one integer or more, got none"),
        ({"d": 2.5}, "d must be integers, got 2.5"),
        ({"d": 3, "seeds": []}, "seeds must be one integer or more, got none"),
        ({"d": [3, 3]}, r"d must be distinct, got \[3, 3\]"),
        ({"d": 3, "sequences": []}, "no inputs on which the program is defined"),
    ],
)
def test_bad_input_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        compress(compiled("count"), **arguments, config=SMALL)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("variant", "share", "unknown variant 'share'; did you mean 'shared'"),
        ("steps", 0, "steps must be a positive integer, got 0"),
        ("lr", -1.0, "lr must be positive, got -1.0"),
        ("layer_weight", float("nan"), "layer_weight must be 0 or more, got nan"),
    ],
)
def test_a_bad_setting_is_named(field, value, message):
    with pytest.raises(ValueError, match=message):
        CompressConfig(**{field: value})


def test_sites_of_writes_are_those_of_the_sublayers_that_exist():
    assert write_sites(compiled("frac_prevs").transformer) == {"0.mlp.out": 0, "1.attn.out": 1}
