"""Binarised circuits of a study and kurtosis: sums that agree with direct ones, and results that are not made again."""

import json
import math

import numpy as np
import pytest
import torch

from pellucid import record
from pellucid.core.checkpoint import content_hash, load_model
from pellucid.core.circuit import channel_circuit
from pellucid.core.files import write_atomic
from pellucid.core.sites import node_sites
from pellucid.lab.binarize import BinarizeConfig, binarize
from pellucid.lab.means import node_means
from pellucid.recipes import measures, workbench
from pellucid.recipes.figures import binarized_figure, kurtosis_figure, shares_figure
from pellucid.recipes.measures import (
    SHARES,
    binarize_study,
    binary_table,
    final_kurtosis,
    kurtosis_of,
    load_binarized,
    load_kurtosis,
    share_losses,
)
from pellucid.recipes.recipe import run
from pellucid.recipes.study import TaskStudy
from tests.lab.toy import ToyTask, known_circuit, toy_model
from tests.recipes.test_ablations import tiny
from tests.recipes.test_study import SEARCH

TEXT = np.random.default_rng(0).integers(0, 12, 4000).astype(np.uint16)
QUICK = BinarizeConfig(steps=2, pairs=4, search=4, pool=32, measure=32)


@pytest.fixture(scope="module")
def toy():
    model = toy_model()
    return model, known_circuit(model), node_means(model, TEXT, seq_len=15)


def test_all_nodes_binarised_are_the_start_of_training_and_few_are_the_circuit(toy):
    model, kept, means = toy
    whole = binarize(model, ToyTask(), kept, means, config=QUICK)
    losses = share_losses(model, ToyTask(), kept, means, whole, QUICK)
    assert [share for share, _ in losses] == list(SHARES)
    assert losses[-1][1] == pytest.approx(whole.start.calibrated_task_loss, abs=1e-6)
    assert losses[0][1] == pytest.approx(whole.circuit.calibrated_task_loss, abs=0.05)


def test_kurtosis_is_streamed_and_equal_to_that_of_the_whole(toy):
    model = toy[0]
    tokens = torch.arange(12).repeat(40).numpy().astype(np.uint16)
    of_tokens, of_channels = final_kurtosis(model, tokens, sequences=500, seq_len=15)
    windows = torch.as_tensor(tokens[: (len(tokens) - 1) // 15 * 15].astype(np.int64)).view(-1, 15)
    x = record(model, windows, ["final"])["final"].flatten(0, 1).double()

    def direct(x):
        centred = x - x.mean(-1, keepdim=True)
        return math.log((centred**4).mean(-1).div(centred.square().mean(-1) ** 2).mean())

    assert of_tokens == pytest.approx(direct(x), abs=1e-4)
    assert of_channels == pytest.approx(direct(x.T), abs=1e-4)


def test_a_gaussian_residual_has_log_3_and_a_model_with_few_large_channels_more(toy):
    model = toy_model()
    with torch.no_grad():
        model.wte.weight[:, 0] = 100
    assert final_kurtosis(model, TEXT)[0] > final_kurtosis(toy[0], TEXT)[0]


@pytest.fixture(scope="module")
def studied(tmp_path_factory):
    """A run, and a study whose circuit is some of its nodes."""
    root = tmp_path_factory.mktemp("studied")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PELLUCID_CACHE", str(root / "cache"))
        patch.setattr(workbench, "MEAN_TOKENS", 2000)
        run(tiny(), root / "run", device="cpu")
        model = load_model(root / "run", device="cpu")
        kept = {site: torch.arange(w) == 0 for site, w in node_sites(model.config).items()}
        circuit = channel_circuit(
            model,
            kept,
            task="for_while",
            model_hash=content_hash(model),
            metrics={"reached": True, "edges": 9},
        )
        result = TaskStudy(
            run="run",
            task="for_while",
            seed=0,
            validation_loss=2.0,
            search=SEARCH.key(),
            circuits={"0.9": circuit},
        )
        write_atomic(root / "study" / "run" / "for_while-0.json", result.model_dump_json())
        yield root


def test_a_studys_circuits_are_binarised_once_and_drawn(studied, tmp_path, monkeypatch):
    def all_of_them(config=QUICK):
        return binarize_study(
            [studied / "run"], studied / "study", tmp_path / "out", target=0.9, config=config
        )

    (found,) = all_of_them()
    assert (found.run, found.task, found.seed) == ("run", "for_while", 0)
    assert 0 <= found.binary_share <= 1
    monkeypatch.setattr(measures, "binarize", None)
    assert all_of_them() == load_binarized(tmp_path / "out") == [found]
    with pytest.raises(ValueError, match=r"for_while-0\.json is of another config"):
        all_of_them(BinarizeConfig(steps=3))
    text = binarized_figure([found], tmp_path / "figure.svg").read_text()
    assert "for_while" in text
    assert "two levels, trained" in text
    assert binarized_figure([found], tmp_path / "again.svg").read_text() == text
    both = [found, found.model_copy(update={"seed": 1})]
    for figure in (binarized_figure, shares_figure):
        assert "for_while, seed 1" in figure(both, tmp_path / "seeds.svg").read_text()
    assert binary_table([found]).row_count == 1
    assert binarize_study([studied / "run"], studied / "study", tmp_path / "none", target=0.1) == []


def test_the_share_is_the_largest_within_the_target():
    found = measures.BinaryTask.model_construct(
        target=0.15, shares=((0.1, 0.1), (0.5, 0.2), (0.8, 0.14), (1.0, 0.3))
    )
    assert found.binary_share == 0.8
    assert measures.BinaryTask.model_construct(target=0.15, shares=((0.1, 0.2),)).binary_share == 0.0


def test_kurtosis_of_a_run_is_kept_beside_that_of_others(tmp_path, monkeypatch):
    monkeypatch.setenv("PELLUCID_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(workbench, "MEAN_TOKENS", 2000)
    other = {"run": "other", "validation_loss": None, "of_tokens": 1.0, "of_channels": 2.0}
    write_atomic(tmp_path / "k.json", json.dumps([other]))
    run(tiny(), tmp_path / "run", device="cpu")
    found = kurtosis_of([tmp_path / "run"], tmp_path / "k.json", sequences=8)
    assert [k.run for k in found] == ["other", "run"]
    assert all(math.isfinite(v) for k in found for v in (k.of_tokens, k.of_channels))
    assert load_kurtosis(tmp_path / "k.json") == found
    text = kurtosis_figure(found, tmp_path / "figure.svg").read_text()
    assert ">other<" in text
    assert ">run<" in text
