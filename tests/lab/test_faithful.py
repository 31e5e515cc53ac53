"""Tests of faithfulness: nothing is amiss with the whole model, and a circuit that only cancels is caught."""

import numpy as np
import pytest
import torch

from pellucid.core.sites import node_sites
from pellucid.lab.ablate import last_logits, task_loss
from pellucid.lab.discretize import Calibration
from pellucid.lab.faithful import correlate, faithfulness, kl, resampled_logits, text_kl
from pellucid.lab.means import node_means
from pellucid.lab.prune import everything
from tests.lab.toy import ToyTask, known_circuit, toy_model

TEXT = np.random.default_rng(0).integers(0, 12, 4000).astype(np.uint16)
SAME = Calibration(torch.ones(()), torch.zeros(12))


@pytest.fixture(scope="module")
def model():
    return toy_model().eval()


@pytest.fixture(scope="module")
def means(model):
    return node_means(model, TEXT, seq_len=15)


def test_the_whole_model_is_faithful_to_itself(model, means):
    batch = ToyTask().pairs(32, split="test")
    found = faithfulness(model, ToyTask(), batch, everything(model), means, SAME)
    assert found["partial_task_loss"] == pytest.approx(task_loss(model, ToyTask(), batch), abs=1e-5)
    assert found["resample_task_loss"] == pytest.approx(task_loss(model, ToyTask(), batch), abs=1e-5)
    for name in ("partial_shift", "kl", "pattern_distance"):
        assert found[name] == pytest.approx(0, abs=1e-5)
    assert found["activation_correlation"] == pytest.approx(1, abs=1e-5)


def test_the_known_circuit_passes_every_test(model, means):
    found = faithfulness(
        model, ToyTask(), ToyTask().pairs(32, split="test"), known_circuit(model), means, SAME
    )
    assert found["partial_shift"] < 0.05
    assert found["resample_task_loss"] < 0.1
    assert found["activation_correlation"] > 0.95
    assert found["pattern_distance"] < 0.1


def test_a_circuit_that_needs_the_rest_frozen_is_caught(means):
    """A second head that the model does not use in the end: what it writes, it also takes away. Kept without its half
    that takes away, it does the task; with the rest running it does not."""
    model = toy_model().eval()
    proj = model.blocks[0].attn.proj
    with torch.no_grad():  # channel 4 carries what channel 3 does, and the logits read their difference
        proj.weight[4] = proj.weight[3]
        model.head.weight[:, 4] = -model.head.weight[:, 3]
    fill = node_means(model, TEXT, seq_len=15)
    batch = ToyTask().pairs(32, split="test")
    assert task_loss(model, ToyTask(), batch) > 0.6  # the model cannot do the task
    found = faithfulness(model, ToyTask(), batch, known_circuit(model), fill, SAME)
    assert found["partial_shift"] > 0.15
    assert found["kl"] > 0.01


def test_with_nothing_kept_the_other_prompts_logits_come_out(model):
    batch = ToyTask().pairs(16)
    nothing = {site: torch.zeros(w, dtype=torch.bool) for site, w in node_sites(model.config).items()}
    # prompts of a pair end alike, but for those of one token more than the first
    long = batch.select_pairs((batch.positions[::2] > 1).nonzero()[:, 0])
    other = last_logits(model, long.select(torch.arange(len(long)).view(-1, 2).flip(1).flatten()))
    torch.testing.assert_close(resampled_logits(model, long, nothing, model), other, atol=1e-5, rtol=0)


def test_divergence_and_correlation_equal_hand_computations():
    p, q = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    assert kl(p, q) == pytest.approx(0.5 * np.log(2) + 0.5 * np.log(2 / 3))
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    y = torch.stack([2 * x[:, 0] + 1, -x[:, 1], torch.ones(50)], dim=1)
    assert correlate(x, y).tolist() == pytest.approx([1, -1])  # what is constant is left out


def test_a_circuit_costs_nothing_on_text_where_it_is_the_model_and_much_where_it_is_nothing(model, means):
    assert text_kl(model, everything(model), means, TEXT, sequences=16, seq_len=15) == pytest.approx(
        0, abs=1e-6
    )
    nothing = {site: torch.zeros_like(mask) for site, mask in everything(model).items()}
    alone = text_kl(model, nothing, means, TEXT, sequences=16, seq_len=15)
    assert 0 < text_kl(model, known_circuit(model), means, TEXT, sequences=16, seq_len=15) <= alone
