"""The transformer keeps its promises for every config: taps, sites, padding, caches, sinks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid import (
    Ablate,
    LayerConfig,
    Mask,
    ModelConfig,
    Patch,
    Recorder,
    Tap,
    Transformer,
    chain,
    generate,
    record,
)
from pellucid.core.attention import Cache, attention_pattern, fused_attention
from pellucid.core.sites import node_sites
from tests.core.strategies import CONTEXT, configs, scrambled, some_tokens

examples = settings(max_examples=40, deadline=None)


def close(a, b, atol=1e-9):
    torch.testing.assert_close(a, b, atol=atol, rtol=1e-7)


@examples
@given(configs(), st.integers(0, 99))
def test_an_identity_tap_on_the_cheap_sites_changes_nothing_bit_for_bit(config, seed):
    model, tokens = scrambled(config, seed), some_tokens(seed, 2, 7)
    assert torch.equal(model(tokens), model(tokens, tap=Tap.at(lambda site, x: x, None)))


@examples
@given(configs(), st.integers(0, 99))
def test_every_site_of_the_model_can_be_tapped_and_on_demand_ones_change_only_rounding(config, seed):
    model, tokens = scrambled(config, seed), some_tokens(seed, 2, 7)
    reads = [s for s in model.sites if s.endswith(".read")]
    others = [s for s in model.sites if s not in reads]
    for sites in (others, reads, [s for s in model.sites if not s.endswith(".in")]):
        recorder = Recorder(sites)
        close(model(tokens, tap=recorder), model(tokens))
        assert recorder.values.keys() == set(sites)


@examples
@given(configs(), st.integers(0, 99), st.data())
def test_patching_a_site_with_its_own_recording_changes_nothing(config, seed, data):
    model, tokens = scrambled(config, seed), some_tokens(seed, 2, 7)
    site = data.draw(st.sampled_from(sorted(model.sites)))
    values = record(model, tokens, [site])
    before = model(tokens, tap=Tap.at(lambda _, x: x, [site]))
    assert torch.equal(model(tokens, tap=Patch(values)), before)


@examples
@given(configs(), st.integers(0, 99), st.data())
def test_patching_a_site_of_the_residual_stream_with_another_runs_gives_that_run(config, seed, data):
    model = scrambled(config, seed)
    here, there = some_tokens(seed, 2, 7), some_tokens(seed + 1000, 2, 7)
    there[:, -1] = here[:, -1]  # the bigram table reads the newest token
    site = data.draw(st.sampled_from([s for s in model.sites if ".resid." in s] + ["embed", "final"]))
    patched = model(here, tap=Patch(record(model, there, [site])))
    close(patched[:, -1], model(there)[:, -1])


@examples
@given(configs(), st.lists(st.integers(1, 8), min_size=2, max_size=4), st.booleans(), st.integers(0, 99))
def test_a_padded_batch_equals_its_sequences_one_by_one(config, lengths, left, seed):
    model, width = scrambled(config, seed), max(lengths)
    tokens, mask = some_tokens(seed, len(lengths), width), torch.zeros(len(lengths), width, dtype=torch.bool)
    for row, n in enumerate(lengths):
        mask[row, slice(width - n, None) if left else slice(0, n)] = True
    logits = model(tokens, mask=mask)
    for row in range(len(lengths)):
        close(logits[row, mask[row]], model(tokens[row, mask[row]][None])[0])
    assert logits.isfinite().all()


@examples
@given(configs(causal=True), st.integers(0, 99), st.integers(1, 6))
def test_a_cache_gives_the_same_logits_in_any_chunks(config, seed, cut):
    model, tokens, cache = scrambled(config, seed), some_tokens(seed, 2, 7), Cache()
    parts = [model(tokens[:, :cut], cache=cache), model(tokens[:, cut:], cache=cache)]
    close(torch.cat(parts, dim=1), model(tokens))


@examples
@given(configs(causal=True), st.integers(0, 99), st.sampled_from([0.0, 1.0]))
def test_cached_generation_equals_uncached(config, seed, temperature):
    model = scrambled(config, seed)
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8]]
    options = {"temperature": temperature, "seed": seed}
    cached = generate(model, prompts, 6, **options)
    assert cached == generate(model, prompts, 6, use_cache=False, **options)
    assert cached == [t[:6] for t in generate(model, prompts, 7, **options)]


def test_generation_stops_at_the_stop_token_and_leaves_it_out():
    model = scrambled(ModelConfig(vocab_size=11, d_model=8, n_ctx=40, layers=(), bigram=True), 3)
    with torch.no_grad():
        model.bigram[:] = 0
        for a, b in ((1, 2), (2, 3), (3, 4), (4, 5)):
            model.bigram[a, b] = 1e3
    assert generate(model, [[1], [3]], 4, stop=4) == [[2, 3], []]


def test_a_tap_sees_the_prompt_then_one_token_a_call_and_the_cache_keeps_what_it_writes():
    model = scrambled(ModelConfig(vocab_size=11, d_model=8, n_ctx=20, layers=(LayerConfig(heads=(4, 4)),)), 1)
    seen = []

    def zero(site, x):
        seen.append(x.shape[1])
        return torch.zeros_like(x)

    tap = Tap.at(zero, ["0.attn.v"])
    out = generate(model, [[1, 2, 3]], 4, tap=tap)
    assert seen == [3, 1, 1, 1]
    assert out == generate(model, [[1, 2, 3]], 4, tap=tap, use_cache=False)


@examples
@given(
    st.integers(1, 4), st.integers(1, 9), st.sampled_from([1, 2, 5, 16]), st.booleans(), st.integers(0, 999)
)
def test_sinks_are_equal_in_fused_and_explicit_attention_in_value_and_gradient(heads, t, m, causal, seed):
    torch.manual_seed(seed)
    q, k, v = (torch.randn(2, heads, t, m, dtype=torch.float64, requires_grad=True) for _ in range(3))
    sink = torch.randn(heads, dtype=torch.float64, requires_grad=True)
    how = {"scale": 0.6, "sink": sink, "allowed": None, "causal": causal}
    fused = fused_attention(q, k, v, **how)
    explicit = attention_pattern(q, k, **how) @ v
    close(fused, explicit)
    up = torch.randn_like(fused)
    leaves = (q, k, v, sink)
    for a, b in zip(
        torch.autograd.grad(fused, leaves, up), torch.autograd.grad(explicit, leaves, up), strict=True
    ):
        close(a, b)


def test_a_sink_takes_its_share_of_attention():
    one = torch.ones(1, 1, 1, 1)
    how = {"scale": 1.0, "allowed": None, "causal": True}
    pattern = attention_pattern(one, one, sink=torch.tensor([1.0]), **how)
    assert pattern.item() == pytest.approx(0.5)  # the key's logit is 1 and the sink's too
    assert fused_attention(one, one, one, sink=torch.tensor([1.0]), **how).item() == pytest.approx(0.5)


@pytest.mark.parametrize("causal", [True, False])
def test_bfloat16_attention_agrees_with_float32(causal):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 9, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    how = {"scale": 0.25, "sink": torch.randn(3), "allowed": None, "causal": causal}
    low, high = fused_attention(q, k, v, **how), fused_attention(q.float(), k.float(), v.float(), **how)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), high, atol=2e-2, rtol=2e-2)
    assert all(g.isfinite().all() for g in torch.autograd.grad(low.sum(), (q, k, v)))


def test_the_norm_and_the_last_read_see_the_model_of_the_equations():
    """A two-layer model written out by hand."""
    config = ModelConfig(
        vocab_size=11, d_model=8, n_ctx=9, layers=(LayerConfig(heads=(4, 4), d_mlp=6),), sink=True,
        bigram=True, logits_bias=True, positions="learned", d_position=3, dtype="float64",
    )  # fmt: skip
    model, tokens = scrambled(config, 5), some_tokens(5, 1, 6)

    def norm(x, gain):
        return gain * x / (x.square().mean(-1, keepdim=True) + config.norm_eps).sqrt()

    block = model.blocks[0]
    attn, mlp = block.attn, block.mlp
    x = model.wte.weight[tokens[0]]
    position = norm(model.wpe.weight[:6], attn.read.position_norm.gain)
    read = torch.cat([norm(x, attn.read.norm.gain), position], dim=-1)
    q, k, v = (read @ attn.qkv.weight.T + attn.qkv.bias).split(8, dim=-1)
    mixes = []
    for h in range(2):
        part = slice(4 * h, 4 * h + 4)
        logits = q[:, part] @ k[:, part].T / 2
        weights = logits.exp().tril()
        mixes.append(weights @ v[:, part] / (weights.sum(-1, keepdim=True) + attn.sink[h].exp()))
    x = x + torch.cat(mixes, dim=-1) @ attn.proj.weight.T + attn.proj.bias
    position = norm(model.wpe.weight[:6], mlp.read.position_norm.gain)
    read = torch.cat([norm(x, mlp.read.norm.gain), position], dim=-1)
    act = torch.nn.functional.gelu(read @ mlp.fc.weight.T + mlp.fc.bias)
    x = x + act @ mlp.proj.weight.T + mlp.proj.bias
    logits = norm(x, model.norm.gain) @ model.head.weight.T + model.logits_bias + model.bigram[tokens[0]]
    close(model(tokens)[0], logits)


@examples
@given(configs(), st.integers(0, 99))
def test_logits_of_one_position_of_each_row_equal_those_of_the_whole_run(config, seed):
    model, tokens = scrambled(config, seed), some_tokens(seed, 3, 7)
    only = torch.tensor([6, 0, 3])
    close(model(tokens, only=only)[:, 0], model(tokens)[torch.arange(3), only])


def test_unembed_of_the_final_stream_is_the_logits_and_the_bigram_table_needs_tokens():
    model, tokens = (
        scrambled(ModelConfig(vocab_size=11, d_model=8, n_ctx=9, layers=(), bigram=True), 1),
        some_tokens(1, 2, 5),
    )
    final = record(model, tokens, ["final"])["final"]
    close(model.unembed(final, tokens), model(tokens), atol=1e-6)
    close(model.unembed(final), model(tokens) - model.bigram[tokens], atol=1e-5)


@examples
@given(configs(), st.integers(0, 99))
def test_masks_of_ones_keep_the_model_and_masks_of_zeros_put_the_fill_in_its_place(config, seed):
    model, tokens = scrambled(config, seed), some_tokens(seed, 2, 7)
    widths = node_sites(config)
    recorder = Recorder(widths)
    model(tokens, tap=recorder)
    for site, width in widths.items():
        assert recorder.values[site].shape == (2, 7, width)
    ones = {site: torch.ones(w, dtype=torch.float64) for site, w in widths.items()}
    fill = {site: torch.randn(w, dtype=torch.float64) for site, w in widths.items()}
    assert torch.equal(model(tokens, tap=Mask(ones, fill)), model(tokens))
    after = Recorder(widths)
    model(tokens, tap=chain(Mask({s: o * 0 for s, o in ones.items()}, fill), after))
    for site in widths:
        assert torch.equal(after.values[site], fill[site].expand(2, 7, -1))


def test_ablate_replaces_the_named_channels_only():
    model = scrambled(
        ModelConfig(vocab_size=11, d_model=8, n_ctx=9, layers=(LayerConfig(heads=(4,), d_mlp=6),)), 2
    )
    tokens, after = some_tokens(2, 2, 5), Recorder(["0.mlp.act"])
    before = record(model, tokens, ["0.mlp.act"])["0.mlp.act"]
    model(tokens, tap=chain(Ablate({"0.mlp.act": [1, 4]}, {"0.mlp.act": torch.full((6,), 7.0)}), after))
    expected = before.clone()
    expected[..., [1, 4]] = 7.0
    assert torch.equal(after.values["0.mlp.act"], expected)
    with pytest.raises(ValueError, match=r"channels of '0.mlp.act' must be in 0..5"):
        model(tokens, tap=Ablate({"0.mlp.act": [6]}))


def test_a_chain_applies_each_tap_at_its_own_sites_in_turn():
    model = scrambled(
        ModelConfig(vocab_size=11, d_model=8, n_ctx=9, layers=(LayerConfig(heads=(4,), d_mlp=6),)), 2
    )
    everything, pattern = Recorder(None), Recorder(["0.attn.pattern"])
    add = Tap.at(lambda _, x: x + 1, ["embed"])
    double = Tap.at(lambda _, x: 2 * x, ["embed"])
    tokens = some_tokens(2, 1, 4)
    model(tokens, tap=chain(add, chain(double, pattern), everything))
    close(everything.values["embed"], 2 * (model.wte.weight[tokens] + 1))
    assert pattern.values["0.attn.pattern"].shape == (1, 1, 4, 4)
    assert "0.attn.pattern" not in everything.values
    assert everything.values.keys() == {name for name, site in model.sites.items() if site.cheap}


def test_gradients_reach_what_a_recorder_keeps():
    model = scrambled(ModelConfig(vocab_size=11, d_model=8, n_ctx=9, layers=(LayerConfig(d_mlp=6),)), 2)
    recorder = Recorder(["0.mlp.act"])
    logits = model(some_tokens(0, 1, 4), tap=recorder)
    (gradient,) = torch.autograd.grad(logits.sum(), recorder.values["0.mlp.act"])
    assert gradient.abs().sum() > 0


@pytest.mark.parametrize(
    ("sites", "message"),
    [
        (["0.mlp.akt"], r"unknown site '0.mlp.akt'; did you mean '0.mlp.act'"),
        (["5.mlp.act"], r"unknown site '5.mlp.act'"),
        (["1.attn.q"], r"unknown site '1.attn.q'"),
        (["0.attn.in", "0.attn.q.read"], r"cannot be tapped in one run"),
    ],
)
def test_unknown_sites_and_sites_that_exclude_each_other_are_errors(sites, message):
    layers = (LayerConfig(heads=(4,), d_mlp=6), LayerConfig(d_mlp=6))
    model = Transformer(ModelConfig(vocab_size=11, d_model=8, n_ctx=9, layers=layers), device="cpu")
    with pytest.raises(ValueError, match=message):
        record(model, some_tokens(0, 1, 4), sites)


def test_head_writes_are_refused_where_abs_topk_follows_them():
    config = ModelConfig(
        vocab_size=11,
        d_model=8,
        n_ctx=9,
        layers=(LayerConfig(heads=(4,)),),
        activation_sparsity={"fraction": 0.5},
    )
    with pytest.raises(ValueError, match=r"heads do not add up; use '0.attn.out'"):
        record(Transformer(config, device="cpu"), some_tokens(0, 1, 4), ["0.attn.head"])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda m: m(torch.zeros(1, CONTEXT + 1, dtype=torch.long)),
            rf"{CONTEXT + 1} tokens do not fit into n_ctx",
        ),
        (lambda m: m(torch.zeros(4, dtype=torch.long)), "tokens must be integers of shape"),
        (lambda m: m(torch.zeros(1, 4)), "tokens must be integers of shape"),
        (lambda m: m(torch.full((1, 4), 11)), "token 11 is not in the vocabulary of 11"),
        (lambda m: m(torch.full((1, 4), -1)), "token -1 is not in the vocabulary of 11"),
        (lambda m: m(torch.zeros(1, 4, dtype=torch.long), mask=torch.ones(1, 3)), "mask has shape"),
        (
            lambda m: m(torch.zeros(1, 4, dtype=torch.long), tap=Patch({"final": torch.zeros(1)})),
            "patch at 'final'",
        ),
        (lambda m: generate(m, [[1], []], 2), "prompts must be non-empty"),
        (lambda m: generate(m, [[1]], CONTEXT + 1), "do not fit into n_ctx"),
        (lambda m: Recorder("final"), "must be a collection of names"),
    ],
)
def test_bad_input_is_named(call, message):
    model = Transformer(ModelConfig(vocab_size=11, d_model=8, n_ctx=CONTEXT, layers=()), device="cpu")
    with pytest.raises(ValueError, match=message):
        call(model)


def test_an_unknown_device_is_named():
    with pytest.raises(ValueError, match="device 'gpu7' cannot be used"):
        Transformer(ModelConfig(vocab_size=11, d_model=8, n_ctx=9, layers=()), device="gpu7")


def test_the_same_seed_gives_the_same_weights_and_leaves_the_global_generator_alone():
    config = ModelConfig(vocab_size=11, d_model=8, n_ctx=9, layers=(LayerConfig(heads=(4,), d_mlp=6),))
    state = torch.get_rng_state()
    a, b, c = (Transformer(config, seed=s, device="cpu").state_dict() for s in (1, 1, 2))
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert not torch.equal(a["blocks.0.mlp.fc.weight"], c["blocks.0.mlp.fc.weight"])
