"""The study: what is done is not done again, and its sums are those of a hand computation."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pellucid.cli import main
from pellucid.core.checkpoint import BOX, content_hash, load_model, load_tokenizer
from pellucid.core.circuit import Circuit, Node
from pellucid.core.config import uniform
from pellucid.core.files import write_atomic
from pellucid.core.generate import generate
from pellucid.lab.config import PruneConfig
from pellucid.lab.controls import Point
from pellucid.recipes import study as studying
from pellucid.recipes import workbench
from pellucid.recipes.figures import edges_figure, necessity_figure, size_figure
from pellucid.recipes.recipe import run
from pellucid.recipes.study import TaskStudy, load_study, study
from pellucid.recipes.study_report import baseline_ratio, comparisons, controls_table, ratio, stability, table
from pellucid.recipes.workbench import Workbench
from pellucid.tasks import make_task
from tests.recipes.test_ablations import tiny

SEARCH = PruneConfig(target=0.9, hopeless=2.0, steps=2, pairs=4, pool=64, measure=16)


def result(name: str, task: str, edges: int | None, seed: int = 0) -> TaskStudy:
    metrics = {
        "reached": edges is not None,
        "edges": edges or 5,
        "nodes": 3,
        "verdict": "reached" if edges is not None else "unreachable",
        **dict.fromkeys(
            (
                "full_task_loss",
                "calibrated_task_loss",
                "ablated_task_loss",
                "partial_task_loss",
                "resample_task_loss",
            ),
            0.1,
        ),
    }
    circuit = Circuit(task=task, model="0" * 16, nodes=(), edges=(), metrics=metrics)
    curves = {"learned": [Point(1, 10, 0.5, 0.6), Point(9, 90, 0.1, 0.2)]}
    return TaskStudy(
        run=name, task=task, seed=seed, validation_loss=2.0, circuits={"0.15": circuit}, curves=curves
    )


def test_the_ratio_is_a_geometric_mean_over_tasks_that_both_reach():
    results = [
        result("dense", "a", 99), result("sparse", "a", 9),
        result("dense", "b", 399), result("sparse", "b", 9),
        result("dense", "b", 39, seed=1), result("sparse", "b", 9, seed=1),
        result("dense", "c", None), result("sparse", "c", 9),
        result("dense", "d", 50),
    ]  # fmt: skip
    found = ratio(results, "dense", "sparse")
    of_b = math.sqrt(40 * 4)  # over its seeds
    assert found == pytest.approx((math.sqrt(10 * of_b), 10, of_b, 2))
    assert math.isnan(ratio(results, "dense", "none").times)
    assert [list(column.cells) for column in comparisons(results).columns[:2]] == [["dense"], ["sparse"]]


def test_a_baseline_is_compared_with_the_search_in_the_same_run():
    def found(task, edges, attribution):
        return result("sparse", task, edges).model_copy(update={"baselines": {"attribution": attribution}})

    results = [found("a", 9, 39), found("b", 9, 159), found("c", 9, None), found("d", None, 50)]
    assert baseline_ratio(results, "sparse", "attribution") == pytest.approx((8, 4, 16, 2))
    (row,) = zip(*(column.cells for column in comparisons(results).columns), strict=True)
    assert row == ("sparse, attribution", "sparse, as searched", "8.0", "4.0 to 16.0", "2")


def test_a_control_that_the_search_solves_is_marked():
    def with_controls(task, edges, untrained):
        points = {
            "shuffled": [Point(1, 9, 0.7, 0.7)],
            "nonsense": [Point(1, 9, 0.6, 0.7), Point(2, 90, 0.1, 0.1)],
        }
        curves = {**points, "untrained": [Point(1, 9, untrained, 0.7)]}
        return result("sparse", task, edges).model_copy(update={"curves": curves})

    results = [
        with_controls("a", 20, 0.55),
        with_controls("b", 20, 0.08),
        with_controls("c", None, 0.1),
        result("sparse", "d", 3),
    ]
    rows = list(zip(*(column.cells for column in controls_table(results).columns), strict=True))
    assert rows == [
        ("a", "sparse", "0", "20", "0.600", "0.700", "0.550"),
        ("b", "sparse", "0", "20", "0.600", "0.700", "[bold red]0.080![/]"),
    ]


def test_results_are_drawn_and_tabulated_also_where_nothing_was_reached(tmp_path):
    results = [result("dense", "a", 99), result("sparse", "a", 9), result("sparse", "b", None)]
    results.append(TaskStudy(run="dense", task="b", seed=0, validation_loss=None, refused="cannot <do> it"))
    assert table(results).row_count == 4
    for figure in (size_figure, edges_figure, necessity_figure):
        text = figure(results, tmp_path / "figure.svg").read_text()
        assert "sparse" in text
        assert figure(results, tmp_path / "again.svg").read_text() == text


def test_lines_of_loss_against_size_are_of_the_same_tasks(tmp_path):
    results = [result("dense", "a", 99), result("sparse", "a", 9), result("sparse", "b", 9)]
    text = size_figure(results, tmp_path / "figure.svg").read_text()
    assert "dense, learned (1 tasks)" in text
    assert "sparse, learned (1 tasks)" in text
    assert "learned" not in size_figure([results[0], results[2]], tmp_path / "figure.svg").read_text()


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.setenv("PELLUCID_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(workbench, "MEAN_TOKENS", 2000)
    recipe = tiny()
    model = replace(recipe.model, d_model=16, layers=uniform(1, 2, 4, 16))
    recipe = replace(recipe, model=model, sparsity=None, train=replace(recipe.train, steps=1))
    run(recipe, tmp_path / "run", device="cpu")
    return tmp_path


@pytest.fixture
def made(monkeypatch):
    """What each call of `study_task` was asked for, in order."""
    calls, real = [], studying.study_task

    def study_task(path, task, seed, config, **parts):
        calls.append((task, parts))
        return real(path, task, seed, config, **parts)

    monkeypatch.setattr(studying, "study_task", study_task)
    return calls


@pytest.mark.slow
def test_a_study_goes_on_where_it_stopped(runs, made):
    def searches(**options):
        return study([runs / "run"], runs / "out", tasks=["for_while", "if_equals"], config=SEARCH, **options)

    first = searches(controls_for=["for_while"])
    assert [(r.task, r.seed) for r in first] == [("for_while", 0), ("if_equals", 0)]
    assert set(first[0].curves) == {"learned", "attribution", "shuffled", "nonsense", "untrained"}
    assert set(first[1].curves) == {"learned", "attribution"}
    (runs / "out" / "run" / "if_equals-0.json").unlink()
    made.clear()
    again = searches()
    assert [task for task, _ in made] == ["if_equals"]
    assert again == first
    assert load_study(runs / "out") == again
    with pytest.raises(ValueError, match=r"for_while-0\.json is of another search"):
        study([runs / "run"], runs / "out", tasks=["for_while"], config=replace(SEARCH, target=0.8))


@pytest.mark.slow
def test_what_is_asked_for_later_is_added_and_is_what_it_would_have_been(runs, made):
    def ask(out, **options):
        (found,) = study([runs / "run"], runs / out, tasks=["for_while"], config=SEARCH, **options)
        return found

    everything = {
        "targets": [1.0, 1e-9],
        "controls_for": ["for_while"],
        "baselines": ("attribution", "random"),
    }
    at_once = ask("at once", **everything)
    assert at_once.circuits.keys() == {"0.9", "1"}
    assert at_once.baselines.keys() == {"attribution", "random"}
    assert at_once.curves.keys() == {"learned", "attribution", "random", "shuffled", "nonsense", "untrained"}
    made.clear()
    ask("later", baselines=("attribution",))
    file = runs / "later" / "run" / "for_while-0.json"
    older = json.loads(file.read_text())
    del older["model"], older["whole_loss"]  # as results were before
    file.write_text(json.dumps(older))
    ask("later", targets=[1.0], baselines=())
    ask("later", **everything)
    assert ask("later", **everything) == at_once
    assert ask("later") == at_once
    assert [parts for _, parts in made] == [
        {"targets": [0.9], "baselines": ("attribution",), "controls": False},
        {"targets": [1.0], "baselines": [], "controls": False},
        {"targets": [], "baselines": ["random"], "controls": True},
    ]


def test_a_result_of_another_model_is_refused_and_left_alone(runs, made):
    own = content_hash(load_model(runs / "run", device="cpu"))
    of_another = result("run", "for_while", 9).model_copy(update={"search": SEARCH.key()})
    for stored in (
        of_another,
        of_another.model_copy(update={"circuits": {}, "model": "0" * 16, "refused": "no"}),
    ):
        file = runs / "out" / "run" / "for_while-0.json"
        write_atomic(file, stored.model_dump_json())
        with pytest.raises(ValueError, match=rf"for_while-0\.json is of the model 0{{16}}, but .* is {own}"):
            study([runs / "run"], runs / "out", tasks=["for_while"], config=SEARCH)
        assert file.read_text() == stored.model_dump_json()
    assert not made


def test_tasks_that_the_tokenizer_splits_are_refused_with_the_reason_and_the_rest_goes_on(runs, made):
    tasks = [
        "enumerate_range",
        "set_or_string",
        "for_while",
    ]  # an answer is split, all prompts differ in length

    def ask():
        found = study([runs / "run"], runs / "out", tasks=tasks, config=SEARCH, baselines=())
        return {r.task: r for r in found}

    found = ask()
    assert found.keys() == set(tasks)
    assert "must be single tokens" in (found["enumerate_range"].refused or "")
    assert "draws were rejected" in (found["set_or_string"].refused or "")
    assert found["for_while"].circuits.keys() == {"0.9"}
    assert len({r.model for r in found.values()}) == 1
    assert table(list(found.values()), 0.9).row_count == 3
    assert ask() == found
    assert len(made) == 3


def test_what_a_study_cannot_tell_apart_or_read_is_named(runs, tmp_path):
    with pytest.raises(ValueError, match="unknown task 'for_whilst'; did you mean 'for_while'"):
        study([runs / "run"], runs / "out", controls_for=["for_whilst"])
    with pytest.raises(ValueError, match="controls are asked for if_equals, which is not among the tasks"):
        study([runs / "run"], runs / "out", tasks=["for_while"], controls_for=["if_equals"])
    for nothing in ({"runs": []}, {"runs": [runs / "run"], "seeds": ()}):
        with pytest.raises(ValueError, match="at least one run and one seed"):
            study(**nothing, out=runs / "out")
    assert not (runs / "out").exists()
    with pytest.raises(ValueError, match=r"need names of their own, got .*a/run, .*b/run"):
        study([tmp_path / "a" / "run", tmp_path / "b" / "run"], runs / "out")
    file = runs / "out" / "run" / "for_while-0.json"
    write_atomic(file, "{}")
    with pytest.raises(ValueError, match=r"for_while-0\.json is not a result of a study"):
        study([runs / "run"], runs / "out", tasks=["for_while"], config=SEARCH)


def test_the_nodes_that_seeds_share_are_tabulated_for_tasks_with_several():
    def found(task, seed, channels, reached=True):
        r = result("sparse", task, len(channels) if reached else None, seed)
        nodes = tuple(Node(site="0.mlp.act", channel=c) for c in channels)
        circuit = r.circuits["0.15"].model_copy(update={"nodes": nodes})
        return r.model_copy(update={"circuits": {"0.15": circuit}})

    results = [
        found("a", 0, [1, 2]), found("a", 1, [2, 3]), found("a", 2, [2, 3]),
        found("b", 0, [1]), found("b", 1, [1], reached=False),
        found("c", 0, []), found("c", 1, []),
    ]  # fmt: skip
    shown = stability(results)
    cells = [list(column.cells) for column in shown.columns]
    assert cells == [["a", "c"], ["sparse", "sparse"], ["0, 1, 2", "0, 1"], ["0.56", "0.00"]]
    assert stability(results, 0.3).row_count == 0


def test_the_command_names_a_task_that_there_is_not(runs, capsys):
    with pytest.raises(SystemExit):
        main(["study", str(runs / "run"), "--out", str(runs / "out"), "--tasks", "for_whilst"])
    assert "did you mean 'for_while'" in capsys.readouterr().err


def size(name):
    return sum(f.stat().st_size for f in (BOX / name).rglob("*") if f.is_file())


def test_the_box_is_small():
    names = sorted(place.name for place in BOX.iterdir() if place.is_dir())
    assert names == ["parity-tiny", "sparse-python-4l", "sparse-python-4l-wide"]
    assert sum(size(name) for name in names if name.startswith("sparse")) < 5_000_000
    assert size("parity-tiny") < 8_000_000


@pytest.mark.parametrize(
    ("name", "fraction"), [("sparse-python-4l", 0.02), ("sparse-python-4l-wide", 0.00925)]
)
def test_sparse_models_in_the_box_load_by_name_and_do_their_task(name, fraction):
    model = load_model(f"pellucid:{name}", device="cpu")
    task = make_task("single_double_quote", load_tokenizer(f"pellucid:{name}"))
    batch = task.pairs(64, split="test")
    assert task.metric(model(batch.tokens), batch).mean() < 0.1
    weights = [p for name, p in model.named_parameters() if name != "bigram"]
    nonzero = sum(int(p.count_nonzero()) for p in weights) / sum(p.numel() for p in weights)
    assert nonzero == pytest.approx(fraction, abs=1e-4)


def test_the_parity_model_in_the_box_continues_python():
    model = load_model("pellucid:parity-tiny", device="cpu")
    tokenizer = load_tokenizer("pellucid:parity-tiny")
    prompt = tokenizer.encode("import os\nimport sys\n\ndef main").ids
    text = tokenizer.decode(generate(model, [prompt], 1, temperature=0)[0])
    assert text.startswith("(")


def test_a_box_that_there_is_not_is_named():
    with pytest.raises(ValueError, match="did you mean 'pellucid:sparse-python-4l'"):
        load_model("pellucid:sparse-python-4")


def test_what_is_made_of_a_boxed_model_stays_out_of_the_box(tmp_path, monkeypatch):
    monkeypatch.setenv("PELLUCID_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    before = {f: f.stat().st_mtime_ns for f in BOX.rglob("*")}
    bench = Workbench.open("pellucid:sparse-python-4l", device="cpu")
    assert bench.path == Path("runs/sparse-python-4l")
    assert all(np.isfinite(mean.numpy()).all() for mean in bench.means.values())
    assert {f: f.stat().st_mtime_ns for f in BOX.rglob("*")} == before
