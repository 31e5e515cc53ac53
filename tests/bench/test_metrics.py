"""Numbers of the benchmark against plain definitions."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pellucid.bench import metrics


def vectors():
    """(scores, truth) of one length; few distinct scores, so that ties are common."""
    part = st.tuples(st.integers(0, 3), st.booleans())
    return st.lists(part, min_size=1, max_size=9).map(
        lambda x: (torch.tensor([float(s) for s, _ in x]), torch.tensor([t for _, t in x]))
    )


@given(vectors())
def test_auroc_is_the_share_of_pairs_in_order_and_ties_are_misses(both):
    scores, truth = both
    pairs = [a > b for a in scores[truth] for b in scores[~truth]]
    found = metrics.auroc(scores, truth)
    assert (found is None) == (not pairs)
    if pairs:
        assert found == pytest.approx(sum(map(bool, pairs)) / len(pairs))


@given(vectors())
def test_average_precision_takes_the_worst_order_of_ties(both):
    scores, truth = both
    if not truth.any() or truth.all():
        assert metrics.average_precision(scores, truth) is None
        return
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], bool(truth[i])))
    hits, total = 0, 0.0
    for rank, i in enumerate(order, 1):
        if truth[i]:
            hits += 1
            total += hits / rank
    assert metrics.average_precision(scores, truth) == pytest.approx(total / hits)
    assert metrics.precision_at_size(scores, truth) == pytest.approx(
        np.mean([bool(truth[i]) for i in order[: int(truth.sum())]])
    )


def test_all_scores_equal_are_no_better_than_nothing():
    truth = torch.tensor([True, False, False])
    assert metrics.auroc(torch.zeros(3), truth) == 0
    assert metrics.average_precision(torch.zeros(3), truth) == pytest.approx(1 / 3)


@given(vectors())
def test_a_perfect_ranking_scores_one_and_its_reverse_zero(both):
    _, truth = both
    if truth.any() and not truth.all():
        assert metrics.auroc(truth.float(), truth) == metrics.average_precision(truth.float(), truth) == 1
        assert metrics.auroc(-truth.float(), truth) == 0


def test_curve_areas_of_the_ideal_curve_and_of_none():
    assert metrics.curve_areas([0, 1, 2], [1, 1, 1]) == {"cpr": 1, "cmd": 0}
    assert metrics.curve_areas([0, 1, 2], [0, 0, 0]) == {"cpr": 0, "cmd": 1}
    assert metrics.curve_areas([0, 2], [0, 1]) == {"cpr": 0.5, "cmd": 0.5}


def test_calibration():
    found = metrics.calibration(torch.tensor([0.5, -1.0, 9.0]), torch.tensor([1.0, 1.0, 0.0]), 0.1)
    assert found["relative_error"] == pytest.approx(0.5)  # the lower median of 0.5 and 2
    assert found["sign"] == 0.5
    assert metrics.calibration(torch.zeros(2), torch.zeros(2), 0.1)["sign"] is None


def test_jaccard_with_the_nearest_circuit():
    a, b, c = (torch.tensor(x, dtype=torch.bool) for x in ([1, 1, 0], [1, 0, 0], [0, 0, 1]))
    assert metrics.nearest(a, [c, b]) == 0.5
    assert metrics.nearest(a, []) is None
    assert metrics.jaccard(~(a | ~a), ~(a | ~a)) == 1


def test_signs_flip_exactly():
    assert metrics.sign_flip_p([1, 1, 1]) == pytest.approx(2 / 8)
    assert metrics.sign_flip_p([1, -1]) == 1
    assert metrics.sign_flip_p([0.0]) == 1
    assert metrics.sign_flip_p([1.0] * 40) < 0.01


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=20))
def test_the_interval_holds_the_mean_and_is_reproducible(values):
    low, high = metrics.bootstrap(values)
    assert (
        low - 1e-9 <= np.mean(values) <= high + 1e-9
        or math.isclose(low, high, abs_tol=1e-6)
        or len(values) < 5
    )
    assert metrics.bootstrap(values) == (low, high)


@given(st.integers(1, 400))
def test_grids_rise_from_nothing_to_all(n):
    sizes = metrics.grid(n)
    assert sizes[0] == 0
    assert sizes[-1] == n
    assert sizes == sorted(set(sizes))
    assert len(sizes) <= 22
