"""Edge pruning: a model without some edges is what it says, and the known edges of the toy circuit are found."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pellucid import Recorder, Tap, Transformer, chain
from pellucid.core.checkpoint import content_hash
from pellucid.core.circuit import channel_circuit, count_edges, kept_masks, matrices
from pellucid.core.config import ActivationSparsity
from pellucid.core.sites import node_sites
from pellucid.lab.ablate import keep_only, last_logits, task_loss
from pellucid.lab.config import PruneConfig
from pellucid.lab.edge_prune import (
    around,
    circuit_edges,
    edge_model,
    gated,
    gated_circuit,
    learn_edges,
    prune_edges,
)
from pellucid.lab.extract import extract
from pellucid.lab.means import node_means
from tests.core.strategies import scrambled
from tests.lab.toy import CIRCUIT, EDGES, ToyTask, toy_model

SEARCH = PruneConfig(steps=100, pairs=8, pool=64, measure=64, k_coefs=(1e-3, 1e-2))
TEXT = np.random.default_rng(0).integers(0, 12, 4000).astype(np.uint16)


def random_edges(model, seed=1, share=0.5):
    """A random mask of each matrix."""
    draw = torch.Generator().manual_seed(seed)
    return {(w, r): torch.rand(weight.shape, generator=draw) < share for w, r, weight in matrices(model)}


def whole_circuit(model, kept=None, task="toy"):
    if kept is None:
        kept = {site: torch.ones(w, dtype=torch.bool) for site, w in node_sites(model.config).items()}
    return channel_circuit(model, kept, task=task, model_hash=content_hash(model))


def some_nodes(model, seed=2, share=0.7):
    draw = torch.Generator().manual_seed(seed)
    return {site: torch.rand(w, generator=draw) < share for site, w in node_sites(model.config).items()}


def names(circuit):
    return {(str(e.writer), str(e.reader)) for e in circuit.edges}


@pytest.fixture(scope="module")
def model():
    """The toy, with two more weights between the nodes that its circuit needs: no choice of nodes is without them."""
    model = toy_model()
    with torch.no_grad():
        model.blocks[0].attn.qkv.weight[8, 0] = 0.1
        model.blocks[0].attn.qkv.weight[16, 2] = 0.1
    return model


@pytest.fixture(scope="module")
def means(model):
    return node_means(model, TEXT, seq_len=15)


@pytest.fixture(scope="module")
def noisy(model):
    """The known circuit with nodes that it does not need, and their edges."""
    kept = {site: torch.arange(w) < 3 for site, w in node_sites(model.config).items()}
    for site, channels in CIRCUIT.items():
        kept[site][channels] = True
    return whole_circuit(model, kept)


@pytest.fixture(scope="module")
def pruned(model, noisy, means):
    return prune_edges(model, ToyTask(), noisy, means, config=SEARCH)


@pytest.mark.parametrize("bias", [True, False])
def test_with_all_edges_kept_the_model_is_the_same(bias):
    model = scrambled(replace(toy_model().config, linear_bias=bias))
    means = {site: torch.full((w,), 0.3) for site, w in node_sites(model.config).items()}
    tokens = ToyTask().pairs(4).tokens
    kept = {key: torch.ones_like(mask) for key, mask in random_edges(model).items()}
    same = edge_model(model, kept, means)
    assert same.config.linear_bias
    assert torch.equal(same(tokens), model(tokens))
    assert torch.equal(edge_model(model, whole_circuit(model), means)(tokens), model(tokens))


def by_hand(model, tokens, edges, means, kept):
    """Logits with what the cut edges carry above their mean subtracted from what their readers get."""
    sites = [*node_sites(model.config), "0.attn.mix"]
    held = Recorder(sites)

    def subtract(site, x):
        for writer, reader, weight in matrices(model):
            if reader == site:
                source = held.values["0.attn.mix" if writer == "0.attn.v" else writer]
                change = (source - means[writer]) @ (weight * ~edges[writer, reader]).T
                before = model.blocks[0].mlp.fc(source) if reader == "0.mlp.act" else x
                x = torch.relu(before - change) if reader == "0.mlp.act" else before - change
        return x

    return model(tokens, tap=chain(Tap.at(subtract, sites), keep_only(kept, means), held))


@pytest.mark.parametrize("seed", range(4))
def test_a_cut_edge_carries_its_mean(model, seed):
    model = scrambled(model.config, seed).double()
    draw = torch.Generator().manual_seed(seed)
    means = {
        site: torch.randn(w, generator=draw, dtype=torch.float64)
        for site, w in node_sites(model.config).items()
    }
    edges, tokens = random_edges(model, seed), ToyTask().pairs(4).tokens
    expected = by_hand(model, tokens, edges, means, some_nodes(model, share=1.0))
    torch.testing.assert_close(edge_model(model, edges, means)(tokens), expected, atol=1e-10, rtol=1e-8)
    assert not torch.allclose(expected, model(tokens))
    kept = some_nodes(model, seed)
    expected = by_hand(model, tokens, around(kept, edges), means, kept)
    cut = edge_model(model, around(kept, edges), means)
    torch.testing.assert_close(cut(tokens, tap=keep_only(kept, means)), expected, atol=1e-10, rtol=1e-8)
    torch.testing.assert_close(extract(cut, kept, means)(tokens), expected, atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("competing", [False, True])
def test_gates_on_a_small_circuit_are_the_cut_model(model, competing):
    """What the gates learn from is what is measured, where the circuit is extracted and where it cannot be."""
    sparsity = ActivationSparsity(fraction=0.5, sites=("mlp.act",)) if competing else None
    model = scrambled(replace(model.config, activation_sparsity=sparsity), 5).double()
    means = {site: torch.full((w,), 0.3).double() for site, w in node_sites(model.config).items()}
    kept, tokens = some_nodes(model), ToyTask().pairs(4).tokens
    edges = circuit_edges(model, whole_circuit(model, kept))
    module, places = gated_circuit(model, kept, edges, means)
    assert isinstance(module, Transformer) == competing
    chosen = torch.rand(sum(len(p) for p in places), generator=torch.Generator().manual_seed(0)) < 0.5
    cut = {key: mask.clone() for key, mask in edges.items()}
    for p, on in zip(places, chosen.split([len(p) for p in places]), strict=True):
        assert edges[p.writer, p.reader][p.to, p.of].all()
        cut[p.writer, p.reader][p.to, p.of] = on
    left_out = sum(int(m.sum()) for m in edges.values()) - len(chosen)
    assert left_out == 0 if competing else left_out < 20  # extraction leaves out edges with no effect
    options = {"tap": keep_only(kept, means)} if competing else {}
    state = gated(module.state_dict(), places, chosen.double())
    got = torch.func.functional_call(module, state, (tokens,), options)
    expected = edge_model(model, around(kept, cut), means)(tokens, tap=keep_only(kept, means))
    torch.testing.assert_close(got, expected, atol=1e-10, rtol=1e-8)


def test_the_known_edges_are_found_and_nothing_else(pruned, noisy, model, means):
    assert names(pruned) == EDGES < names(noisy)
    kept = {}
    for node in pruned.nodes:
        kept.setdefault(node.site, []).append(node.channel)
    assert kept == {site: channels for site, channels in CIRCUIT.items() if channels}
    m = pruned.metrics
    assert m["verdict"] == "reached"
    assert m["edges"] == len(pruned.edges) == 3
    assert m["node_circuit_edges"] == len(noisy.edges) > 30
    assert m["calibrated_task_loss"] <= 0.15
    assert m["ablated_task_loss"] > 0.65  # chance is ln 2
    assert pruned.model == content_hash(model)


def test_losses_are_those_of_the_cut_model(pruned, model, means):
    kept, batch, task = kept_masks(pruned, model), ToyTask().pairs(64, seed=0, split="test"), ToyTask()
    assert count_edges(model, kept) == 5
    cut = edge_model(model, pruned, means)
    assert count_edges(cut, kept) == 3
    loss = task_loss(cut, task, batch, keep_only(kept, means))
    assert loss == pytest.approx(pruned.metrics["circuit_task_loss"])
    assert loss != pytest.approx(task_loss(model, task, batch, keep_only(kept, means)), abs=1e-7)
    assert pruned.metrics["full_task_loss"] == pytest.approx(task_loss(model, task, batch))
    full, own = last_logits(model, batch), last_logits(cut, batch, keep_only(kept, means))
    p, q = full.log_softmax(-1), own.log_softmax(-1)
    assert pruned.metrics["kl"] == pytest.approx((p.exp() * (p - q)).sum(-1).mean().item(), rel=1e-4)


def test_the_same_seed_finds_the_same_edges_and_tries_do_not_meet(model, noisy, means, pruned):
    assert prune_edges(model, ToyTask(), noisy, means, config=SEARCH) == pruned
    kept, edges = kept_masks(noisy, model), circuit_edges(model, noisy)
    module, places = gated_circuit(model, kept, edges, means)
    search = replace(SEARCH, steps=10, init_noise=0.0, precision="float32")
    both = learn_edges(module, places, ToyTask(), search)
    for i, k_coef in enumerate(SEARCH.k_coefs):
        alone = learn_edges(module, places, ToyTask(), replace(search, k_coefs=(k_coef,)))
        torch.testing.assert_close(both[i], alone[0])


def test_a_target_out_of_reach_is_said_so_and_the_circuit_left_as_it_is(model, noisy, means):
    missed = prune_edges(model, ToyTask(nonsense=True), noisy, means, config=SEARCH)
    assert missed.metrics["verdict"] == "unreachable"
    assert missed.metrics["edges"] == missed.metrics["node_circuit_edges"] == len(noisy.edges)
    assert (missed.nodes, missed.edges) == (noisy.nodes, noisy.edges)


def test_an_edge_pruned_circuit_can_be_pruned_again_and_does_not_grow(model, pruned, means):
    again = prune_edges(model, ToyTask(), pruned, means, config=replace(SEARCH, steps=20))
    assert names(again) <= EDGES
    assert again.metrics["node_circuit_edges"] == 3
    assert again.metrics["reached"]


def test_a_circuit_of_another_model_or_task_is_refused(model, noisy, means):
    with pytest.raises(ValueError, match="the circuit is of task 'other', this is task 'toy'"):
        prune_edges(model, ToyTask(), noisy.model_copy(update={"task": "other"}), means)
    with pytest.raises(ValueError, match=f"the circuit is of model {noisy.model}, this is model"):
        prune_edges(scrambled(model.config), ToyTask(), noisy, means)
    stray = noisy.edges[0].model_copy(update={"reader": noisy.edges[0].writer})
    with pytest.raises(ValueError, match=r"the model has no edge 0\.attn\.in:0 -> 0\.attn\.in:0"):
        edge_model(model, noisy.model_copy(update={"edges": (stray,)}), means)
    by_position = {site: mean.expand(16, -1) for site, mean in means.items()}
    with pytest.raises(ValueError, match=r"the mean of '0\.attn\.in' must have shape"):
        edge_model(model, noisy, by_position)


def test_edges_are_cut_from_a_circuit_that_moves_further_than_the_search_asked(model, noisy, means, pruned):
    strict = replace(SEARCH, ablation="stochastic", shift=1e-9)
    found = prune_edges(model, ToyTask(), noisy, means, config=strict)
    assert found.metrics["verdict"] == "reached"
    assert len(pruned.edges) <= len(found.edges) < len(noisy.edges)
