"""ACDC cuts what one edge after the other would, whatever is measured at once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.core.edges import EdgeTap, edge_table
from pellucid.lab.ablate import all_logits
from pellucid.lab.acdc import acdc
from pellucid.lab.fills import fills
from pellucid.lab.patch import draw
from pellucid.lab.paths import on_a_path
from tests.core.strategies import configs, scrambled
from tests.lab.two_heads import Anything, TwoTokens, edge_effects, two_heads

additive = configs(residual_activation="identity", bigram=False, activation_sparsity=None)


@torch.no_grad()
def one_by_one(model, task, batch, replaced, threshold):
    """The plainest ACDC."""
    table = edge_table(model.config)
    keep = table.exists.double()

    def loss():
        return task.loss(all_logits(model, batch, EdgeTap(model.config, replaced, keep)), batch).mean().item()

    now = loss()
    for reader, writer in reversed(table.exists.nonzero().tolist()):
        keep[reader, writer] = 0
        without = loss()
        if without - now < threshold:
            now = without
        else:
            keep[reader, writer] = 1
    return keep.bool()


@settings(max_examples=12, deadline=None)
@given(additive, st.integers(0, 9), st.floats(-3, 1))
def test_it_cuts_what_one_edge_after_the_other_would(config, seed, log_threshold):
    model, task, threshold = scrambled(config, seed), Anything(), 10**log_threshold
    batch, _ = draw(model, task, 2, seed)
    wanted = on_a_path(config, one_by_one(model, task, batch, fills(model, batch, "resample"), threshold))
    found = acdc(model, task, pairs=2, seed=seed, threshold=threshold, thresholds=(0.1, 1.0))
    assert torch.equal(found.kept, wanted)
    assert bool((found.values[found.kept] >= threshold).all())


def test_two_heads_by_hand():
    """Without head 1 the logit is wrong by 3, without head 0 by 2: the loss is the square."""
    found = acdc(two_heads(), TwoTokens(), pairs=2, threshold=1.0, thresholds=())
    assert torch.equal(found.kept, edge_effects() != 0)
    out, values = found.values[-1], found.values[4:6]
    assert out.tolist() == [0, 4, 9]
    assert values[:, 0].tolist() == [4, 9]


def test_two_cuts_that_make_up_for_each_other_empty_the_circuit():
    """At a threshold of 5 head 0 is cut, which costs 4; then head 1 goes as well, and the loss falls to 1."""
    found = acdc(two_heads(), TwoTokens(), pairs=2, threshold=5.0, thresholds=())
    assert not found.kept.any()


def test_edges_tried_in_one_run_cost_less_than_one_run_each():
    model = two_heads()
    found = acdc(model, TwoTokens(), pairs=2, threshold=1.0, thresholds=())
    assert found.passes < 2 + 2 * edge_table(model.config).n_edges


def test_a_threshold_must_be_positive():
    with pytest.raises(ValueError, match=r"thresholds must be positive, got 0\.0"):
        acdc(two_heads(), TwoTokens(), threshold=0.0)
