"""`pellucid programs` and `pellucid compile`: what they print, write and refuse."""

import subprocess
import sys

import pytest

from pellucid.cli import main
from pellucid.compiled.library import PROGRAMS
from pellucid.compiled.model import CompiledModel
from pellucid.compiled.verify import Verification
from pellucid.recipes import compile as recipe
from pellucid.recipes.compile import parse_sequence, parse_vocab


def test_programs_are_listed(capsys):
    main(["programs"])
    out = capsys.readouterr().out
    assert all(name in out for name in PROGRAMS)


def test_a_program_is_compiled_checked_traced_and_written(tmp_path, capsys):
    main(["compile", "reverse", "--trace", "a b c", "--out", str(tmp_path / "r"), "--reuse"])
    out = capsys.readouterr().out
    assert "residual width" in out
    assert "on all 1,364 inputs: 0 failures" in out
    assert "output: c b a" in out
    assert CompiledModel.load(tmp_path / "r", device="cpu")("abc") == ["c", "b", "a"]
    assert (tmp_path / "r" / "residual.svg").exists()


def test_options_replace_what_the_library_says(capsys):
    options = ["--vocab", "7 8 9", "--max-len", "3", "--dtype", "float64", "--schedule", "narrow"]
    main(["compile", "sort_unique", *options, "--trace", "987"])
    out = capsys.readouterr().out
    assert "float64" in out
    assert "output: 7 8 9" in out
    main(["compile", "length", "--causal"])
    assert "warning: " in capsys.readouterr().out
    main(["compile", "length", "--no-causal"])
    assert "warning: " not in capsys.readouterr().out


def test_without_matplotlib_the_model_is_still_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    main(["compile", "copy", "--out", str(tmp_path / "c")])
    assert "no picture: pictures need matplotlib: pip install 'pellucid[plot]'" in capsys.readouterr().out
    assert CompiledModel.load(tmp_path / "c", device="cpu")("ab") == ["a", "b"]


def test_a_failed_verification_exits_with_1(monkeypatch, capsys):
    failed = Verification(10, True, 1, (["a"], ["a"], ["b"]), 1.0, 2)
    monkeypatch.setattr(recipe, "verify", lambda model: failed)
    with pytest.raises(SystemExit) as stop:
        main(["compile", "copy"])
    assert stop.value.code == 1
    out = capsys.readouterr().out
    assert "first failure: a gives b instead of a" in out
    assert "2 more on which the program is undefined" in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["revese"], "unknown program 'revese'; did you mean 'reverse'"),
        (["reverse", "--trace", "abz"], "'z' in ['a', 'b', 'z'] is not in the vocabulary"),
        (["reverse", "--trace", "a b c d a b"], "has 6 values; the model was compiled for at most 5"),
    ],
)
def test_errors_are_one_line(args, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["compile", *args])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("args", [[], ["--help"], ["reverse", "--help"]])
def test_help(args, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["compile", *args])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert "usage: pellucid compile" in out
    assert ("--no-causal" in out) == (len(args) == 2)


def test_words_become_values():
    assert parse_vocab("1 2", [5, 6]) == [1, 2]
    assert parse_vocab("1 b", [5, 6]) == ["1", "b"]
    assert parse_vocab("1 2", ["a"]) == ["1", "2"]
    assert parse_sequence("312", [1, 2, 3]) == [3, 1, 2]
    assert parse_sequence("10 9", [9, 10]) == [10, 9]
    assert parse_sequence("ab", ["a", "ab"]) == ["ab"]
    assert parse_sequence("", ["a"]) == []


def test_help_does_not_wait_for_the_compiler():
    code = "import sys; from pellucid.cli import main; main(['--help']); sys.exit('pellucid.compiled' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
