"""The L0 constraint: exact counts, the largest magnitudes, live units, and the schedule."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid import ModelConfig, Transformer, uniform
from pellucid.kernels.top_mask import top_mask, top_mask_reference
from pellucid.sparse.projection import Projection, SparsityConfig, dead_fraction, unit_axis
from pellucid.training.config import TrainConfig
from pellucid.training.loop import train

MODEL = ModelConfig(vocab_size=40, d_model=24, n_ctx=8, layers=uniform(2, 3, 4, 20), bigram=True, sink=True)


def naive_mask(weight, k, alive, axis):
    """The rule, slowly: each unit's own largest first, then the largest of what is left."""
    rows = weight.abs() if axis == 1 else weight.abs().T
    units, width = rows.shape
    each = min(alive, k // units, width)
    mask = torch.zeros_like(rows, dtype=torch.bool)
    for unit in range(units):
        for place in rows[unit].argsort(descending=True)[:each].tolist():
            mask[unit, place] = True
    left = [(-rows[u, i].item(), u, i) for u in range(units) for i in range(width) if not mask[u, i]]
    for _, u, i in sorted(left)[: k - int(mask.sum())]:
        mask[u, i] = True
    return mask if axis == 1 else mask.T


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(0, 4),
    st.sampled_from([0, 1]),
    st.floats(0, 1),
    st.integers(0, 999),
)
def test_exactly_k_weights_stay_and_they_are_the_ones_of_the_rule(rows, columns, alive, axis, share, seed):
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    k = round(share * weight.numel())
    mask = top_mask(weight, k, alive=alive, axis=axis)
    assert int(mask.sum()) == k
    assert torch.equal(mask, naive_mask(weight, k, alive, axis))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 60), st.integers(1, 60), st.integers(0, 4), st.sampled_from([0, 1]), st.floats(0, 1),
    st.sampled_from(["normal", "tied", "zeros", "skewed"]), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    st.integers(0, 999),
)  # fmt: skip
def test_the_fast_path_equals_the_reference_in_every_magnitude_it_keeps(
    rows, columns, alive, axis, share, kind, dtype, seed
):
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    weight = {"normal": weight, "tied": weight.round(), "zeros": 0 * weight, "skewed": weight**5}[kind].to(
        dtype
    )
    k = round(share * weight.numel())
    mask = top_mask(weight, k, alive=alive, axis=axis)
    each = min(alive, k // (weight.numel() // weight.shape[axis]), weight.shape[axis])
    reference = top_mask_reference(weight, k, each, axis)
    assert int(mask.sum()) == int(reference.sum()) == k
    assert torch.equal(weight[mask].abs().sort().values, weight[reference].abs().sort().values)
    assert mask.sum(axis).min() >= each


@pytest.mark.parametrize("alive", [0, 1, 2, 4])
def test_no_unit_has_fewer_than_j_weights_where_the_budget_allows_it(alive):
    weight = (
        torch.randn(50, 30, generator=torch.Generator().manual_seed(0)) * torch.logspace(0, -6, 50)[:, None]
    )
    counts = top_mask(weight, 250, alive=alive, axis=1).sum(1)
    assert counts.min() == alive
    assert counts.sum() == 250
    assert top_mask(weight, 60, alive=4, axis=1).sum(1).min() == 1  # 60 // 50


def test_ties_and_zeros_still_give_an_exact_count():
    assert int(top_mask(torch.ones(7, 5), 11).sum()) == 11
    assert int(top_mask(torch.zeros(7, 5), 11, alive=1, axis=0).sum()) == 11
    with pytest.raises(ValueError, match=r"k must be in 0..35, got 36"):
        top_mask(torch.ones(7, 5), 36)


def test_every_matrix_and_bias_gets_the_same_fraction_and_dense_parts_are_left_alone():
    model = Transformer(MODEL, device="cpu")
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    projection = Projection(model, SparsityConfig(fraction=0.1))
    projection.apply(1.0)
    for name, p in model.named_parameters():
        if name == "bigram" or "sink" in name or "norm" in name:
            assert torch.equal(p, before[name]), name
        else:
            kept = p != 0
            assert int(kept.sum()) == round(0.1 * p.numel()), name
            assert torch.equal(p[kept], before[name][kept]), name
            if unit_axis(name) is None and kept.any():
                assert before[name][kept].abs().min() >= before[name][~kept].abs().max(), name
    metrics = projection.metrics()
    assert metrics["nonzero"] == pytest.approx(0.1, abs=0.005)
    assert metrics["dead"] == 0


def test_units_are_rows_that_read_and_columns_that_write():
    assert unit_axis("blocks.0.mlp.fc.weight") == unit_axis("blocks.3.attn.qkv.weight") == 1
    assert unit_axis("blocks.0.mlp.proj.weight") == unit_axis("blocks.3.attn.proj.weight") == 0
    assert unit_axis("wte.weight") is unit_axis("head.weight") is unit_axis("blocks.0.mlp.fc.bias") is None


def test_dead_units_are_counted():
    fc, proj = torch.ones(4, 3), torch.ones(3, 4)
    fc[1] = 0
    proj[:, [1, 2]] = 0
    assert dead_fraction({"mlp.fc.weight": fc, "mlp.proj.weight": proj}) == pytest.approx(3 / 8)


def test_the_fraction_falls_linearly_from_one_to_the_target_in_the_first_half():
    config = SparsityConfig(fraction=0.1)
    assert config.at(0.0) == config.at(0.01) == 1
    assert config.at((0.01 + 0.5) / 2) == pytest.approx(0.55)
    assert config.at(0.5) == config.at(1.0) == 0.1
    assert SparsityConfig(fraction=0.1, anneal_power=3).at((0.01 + 0.5) / 2) == pytest.approx(0.1 + 0.9 / 8)
    at_once = SparsityConfig(fraction=0.1, anneal_start=0.3, anneal_end=0.3)
    assert (at_once.at(0.0), at_once.at(0.29), at_once.at(0.3)) == (1.0, 1.0, 0.1)


def test_the_seeds_schedule_bug_can_be_had():
    config = SparsityConfig(fraction=0.1, anneal_start=0.0, anneal_end=0.5, legacy_embed_schedule=True)
    assert config.of("blocks.0.mlp.fc.weight", 0.24) == config.at(0.24) == pytest.approx(1 - 0.9 * 0.48)
    for name in ("wte.weight", "head.weight", "blocks.0.mlp.fc.bias"):
        assert (config.of(name, 0.24), config.of(name, 0.25)) == (1.0, 0.1)


def test_churn_is_the_share_of_kept_weights_that_were_zero_before():
    model = Transformer(MODEL, device="cpu")
    projection = Projection(
        model, SparsityConfig(fraction=0.2, dense=("*bigram", "*wte*", "*blocks*", "*norm*"))
    )
    assert projection.parameters.keys() == {"head.weight"}
    projection.apply(1.0)
    assert projection.churn() == 0
    with torch.no_grad():  # a quarter of the kept weights die, and as many zeros come back
        weight = model.head.weight.view(-1)
        kept, zero = (weight != 0).nonzero()[:, 0], (weight == 0).nonzero()[:, 0]
        n = len(kept) // 4
        weight[kept[:n]] = 0
        weight[zero[:n]] = 10
    projection.apply(1.0)
    assert projection.metrics()["churn"] == pytest.approx(n / len(kept))


def test_between_choices_zeros_stay_zero_and_the_last_step_chooses():
    model = Transformer(MODEL, device="cpu")
    projection = Projection(model, SparsityConfig(fraction=0.2, anneal_start=0.0, anneal_end=0.8, every=3))
    shake = torch.Generator().manual_seed(0)
    steps, held = 11, []
    for step in range(steps):
        projection.before(step)
        before = {name: p.detach() != 0 for name, p in projection.parameters.items()}
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn(p.shape, generator=shake))
        projection.apply((step + 1) / steps)
        after = {name: p.detach() != 0 for name, p in projection.parameters.items()}
        same = all(torch.equal(before[name], after[name]) for name in before)
        held.append(same)
        if not same:
            k = {n: round(projection.config.at((step + 1) / steps) * p.numel()) for n, p in after.items()}
            assert {name: int(mask.sum()) for name, mask in after.items()} == k
            assert projection.churn() > 0 or step == 2
        else:
            assert projection.churn() == 0
    assert [step for step in range(steps) if not held[step]] == [2, 5, 8, 10]


def test_pruning_at_the_end_alone_is_magnitude_pruning_of_what_training_without_a_constraint_gives(tmp_path):
    """The one difference that a sharkfin would make, the learning rate, left out."""
    config = TrainConfig(steps=8, batch_size=2, seq_len=6, lr=1e-2)
    tokens = np.random.default_rng(0).integers(0, 40, 500)
    ends = {}
    at_end = SparsityConfig(fraction=0.1, anneal_start=1.0, anneal_end=1.0, sharkfin=False)
    for name, sparsity in (("dense", None), ("pruned", at_end)):
        model = Transformer(MODEL, device="cpu")
        train(model, config, tokens, tmp_path / name, constraint=sparsity and Projection(model, sparsity))
        ends[name] = model
    Projection(ends["dense"], SparsityConfig(fraction=0.1)).apply(1.0)
    for a, b in zip(ends["dense"].parameters(), ends["pruned"].parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"fraction": 0}, r"fraction must be in \(0, 1\], got 0"),
        ({"fraction": 0.1, "anneal_end": 0.0}, "need 0 <= anneal_start <= anneal_end"),
        ({"fraction": 0.1, "alive": -1}, "alive must be 0 or more, got -1"),
        ({"fraction": 0.1, "anneal_power": 0}, "anneal_power must be positive"),
        ({"fraction": 0.1, "every": 0}, "every must be 1 or more, got 0"),
    ],
)
def test_bad_settings_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        SparsityConfig(**fields)
