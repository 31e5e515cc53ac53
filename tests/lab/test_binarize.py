"""Binarised circuits say two things a node, and their losses are those of exactly that."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid import Node, Recorder, Tap, chain
from pellucid.core.circuit import channel_circuit
from pellucid.core.sites import node_sites
from pellucid.lab.ablate import keep_only, last_logits, task_loss
from pellucid.lab.binarize import (
    BinarizeConfig,
    Binarized,
    Steps,
    TwoLevels,
    binarize,
    grid_search,
    included,
    observed,
    soft_step,
    split_means,
    train_levels,
)
from pellucid.lab.means import node_means
from tests.lab.toy import CIRCUIT, ToyTask, toy_model

SEARCH = BinarizeConfig(steps=60, pairs=16, search=16, pool=64, measure=64)
TEXT = np.random.default_rng(0).integers(0, 12, 4000).astype(np.uint16)
LEVEL = st.floats(-5, 5, width=32)


@pytest.fixture(scope="module")
def model():
    return toy_model()


@pytest.fixture(scope="module")
def means(model):
    return node_means(model, TEXT, seq_len=15)


@pytest.fixture(scope="module")
def kept(model):
    return {
        site: torch.zeros(w, dtype=torch.bool).index_fill(0, torch.tensor(CIRCUIT.get(site, []), dtype=torch.int64), True)
        for site, w in node_sites(model.config).items()
    }  # fmt: skip


@pytest.fixture(scope="module")
def result(model, means, kept):
    return binarize(model, ToyTask(), kept, means, config=SEARCH)


@settings(deadline=None)
@given(LEVEL, LEVEL, st.lists(st.floats(-20, 20), min_size=1, max_size=20), st.floats(0, 1))
def test_the_soft_step_is_the_identity_at_1_and_the_step_at_0_and_keeps_its_levels(a, b, xs, t):
    low, high = torch.tensor(min(a, b), dtype=torch.float64), torch.tensor(max(a, b), dtype=torch.float64)
    x = torch.tensor(sorted(xs), dtype=torch.float64)
    torch.testing.assert_close(soft_step(x, low, high, 1.0), x)
    for level in (low, high) if high - low > 1e-9 else ():
        torch.testing.assert_close(soft_step(level, low, high, t), level)
        torch.testing.assert_close(soft_step(level, high, low, t), level)  # training may swap them
    hard = soft_step(x, low, high, 0.0).tolist()
    assert hard == [low.item() if v < ((low + high) / 2).item() else high.item() for v in x.tolist()]
    assert (soft_step(x, low, high, t).diff() >= -1e-9).all()  # monotone


@settings(deadline=None)
@given(LEVEL, st.floats(0, 1), st.floats(-5, 5))
def test_the_soft_steps_gradient_is_finite_even_where_the_levels_are_equal(level, t, at):
    low, high, x = (torch.tensor(v, requires_grad=True) for v in (level, level, at))
    soft_step(x, low, high, t).backward()
    assert all(v.grad is None or v.grad.isfinite() for v in (low, high, x))


def test_a_mechanism_that_is_binary_by_construction_loses_nothing(result):
    assert {str(level.node) for level in result.levels} == {
        f"{s}:{c}" for s, cs in CIRCUIT.items() for c in cs
    }
    assert result.circuit.task_loss < 0.05
    assert result.binarized.task_loss <= result.circuit.task_loss + 1e-3
    assert result.binarized.calibrated_task_loss <= result.circuit.calibrated_task_loss + 1e-3
    assert result.binarized.accuracy == 1
    assert all(level.explained > 0.9 for level in result.levels)
    value = next(level for level in result.levels if level.node.site == "0.attn.v")
    assert (value.low, value.high) == pytest.approx((-2, 2), abs=0.2)  # 2 times what the first token says


def test_every_node_takes_exactly_its_two_values(result, model, means, kept):
    batch, recorder = ToyTask().pairs(64, seed=5, split="test"), Recorder(CIRCUIT)
    model(batch.tokens, tap=chain(keep_only(kept, means), result.tap(), recorder))
    for level in result.levels:
        seen = recorder.values[level.node.site][..., level.node.channel].unique().tolist()
        assert seen == [level.low, level.high]


def test_the_losses_are_those_of_the_levels_in_the_json(result, model, means, kept):
    again = Binarized.model_validate_json(result.model_dump_json())
    assert again == result

    def by_hand(site, x):
        x = torch.where(kept[site], x, means[site]).clone()
        for level in again.levels:
            if level.node.site == site:
                c, middle = level.node.channel, (level.low + level.high) / 2
                x[..., c] = (x[..., c] >= middle) * (level.high - level.low) + level.low
        return x

    batch = ToyTask().pairs(SEARCH.measure, seed=0, split="test")
    loss = task_loss(model, ToyTask(), batch, Tap.at(by_hand, kept))
    assert loss == pytest.approx(result.binarized.task_loss, rel=1e-4)
    alone = task_loss(model, ToyTask(), batch, keep_only(kept, means))
    assert alone == pytest.approx(result.circuit.task_loss, rel=1e-4)


def test_the_same_seed_finds_the_same_levels_and_the_model_is_left_as_it_was(result, means, kept):
    model, calls = toy_model().train(), []
    again = binarize(
        model, ToyTask(), kept, means, config=SEARCH, progress=lambda **now: calls.append(now["t"])
    )
    assert again == result
    assert model.training
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert calls == [(1 - i / SEARCH.steps) ** 5 for i in range(SEARCH.steps)]


def test_a_task_without_an_answer_is_not_solved_by_choosing_levels(model, means, kept):
    result = binarize(model, ToyTask(nonsense=True), kept, means, config=SEARCH)
    assert result.binarized.calibrated_task_loss > 0.6


def test_levels_stay_within_the_activations_unless_they_are_freed(result, model, means, kept):
    batch = ToyTask().pairs(SEARCH.search, seed=0).trimmed()
    chosen = included(model, kept, ())
    seen = {s: x for s, (_, x) in observed(model, keep_only(kept, means), chosen, batch).items()}
    free = BinarizeConfig(steps=60, pairs=16, search=16, pool=64, measure=64, bounded=False, lr=0.1)
    freed = binarize(model, ToyTask(), kept, means, config=free)

    def outside(found):
        return [
            level
            for level in found.levels
            for x in [seen[level.node.site]]
            if level.low < x.min() - 1e-5 or level.high > x.max() + 1e-5
        ]

    assert not outside(result)
    assert outside(freed)
    assert freed.binarized.task_loss < result.binarized.task_loss  # what the larger scale of logits buys


def test_training_repairs_levels_that_carry_nothing(model, means, kept):
    task, ablated = ToyTask(), keep_only(kept, means)
    channels = torch.tensor([0])
    start = {
        "0.attn.v": (channels, torch.tensor([-2.0]), torch.tensor([9.0]))
    }  # its middle is above all values
    pool = task.pairs(64)
    before = task_loss(model, task, pool, chain(ablated, Steps(start)))
    config = BinarizeConfig(steps=100, pairs=16, lr=0.05)
    end = train_levels(model, task, ablated, start, None, pool, config, seed=0, progress=None)
    assert before > 0.65
    assert task_loss(model, task, pool, chain(ablated, Steps(end))) < 0.1


def test_levels_that_follow_the_circuit_end_at_its_distribution_and_not_beyond(model, means, kept):
    weak = toy_model()
    weak.head.weight.data *= 0.3  # unsure of its answers
    how = {"steps": 200, "pairs": 16, "search": 16, "pool": 64, "measure": 64, "lr": 0.05, "bounded": False}
    sure, same = (
        binarize(weak, ToyTask(), kept, means, config=BinarizeConfig(objective=objective, **how))
        for objective in ("task", "circuit")
    )
    assert sure.binarized.task_loss < same.circuit.task_loss / 2
    assert same.binarized.task_loss == pytest.approx(same.circuit.task_loss, rel=0.1)


def test_the_grid_takes_the_threshold_of_least_loss_for_each_node_alone(model, means, kept):
    task, ablated, batch = ToyTask(), keep_only(kept, means), ToyTask().pairs(8, seed=2)
    values = observed(model, ablated, included(model, kept, ()), batch)
    places = (0.1, 0.5, 0.9)
    found = grid_search(model, task, ablated, values, batch, places)
    for site, (channels, lows, highs) in found.items():
        x = values[site][1]
        for i, channel in enumerate(channels.tolist()):
            tried = []
            for place in places:
                low, high = split_means(x[:, i : i + 1], place)
                alone = Steps({site: (torch.tensor([channel]), low, high)})
                loss = (
                    task.metric(last_logits(model, batch, chain(ablated, alone)), batch.last()).mean().item()
                )
                tried.append((loss, low.item(), high.item()))
            assert min(loss for loss, *_ in tried) == pytest.approx(
                next(loss for loss, *levels in tried if levels == [lows[i].item(), highs[i].item()]), abs=1e-6
            )


@settings(deadline=None)
@given(st.lists(LEVEL, min_size=1, max_size=12), st.floats(0.05, 0.95))
def test_levels_begin_at_the_means_on_either_side(xs, place):
    x = torch.tensor(xs)
    low, high = split_means(x[:, None], place)
    threshold = torch.lerp(x.min(), x.max(), place)
    below, above = x[x < threshold], x[x >= threshold]
    if x.min() == x.max():
        assert low.item() == high.item() == xs[0]
    elif len(below) and len(above):
        torch.testing.assert_close(low[0], below.mean(), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(high[0], above.mean(), atol=1e-5, rtol=1e-5)


def test_excluded_sites_stay_as_they_are_and_are_listed(model, means, kept):
    few = BinarizeConfig(steps=2, pairs=4, search=4, pool=16, measure=16, exclude=("attn.k", "0.attn.out"))
    result = binarize(model, ToyTask(), kept, means, config=few)
    assert {str(node) for node in result.excluded} == {"0.attn.k:0", "0.attn.out:3"}
    assert {level.node.site for level in result.levels} == {"0.attn.in", "0.attn.v"}
    recorder = Recorder(["0.attn.out"])
    model(ToyTask().pairs(8).tokens, tap=chain(keep_only(kept, means), result.tap(), recorder))
    assert len(recorder.values["0.attn.out"][..., 3].unique()) > 2


def test_bad_input_is_named(model, means, kept):
    def run(circuit, **fields):
        binarize(model, ToyTask(), circuit, means, config=BinarizeConfig(steps=0, pool=32, **fields))

    with pytest.raises(ValueError, match=r"unknown site to exclude '0\.attn\.kk'; did you mean '0\.attn\.k'"):
        run(kept, exclude=("0.attn.kk",))
    with pytest.raises(ValueError, match="no node to binarise"):
        run({site: torch.zeros_like(mask) for site, mask in kept.items()})
    stranger = channel_circuit(model, kept, task="toy", model_hash="feedbeef")
    with pytest.raises(ValueError, match="is of model feedbeef, this is model"):
        run(stranger)
    for fields, message in (
        ({"thresholds": (0.5, 1.0)}, "thresholds must lie between 0 and 1"),
        ({"objective": "tusk"}, "unknown objective 'tusk'; did you mean 'task'"),
        ({"pairs": 0}, "pairs must be positive, got 0"),
        ({"steps": -1}, "steps must not be negative"),
        ({"pool": 8}, "pool must hold pairs = 32, got 8"),
    ):
        with pytest.raises(ValueError, match=message):
            BinarizeConfig(**fields)


def test_a_node_that_never_moves_keeps_its_one_value(kept):
    model, node = toy_model(noise=0.0), Node(site="0.attn.q", channel=0)  # a bias alone
    more = {**kept, node.site: kept[node.site].index_fill(0, torch.tensor([node.channel]), True)}
    few = BinarizeConfig(steps=5, pairs=4, search=4, pool=16, measure=16)
    found = binarize(model, ToyTask(), more, node_means(model, TEXT, seq_len=15), config=few)
    assert TwoLevels(node=node, low=4.0, high=4.0, explained=None) in found.levels
