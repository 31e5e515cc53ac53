"""Gates that every method which scores nodes or edges must pass, on compiled programs and on models with random weights."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid import LayerConfig, ModelConfig
from pellucid.bench.task import ProgramTask
from pellucid.compiled.library import PROGRAMS
from pellucid.compiled.model import compile_program
from pellucid.core.edges import EdgeTap
from pellucid.core.weights import weight_graph
from pellucid.lab.ablate import all_logits
from pellucid.lab.acdc import acdc
from pellucid.lab.attribute import atp, eap, eap_ig_activations, eap_ig_inputs, eap_query_key
from pellucid.lab.baselines import activation_norm, degree, random, reachability
from pellucid.lab.edge_masks import MaskConfig, edge_masks
from pellucid.lab.fills import ABLATIONS, clean_writes, fills, real
from pellucid.lab.node_masks import KeepNodes, node_masks
from pellucid.lab.patch import draw, patch_edges, patch_nodes
from pellucid.lab.scores import check_scores
from pellucid.lab.trace import trace
from tests.core.strategies import configs, scrambled
from tests.lab.toy import ToyTask, toy_model
from tests.lab.two_heads import Anything, exists

SHORT = MaskConfig(steps=6, batch=2)
ESTIMATES = {
    "patch_edges": patch_edges,
    "patch_nodes": patch_nodes,
    "atp": atp,
    "eap": eap,
    "eap_ig_inputs": partial(eap_ig_inputs, steps=3),
    "eap_ig_activations": partial(eap_ig_activations, steps=2),
    "eap_query_key": eap_query_key,
}
METHODS = ESTIMATES | {
    "random": random,
    "random nodes": partial(random, universe="node"),
    "degree": degree,
    "degree of nodes": partial(degree, universe="node"),
    "reachability": reachability,
    "activation_norm": activation_norm,
    "acdc": acdc,
    "edge_masks": partial(edge_masks, config=SHORT),
    "node_masks": partial(node_masks, config=SHORT),
    "trace": trace,
}
additive = configs(residual_activation="identity", bigram=False).filter(
    lambda c: not (c.keeps("resid.mid") or c.keeps("resid.post"))
)


def program(name):
    case = PROGRAMS[name]
    compiled = compile_program(case.program, case.vocab, case.max_len, causal=case.causal)
    return compiled.transformer.to("cpu"), ProgramTask(compiled, name)


def small(causal=True):
    layers = (LayerConfig(heads=(2, 3), d_mlp=5), LayerConfig(heads=(4,)))
    config = ModelConfig(vocab_size=11, d_model=8, n_ctx=6, layers=layers, causal=causal, positions="learned")
    return scrambled(config)


@pytest.mark.parametrize("ablation", ABLATIONS)
@pytest.mark.parametrize("name", METHODS)
def test_every_method_runs_on_every_kind_of_task_and_two_runs_are_equal(name, ablation):
    """Programs, two-answer tasks, causal and bidirectional models; nothing is drawn from the global generator."""
    for model, task in ((small(False), Anything()), (toy_model(), ToyTask())):
        first = check_scores(METHODS[name](model, task, pairs=3, ablation=ablation), model)
        torch.manual_seed(1)
        again = METHODS[name](model, task, pairs=3, ablation=ablation)
        assert first.universe == again.universe
        assert first.passes == again.passes
        for field in ("values", "effects", "kept"):
            one, two = getattr(first, field), getattr(again, field)
            assert (one is None) == (two is None)
            assert one is None or torch.equal(one, two)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_runs_on_a_program(name):
    model, task = program("hist")
    check_scores(METHODS[name](model, task, pairs=4), model)


@settings(max_examples=6, deadline=None)
@given(additive, st.integers(0, 9))
def test_a_corrupt_input_that_equals_the_clean_one_has_exactly_no_effect(config, seed):
    model, task = scrambled(config, seed), Anything(same=True)
    for name, method in ESTIMATES.items():
        effects = method(model, task, pairs=2, seed=seed).effects
        # Exact patching compares runs of different batch sizes, which round differently.
        assert effects.abs().max() <= (1e-12 if name.startswith("patch") else 0)
    for method in (acdc, activation_norm):
        assert not method(model, task, pairs=2, seed=seed).values.any()
    assert trace(model, task, pairs=2, seed=seed).values.max() < 1e-12
    assert not acdc(model, task, pairs=2, seed=seed).kept.any()


@pytest.mark.parametrize("ablation", ABLATIONS)
@settings(max_examples=8, deadline=None)
@given(config=additive, seed=st.integers(0, 9))
def test_all_parts_are_the_model_and_none_is_all_ablated(ablation, config, seed):
    model = scrambled(config, seed)
    batch, pool = draw(model, Anything(), 2, seed)
    replaced, whole = fills(model, batch, ablation, pool), all_logits(model, batch)
    nodes = len(exists(model)[0])

    def says(tap):
        return all_logits(model, batch, tap)

    def final(tap):
        return says(tap)[batch.mask]

    keep = torch.ones(len(batch), nodes, dtype=torch.float64)
    shape = exists(model).shape
    for tap in (KeepNodes(model, replaced, keep), EdgeTap(config, replaced, torch.ones(shape))):
        torch.testing.assert_close(final(tap), whole[batch.mask], atol=1e-8, rtol=1e-7)
    # With nothing kept the output reads the sum of all ablated writes.
    written = sum(x.sum(2) if x.dim() == 4 else x for x in replaced.values()) + bias(model, config)
    wanted = model.unembed(written)[batch.mask]
    for tap in (KeepNodes(model, replaced, 0 * keep), EdgeTap(config, replaced, torch.zeros(shape))):
        torch.testing.assert_close(final(tap), wanted, atol=1e-8, rtol=1e-7)
    if ablation == "resample":
        corrupt = model(batch.corrupt, mask=real(model, batch.corrupt_mask))[batch.mask]
        torch.testing.assert_close(wanted, corrupt, atol=1e-8, rtol=1e-7)
    assert set(replaced) == set(clean_writes(model, batch))


def bias(model, config):
    """What attention adds that no head writes."""
    if config.keeps("attn.out") is not None:
        return 0
    return sum(b.attn.proj.bias for b in model.blocks if b.attn is not None and b.attn.proj.bias is not None)


@pytest.mark.parametrize("name", ["hist", "reverse", "redundant_or", "induction"])
@pytest.mark.parametrize("ablation", ["zero", "mean", "resample"])
def test_edges_that_are_not_in_the_weights_have_no_effect(name, ablation):
    model, task = program(name)
    absent = exists(model) & ~weight_graph(model)
    assert absent.any()
    for key in ("patch_edges", "eap", "eap_ig_inputs", "eap_ig_activations", "eap_query_key"):
        assert ESTIMATES[key](model, task, pairs=8, ablation=ablation).values[absent].max() < 1e-6
    found = acdc(model, task, pairs=8, ablation=ablation)
    assert not found.values[absent].any()
    assert not found.kept[absent].any()


@settings(max_examples=6, deadline=None)
@given(additive, st.integers(0, 9))
def test_scores_fit_any_additive_model(config, seed):
    model = scrambled(config, seed)
    for method in METHODS.values():
        check_scores(method(model, Anything(), pairs=2, seed=seed), model)
