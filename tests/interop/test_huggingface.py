"""GPT-2 models open as Transformers, and Transformers live as Hugging Face models, with the same logits."""

import json
import pickle
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from pellucid import ModelConfig, Transformer, generate, record, uniform
from pellucid.core import parts
from pellucid.core.checkpoint import content_hash
from pellucid.data import END_OF_TEXT, train_tokenizer
from pellucid.interop.huggingface import (
    PellucidConfig,
    PellucidForCausalLM,
    load_gpt2,
    to_huggingface,
    to_huggingface_tokenizer,
)
from tests.core.strategies import CONTEXT, VOCAB, configs, scrambled, some_tokens

SHAPE = {"vocab_size": VOCAB, "n_positions": 12, "n_embd": 24, "n_layer": 2, "n_head": 3}
SHAPE |= {"bos_token_id": None, "eos_token_id": None}


def gpt2(**options):
    """A GPT-2 whose every parameter is random, also those that begin at 0 or 1."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**(SHAPE | options))).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.3)
    return model


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n_inner": 7, "layer_norm_epsilon": 1e-3, "activation_function": "relu"},
        {"tie_word_embeddings": False, "scale_attn_weights": False, "activation_function": "gelu"},
        {"reorder_and_upcast_attn": True, "activation_function": "gelu_pytorch_tanh"},
    ],
)
def test_a_gpt2_keeps_its_logits_and_residual_stream(options, tmp_path):
    theirs = gpt2(**options)
    theirs.save_pretrained(tmp_path / "gpt2")
    tokens = some_tokens(0, 2, 12)
    want = theirs(tokens, output_hidden_states=True)
    for source in (theirs, tmp_path / "gpt2", str(tmp_path / "gpt2")):
        model = load_gpt2(source, device="cpu")
        torch.testing.assert_close(model(tokens), want.logits, atol=1e-4, rtol=0)
        stream = record(model, tokens, ["embed", "0.resid.post"])
        for ours, hidden in zip(stream.values(), want.hidden_states, strict=False):
            torch.testing.assert_close(ours, hidden, atol=1e-4, rtol=0)


def test_a_loaded_gpt2_is_a_copy():
    theirs = gpt2()
    model = load_gpt2(theirs, device="cpu")
    before = content_hash(model)
    with torch.no_grad():
        theirs.transformer.wte.weight.zero_()
    assert content_hash(model) == before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ({"add_cross_attention": True}, "add_cross_attention=True"),
        ({"activation_function": "silu"}, "unknown activation_function 'silu'"),
    ],
)
def test_what_a_transformer_has_not_is_refused_by_name(options, said):
    with pytest.raises(ValueError, match=said):
        load_gpt2(gpt2(**options))


class Code:
    def __reduce__(self):
        return (Path.touch, (Path("pwned"),))


def test_other_models_and_directories_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="got Linear"):
        load_gpt2(torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"cannot be torch\.float16"):
        load_gpt2(gpt2().half())
    with pytest.raises(ValueError, match=r"there is no .*config\.json"):
        load_gpt2("gpt2")
    gpt2().save_pretrained(tmp_path / "m")
    weights, config = tmp_path / "m" / "model.safetensors", tmp_path / "m" / "config.json"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_gpt2(tmp_path / "m")
    weights.unlink()
    (tmp_path / "m" / "pytorch_model.bin").write_bytes(pickle.dumps(Code()))
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_gpt2(tmp_path / "m")
    assert not (tmp_path / "pwned").exists()
    (tmp_path / "m" / "pytorch_model.bin").unlink()
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_gpt2(tmp_path / "m")
    weights.write_bytes(whole)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"n_layer": 3}))
    with pytest.raises(ValueError, match=r"lacks transformer\.h\.2"):
        load_gpt2(tmp_path / "m")
    config.write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ValueError, match="model_type is 'llama', not 'gpt2'"):
        load_gpt2(tmp_path / "m")
    config.write_text("{")
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_gpt2(tmp_path / "m")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    configs(causal=True),
    st.sampled_from(["float32", "float64", "bfloat16"]),
    st.integers(0, 9),
)
def test_any_causal_model_saves_and_loads_bit_for_bit(tmp_path, config, dtype, seed):
    model = scrambled(replace(config, dtype=dtype), seed)
    theirs = to_huggingface(model)
    tokens = some_tokens(seed, 2, CONTEXT)
    assert torch.equal(theirs(tokens).logits, model(tokens))
    theirs.save_pretrained(tmp_path / "m")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "m", local_files_only=True)
    assert isinstance(loaded, PellucidForCausalLM)
    assert torch.equal(loaded(tokens).logits, model(tokens))
    assert loaded.transformer.config == model.config
    assert content_hash(loaded.transformer) == content_hash(model)


def test_a_module_named_by_the_config_goes_along(tmp_path, monkeypatch):
    point = EntryPoint(name="halve", value="tests.core.test_parts:Halve", group="pellucid.parts")
    monkeypatch.setattr(parts, "entry_points", lambda group: [point])
    model = scrambled(replace(MODEL, mlp_input={"kind": "halve"}))
    to_huggingface(model).save_pretrained(tmp_path / "m")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "m", local_files_only=True)
    tokens = some_tokens(0, 2, 7)
    assert torch.equal(loaded(tokens).logits, model(tokens))


MODEL = ModelConfig(
    vocab_size=VOCAB, d_model=8, n_ctx=32, layers=uniform(2, 2, 4, 6), positions="learned", sink=True
)


@pytest.mark.parametrize("options", [{}, {"use_cache": True}])
def test_it_generates_what_pellucid_generates(options):
    """Also where the prompts are of different length, padded on the left."""
    model = scrambled(MODEL)
    prompts = [[1, 2, 3, 4, 5], [7, 8]]
    padded = torch.tensor([prompts[0], [0, 0, 0, *prompts[1]]])
    mask = torch.tensor([[1] * 5, [0, 0, 0, 1, 1]])
    theirs: Any = to_huggingface(model)
    new = theirs.generate(padded, attention_mask=mask, max_new_tokens=9, do_sample=False, **options)
    assert new[:, 5:].tolist() == generate(model, prompts, 9)


def test_labels_give_the_loss_of_the_next_token():
    model = scrambled(MODEL)
    tokens = some_tokens(0, 2, 7)
    labels = tokens.clone()
    labels[0, 3] = -100
    out = to_huggingface(model)(tokens, labels=labels)
    logp = model(tokens).log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]
    counts = labels[:, 1:] != -100
    torch.testing.assert_close(out.loss, -logp[counts].mean())


def test_the_tokenizer_goes_along(tmp_path):
    tokenizer = train_tokenizer(["for x in y:\n    print(x)\n"] * 9, 300)
    model = Transformer(replace(MODEL, vocab_size=300), device="cpu")
    to_huggingface(model, tokenizer).save_pretrained(tmp_path / "m")
    to_huggingface_tokenizer(tokenizer).save_pretrained(tmp_path / "m")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "m", local_files_only=True)
    for text in ("for y in x:", f"a{END_OF_TEXT}b", "\n    print ( x ) ."):
        assert theirs(text)["input_ids"] == tokenizer.encode(text).ids
        assert theirs.decode(theirs(text)["input_ids"]) == text
    batch = theirs(["for x", "x"], padding=True, return_tensors="pt")
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "m", local_files_only=True)
    assert loaded.generation_config.eos_token_id == loaded.generation_config.pad_token_id == 0
    assert loaded.generate(**batch, max_new_tokens=2).shape[0] == 2


def test_a_dtype_asked_for_is_the_models():
    theirs = to_huggingface(scrambled(MODEL))
    fields = theirs.config.transformer
    half = PellucidForCausalLM(PellucidConfig(transformer=fields, dtype="bfloat16"))
    assert half.transformer.config.dtype == "bfloat16"
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    with pytest.raises(ValueError, match="unknown dtype 'float16'"):
        PellucidForCausalLM(PellucidConfig(transformer=fields, dtype="float16"))


def test_models_that_predict_no_next_token_are_refused():
    with pytest.raises(ValueError, match="causal=False"):
        to_huggingface(Transformer(replace(MODEL, causal=False), device="cpu"))
    with pytest.raises(ValueError, match="output_vocab=3"):
        to_huggingface(Transformer(replace(MODEL, output_vocab=3), device="cpu"))
    with pytest.raises(ValueError, match="needs `transformer`"):
        PellucidForCausalLM(PellucidConfig())
    with pytest.raises(ValueError, match="unknown ModelConfig field 'd_modle'"):
        PellucidForCausalLM(PellucidConfig(transformer={"d_modle": 3}))


def test_only_this_module_imports_transformers():
    """And without the package it names the extra."""
    code = "import sys, pellucid, pellucid.interop, pellucid.interop.openai; assert 'transformers' not in sys.modules\n"
    code += "sys.modules['transformers'] = None\n"
    code += "try: import pellucid.interop.huggingface\nexcept ImportError as error: print(error)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install pellucid[hf]" in done.stdout
