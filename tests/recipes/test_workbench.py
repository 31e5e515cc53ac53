"""Pruning a run: the same search is made once, and no search, model or mistake costs a circuit that is there."""

import json
import math
import shutil
from dataclasses import replace

import pytest

from pellucid.cli import main
from pellucid.core.checkpoint import content_hash
from pellucid.core.circuit import Circuit
from pellucid.core.config import uniform
from pellucid.lab.config import PruneConfig
from pellucid.lab.prune import prune as lab_prune
from pellucid.recipes import workbench
from pellucid.recipes.recipe import run
from pellucid.recipes.tune import tune
from pellucid.recipes.workbench import Workbench, load_view
from tests.recipes.test_ablations import tiny

TASK = "for_while"
SEARCH = PruneConfig(target=0.9, hopeless=2.0, steps=2, pairs=4, pool=64, measure=16, k_coefs=(1e-4,))
OTHER = replace(SEARCH, target=0.8)
IMPOSSIBLE = replace(SEARCH, target=1e-9)
HOPELESS = replace(SEARCH, hopeless=0.01)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of hardly any training; everything of this module reads little text, from one cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PELLUCID_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(workbench, "MEAN_TOKENS", 2000)
        recipe = tiny()
        model = replace(recipe.model, d_model=16, layers=uniform(1, 2, 4, 16))
        recipe = replace(recipe, model=model, sparsity=None, train=replace(recipe.train, steps=1))
        path = tmp_path_factory.mktemp("runs") / "run"
        run(recipe, path, device="cpu")
        yield path


@pytest.fixture
def bench(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    return Workbench.open(tmp_path / "run", device="cpu")


@pytest.fixture(scope="module")
def circuit(trained):
    """What `SEARCH` finds in the run, made elsewhere."""
    bench = Workbench.open(trained, device="cpu")
    return lab_prune(bench.model, bench.task(TASK), bench.means, config=SEARCH)


def files(bench):
    """The content of what pruning wrote, by its place under `circuits/TASK/`."""
    place = bench.path / "circuits" / TASK
    return {str(f.relative_to(place)): f.read_text() for f in place.rglob("*.json")}


def options(config):
    """The flags of `config`."""
    fields = ("target", "hopeless", "steps", "pairs", "pool", "measure")
    flags = [text for name in fields for text in (f"--search.{name}", str(getattr(config, name)))]
    return [*flags, "--search.k-coefs", *map(str, config.k_coefs), "--device", "cpu"]


def prune(bench, config, *more):
    """`pellucid prune` as a user calls it."""
    main(["prune", str(bench.path), "--task", TASK, *options(config), *more])


def no_search(*args, **kwargs):
    raise AssertionError("searched again")


def test_searches_of_one_run_are_kept_side_by_side_with_what_came_of_them(bench, monkeypatch, capsys):
    prune(bench, SEARCH, "--controls")
    first = files(bench)
    assert first.keys() == {"circuit.json", "view.json", "controls.json"}
    shown, points = json.loads(first["view.json"])["metrics"], json.loads(first["controls.json"])
    for name in ("shuffled", "nonsense", "untrained"):
        within = [p["loss"] for p in points[name] if p["edges"] <= shown["edges"]]
        assert shown[f"control_{name}"] == pytest.approx(min(within, default=math.log(2)))
    assert "Control: untrained model" in capsys.readouterr().out
    prune(bench, OTHER)
    both = files(bench)
    (old,) = {name.split("/")[0] for name in both} - {"circuit.json", "view.json"}
    assert both.keys() == {"circuit.json", "view.json", *(f"{old}/{name}" for name in first)}
    assert {name: both[f"{old}/{name}"] for name in first} == first
    assert json.loads(both["circuit.json"])["metrics"]["target"] == 0.8
    assert "control_untrained" not in json.loads(both["view.json"])["metrics"]
    assert load_view(bench.path).metrics["target"] == 0.8
    assert load_view(bench.path / "circuits" / TASK / old).metrics["target"] == 0.9
    prune(bench, SEARCH, "--seed", "1")
    assert len(files(bench)) == 7
    # A search that was made comes back without being made again, and then is the latest.
    monkeypatch.setattr(workbench, "prune", no_search)
    for _ in range(2):
        prune(bench, SEARCH)
        again = files(bench)
        assert len(again) == 7
        assert {name: again[name] for name in first} == first
    assert capsys.readouterr().out.splitlines()[-1] == str(bench.path / "circuits" / TASK / "circuit.json")


@pytest.mark.parametrize(("command", "before"), [("prune", None), ("prune", SEARCH), ("tune", SEARCH)])
def test_a_target_below_the_whole_models_loss_is_an_error_and_writes_no_circuit(
    bench, before, command, capsys
):
    if before:
        prune(bench, before)
    there = files(bench)
    capsys.readouterr()
    trials = ["--trials", "1"] if command == "tune" else []
    with pytest.raises(SystemExit) as stop:
        main([command, str(bench.path), "--task", TASK, *options(IMPOSSIBLE), *trials])
    assert stop.value.code == 2
    said, errors = capsys.readouterr()
    assert "is above the target of 1e-09: choose a larger --search.target" in errors
    assert "circuit.json" not in said
    assert {name: text for name, text in files(bench).items() if not name.startswith("tune/")} == there


def test_a_hopeless_task_is_shown_and_replaces_no_circuit(bench, capsys):
    prune(bench, HOPELESS)
    said = capsys.readouterr().out
    assert "circuit.json" not in said
    assert files(bench).keys() == {"view.json"}
    assert "cannot do the task" in (load_view(bench.path).note or "")
    prune(bench, SEARCH)
    good = files(bench)
    assert good.keys() == {"circuit.json", "view.json"}
    prune(bench, HOPELESS)
    assert {name: files(bench)[name] for name in good} == good


def test_a_circuit_of_another_model_is_named_and_left_alone(bench, circuit, monkeypatch):
    file = bench.path / "circuits" / TASK / "circuit.json"
    circuit.model_copy(update={"model": "0123456789abcdef"}).save(file)
    there = files(bench)
    monkeypatch.setattr(workbench, "prune", no_search)
    monkeypatch.setattr("pellucid.recipes.tune.run_trials", no_search)
    said = rf"circuit\.json is a circuit of the model 0123456789abcdef, but .* is {content_hash(bench.model)}"
    for call in (
        lambda: bench.prune(bench.task(TASK), SEARCH),
        lambda: bench.prune(bench.task(TASK), OTHER),
        lambda: bench.keep(circuit),
        lambda: tune(bench.path, TASK, config=SEARCH, trials=1, device="cpu"),
    ):
        with pytest.raises(ValueError, match=said):
            call()
    assert files(bench) == there


def test_tuning_and_pruning_keep_each_others_circuits(bench):
    pruned = bench.prune(bench.task(TASK), OTHER)
    tuned = tune(bench.path, TASK, config=SEARCH, trials=1, device="cpu")
    place = bench.path / "circuits" / TASK
    assert Circuit.load(place / "circuit.json") == tuned
    assert [Circuit.load(f) for f in place.glob("*/circuit.json")] == [pruned]
    assert bench.prune(bench.task(TASK), OTHER) == pruned
    assert Circuit.load(place / "circuit.json") == pruned
    assert [Circuit.load(f) for f in place.glob("*/circuit.json")] == [tuned]


@pytest.mark.parametrize("moves", range(6))
def test_a_crash_while_files_move_loses_no_circuit(bench, circuit, monkeypatch, moves):
    first, second = (
        circuit.model_copy(update={"metrics": {**circuit.metrics, "search": config.key()}})
        for config in (SEARCH, OTHER)
    )
    place = bench.path / "circuits" / TASK
    for each in (first, second):
        bench.keep(each)
        for name in ("view.json", "controls.json"):
            (place / name).write_text(str(each.metrics["search"]))
    done, real = 0, type(place).replace

    def crash(self, target):
        nonlocal done
        done += 1
        if done > moves:
            raise KeyboardInterrupt
        return real(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(type(place), "replace", crash)
        with pytest.raises(KeyboardInterrupt):
            bench.keep(first)
    found = [Circuit.load(file) for file in place.rglob("circuit.json")]
    assert first in found
    assert second in found
    monkeypatch.setattr(workbench, "prune", no_search)
    for config, each in ((SEARCH, first), (OTHER, second), (SEARCH, first)):
        assert bench.prune(bench.task(TASK), config) == each
        assert Circuit.load(place / "circuit.json") == each
        for name in ("view.json", "controls.json"):
            assert (place / name).read_text() == config.key()
