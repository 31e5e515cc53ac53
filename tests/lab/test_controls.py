"""Controls: tasks that mean nothing and models that know nothing."""

import numpy as np
import pytest
import torch

from pellucid.lab.config import PruneConfig
from pellucid.lab.controls import Nonsense, Point, Shuffled, controls, curve, loss_at, untrained
from pellucid.lab.means import node_means
from pellucid.lab.prune import probe_of
from pellucid.lab.rank import RANKERS
from tests.core.strategies import scrambled
from tests.lab.toy import EDGES, ToyTask, toy_model

TEXT = np.random.default_rng(0).integers(0, 12, 4000).astype(np.uint16)
SEARCH = PruneConfig(steps=100, pairs=16, pool=64, measure=64, k_coefs=(3e-4, 1e-3))


def test_shuffled_answers_are_exchanged_in_half_of_the_pairs():
    batch, shuffled = ToyTask().pairs(400), Shuffled(ToyTask()).pairs(400)
    assert torch.equal(shuffled.tokens, batch.tokens)
    exchanged = (shuffled.answers != batch.answers).any(1).view(-1, 2)
    assert torch.equal(exchanged[:, 0], exchanged[:, 1])
    assert 0.4 < exchanged[:, 0].float().mean() < 0.6
    assert torch.equal(Shuffled(ToyTask()).pairs(400).answers, shuffled.answers)


def test_nonsense_asks_for_tokens_that_are_not_the_tasks():
    task = Nonsense(ToyTask(), vocab_size=12, seed=3)
    answers = task.pairs(5).answers
    assert answers.unique().numel() == 2
    assert not set(answers.unique().tolist()) & set(ToyTask().pairs(5).answers.unique().tolist())
    assert torch.equal(answers[::2], answers[1::2].flip(1))
    assert torch.equal(answers[0], answers[2])


def test_an_untrained_model_has_as_many_weights_and_none_of_the_trained_ones():
    model = scrambled(toy_model().config)
    with torch.no_grad():
        model.blocks[0].mlp.fc.weight[:, ::2] = 0
    fresh = untrained(model)
    weight, theirs = fresh.blocks[0].mlp.fc.weight, model.blocks[0].mlp.fc.weight
    assert weight.count_nonzero() == theirs.count_nonzero() < weight.numel()
    assert not set(weight[weight != 0].tolist()) & set(theirs[theirs != 0].tolist())


def test_the_least_loss_of_circuits_no_larger():
    points = [Point(1, 10, 0.6, 0.9), Point(2, 20, 0.2, 0.8), Point(3, 30, 0.1, 0.05)]
    assert loss_at(points, 25) == 0.2
    assert loss_at(points, 25, calibrated=False) == 0.8
    assert loss_at(points, 5) == pytest.approx(np.log(2))


def test_a_curve_goes_from_few_nodes_to_the_whole_model():
    model = toy_model()
    means = node_means(model, TEXT, seq_len=15)
    scores = RANKERS["attribution"](model, ToyTask(), means, SEARCH)
    points = curve(model, scores, probe_of(model, ToyTask(), means, SEARCH, 0), sizes=6)
    assert points[-1].nodes == sum(s.shape[1] for s in scores.values())
    assert [p.edges for p in points] == sorted(p.edges for p in points)
    assert points[-1].loss < 0.05


def test_a_search_finds_nothing_where_there_is_nothing():
    model = toy_model()
    means = node_means(model, TEXT, seq_len=15)
    found = controls(model, ToyTask(), means, TEXT, SEARCH)
    assert set(found) == {"shuffled", "nonsense", "untrained"}
    for points in found.values():
        assert loss_at(points, len(EDGES)) > 0.5
