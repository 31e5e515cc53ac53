"""A circuit as a page shows it, from a model whose circuit is known."""

import math
import re
from dataclasses import dataclass

import numpy as np
import pytest

from pellucid.cli import main
from pellucid.core.checkpoint import content_hash
from pellucid.core.circuit import channel_circuit, kept_masks
from pellucid.data import train_tokenizer
from pellucid.lab.ablate import keep_only, task_loss
from pellucid.lab.eliminate import without
from pellucid.lab.means import node_means
from pellucid.recipes.view import Subject, model_view, verdict
from pellucid.recipes.workbench import load_view
from pellucid.viewer.schema import ModelView
from tests.lab.toy import CIRCUIT, EDGES, ToyTask, known_circuit, toy_model

TEXT = np.random.default_rng(0).integers(0, 12, 4000).astype(np.uint16)


@dataclass
class Setting:
    subject: Subject
    circuit: object
    view: ModelView


@pytest.fixture(scope="module")
def setting():
    model = toy_model()
    kept = known_circuit(model)
    means = node_means(model, TEXT, seq_len=15)
    subject = Subject(model, train_tokenizer([], 257), means, ToyTask(), TEXT)
    metrics = {"reached": True, "searched": True, "target": 0.15, "calibrated_task_loss": 0.01}
    circuit = channel_circuit(model, kept, task="toy", model_hash=content_hash(model), metrics=metrics)
    view = model_view("toy", "a toy", subject, circuit, metrics, {"loss": [(0.0, 1.0), (1.0, 0.5)]})
    return Setting(subject, circuit, view)


def test_nodes_edges_and_tokens_are_those_of_the_circuit(setting):
    shown = setting.view.circuit
    assert {node.id for node in shown.nodes} == {
        f"{s}:{c}" for s, channels in CIRCUIT.items() for c in channels
    }
    assert {(e.writer, e.reader) for e in shown.edges if e.kind == "weight"} == EDGES
    assert all(e.writer.startswith("token:") for e in shown.edges if e.kind == "embed")
    assert {e.writer for e in shown.edges if e.kind == "unembed"} == {"0.attn.out:3"}
    value = next(node for node in shown.nodes if node.id == "0.attn.v:0")
    assert (value.in_edges, value.out_edges) == (1, 1)
    assert value.mean == pytest.approx(setting.subject.means["0.attn.v"][0].item())
    assert setting.view.note is None
    assert ModelView.model_validate_json(setting.view.model_dump_json()) == setting.view


def test_importance_is_the_rise_in_loss_when_the_node_goes_too(setting):
    subject, circuit = setting.subject, setting.circuit
    kept, batch = kept_masks(circuit, subject.model), ToyTask().pairs(64, seed=7, split="test")
    base = task_loss(subject.model, subject.task, batch, keep_only(kept, subject.means))
    for node in setting.view.circuit.nodes:
        less = without(kept, [(node.site, node.channel)])
        loss = task_loss(subject.model, subject.task, batch, keep_only(less, subject.means))
        assert node.importance == pytest.approx(loss - base, abs=1e-5)
        assert node.importance > 0.1


def test_snippets_show_the_activations_that_the_model_has(setting):
    value = next(node for node in setting.view.circuit.nodes if node.id == "0.attn.v:0")
    assert max(value.top[0].activations) == value.top[0].activations[value.top[0].focus] > 1
    assert min(value.bottom[0].activations) == value.bottom[0].activations[value.bottom[0].focus] < -1
    assert {snippet.label for snippet in value.task} == {"positive", "negative"}
    first = {snippet.label: snippet.activations[0] for snippet in value.task}
    assert first["positive"] == pytest.approx(2, abs=0.2)  # A is +1 on channel 0, times a weight of 2
    assert first["negative"] == pytest.approx(-2, abs=0.2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"reached": False},
            "unreachable: no circuit met the target of 0.15 nats; the best one had 0.010 nats",
        ),
        (
            {"searched": False, "reached": False, "calibrated_task_loss": math.log(2)},
            "cannot do the task: .* 0.693",
        ),
        (
            {"calibrated_task_loss": 0.2},
            "met its target of 0.15 nats on the pairs of the search; on held-out ones it has 0.200",
        ),
    ],
)
def test_a_circuit_that_fell_short_says_so(setting, change, said):
    circuit = setting.circuit.model_copy(update={"metrics": {**setting.circuit.metrics, **change}})
    assert re.search(said, verdict(circuit) or "")
    view = model_view("toy", "a toy", setting.subject, circuit, circuit.metrics, {})
    assert (view.circuit is None) == (not circuit.metrics["reached"])


def test_a_page_is_made_of_stored_views_and_a_view_without_a_task_is_named(setting, tmp_path):
    def store(name, **metrics):
        view = setting.view.model_copy(update={"metrics": {**setting.view.metrics, **metrics}})
        file = tmp_path / name / "circuits" / "toy" / "view.json"
        file.parent.mkdir(parents=True)
        file.write_text(view.model_dump_json())
        return tmp_path / name

    one, two = store("one", task="for_while"), store("two", task="for_while")
    main(["report", str(one), str(two), "--out", str(tmp_path / "page.html")])
    page = (tmp_path / "page.html").read_text()
    assert "0.attn.out:3" in page
    assert str(two) in page  # both views are called toy: their paths tell them apart
    assert load_view(one).metrics["task"] == "for_while"
    with pytest.raises(ValueError, match=r"view\.json does not say which task it is of"):
        load_view(store("three"))
    with pytest.raises(SystemExit):
        main(
            [
                "report",
                str(one),
                str(store("four", task="bracket_counting")),
                "--out",
                str(tmp_path / "x.html"),
            ]
        )
    assert not (tmp_path / "x.html").exists()
