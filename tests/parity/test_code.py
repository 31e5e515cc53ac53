"""The field, and the directions that come of it."""

import galois
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pellucid.parity import coherence, coherence_bound, directions
from pellucid.parity.code import inner_products, masks, walsh_hadamard
from pellucid.parity.galois import POLYNOMIALS, inverses, multiply

DEGREES = range(3, 17)


@pytest.mark.parametrize("t", DEGREES)
def test_every_element_but_0_has_an_inverse_so_that_the_polynomial_is_irreducible(t):
    elements, inverse = np.arange(1 << t), inverses(t)
    assert inverse[0] == 0
    assert (multiply(elements[1:], inverse[1:], t) == 1).all()
    assert sorted(inverse) == list(elements)


@pytest.mark.parametrize("t", DEGREES)
def test_it_is_the_field_that_an_independent_library_knows(t):
    field = galois.GF(2**t, irreducible_poly=POLYNOMIALS[t])
    draw = np.random.default_rng(t)
    a, b = draw.integers(0, 1 << t, (2, 500))
    assert (multiply(a, b, t) == np.asarray(field(a) * field(b))).all()
    assert (inverses(t)[1:200] == np.asarray(field(np.arange(1, min(200, 1 << t))) ** -1)[:199]).all()


@pytest.mark.parametrize("t", [2, 17])
def test_degrees_outside_are_refused(t):
    with pytest.raises(ValueError, match=rf"t must be in 3..16, got {t}"):
        inverses(t)


@pytest.mark.parametrize(("d", "measured"), [(16, 0.5), (64, 0.25), (256, 0.125)])
def test_coherence_by_linearity_is_that_of_all_pairs_and_within_the_bound(d, measured):
    all_pairs = max(inner_products(d, beta)[int(beta == 0) :].abs().max().item() for beta in range(d))
    assert coherence(d) == all_pairs == measured <= coherence_bound(d)


@pytest.mark.parametrize("d", [8, 16, 32])
def test_linearity_holds_on_all_explicit_pairs(d):
    phi = directions(d, torch.arange(d * d)).double()
    gram = phi @ phi.T
    i = torch.arange(d * d)
    difference = i[:, None] ^ i
    expected = torch.stack([inner_products(d, beta) for beta in range(d)])
    torch.testing.assert_close(gram, expected[difference >> d.bit_length() - 1, difference & d - 1])
    other = ~torch.eye(d * d, dtype=torch.bool)
    assert gram[other].abs().max() == pytest.approx(coherence(d))


@pytest.mark.parametrize("t", DEGREES)
def test_no_two_directions_are_closer_than_the_bound(t):
    assert 0 < coherence(1 << t) <= coherence_bound(1 << t)


@given(st.sampled_from([8, 16, 64, 1024]), st.data())
def test_directions_that_differ_in_one_half_only_are_exactly_orthogonal(d, data):
    halves = st.integers(0, d - 1)
    a, b, c = (data.draw(halves) for _ in range(3))
    t = d.bit_length() - 1
    for pair in ((a | c << t, b | c << t), (c | a << t, c | b << t)):
        phi = (directions(d, torch.tensor(pair)) * d**0.5).round()
        assert (phi[0] @ phi[1]).item() == (d if a == b else 0)


@given(st.sampled_from([8, 32, 256]), st.data())
def test_the_code_is_linear(d, data):
    i, j = (data.draw(st.integers(0, d * d - 1)) for _ in range(2))
    phi = directions(d, torch.tensor([i, j, i ^ j])) * d**0.5
    assert torch.equal((phi[0] * phi[1]).round(), phi[2].round())


def test_the_first_d_directions_are_the_orthonormal_walsh_basis():
    phi = directions(64, torch.arange(64))
    torch.testing.assert_close(phi @ phi.T, torch.eye(64))
    torch.testing.assert_close(walsh_hadamard(torch.eye(64)) / 8, phi)


def test_the_largest_code_has_two_masks_bits_each_and_all_masks_differ():
    assert len(masks(65536).unique()) == 65536
    phi = directions(65536, torch.tensor([0, 65536 * 65536 - 1]))
    assert phi.shape == (2, 65536)
    assert phi.abs().unique().tolist() == [1 / 256]


def test_masks_are_numbers_also_where_models_are_made_without_memory():
    masks.cache_clear()
    with torch.device("meta"):
        assert masks(16).device.type == "cpu"
    assert masks(16)[:2].tolist() == [0, 1 | 1 << 4]


@pytest.mark.parametrize("d", [12, 4, 131072, 8.0])
def test_a_width_that_has_no_code_is_named(d):
    with pytest.raises(ValueError, match=f"d must be a power of two in 8..65536, got {d}"):
        directions(d, torch.tensor([0]))


def test_an_index_outside_is_named():
    with pytest.raises(ValueError, match=r"indices must be in 0..d\^2 - 1 = 63, got 0..64"):
        directions(8, torch.tensor([0, 64]))
