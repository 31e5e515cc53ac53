"""Released circuit_sparsity files: reference runs are reproduced, models and circuits go there and back, damage is named.

`tests/data/openai` holds small random models in the release's layout, and what the release's own code computes on them.
"""

import json
import pickle
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pellucid import ActivationSparsity, Mask, ModelConfig, Recorder, Transformer, chain, generate, uniform
from pellucid.core.checkpoint import content_hash, load_model, save_model
from pellucid.core.circuit import channel_circuit
from pellucid.core.config import ABS_TOPK_SITES
from pellucid.core.sites import node_sites
from pellucid.data import train_tokenizer
from pellucid.interop.gpt2_names import gpt2_name
from pellucid.interop.openai import (
    LAYER_EPS,
    RMS_EPS,
    Dropped,
    export_checkpoint,
    hook_names,
    load_checkpoint,
    load_tokenizer,
    mask_widths,
    read_masks,
    read_viz,
    site_names,
    with_their_eps,
    write_viz,
)
from tests.core.strategies import CONTEXT, VOCAB, configs, scrambled, some_tokens

DATA = Path(__file__).parent.parent / "data" / "openai"
MODELS = ("sink_flash", "catpos_bigram_rms_afrac", "plain_layernorm")
NEAR = {"atol": 1e-4, "rtol": 0}


def load(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Dropped)
        return load_checkpoint(DATA / name, device="cpu")


@pytest.fixture(params=MODELS)
def released(request):
    """A released model, and what the release's code computed with it."""
    return load(request.param), torch.load(DATA / request.param / "reference.pt", weights_only=True)


def loss_of(logits, reference):
    return F.cross_entropy(logits.flatten(0, 1), reference["targets"].flatten(), ignore_index=-1)


def test_logits_loss_and_every_hook_agree(released):
    model, reference = released
    sites = site_names(model.config)
    recorder = Recorder(sites.values())
    logits = model(reference["input_ids"], tap=recorder)
    torch.testing.assert_close(logits, reference["logits"], **NEAR)
    torch.testing.assert_close(loss_of(logits, reference), reference["loss"], **NEAR)
    assert set(reference["hooks"]) == set(sites)
    for hook, value in reference["hooks"].items():
        torch.testing.assert_close(recorder.values[sites[hook]], value, **NEAR)


@pytest.mark.parametrize("ablation", ["zero", "mean"])
def test_circuits_agree_under_ablation(released, ablation, request):
    model, reference = released
    path = DATA / request.node.callspec.params["released"] / "reference.pt"
    masks, sites = read_masks(path, model), site_names(model.config)
    means = {sites[place]: mean for place, mean in reference["means"].items()}
    recorder = Recorder(sites[hook] for hook in reference[f"hooks_{ablation}_ablated"])
    tap = chain(Mask(masks, means if ablation == "mean" else None), recorder)
    logits = model(reference["input_ids"], tap=tap)
    torch.testing.assert_close(logits, reference[f"logits_{ablation}_ablated"], **NEAR)
    torch.testing.assert_close(loss_of(logits, reference), reference[f"loss_{ablation}_ablated"], **NEAR)
    for hook, value in reference[f"hooks_{ablation}_ablated"].items():
        torch.testing.assert_close(recorder.values[sites[hook]], value, **NEAR)


@pytest.mark.parametrize("name", MODELS[:2])
def test_gradients_agree(name):
    """But where the release differs from what it computes: it gives the bigram table's last row no gradient, as if that
    were padding. And where an embedding has fewer nonzeros than AbsTopK keeps, which zeros pass a gradient is a tie.
    """
    model, reference = load(name), torch.load(DATA / name / "reference.pt", weights_only=True)
    loss_of(model(reference["input_ids"]), reference).backward()
    ours = {gpt2_name(n): p.grad for n, p in model.named_parameters() if n != "logits_bias"}
    assert set(ours) == set(reference["param_grads"])
    for n, grad in reference["param_grads"].items():
        same = torch.ones_like(grad, dtype=torch.bool)
        if n == "bigram_table":
            same[-1] = False
        if n == "transformer.wte.weight" and model.config.activation_sparsity is not None:
            same = model.wte.weight != 0
        torch.testing.assert_close(ours[n][same], grad[same], **NEAR)


def test_the_likeliest_continuation_is_theirs(released):
    model, reference = released
    n, prompts = model.config.n_ctx, reference["input_ids"][:, :8].tolist()
    assert generate(model, prompts, n - 8) == reference["generate_top1"][:, 8:n].tolist()


def test_nodes_are_theirs(released):
    model, reference = released
    widths, hooks = mask_widths(model.config), hook_names(model.config)
    assert [hooks[site] for site in widths] == reference["node_locations"]
    assert sum(widths.values()) == reference["num_total_nodes"]
    assert {hook: hooks[site] for hook, site in site_names(model.config).items()} == {
        hook: hook for hook in reference["hooks"]
    }


@pytest.mark.parametrize("name", MODELS)
def test_unknown_keys_are_reported_and_change_nothing(tmp_path, name):
    shutil.copy(DATA / name / "final_model.pt", tmp_path)
    shutil.copy(DATA / name / "beeg_config_extra_keys.json", tmp_path / "beeg_config.json")
    with pytest.warns(Dropped) as caught:
        model = load_checkpoint(tmp_path, device="cpu")
    assert len(caught) == 1
    extra = [
        "afrac_approx",
        "bigram_table_rank",
        "debug_exact_topk",
        "expansion_factor",
        "expansion_factor_mlp",
    ]
    extra += ["ignore_dw_grad", "n_embd", "pfrac", "rtopk", "sparse_matmul_impl"]
    assert all(f"unknown key {key}" in str(caught[0].message) for key in extra)
    assert content_hash(model) == content_hash(load(name))


def test_legacy_keys_and_mask_buffers_are_reported():
    with pytest.warns(Dropped, match=r"legacy key n_mlp \(read as d_mlp\), legacy key use_tied_aux_matrix"):
        load_checkpoint(DATA / "sink_flash", device="cpu")
    with pytest.warns(Dropped, match=r"causal masks attn\.bias$"):
        load_checkpoint(DATA / "plain_layernorm", device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_checkpoint(DATA / "catpos_bigram_rms_afrac", device="cpu")


def test_a_model_in_the_box_is_exported_with_the_release_s_constant_in_its_norms(tmp_path):
    model = load_model("pellucid:sparse-python-4l", device="cpu")
    with pytest.raises(ValueError, match=r"norm_eps=1e-05 .*see with_their_eps"):
        export_checkpoint(model, tmp_path / "m")
    theirs = with_their_eps(model)
    export_checkpoint(theirs, tmp_path / "m")
    tokens = some_tokens(0, 4, 64)
    loaded = load_checkpoint(tmp_path / "m", device="cpu")(tokens)
    assert torch.equal(loaded, theirs(tokens))
    assert 0 < (loaded - model(tokens)).abs().mean() < 0.02


@pytest.mark.parametrize("name", MODELS)
def test_an_export_is_the_file_that_was_loaded(tmp_path, name):
    """Up to what was reported as not used; what the file leaves to its default is written out."""
    export_checkpoint(load(name), tmp_path / "m")
    was, now = (torch.load(d / "final_model.pt", weights_only=True) for d in (DATA / name, tmp_path / "m"))
    was = {k: v for k, v in was.items() if not k.endswith(".attn.bias")}
    was.setdefault("final_logits_bias", torch.zeros(64))
    assert was.keys() == now.keys()
    assert all(torch.equal(was[k], now[k]) for k in was)
    config, written = (
        json.loads((d / "beeg_config.json").read_text()) for d in (DATA / name, tmp_path / "m")
    )
    config.setdefault("d_mlp", config.get("n_mlp"))
    free = {"ln_bias"} if config["rms_norm"] else set()
    free |= {"afrac_loctypes"} if config["afrac"] is None else set()
    assert all(config[k] == written[k] for k in config.keys() & written.keys() - free)


@st.composite
def released_configs(draw):
    """Models that the format expresses, some only in another form (positions, gains)."""
    norm = draw(st.sampled_from(["rms", "layer"]))
    sizes = draw(
        st.tuples(st.integers(1, 2), st.sampled_from([1, 2, 4]), st.integers(1, 4), st.integers(1, 9))
    )
    sparsity = draw(
        st.none()
        | st.builds(
            ActivationSparsity,
            fraction=st.just(1.0) if 1 in (sizes[1] * sizes[2], sizes[3]) else st.sampled_from([0.5, 0.7]),
            sites=st.lists(st.sampled_from(ABS_TOPK_SITES), unique=True).map(tuple),
        )
    )
    return draw(
        configs(
            layers=uniform(*sizes),
            norm=norm,
            norm_bias=norm == "layer" and draw(st.booleans()),
            norm_eps=RMS_EPS if norm == "rms" else LAYER_EPS,
            activation=draw(st.sampled_from(["gelu", "relu"])),
            activation_sparsity=sparsity,
            attention_scale=None,
            causal=True,
            dtype="float32",
        )
    )


def assert_same_logits(loaded, model, tokens):
    """Bit for bit; the norms' gains of one count as the model's, since a layer norm without a gain rounds otherwise."""
    twin = Transformer(replace(model.config, norm_gain=True), device="cpu")
    twin.load_state_dict(model.state_dict(), strict=False)
    assert torch.equal(loaded(tokens), twin(tokens))


ROUND_TRIP = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@ROUND_TRIP
@given(released_configs(), st.integers(0, 9))
def test_any_model_that_the_format_expresses_comes_back(tmp_path, config, seed):
    model = scrambled(config, seed)
    export_checkpoint(model, tmp_path / "m")
    loaded = load_checkpoint(tmp_path / "m", device="cpu")
    tokens = some_tokens(seed, 2, CONTEXT)
    assert_same_logits(loaded, model, tokens)
    same = {"norm_gain": True, "positions": "learned", "logits_bias": True}
    assert loaded.config == replace(config, **same, output_vocab=None)
    export_checkpoint(loaded, tmp_path / "again")
    assert content_hash(load_checkpoint(tmp_path / "again", device="cpu")) == content_hash(loaded)


@ROUND_TRIP
@given(configs(dtype="float32"))
def test_a_model_is_exported_exactly_or_refused_by_name(tmp_path, config):
    model = scrambled(config)
    try:
        export_checkpoint(model, tmp_path / "m")
    except ValueError as error:
        assert str(error).startswith("circuit_sparsity's format cannot")  # noqa: PT017  some are exported
    else:
        tokens = some_tokens(0, 2, CONTEXT)
        assert_same_logits(load_checkpoint(tmp_path / "m", device="cpu"), model, tokens)


PLAIN = ModelConfig(vocab_size=VOCAB, d_model=8, n_ctx=9, layers=uniform(2, 2, 4, 6), norm_eps=RMS_EPS)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layers": ()}, "no layers"),
        ({"layers": uniform(1, 2, 4, 6) + uniform(1, 2, 4, 5)}, "layers of unequal sizes"),
        ({"layers": uniform(1, 0, 4, 6)}, "a layer without heads"),
        ({"layers": uniform(1, 2, 4, 0)}, "a layer without an MLP"),
        ({"layers": ({"heads": (2, 3), "d_mlp": 4},)}, "heads of unequal sizes"),
        ({"layers": uniform(1, 3, 4, 6)}, "3 heads that do not divide d_model=8"),
        ({"norm": "none"}, "norm='none'"),
        ({"norm_eps": 1e-5}, "norm_eps=1e-05"),
        ({"activation": "gelu_tanh"}, "activation='gelu_tanh'"),
        ({"attention_scale": 0.7}, "attention_scale=0.7"),
        ({"output_vocab": 3}, "output_vocab=3"),
        ({"causal": False, "dtype": "float64"}, "causal=False, dtype='float64'"),
        ({"activation_sparsity": ActivationSparsity(fraction=0.1)}, "rounds to no channel"),
    ],
)
def test_what_the_format_cannot_express_is_named(tmp_path, change, named):
    model = Transformer(replace(PLAIN, **change), device="cpu")
    with pytest.raises(ValueError, match="cannot express") as error:
        export_checkpoint(model, tmp_path / "m")
    assert named in str(error.value)
    assert not list(tmp_path.iterdir())


def test_an_export_replaces_a_released_checkpoint_and_nothing_else(tmp_path):
    save_model(Transformer(PLAIN, device="cpu"), tmp_path / "ours")
    with pytest.raises(ValueError, match="is not a released checkpoint: it is left alone"):
        export_checkpoint(Transformer(PLAIN, device="cpu"), tmp_path / "ours")
    load_model(tmp_path / "ours")
    for seed in (1, 2):
        export_checkpoint(Transformer(PLAIN, seed=seed, device="cpu"), tmp_path / "theirs")
    assert torch.equal(
        load_checkpoint(tmp_path / "theirs", device="cpu").wte.weight,
        Transformer(PLAIN, seed=2, device="cpu").wte.weight,
    )


def test_the_tokenizer_comes_from_the_directory(tmp_path):
    tokenizer = train_tokenizer(["a b c"] * 9, 257)
    export_checkpoint(Transformer(PLAIN, device="cpu"), tmp_path / "m", tokenizer=tokenizer)
    assert load_tokenizer(tmp_path / "m").to_str() == tokenizer.to_str()
    (tmp_path / "m" / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        load_tokenizer(tmp_path / "m")
    with pytest.raises(ValueError, match=r"tokenizer\.json is missing"):
        load_tokenizer(tmp_path)


@ROUND_TRIP
@given(st.integers(0, 999), st.sampled_from([0.0, 0.3, 1.0]))
def test_any_node_circuit_comes_back(tmp_path, seed, density):
    model = scrambled(PLAIN, seed)
    draw = torch.Generator().manual_seed(seed)
    kept = {s: torch.rand(w, generator=draw) < density for s, w in node_sites(PLAIN).items()}
    circuit = channel_circuit(
        model, kept, task="brackets", model_hash=content_hash(model), metrics={"loss": 0.1}, token_edges=3
    )
    write_viz(circuit, tmp_path / "viz_data.pt", model)
    assert read_viz(tmp_path / "viz_data.pt", model) == circuit
    masks = read_masks(tmp_path / "viz_data.pt", model)
    assert bool(masks.pop("final").all())
    assert all(torch.equal(masks[site], kept[site]) for site in kept)


def test_a_released_circuit_keeps_their_channels_and_reports_the_last(released, request, tmp_path):
    model, reference = released
    path = DATA / request.node.callspec.params["released"] / "reference.pt"
    with pytest.warns(Dropped, match="final_resid keeps"):
        circuit = read_viz(path, model, task="random")
    kept = {}
    for node in circuit.nodes:
        kept.setdefault(hook_names(model.config)[node.site], []).append(node.channel)
    assert kept == {k: sorted(v.tolist()) for k, v in reference["circuit_data"].items() if k != "final_resid"}
    assert circuit.task == "random"
    write_viz(circuit, tmp_path / "viz_data.pt", model)
    assert read_viz(tmp_path / "viz_data.pt", model) == circuit


def test_circuits_that_the_format_cannot_say_are_refused(tmp_path):
    model, path = scrambled(PLAIN), tmp_path / "viz_data.pt"
    kept = {s: torch.ones(w, dtype=torch.bool) for s, w in node_sites(PLAIN).items()}
    circuit = channel_circuit(model, kept, task="t", model_hash=content_hash(model))
    with pytest.raises(ValueError, match=r"have all \d+ edges between their nodes"):
        write_viz(circuit.model_copy(update={"edges": circuit.edges[1:]}), path, model)
    with pytest.raises(ValueError, match="universe 'component'"):
        write_viz(circuit.model_copy(update={"universe": "component"}), path, model)
    with pytest.raises(ValueError, match="the circuit is of model"):
        write_viz(circuit, path, scrambled(PLAIN, 1))
    assert not path.exists()
    write_viz(circuit, path, model)
    with pytest.raises(ValueError, match="is a circuit of the model"):
        read_viz(path, scrambled(PLAIN, 1))


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("0.attn.q", [8], r"channels of 0\.attn\.q must be in 0\.\.7"),
        ("0.attn.q", [-1], r"channels of 0\.attn\.q must be in 0\.\.7"),
        ("0.attn.q", torch.tensor([0.5]), r"0\.attn\.q is not a list of channels"),
        ("0.attn.q", torch.ones(8, dtype=torch.bool), r"0\.attn\.q is not a list of channels"),
        ("0.attn.q", torch.tensor(3), r"0\.attn\.q is not a list of channels"),
        ("0.attn.q", [2**70], r"0\.attn\.q is not a list of channels"),
        ("0.attn.q", torch.ones(3, dtype=torch.long).to_sparse(), r"0\.attn\.q is not a list of channels"),
        ("0.attn.q", torch.ones(3, dtype=torch.long, device="meta"), r"0\.attn\.q is not a list of channels"),
        ("0.attn.q", "all", r"0\.attn\.q is not a list of channels"),
        ("0.attn.Q", [1], r"'0\.attn\.Q'; did you mean .*'0\.attn\.q'"),
        ("2.attn.q", [1], r"'2\.attn\.q'"),
        ("final_resid", None, r"circuit_data lacks final_resid"),
    ],
)
def test_a_circuit_that_does_not_fit_is_named(tmp_path, place, value, said):
    model, path = scrambled(PLAIN), tmp_path / "viz_data.pt"
    hooks = hook_names(PLAIN)
    data = {hooks[site]: torch.arange(w) for site, w in mask_widths(PLAIN).items()} | {place: value}
    torch.save({"circuit_data": {k: v for k, v in data.items() if v is not None}}, path)
    with pytest.raises(ValueError, match=said):
        read_viz(path, model)


def test_other_files_are_no_circuit(tmp_path):
    model, path = scrambled(PLAIN), tmp_path / "viz_data.pt"
    with pytest.raises(ValueError, match=r"viz_data\.pt is missing"):
        read_masks(path, model)
    torch.save({"nodes": []}, path)
    with pytest.raises(ValueError, match="has no circuit_data"):
        read_masks(path, model)
    torch.save([1], path)
    with pytest.raises(ValueError, match="holds no table of names"):
        read_masks(path, model)


@pytest.fixture
def copied(tmp_path):
    shutil.copytree(DATA / "catpos_bigram_rms_afrac", tmp_path / "m")
    return tmp_path / "m"


class Code:
    def __reduce__(self):
        return (Path.touch, (Path("pwned"),))


def damage(path, how):
    """Rewrite `final_model.pt` through `how`, a change of its tensors."""
    tensors = torch.load(path / "final_model.pt", weights_only=True)
    how(tensors)
    torch.save(tensors, path / "final_model.pt")


def test_damaged_weights_are_named(copied, monkeypatch):
    monkeypatch.chdir(copied)
    file = copied / "final_model.pt"
    whole = file.read_bytes()
    for data in (
        b"",
        whole[:100],
        whole[: len(whole) // 2],
        whole[:-10],
        b"not a model",
        pickle.dumps(Code()),
    ):
        file.write_bytes(data)
        with pytest.raises(ValueError, match=r"final_model\.pt is damaged or holds more than tensors"):
            load_checkpoint(copied, device="cpu")
    torch.save({"transformer.wte.weight": Code()}, file)
    with pytest.raises(ValueError, match="holds more than tensors"):
        load_checkpoint(copied, device="cpu")
    assert not (copied / "pwned").exists()
    torch.save({"transformer.wte.weight": [1.0]}, file)
    with pytest.raises(ValueError, match=r"transformer\.wte\.weight is not a tensor"):
        load_checkpoint(copied, device="cpu")
    file.unlink()
    with pytest.raises(ValueError, match=r"final_model\.pt is missing"):
        load_checkpoint(copied, device="cpu")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (lambda t: t.pop("transformer.h.1.ln_p2.weight"), r"lacks transformer\.h\.1\.ln_p2\.weight"),
        (lambda t: t.update(extra=torch.ones(2)), "has extra, which the config does not"),
        (
            lambda t: t.update({"lm_head.weight": torch.ones(63, 32)}),
            r"lm_head\.weight has shape \(63, 32\), the config says \(64, 32\)",
        ),
        (
            lambda t: t.update({"transformer.ln_f.weight": torch.ones(32, dtype=torch.long)}),
            r"transformer\.ln_f\.weight is not a dense tensor of floating-point numbers",
        ),
        (
            lambda t: t.update({"lm_head.weight": torch.ones(64, 32).to_sparse()}),
            r"lm_head\.weight is not a dense tensor",
        ),
        (
            lambda t: t.update({"lm_head.weight": torch.ones(64, 32, device="meta")}),
            r"lm_head\.weight is not a dense tensor",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(copied, how, said):
    damage(copied, how)
    with pytest.raises(ValueError, match=said):
        load_checkpoint(copied, device="cpu")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"block_size": float("nan")}, "block_size=nan"),
        ({"afrac": float("nan")}, "afrac=nan"),
        ({"afrac": float("inf")}, "afrac=inf"),
        ({"afrac": 0.0}, r"afrac=0\.0"),
        ({"afrac": 0.01}, r"afrac 0\.01 keeps no channel at attn\.in, attn\.q"),
        ({"afrac_loctypes": "attn_in,mlp_inn"}, "'mlp_inn'; did you mean 'mlp_in'"),
        ({"n_layer": 10**12}, "n_layer=1000000000000"),
        ({"n_layer": 3}, r"lacks transformer\.h\.2"),
        ({"n_layer": 1}, r"has transformer\.h\.1"),
        ({"n_head": True}, "n_head=True"),
        ({"d_model": "32"}, "d_model='32'"),
        ({"vocab_size": 10**7}, r"the config says \(10000000"),
        ({"d_pos_emb": 0}, "d_pos_emb=0"),
        ({"sink": True}, r"lacks transformer\.h\.0\.attn\.attn_imp\.sink_logit"),
        ({"activation_type": "swish"}, "activation_type='swish'"),
        ({"use_tied_aux_matrix": True}, "use_tied_aux_matrix must be false"),
        ({"n_mlp": 64}, "n_mlp=64 but d_mlp=128"),
    ],
)
def test_bad_configs_are_named(copied, changes, said):
    file = copied / "beeg_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ValueError, match=said):
        load_checkpoint(copied, device="cpu")


def test_damaged_configs_are_named(copied):
    file = copied / "beeg_config.json"
    for text in ("{", '{"n_layer": 2', "\xff", "[" * 100_000):
        file.write_bytes(text.encode("latin-1"))
        with pytest.raises(ValueError, match=r"beeg_config\.json is damaged"):
            load_checkpoint(copied, device="cpu")
    file.write_text("[]")
    with pytest.raises(ValueError, match="it holds no table"):
        load_checkpoint(copied, device="cpu")
    with pytest.raises(ValueError, match="no released checkpoint at"):
        load_checkpoint(copied / "nowhere", device="cpu")


def test_a_tied_model_whose_two_tables_differ_is_refused(tmp_path):
    shutil.copytree(DATA / "plain_layernorm", tmp_path / "m")
    damage(tmp_path / "m", lambda t: t.update({"lm_head.weight": t["lm_head.weight"] + 1}))
    with pytest.raises(ValueError, match=r"lm_head\.weight is not equal to transformer\.wte\.weight"):
        load_checkpoint(tmp_path / "m", device="cpu")


def test_weights_are_float32_and_the_models_own(copied):
    """As in the release's own code; matrices that share memory in the file do not in the model."""
    damage(copied, lambda t: t.update({n: x.bfloat16() for n, x in t.items()}))
    damage(copied, lambda t: t.update({"lm_head.weight": t["transformer.wte.weight"]}))
    model = load_checkpoint(copied, device="cpu")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(p.requires_grad for p in model.parameters())
    with torch.no_grad():
        model.head.weight.zero_()
    assert bool(model.wte.weight.any())
