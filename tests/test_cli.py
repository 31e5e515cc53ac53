"""The command line: help that helps, errors of one line, and every part of the demo from end to end."""

import contextlib
import json
import os
import subprocess
import sys

import pytest

from pellucid.cli import main
from pellucid.core.circuit import Circuit
from pellucid.viewer.schema import ModelView


def run(*args):
    """`pellucid ARGS` in a process of its own: (exit code, output, errors)."""
    done = subprocess.run(
        [sys.executable, "-m", "pellucid", *map(str, args)],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("args", [[], ["--help"], ["train"], ["train", "--help"]])
def test_help_names_what_there_is(args, capsys):
    with contextlib.suppress(SystemExit):
        main(args)
    assert "demo-sparse" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["train demo-sparse", "prune", "tasks", "report", "demo"])
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*command.split(), "--help"])
    assert stop.value.code == 0
    assert "usage: pellucid " + command in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["trian"], "unknown command 'trian'; did you mean 'train'"),
        (["train", "demo-sprase", "--out", "x"], "unknown recipe 'demo-sprase'; did you mean 'demo-sparse'"),
        (
            ["train", "demo-sparse", "--out", "x", "--recipe.model.norm", "none", "--recipe.train.lr", "-1"],
            "lr must be positive",
        ),
        (["prune", "nowhere", "--task", "for_while"], "no checkpoint at nowhere"),
        (["report", "nowhere", "--out", "x.html"], "no pruned circuit at nowhere"),
    ],
)
def test_errors_are_one_line_without_a_traceback(args, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, errors = run(*args)
    assert code == 2
    assert message in errors
    assert "Traceback" not in errors
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_demo_trains_prunes_and_draws_and_its_parts_can_be_used_again(tmp_path):
    out = tmp_path / "demo"
    code, _, errors = run("demo", "--out", out, "--smoke")
    assert code == 0, errors
    summary = json.loads((out / "summary.json").read_text())
    assert {"sparse", "dense", "magnitude", "seconds"} <= summary.keys()
    for name in ("sparse", "dense", "magnitude"):
        assert {"val_loss", "nonzero_fraction", "parameters", "tokens", "task", "full_task_loss", "circuit_task_loss",
                "calibrated_task_loss", "nodes", "edges", "ablated_task_loss"} <= summary[name].keys()  # fmt: skip
    assert summary["sparse"]["nonzero_fraction"] == pytest.approx(0.03, abs=1e-3)
    assert summary["magnitude"]["nonzero_fraction"] == pytest.approx(
        summary["sparse"]["nonzero_fraction"], abs=1e-4
    )
    assert summary["dense"]["nonzero_fraction"] > 0.95
    page = (out / "report.html").read_text()
    assert "single_double_quote" in page
    circuit = Circuit.load(out / "sparse" / "circuits" / "single_double_quote" / "circuit.json")
    assert len(circuit.edges) == summary["sparse"]["edges"]
    ModelView.model_validate_json(
        (out / "sparse" / "circuits" / "single_double_quote" / "view.json").read_text()
    )

    code, _, errors = run("tasks", "--model", out / "sparse")
    assert code == 0, errors
    code, _, errors = run("report", out / "sparse", out / "dense", "--out", tmp_path / "page.html")
    assert code == 0, errors
    assert (tmp_path / "page.html").exists()
    code, _, errors = run("prune", out / "sparse", "--task", "for_whlie")
    assert code == 2
    assert "unknown task 'for_whlie'; did you mean 'for_while'" in errors
    # A second demo in the same place makes nothing again, and finds the same.
    code, _, errors = run("demo", "--out", out, "--smoke")
    assert code == 0, errors
    again = json.loads((out / "summary.json").read_text())
    assert {k: v for k, v in again.items() if k != "seconds"} == {
        k: v for k, v in summary.items() if k != "seconds"
    }
