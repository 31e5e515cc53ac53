"""AbsTopK keeps exactly the largest magnitudes, the first of equal ones, and lets gradients through those alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.kernels.abs_topk import abs_topk


def naive(row: list[float], k: int) -> list[float]:
    kept = sorted(range(len(row)), key=lambda i: (-abs(row[i]), i))[:k]
    return [x if i in kept else 0.0 for i, x in enumerate(row)]


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=12), st.data())
def test_it_equals_sorting_with_ties_in_order(row, data):
    k = data.draw(st.integers(1, len(row)))
    x = torch.tensor([row, row[::-1]], requires_grad=True)
    y = abs_topk(x, k)
    assert y.tolist() == [naive(row, k), naive(row[::-1], k)]
    y.sum().backward()
    kept = torch.tensor([[v != 0 for v in naive([c or 0.5 for c in r], k)] for r in (row, row[::-1])])
    if all(row):  # where no entry is 0, what is kept is what has a gradient
        assert torch.equal(x.grad != 0, kept)


@pytest.mark.parametrize("k", [0, 6])
def test_a_k_that_does_not_fit_is_named(k):
    with pytest.raises(ValueError, match=rf"k must be in 1\.\.5, got {k}"):
        abs_topk(torch.zeros(2, 5), k)
