"""Checkpoints come back exactly, damage is named, and a crash while saving leaves the old one."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pellucid import ModelConfig, Transformer, load_model, save_model, uniform
from pellucid.core.checkpoint import content_hash, load_metadata, load_tokenizer, pack, unpack
from pellucid.core.files import atomic_directory, write_atomic
from pellucid.data import END_OF_TEXT, train_tokenizer
from tests.core.strategies import configs, scrambled, some_tokens

MODEL = ModelConfig(vocab_size=11, d_model=8, n_ctx=9, layers=uniform(1, 2, 4, 6))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(configs(), st.sampled_from(["float32", "float64", "bfloat16"]), st.integers(0, 9))
def test_any_model_comes_back_bit_for_bit(tmp_path, config, dtype, seed):
    config = ModelConfig.from_json(config.to_json().replace('"dtype": "float64"', f'"dtype": "{dtype}"'))
    model = scrambled(config, seed)
    with torch.no_grad():  # some matrices sparse, so that both storage forms are met
        for p in list(model.parameters())[::2]:
            p[torch.rand(p.shape, generator=torch.Generator().manual_seed(seed)) < 0.95] = 0
    save_model(model, tmp_path / "m", metadata={"seed": seed})
    loaded = load_model(tmp_path / "m", device="cpu")
    assert loaded.config == config
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.state_dict().values(), loaded.state_dict().values(), strict=True)
    )
    assert content_hash(loaded) == content_hash(model)
    assert load_metadata(tmp_path / "m") == {"seed": seed}
    tokens = some_tokens(seed, 2, 5)
    assert torch.equal(model(tokens), loaded(tokens))


def test_the_tokenizer_comes_back_with_the_model_and_no_text_can_forge_the_end_of_a_document(tmp_path):
    tokenizer = train_tokenizer(["a b c"] * 9, 257)
    save_model(Transformer(MODEL, device="cpu"), tmp_path / "m", tokenizer=tokenizer)
    loaded = load_tokenizer(tmp_path / "m")
    assert loaded.to_str() == tokenizer.to_str()
    assert loaded.encode(f"a {END_OF_TEXT}").ids == tokenizer.encode(f"a {END_OF_TEXT}").ids
    assert 0 not in loaded.encode(END_OF_TEXT).ids
    file = tmp_path / "m" / "tokenizer.json"
    file.write_text(file.read_text().replace("BPE", "BPF"))
    with pytest.raises(ValueError, match=r"tokenizer\.json is damaged or truncated"):
        load_tokenizer(tmp_path / "m")
    file.unlink()
    with pytest.raises(ValueError, match=r"tokenizer\.json is missing"):
        load_tokenizer(tmp_path / "m")


def test_a_reader_leaves_a_checkpoint_that_is_being_replaced_alone(tmp_path):
    """Between a writer's two renames the old checkpoint stands beside: it can be read there, and is not moved."""
    model = Transformer(MODEL, device="cpu")
    save_model(model, tmp_path / "m")
    (tmp_path / "m").rename(tmp_path / ".m.old")
    assert content_hash(load_model(tmp_path / "m", device="cpu")) == content_hash(model)
    assert [p.name for p in tmp_path.iterdir()] == [".m.old"]


def test_of_two_writers_of_the_same_content_the_first_is_kept(tmp_path):
    with atomic_directory(tmp_path / "d", replace=False) as late:
        (late / "x").write_text("late")
        with atomic_directory(tmp_path / "d", replace=False) as early:
            (early / "x").write_text("early")
    assert (tmp_path / "d" / "x").read_text() == "early"
    assert [p.name for p in tmp_path.iterdir()] == ["d"]


def test_sparse_matrices_take_little_room():
    dense = torch.randn(300, 300)
    sparse = torch.where(torch.rand(300, 300) < 0.01, dense, 0)
    assert len(pack({"w": sparse})) < len(pack({"w": dense})) / 20
    for tensors in ({"w": sparse}, {"w": dense}, {"w": torch.zeros(3, 4)}, {"b": torch.zeros(5)}):
        back = unpack(pack(tensors))
        assert back.keys() == tensors.keys()
        assert all(torch.equal(back[name], tensors[name]) for name in tensors)


def test_a_sparse_model_hashes_as_what_is_loaded_of_it_though_cut_weights_were_negative(tmp_path):
    model = Transformer(MODEL, seed=0, device="cpu")
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(torch.rand_like(p) < 0.05)
    assert torch.signbit(model.head.weight[model.head.weight == 0]).any()
    save_model(model, tmp_path / "m")
    assert content_hash(load_model(tmp_path / "m", device="cpu")) == content_hash(model)


def test_the_hash_tells_models_apart():
    a, b = Transformer(MODEL, seed=0, device="cpu"), Transformer(MODEL, seed=0, device="cpu")
    assert content_hash(a) == content_hash(b)
    with torch.no_grad():
        b.head.weight[0, 0] += 1e-6
    assert content_hash(a) != content_hash(b)


def damage_truncate(d):
    file = d / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def damage_bit(d):
    file = d / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)


def edit(d, change):
    config = json.loads((d / "config.json").read_text())
    change(config)
    (d / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_truncate, r"model\.safetensors is damaged or truncated"),
        (damage_bit, r"model\.safetensors is damaged or truncated"),
        (lambda d: (d / "model.safetensors").unlink(), r"model\.safetensors is missing"),
        (lambda d: (d / "config.json").write_text("{"), r"config\.json is damaged"),
        (lambda d: (d / "config.json").write_text("[]"), r"config\.json is not a checkpoint's config"),
        (lambda d: edit(d, lambda c: c.update(format=99)), r"has format 99; this version reads 1"),
        (lambda d: edit(d, lambda c: c["model"].update(d_modle=3)), r"unknown ModelConfig field 'd_modle'; did you mean 'd_model'"),
        (lambda d: edit(d, lambda c: c["model"].update(norm="rsm")), r"unknown norm 'rsm'; did you mean 'rms'"),
        (lambda d: edit(d, lambda c: c["model"]["layers"][0].update(head=1)), r"unknown LayerConfig field 'head'; did you mean 'heads'"),
        (lambda d: edit(d, lambda c: c["model"].pop("n_ctx")), r"n_ctx"),
        (lambda d: edit(d, lambda c: c["model"].update(d_model=16)), r"wte.weight has shape \(11, 8\), the config says \(11, 16\)"),
        (lambda d: edit(d, lambda c: c["model"].update(bigram=True)), r"lacks bigram"),
        (lambda d: edit(d, lambda c: c["model"].update(norm_gain=False)), r"has blocks.0.attn.read.norm.gain, .* which the config does not"),
    ],
)  # fmt: skip
def test_damage_is_named(tmp_path, damage, message):
    save_model(Transformer(MODEL, device="cpu"), tmp_path / "m")
    damage(tmp_path / "m")
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path / "m", device="cpu")


def test_a_pickle_is_never_read(tmp_path):
    torch.save({"x": 1}, tmp_path / "model.pt")
    with pytest.raises(ValueError, match="looks like a pickle, which is never read"):
        load_model(tmp_path / "model.pt")
    with pytest.raises(ValueError, match="no checkpoint at"):
        load_model(tmp_path / "nowhere")


@pytest.mark.parametrize("there", ["file", "directory"])
def test_what_is_no_checkpoint_is_never_replaced_by_one(tmp_path, there):
    place = tmp_path / "place"
    notes = place if there == "file" else place / "notes.txt"
    notes.parent.mkdir(exist_ok=True)
    notes.write_text("mine")
    with pytest.raises(ValueError, match="place exists and is not a checkpoint: it is left alone"):
        save_model(Transformer(MODEL, device="cpu"), place)
    assert notes.read_text() == "mine"


def test_killed_while_saving_the_old_checkpoint_survives(tmp_path):
    """A process is killed at each file-system step of a save; what can be loaded is the old model or the new one."""
    old, new = Transformer(MODEL, seed=0, device="cpu"), Transformer(MODEL, seed=1, device="cpu")
    script = textwrap.dedent(
        """
        import os, signal, sys, pathlib
        from pellucid import load_model, save_model
        new, path, left = load_model(sys.argv[2], device="cpu"), sys.argv[1], int(sys.argv[3])
        def counted(name, owner):
            real = getattr(owner, name)
            def call(*args, **kwargs):
                global left
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **kwargs)
            setattr(owner, name, call)
        counted("write_bytes", pathlib.Path); counted("write_text", pathlib.Path)
        counted("rename", pathlib.Path); counted("fsync", os)
        import shutil; counted("rmtree", shutil)
        save_model(new, path)
        """
    )
    save_model(new, tmp_path / "new")
    hashes, outcomes = {content_hash(old), content_hash(new)}, []
    for steps in (1, 2, 4, 5, 6, 7, 30):
        path = tmp_path / f"m{steps}"
        save_model(old, path)
        done = subprocess.run(
            [sys.executable, "-c", script, path, tmp_path / "new", str(steps)], cwd=os.getcwd()
        )
        assert done.returncode in (0, -signal.SIGKILL)
        loaded = content_hash(load_model(path, device="cpu"))
        assert loaded in hashes
        outcomes.append((done.returncode, loaded == content_hash(new)))
    assert outcomes[0] == (-signal.SIGKILL, False)
    assert outcomes[-1] == (0, True)


def test_a_failing_write_leaves_the_old_file_and_directory(tmp_path):
    write_atomic(tmp_path / "a.txt", "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomic(tmp_path / "a.txt", "\ud800")
    assert (tmp_path / "a.txt").read_text() == "old"
    with atomic_directory(tmp_path / "d") as fresh:
        (fresh / "x").write_text("old")
    with pytest.raises(IsADirectoryError), atomic_directory(tmp_path / "d") as fresh:  # noqa: PT012  the block is what fails
        (fresh / "x").write_text("new")
        fresh.write_text("a directory is no file")
    assert (tmp_path / "d" / "x").read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.txt", "d"]


@settings(max_examples=50, deadline=None)
@given(configs())
def test_a_config_comes_back_from_json(config):
    assert ModelConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"d_model": 0}, "d_model must be a positive integer, got 0"),
        ({"norm": "rmsnorm"}, "unknown norm 'rmsnorm'; did you mean 'rms'"),
        ({"activation": "gleu"}, "unknown activation 'gleu'; did you mean 'gelu'"),
        ({"d_position": 4}, "d_position needs positions"),
        ({"norm_bias": True}, "norm_bias needs norm='layer'"),
        (
            {"tied_embeddings": True, "output_vocab": 3},
            "tied embeddings need equal vocabularies, got 11 and 3",
        ),
        ({"activation_sparsity": {"fraction": 2}}, r"fraction must be in \(0, 1\], got 2"),
        (
            {"activation_sparsity": {"fraction": 0.5, "sites": ["attn.kk"]}},
            "unknown activation sparsity site 'attn.kk'",
        ),
        ({"mlp_input": {"size": 3}}, "mlp_input needs a 'kind'"),
        ({"layers": (3,)}, "layers must be LayerConfigs, got 3"),
        ({"output_vocab": -3}, "output_vocab must be positive, got -3"),
        ({"bigram": "no"}, "bigram must be True or False, got 'no'"),
        ({"layers": ({"heads": (-4,)},)}, "heads must be positive sizes"),
    ],
)
def test_bad_config_values_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**({"vocab_size": 11, "d_model": 8, "n_ctx": 9, "layers": ()} | fields))
