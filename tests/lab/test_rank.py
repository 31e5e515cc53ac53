"""Rankings of nodes: one signature, and those that look find what is known to matter."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pellucid.core.circuit import count_edges
from pellucid.core.sites import node_sites
from pellucid.core.taps import Ablate
from pellucid.lab.ablate import keep_only, last_logits, partial_logits, task_loss
from pellucid.lab.config import PruneConfig
from pellucid.lab.discretize import Probe, discretize
from pellucid.lab.gates import HardConcreteGate
from pellucid.lab.means import node_means
from pellucid.lab.prune import everything, prune, sweep
from pellucid.lab.rank import RANKERS, running
from tests.lab.toy import EDGES, ToyTask, known_circuit, toy_model

SEARCH = PruneConfig(steps=150, pairs=16, pool=64, measure=64, k_coefs=(3e-4, 1e-3))
TEXT = np.random.default_rng(0).integers(0, 12, 4000).astype(np.uint16)


@pytest.fixture(scope="module")
def model():
    return toy_model()


@pytest.fixture(scope="module")
def means(model):
    return node_means(model, TEXT, seq_len=15)


@pytest.mark.parametrize("method", RANKERS)
def test_every_ranking_scores_every_node_and_depends_on_the_seed_alone(method, model, means):
    search = PruneConfig(steps=3, pairs=8, pool=32, measure=32, k_coefs=(3e-4, 1e-3))
    first, again, other = (RANKERS[method](model, ToyTask(), means, search, seed=seed) for seed in (0, 0, 1))
    tries = 2 if method in ("learned", "hard_concrete") else 1
    assert {site: tuple(s.shape) for site, s in first.items()} == {
        site: (tries, width) for site, width in node_sites(model.config).items()
    }
    assert all(torch.equal(first[site], again[site]) for site in first)
    assert any(not torch.equal(first[site], other[site]) for site in first)


@pytest.mark.parametrize("method", ["learned", "hard_concrete", "attribution"])
def test_rankings_that_look_put_the_known_circuit_on_top(method, model, means):
    scores = RANKERS[method](model, ToyTask(), means, SEARCH)
    flat = torch.cat([s[0] for s in scores.values()])
    known = torch.cat(list(known_circuit(model).values()))
    top = flat.topk(int(known.sum())).indices
    assert known[top].sum() >= known.sum() - 1


def test_attribution_is_what_freezing_a_node_does_to_first_order(model, means):
    """For the value channel, whose effect on the logits is linear, the sign-free score follows the true change."""
    search = PruneConfig(measure=64, pool=64, pairs=16)
    scores = RANKERS["attribution"](model, ToyTask(), means, search)
    batch = ToyTask().pairs(64, seed=0)
    base = task_loss(model, ToyTask(), batch)
    change = {
        c: abs(
            task_loss(model, ToyTask(), batch, Ablate({"0.attn.v": [c]}, {"0.attn.v": means["0.attn.v"]}))
            - base
        )
        for c in range(8)
    }
    assert max(change, key=lambda c: change[c]) == int(scores["0.attn.v"][0].argmax()) == 0


def test_tied_queries_and_keys_are_kept_together(model, means):

    scores = RANKERS["learned"](model, ToyTask(), means, replace(SEARCH, tied_qk=True, steps=20))
    assert torch.equal(scores["0.attn.q"], scores["0.attn.k"])
    assert list(scores) == list(node_sites(model.config))


def test_hard_concrete_gates_cost_as_often_as_they_are_open():
    x = torch.linspace(-0.5, 0.5, 11).repeat(20_000, 1)
    gates, size = HardConcreteGate()(x, torch.Generator().manual_seed(0))
    assert gates.min() == 0
    assert gates.max() == 1
    torch.testing.assert_close((gates > 0).float().mean(0), size[0], atol=0.015, rtol=0)


def test_a_third_of_the_pairs_run_nothing_and_the_others_any_share():
    runs = running(4000, {"a": 200}, torch.Generator().manual_seed(0))["a"].float().mean(1)
    assert 0.30 < (runs == 0).float().mean() < 0.37
    shares = runs[runs > 0]
    assert abs(shares.mean() - 0.5) < 0.03
    assert shares.std() == pytest.approx(1 / 12**0.5, abs=0.03)  # uniform


def test_partial_ablation_is_the_model_or_the_circuit_at_its_ends(model, means):
    batch = ToyTask().pairs(16)
    kept = {site: torch.zeros(w, dtype=torch.bool) for site, w in node_sites(model.config).items()}
    whole = last_logits(model, batch)
    for share, expected in ((0.0, whole), (1.0, None)):
        found = partial_logits(model, batch, kept, means, share=share, rows=8)
        if expected is None:
            expected = last_logits(model, batch, Ablate(dict.fromkeys(kept), means))
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(
        partial_logits(model, batch, everything(model), means), whole, atol=1e-6, rtol=0
    )


def test_a_probe_that_ablates_in_part_takes_the_larger_loss(model, means):
    kept = known_circuit(model)
    mean, stochastic = (
        Probe(model, ToyTask(), means, 0.15, ablation=a, pairs=64) for a in ("mean", "stochastic")
    )
    found, batch = stochastic(kept), stochastic.scored
    partial = partial_logits(model, batch, kept, means, seed=0)
    own = last_logits(model, stochastic.scored, keep_only(kept, means))
    assert found.loss == pytest.approx(
        max(
            stochastic.loss(found.calibration(own), stochastic.scored),
            stochastic.loss(found.calibration(partial), batch),
        ),
        abs=1e-5,
    )
    assert mean(kept).loss <= found.loss
    moved = abs(
        stochastic.loss(found.calibration(own), batch) - stochastic.loss(found.calibration(partial), batch)
    )
    for shift in (moved + 1e-4, moved - 1e-4):
        probe = Probe(model, ToyTask(), means, 0.15, ablation="stochastic", shift=shift, pairs=64)
        assert probe(kept).reached == (shift > moved)


def test_both_ablations_find_the_known_circuit(model, means):

    for ablation in ("mean", "stochastic"):
        circuit = prune(model, ToyTask(), means, config=replace(SEARCH, steps=300, ablation=ablation))
        assert {(str(e.writer), str(e.reader)) for e in circuit.edges} == EDGES


def test_a_sweep_ends_each_circuit_at_its_own_target(model, means):
    circuits = sweep(model, ToyTask(), means, (0.05, 0.4), config=SEARCH)
    assert [c.metrics["target"] for c in circuits] == [0.05, 0.4]
    assert all(c.metrics["verdict"] == "reached" for c in circuits)
    assert len(circuits[1].edges) <= len(circuits[0].edges)


def test_a_target_below_the_whole_models_loss_is_said_and_not_searched(model, means):
    search = PruneConfig(target=1e-9, measure=64, pool=64, pairs=16)
    metrics = prune(model, ToyTask(), means, config=search).metrics
    assert str(metrics["verdict"]).startswith("the whole model's loss of 0.0")
    assert (metrics["searched"], metrics["reached"]) == (False, False)


def test_random_rankings_need_more_than_learned_ones(model, means):
    probe = Probe(model, ToyTask(), means, 0.15, pairs=64)
    sizes = {}
    for method in ("learned", "random"):
        scores = RANKERS[method](model, ToyTask(), means, SEARCH)
        sizes[method] = count_edges(model, discretize({s: x[0] for s, x in scores.items()}, probe).kept)
    assert sizes["learned"] * 3 < sizes["random"]


def test_means_by_position_are_each_positions_own(model):
    tokens = np.arange(1 + 4 * 8).astype(np.uint16) % 12
    by_position = node_means(model, tokens, seq_len=8, by_position=True)
    overall = node_means(model, tokens, seq_len=8)
    for site, mean in by_position.items():
        assert mean.shape == (8, overall[site].shape[0])
        torch.testing.assert_close(mean.mean(0), overall[site], atol=1e-6, rtol=1e-5)
    circuit = prune(model, ToyTask(), by_position, config=PruneConfig(steps=2, pairs=4, pool=16, measure=16))
    assert circuit.metrics["full_task_loss"] < 0.1
