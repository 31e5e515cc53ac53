"""Backward elimination removes what a circuit does not need, and nothing that it does."""

import numpy as np
import pytest
import torch

from pellucid.core.sites import node_sites
from pellucid.lab.discretize import Probe
from pellucid.lab.eliminate import eliminate, least_attributed, removal_losses, without
from pellucid.lab.means import node_means
from pellucid.lab.rank import by_length, shares
from tests.lab.toy import CIRCUIT, ToyTask, toy_model

TEXT = np.random.default_rng(0).integers(0, 12, 4000).astype(np.uint16)


@pytest.fixture(scope="module")
def setting():
    model = toy_model()
    means = node_means(model, TEXT, seq_len=15)
    probe = Probe(model, ToyTask(), means, 0.15, pairs=64)
    whole = probe({site: torch.ones(w, dtype=torch.bool) for site, w in node_sites(model.config).items()})
    return model, means, probe, whole, by_length(ToyTask().pairs(32, seed=9), 2)


def test_from_the_whole_model_down_to_the_known_circuit(setting):
    model, means, probe, whole, strata = setting
    found = eliminate(model, ToyTask(), means, whole, probe, strata, rounds=50)
    kept = {site: mask.nonzero()[:, 0].tolist() for site, mask in found.kept.items() if mask.any()}
    assert kept == {site: channels for site, channels in CIRCUIT.items() if channels}
    assert found.loss <= 0.075


def test_a_circuit_that_missed_its_target_is_left_as_it_is(setting):
    model, means, probe, whole, strata = setting
    broken = probe(without(whole.kept, [("0.attn.out", 3)]))
    assert not broken.reached
    assert eliminate(model, ToyTask(), means, broken, probe, strata) is broken


def test_an_empty_circuit_has_nothing_to_remove(setting):
    model, means, _, whole, strata = setting
    empty = {site: torch.zeros_like(mask) for site, mask in whole.kept.items()}
    assert removal_losses(model, ToyTask(), means, empty, whole.calibration, [], strata).shape == (0,)
    easy = Probe(model, ToyTask(), means, 10.0, pairs=16)
    assert not any(
        m.any() for m in eliminate(model, ToyTask(), means, easy(empty), easy, strata).kept.values()
    )


def test_single_removals_stacked_equal_removals_one_by_one_and_attribution_ranks_the_needed_last(setting):
    model, means, _, whole, strata = setting
    task, places = ToyTask(), least_attributed(model, ToyTask(), means, whole, strata)
    assert len(places) == sum(len(m) for m in whole.kept.values())
    needed = {(site, c) for site, channels in CIRCUIT.items() for c in channels}
    assert needed & set(places[: len(places) // 2]) == set()
    some = [*places[:20], *needed]
    together = removal_losses(model, task, means, whole.kept, whole.calibration, some, strata)
    for place, loss in zip(some, together.tolist(), strict=True):
        alone = removal_losses(model, task, means, whole.kept, whole.calibration, [place], strata)
        assert loss == pytest.approx(alone.item(), abs=1e-5)
    assert together[:20].max() < together[20:].min()


def test_parts_by_length_hold_every_pair_once_and_need_no_padding():
    batch = ToyTask().pairs(40, seed=1)
    parts = by_length(batch, 4)
    assert [len(p) for p in parts] == [20] * 4
    assert sorted(p for part in parts for p in part.positions.tolist()) == sorted(batch.positions.tolist())
    for part in parts:
        assert part.tokens.shape[1] == part.positions.max() + 1
        assert torch.equal(part.positions[::2], part.positions[1::2])
        assert (part.answers[::2] == part.answers[1::2].flip(1)).all()
    assert shares(10, 4) == [3, 3, 2, 2]
