"""Traces say what the residual stream holds, and pictures of them are the same every time."""

import io
import sys
from xml.etree import ElementTree

import numpy as np
import pytest
from rich.console import Console

from pellucid.compiled.library import PROGRAMS
from pellucid.compiled.model import CompiledModel, compile_program
from pellucid.compiled.rasp.values import RaspError


def compiled(name: str, **options) -> CompiledModel:
    case = PROGRAMS[name]
    return compile_program(case.program, case.vocab, case.max_len, causal=case.causal, **options)


def test_every_step_reads_what_the_program_computes():
    trace = compiled("reverse").trace("abcd")
    assert trace.steps == ["embedding", "layer 1 attention", "layer 1 MLP", "layer 2 attention"]
    assert trace.sites == ["embed", "0.resid.mid", "0.resid.post", "1.resid.mid"]
    assert [trace.read(0, p)["tokens"] for p in range(5)] == ["", "a", "b", "c", "d"]
    assert [trace.read(-1, p)["reverse"] for p in range(1, 5)] == ["d", "c", "b", "a"]
    assert "reverse" not in trace.read(-2, 1)
    assert trace.outputs == ["d", "c", "b", "a"]
    assert "1 a      indices=0  tokens=a" in str(trace)
    assert str(trace).endswith("output: d c b a")


@pytest.mark.parametrize("reuse", [False, True])
def test_labels_are_the_models_and_only_of_what_is_held_by_then(reuse):
    model = compiled("shuffle_dyck2", reuse=reuse)
    trace = model.trace("([)]")
    assert trace.labels[0] == model.labels(0)
    assert trace.labels[-1] == model.labels(len(model.transformer.config.layers))
    for labels, residual in zip(trace.labels, trace.residuals, strict=True):
        empty = [not label for label in labels]
        assert np.abs(residual[:, empty]).max(initial=0) < 1e-4
    assert ("erased: " in str(trace)) == reuse


def test_numbers_have_four_digits():
    assert [compiled("frac_prevs").trace("xax").read(-1, p)["frac_prevs"] for p in (1, 2, 3)] == [
        "1",
        "0.5",
        "0.6667",
    ]


def test_patterns_are_of_every_head_and_sum_to_one():
    model = compiled("shuffle_dyck2")
    trace = model.trace("([)]")
    heads = [
        (n, h) for n, layer in enumerate(model.transformer.config.layers) for h in range(len(layer.heads))
    ]
    assert [(p.layer, p.head) for p in trace.patterns] == heads
    for pattern in trace.patterns:
        assert pattern.weights.shape == (5, 5)
        np.testing.assert_allclose(pattern.weights.sum(1), 1, atol=1e-6)


def test_tables_list_what_is_not_zero():
    trace = compiled("reverse").trace("ab")
    assert ("1 a", "tokens:a", 1.0) in trace.rows(0)
    out = io.StringIO()
    Console(width=100, file=out).print(trace.table(0))
    assert "tokens:a" in out.getvalue()
    with pytest.raises(ValueError, match="step must be between 0 and 3, got 4"):
        trace.table(4)


def test_no_layers_and_no_tokens_can_be_traced():
    assert compiled("copy").trace("ab").steps == ["embedding"]
    assert compiled("reverse").trace("").outputs == []


def test_bad_sequences_are_refused():
    with pytest.raises(RaspError, match=r"'z' in .* is not in the vocabulary"):
        compiled("reverse").trace("abz")


@pytest.mark.parametrize("options", [{}, {"reuse": True}])
@pytest.mark.parametrize("name", ["copy", "reverse"])
def test_pictures_are_the_same_every_time(name, options, tmp_path):
    trace = compiled(name, **options).trace("abc")
    first, second = trace.draw(tmp_path / "a.svg"), trace.draw(tmp_path / "b.svg")
    assert first.read_bytes() == second.read_bytes()
    ElementTree.fromstring(first.read_text())
    assert "tokens:a" in first.read_text()
    assert trace.draw(tmp_path / "a.png").read_bytes() == trace.draw(tmp_path / "b.png").read_bytes()


def test_wide_streams_are_drawn_without_labels_and_text_is_no_mathematics(tmp_path):
    case = PROGRAMS["copy"]
    wide = compile_program(case.program, [f"$x_{i}$" for i in range(120)], 3).trace(["$x_1$"])
    text = wide.draw(tmp_path / "wide.svg").read_text()
    assert "tokens:" not in text
    assert "$x_1$" in text


def test_other_extensions_and_a_missing_matplotlib_say_so(tmp_path, monkeypatch):
    trace = compiled("copy").trace("a")
    with pytest.raises(ValueError, match=r"a picture ends in \.svg or \.png"):
        trace.draw(tmp_path / "a.pdf")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'pellucid\[plot\]'"):
        trace.draw(tmp_path / "a.svg")
    assert not list(tmp_path.iterdir())
