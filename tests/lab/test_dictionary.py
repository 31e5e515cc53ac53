import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.lab.dictionary import Dictionary, fit, learn_dictionary, recovery
from tests.lab.toy import ToyTask, toy_model


def sparse_rows(features, width, active, rows, seed):
    """(directions, rows): sums of a few of more unit directions than there are dimensions."""
    draw = torch.Generator().manual_seed(seed)
    directions = torch.nn.functional.normalize(torch.randn(features, width, generator=draw), dim=1)
    chosen = torch.rand(rows, features, generator=draw).topk(active).indices
    size = torch.rand(rows, active, generator=draw) + 0.5
    return directions, torch.zeros(rows, features).scatter(1, chosen, size) @ directions


def test_known_features_are_recovered_and_not_by_the_baselines():
    known, rows = sparse_rows(24, 16, 2, 3000, seed=0)
    options = {"size": 24, "k": 2, "steps": 800, "batch_size": 128, "lr": 1e-2}
    recall = {
        frozen: recovery(fit(rows, frozen=frozen, **options), known).recall
        for frozen in ("nothing", "decoder", "encoder")
    }
    assert recall["nothing"] >= 0.8
    assert recall["decoder"] <= 0.1
    assert recall["encoder"] <= 0.3


def test_predicting_the_mean_explains_nothing():
    rows = torch.randn(50, 3, generator=torch.Generator().manual_seed(0)) + 100
    silent = Dictionary(torch.zeros(4, 3), torch.eye(4, 3), rows.mean(0), k=1)
    assert silent.explained(rows) == pytest.approx(0, abs=1e-5)
    both_ways = torch.cat([torch.eye(3), -torch.eye(3)])
    assert Dictionary(both_ways, both_ways, rows.mean(0), k=3).explained(rows) == pytest.approx(1, abs=1e-5)


@given(st.integers(0, 1000), st.integers(2, 5))
@settings(max_examples=20)
def test_recovery_is_blind_to_order_and_length_but_not_to_sign(seed, m):
    draw = torch.Generator().manual_seed(seed)
    known = torch.linalg.qr(torch.randn(5, 5, generator=draw))[0][:m]
    order = torch.randperm(m, generator=draw)
    centre = torch.zeros(5)
    found = recovery(Dictionary(known, known[order], centre, 1), 3 * known)
    assert found.recall == 1
    assert torch.equal(order[found.features], torch.arange(m))
    assert recovery(Dictionary(known, -known, centre, 1), known).recall == 0


def test_no_more_features_are_active_than_asked_for():
    _, rows = sparse_rows(8, 4, 2, 200, seed=0)
    found = fit(rows, size=8, k=2, steps=20, batch_size=32)
    code = found.encode(rows)
    assert int((code != 0).sum(1).max()) <= 2
    assert bool((code >= 0).all())
    torch.testing.assert_close(found.decoder.norm(dim=1), torch.ones(8))


def test_a_model_s_stream_and_the_same_numbers_twice():
    first, second = (
        learn_dictionary(toy_model(), ToyTask(), pairs=16, size=6, k=2, steps=20) for _ in range(2)
    )
    assert first.decoder.shape == (6, 8)
    assert torch.equal(first.decoder, second.decoder)


def test_directions_without_a_feature_are_not_recovered():
    found = recovery(Dictionary(torch.eye(2), torch.eye(2), torch.zeros(2), 1), torch.eye(2).repeat(2, 1))
    assert found.recall == 0.5
    assert sorted(found.features.tolist()) == [-1, -1, 0, 1]


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (torch.full((4, 2), float("nan")), {}, "finite rows"),
        (torch.zeros(4), {}, r"rows \(r, d\), got shape \(4,\)"),
        (torch.ones(4, 2), {"k": 4}, "k must be between 1 and size = 3, got 4"),
        (torch.ones(4, 2), {"frozen": "decoders"}, "did you mean 'decoder'"),
    ],
)
def test_bad_input(rows, options, message):
    with pytest.raises(ValueError, match=message):
        fit(rows, **{"size": 3, "k": 1, **options})


def test_directions_of_another_width_are_an_error():
    with pytest.raises(ValueError, match="directions have width 3, the dictionary 2"):
        recovery(Dictionary(torch.eye(2), torch.eye(2), torch.zeros(2), 1), torch.eye(3))
