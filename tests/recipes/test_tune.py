"""Tuning: the centre comes first, the fewest edges win, and a study outlives its processes and is of one search."""

import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from pellucid.core.circuit import Circuit
from pellucid.core.config import uniform
from pellucid.lab.config import PruneConfig
from pellucid.recipes import tune as tuning
from pellucid.recipes import workbench
from pellucid.recipes.recipe import run
from pellucid.recipes.tune import (
    SPACE,
    centre,
    objective,
    open_study,
    queue,
    quiet,
    release_stale,
    settings_of,
    suggest,
    tune,
)
from tests.recipes.test_ablations import tiny

TASK = "for_while"
SEARCH = PruneConfig(target=0.9, hopeless=2.0, steps=2, pairs=4, pool=64, measure=16, k_coefs=(1e-4,))
FACTS = {"model": "0123", "task": TASK, "seed": 0, **json.loads(SEARCH.key())}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Everything of this module reads little text, from one cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PELLUCID_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(workbench, "MEAN_TOKENS", 2000)
        yield


@pytest.fixture
def path(cache, tmp_path):
    """A run of hardly any training."""
    recipe = tiny()
    model = replace(recipe.model, d_model=16, layers=uniform(1, 2, 4, 16))
    recipe = replace(recipe, model=model, sparsity=None, train=replace(recipe.train, steps=1))
    run(recipe, tmp_path / "run", device="cpu")
    return tmp_path / "run"


def tune_elsewhere(path, **options):
    """`tune` in a process of its own, which says what it was interrupted with."""
    code = f"""
from pellucid.lab.config import PruneConfig
from pellucid.recipes import workbench
from pellucid.recipes.tune import tune
from pellucid.training.loop import Interrupted
workbench.MEAN_TOKENS = 2000
try:
    tune({str(path)!r}, {TASK!r}, config={SEARCH!r}, device="cpu", **{options!r})
except Interrupted as stop:
    print(stop)
"""
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def stored(path):
    """The trials in the journal of a run's study."""
    with quiet():
        file = path / "circuits" / TASK / "tune" / "journal.log"
        place = JournalStorage(JournalFileBackend(str(file)))
        return optuna.load_study(study_name=None, storage=place).trials


def by_state(trials, state):
    return [trial for trial in trials if trial.state == state]


def circuit_of(path, trial):
    return Circuit.load(path / "circuits" / TASK / "tune" / f"trial-{trial.number:04}.json")


losses = st.floats(1e-6, 100.0)


@given(st.integers(0, 10**6), st.integers(0, 10**6), losses, losses)
def test_fewer_edges_are_better_and_a_missed_target_is_worse_than_all_edges(a, b, loss, other):
    fewer, total = sorted((a, b))

    def value(edges, loss, reached):
        return objective(
            {"edges": edges, "total_edges": total, "calibrated_task_loss": loss, "reached": reached}
        )

    assert (value(fewer, loss, True) < value(total, other, True)) == (fewer < total)
    assert value(0, loss, False) > value(total, other, True)
    assert (value(0, loss, False) < value(total, other, False)) == (
        value(7, loss, False) < value(9, other, False)
    )
    if other > loss + 1e-9:
        assert value(total, loss, False) < value(0, other, False)


def configs():
    sizes = st.floats(1e-6, 0.5)
    return st.builds(
        lambda k, bias, lr, beta2, warmup, decay: replace(
            SEARCH, k_coefs=(k,), init_bias=bias, lr=lr, beta2=beta2, warmup=warmup, weight_decay=decay
        ),
        sizes, sizes, sizes, st.floats(0.5, 0.999), st.just(0.0) | sizes, st.just(0.0) | sizes,
    )  # fmt: skip


@given(configs())
def test_the_centre_is_the_search_that_was_asked_for(config):
    there = settings_of(config, centre(config))
    assert there.beta2 == pytest.approx(config.beta2, abs=1e-12)
    assert replace(there, beta2=config.beta2) == config


def test_gates_without_a_temperature_have_none_tuned():
    assert SPACE.keys() - centre(SEARCH).keys() == set()
    assert SPACE.keys() - centre(replace(SEARCH, method="hard_concrete")).keys() == {"temperature"}


@given(configs(), st.integers(0, 1000))
def test_every_suggestion_is_a_search_near_the_centre_and_leaves_alone_what_is_off(config, seed):
    with quiet():
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
        params = suggest(study.ask(), centre(config))
    settings = settings_of(config, params)
    for name, value in params.items():
        spread, most = SPACE[name]
        middle = centre(config)[name]
        assert middle / spread <= value * (1 + 1e-9)
        assert value <= max(middle, min(middle * spread, most)) * (1 + 1e-9)
    assert 0 < settings.beta2 < 1
    assert settings.warmup < 1
    for name in ("warmup", "weight_decay"):
        if not getattr(config, name):
            assert getattr(settings, name) == 0
    untouched = {"k_coefs", "init_noise", "init_bias", "weight_decay", "lr", "beta2", "warmup", "temperature"}
    before, after = json.loads(config.key()), json.loads(settings.key())
    assert {k: v for k, v in before.items() if k not in untouched} == {
        k: v for k, v in after.items() if k not in untouched
    }


@pytest.mark.parametrize(("key", "value"), [("model", "4567"), ("task", "else_elif"), ("target", 0.1),
                                            ("ablation", "mean"), ("steps", 3), ("seed", 1)])  # fmt: skip
def test_a_journal_of_another_search_is_refused(tmp_path, key, value):
    file = tmp_path / "journal.log"
    with quiet():
        queue(open_study(file, FACTS), centre(SEARCH))
        before = file.read_bytes()
        said = rf"journal.log holds another search, which differs in {key} \({FACTS[key]!r} there, {value!r} here\)"
        with pytest.raises(ValueError, match=said):
            open_study(file, {**FACTS, key: value})
        assert file.read_bytes() == before
        assert len(open_study(file, FACTS).trials) == 1


def test_a_database_holds_several_models_apart(tmp_path):
    url = f"sqlite:///{tmp_path}/studies.db"
    with quiet():
        queue(open_study(url, FACTS), centre(SEARCH))
        other = open_study(url, {**FACTS, "model": "4567"})
        assert not other.trials
        with pytest.raises(ValueError, match=r"differs in steps \(2 there, 3 here\)"):
            open_study(url, {**FACTS, "steps": 3})
        for study in (other, open_study(url, FACTS)):
            study._storage.remove_session()  # type: ignore[attr-defined]


def test_a_line_that_a_crash_cut_short_is_dropped_and_other_files_are_left_alone(tmp_path):
    file = tmp_path / "journal.log"
    with quiet():
        study = open_study(file, FACTS)
        queue(study, centre(SEARCH))
        whole = file.read_bytes()
        for cut in (1, 20):
            file.write_bytes(whole + whole.splitlines()[-1][:cut])
            study = open_study(file, FACTS)
            assert file.read_bytes() == whole
        assert study.ask().number == 0
        for text in ("a letter", '{"a": 1}\n{"b"', "first\nsecond\n"):
            file.write_text(text)
            with pytest.raises(ValueError, match="not a journal of Optuna's"):
                open_study(file, FACTS)
            assert file.read_text() == text
        file.write_bytes(whole + b"{}\n" + whole)
        with pytest.raises(ValueError, match="or is damaged"):
            open_study(file, FACTS)


def test_settings_of_a_killed_trial_are_tried_again_once_and_those_of_a_live_one_are_not(tmp_path):
    with quiet():
        study, other = (open_study(tmp_path / "journal.log", FACTS) for _ in range(2))
        killed, alive, own = (study.ask() for _ in range(3))
        params = suggest(killed, centre(SEARCH))
        suggest(alive, centre(SEARCH))
        for trial, age in ((killed, 1), (alive, -1), (own, 1)):
            trial.set_user_attr("alive", time.time() - tuning.STALE - 5 * age)
        for each in (study, other, study):
            release_stale(each, {own.number})
        states = [trial.state for trial in study.trials]
        assert states == [TrialState.FAIL, TrialState.RUNNING, TrialState.RUNNING, TrialState.WAITING]
        again = other.ask()
        assert suggest(again, centre(SEARCH)) == params


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trials": 0}, "trials and jobs must be at least 1, got 0 and 1"),
        ({"jobs": 0}, "trials and jobs must be at least 1"),
        ({"config": PruneConfig(method="attribution")}, "'attribution' has nothing to tune"),
        ({"config": PruneConfig(k_coefs=(1e-4, 1e-3))}, "tuning starts from one k_coef"),
        ({}, "no checkpoint at"),
    ],
)
def test_what_cannot_be_tuned_is_said_before_anything_starts(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        tune(tmp_path / "nowhere", TASK, **options)
    assert not list(tmp_path.iterdir())


def test_without_optuna_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ImportError, match=r"pellucid\[sweep\]"):
        tune(tmp_path / "nowhere", TASK)


def test_the_centre_is_tried_first_and_the_circuit_of_fewest_edges_is_the_runs(path):
    circuit = tune(path, TASK, config=SEARCH, trials=3, device="cpu")
    trials = stored(path)
    assert len(by_state(trials, TrialState.COMPLETE)) == len(trials) == 3
    circuits = [circuit_of(path, trial) for trial in trials]
    assert circuits[0].metrics["search"] == SEARCH.key()
    assert len({c.metrics["search"] for c in circuits}) == 3
    assert [trial.value for trial in trials] == [objective(c.metrics) for c in circuits]
    assert circuit == min(circuits, key=lambda c: objective(c.metrics))
    assert Circuit.load(path / "circuits" / TASK / "circuit.json") == circuit
    assert not multiprocessing.active_children()
    # Nothing is left to do: no process starts, and a circuit whose file is lost is found again.
    best = min(trials, key=lambda trial: trial.values[0])
    (path / "circuits" / TASK / "tune" / f"trial-{best.number:04}.json").unlink()
    assert tune(path, TASK, config=SEARCH, trials=3, device="cpu") == circuit
    assert len(stored(path)) == 3


@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_sweep_goes_on_where_it_stood(path, stop, monkeypatch):
    sweep = tune_elsewhere(path, trials=100, jobs=2)
    kept = path / "circuits" / TASK / "tune"
    while sweep.poll() is None and len(list(kept.glob("trial-*.json"))) < 3:
        time.sleep(0.05)
    os.kill(sweep.pid, stop)
    said, errors = sweep.communicate()
    before = stored(path)
    done = by_state(before, TrialState.COMPLETE)
    cut = by_state(before, TrialState.RUNNING) + by_state(before, TrialState.FAIL)
    assert done
    if stop == signal.SIGINT:
        assert f"stopped at {len(done)} of 100 trials; run again to go on" in said, errors
    files = {trial.number: circuit_of(path, trial) for trial in done}
    monkeypatch.setattr(tuning, "STALE", -1.0)
    tune(path, TASK, config=SEARCH, trials=len(done) + 2, device="cpu")
    after = stored(path)
    assert len(by_state(after, TrialState.COMPLETE)) == len(done) + 2
    assert not by_state(after, TrialState.RUNNING)
    assert {number: circuit_of(path, after[number]) for number in files} == files
    tried = [trial.params for trial in by_state(after, TrialState.COMPLETE)]
    for trial in cut[:2]:  # a trial may have been cut while its settings were drawn
        assert any(trial.params.items() <= params.items() for params in tried)


@pytest.mark.slow
def test_two_processes_share_a_storage(path):
    sweeps = [tune_elsewhere(path, trials=6) for _ in range(2)]
    for sweep in sweeps:
        _, errors = sweep.communicate()
        assert sweep.returncode == 0, errors
    trials = stored(path)
    done = by_state(trials, TrialState.COMPLETE)
    assert 6 <= len(done) <= 7  # each may have had its last one on the way
    assert len(trials) == len(done)
    params = [tuple(trial.params.values()) for trial in done[1:]]
    assert len(set(params)) == len(params)
    best = min(done, key=lambda trial: trial.values[0])
    circuit = Circuit.load(path / "circuits" / TASK / "circuit.json")
    assert objective(circuit.metrics) == best.value


@pytest.mark.slow
def test_a_killed_worker_is_named_and_its_trial_is_made_later(path, monkeypatch):
    def kill(pipes, timeout):
        (worker,) = multiprocessing.active_children()
        worker.kill()
        return multiprocessing.connection.wait(pipes, timeout)

    with monkeypatch.context() as patch:
        patch.setattr(tuning, "wait", kill)
        with pytest.raises(ChildProcessError, match=r"trial 0 ended with code -9: run again to go on"):
            tune(path, TASK, config=SEARCH, trials=1, device="cpu")
    assert tune(path, TASK, config=SEARCH, trials=1, device="cpu").metrics["search"] == SEARCH.key()


@pytest.mark.slow
def test_what_stops_a_trial_stops_the_sweep_and_says_why(path, tmp_path):
    low = replace(SEARCH, target=0.001)
    circuit = tune(path, TASK, config=low, trials=5, device="cpu", storage=tmp_path / "low" / "journal.log")
    assert str(circuit.metrics["verdict"]).endswith("is above the target of 0.001")
    hopeless = replace(SEARCH, hopeless=0.01)
    folder = tmp_path / "hopeless"
    circuit = tune(path, TASK, config=hopeless, trials=5, device="cpu", storage=folder / "journal.log")
    assert circuit.metrics["verdict"] == "the model cannot do the task"
    assert [file.name for file in sorted(folder.glob("trial-*"))] == ["trial-0000.json"]
    assert not multiprocessing.active_children()
