"""Attribution estimates what exact patching measures: exactly where the model is linear, in sum where it is not."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.lab.attribute import atp, eap, eap_ig_activations, eap_ig_inputs, eap_query_key
from pellucid.lab.fills import ABLATIONS
from pellucid.lab.patch import patch_edges, patch_nodes
from tests.core.strategies import configs, scrambled
from tests.lab.two_heads import NODE_EFFECTS, Anything, TwoTokens, edge_effects, two_heads

EDGE_METHODS = (eap, eap_ig_inputs, eap_ig_activations, eap_query_key)
smooth = configs(
    residual_activation="identity", bigram=False, activation_sparsity=None, activation="gelu", norm_eps=0.1
).filter(lambda c: any(layer.heads for layer in c.layers))


def close(found, wanted, scale=1e-5):
    """Equal, to so much of the largest effect."""
    torch.testing.assert_close(found, wanted, rtol=0, atol=scale * max(1e-3, float(wanted.abs().max())))


@pytest.mark.parametrize("method", EDGE_METHODS)
def test_two_heads_by_hand(method):
    close(method(two_heads(), TwoTokens(), pairs=2).effects, edge_effects())
    close(patch_edges(two_heads(), TwoTokens(), pairs=2).effects, edge_effects())


def test_two_heads_nodes_by_hand():
    close(atp(two_heads(), TwoTokens(), pairs=2).effects, torch.tensor(NODE_EFFECTS))
    assert atp(two_heads(), TwoTokens(), pairs=2).values.tolist() == [1, 2, 3]


@settings(max_examples=12, deadline=None)
@given(smooth, st.sampled_from(ABLATIONS), st.integers(0, 9))
def test_a_linear_model_is_attributed_exactly(config, ablation, seed):
    """No norm, no MLP, and heads that attend to all tokens alike."""
    layers = tuple(replace(layer, d_mlp=0) for layer in config.layers)
    model = scrambled(replace(config, layers=layers, norm="none", norm_bias=False), seed)
    with torch.no_grad():
        for block in model.blocks:
            if block.attn is not None:
                block.attn.qkv.weight[: 2 * block.attn.width] = 0
                if block.attn.qkv.bias is not None:
                    block.attn.qkv.bias[: 2 * block.attn.width] = 0
    options = {"pairs": 3, "seed": seed, "ablation": ablation}
    exact = patch_edges(model, Anything(), **options).effects
    for method in EDGE_METHODS:
        close(method(model, Anything(), **options).effects, exact)
    close(atp(model, Anything(), **options).effects, patch_nodes(model, Anything(), **options).effects)


@settings(max_examples=8, deadline=None)
@given(smooth, st.sampled_from(ABLATIONS), st.integers(0, 9))
def test_integrated_effects_out_of_a_writer_sum_to_its_exact_effect(config, ablation, seed):
    model, options = scrambled(config, seed), {"pairs": 2, "seed": seed, "ablation": ablation}
    exact = patch_nodes(model, Anything(), **options).effects
    along_input = eap_ig_inputs(model, Anything(), **options, steps=60).effects.sum(0)
    along_each = eap_ig_activations(model, Anything(), **options, steps=60).effects.sum(0)
    close(along_input[0], exact[0], 2e-2)
    close(along_each, exact, 2e-2)


@settings(max_examples=12, deadline=None)
@given(smooth, st.sampled_from(ABLATIONS), st.integers(0, 9))
def test_the_query_key_fix_is_exact_where_the_softmax_is_the_only_nonlinearity(config, ablation, seed):
    layer = replace(next(layer for layer in config.layers if layer.heads), d_mlp=0)
    model = scrambled(replace(config, layers=(layer,), norm="none", norm_bias=False), seed)
    options = {"pairs": 3, "seed": seed, "ablation": ablation}
    close(
        eap_query_key(model, Anything(), **options).effects, patch_edges(model, Anything(), **options).effects
    )


@settings(max_examples=8, deadline=None)
@given(smooth, st.integers(0, 9))
def test_what_stands_in_padding_does_not_count(config, seed):
    def scramble_padding(batch):
        return replace(
            batch,
            tokens=torch.where(batch.mask, batch.tokens, 3),
            corrupt=torch.where(batch.mask, batch.corrupt, 4),
        )

    model, other = scrambled(config, seed), Anything(change=scramble_padding)
    for method in (*EDGE_METHODS, atp, patch_edges):
        close(method(model, Anything(), pairs=3).effects, method(model, other, pairs=3).effects, 1e-6)


def test_the_price_is_said():
    model, pairs = two_heads(), {"pairs": 2}
    assert eap(model, TwoTokens(), **pairs).passes == 5
    assert eap_ig_inputs(model, TwoTokens(), steps=7, **pairs).passes == 2 + 3 * 7
    assert eap_ig_activations(model, TwoTokens(), steps=7, **pairs).passes == 2 + 3 * 7 * 3
    assert eap_query_key(model, TwoTokens(), **pairs).passes == 6 + 2 * 1


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        eap_ig_inputs(two_heads(), TwoTokens(), steps=0)
    with pytest.raises(ValueError, match="unknown ablation 'zeros'; did you mean 'zero'"):
        eap(two_heads(), TwoTokens(), ablation="zeros")
