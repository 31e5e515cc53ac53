"""Every command and snippet in the README and in docs/ is run, and prints what the page says.

`git clone`, `pip install`, `make test` and opening a page are left to people; the demo is run in its smoke form.
"""

import contextlib
import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from pellucid.cli import main

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
LEFT_TO_PEOPLE = (
    "git clone",
    "cd ",
    "pip install",
    "make test",
    "make lint",
    "make bench",
    "make test-all",
    "torchrun",
    "tensorboard",
)


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def commands(page):
    for block in blocks(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            line = line.split("#")[0].strip()
            if line and not line.startswith(LEFT_TO_PEOPLE):
                yield line


def test_there_are_commands_to_run():
    assert "make demo" in list(commands(ROOT / "README.md"))


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    todo = list(commands(page))
    if any("runs/demo" in line for line in todo):
        main(["demo", "--out", "runs/demo", "--smoke"])
    for line in todo:
        if line == "make demo":
            continue  # that was the smoke run
        name, *args = shlex.split(line)
        if name == "python":
            subprocess.run([sys.executable, *args], check=True, timeout=300)
            continue
        assert name == "pellucid", f"{page.name} has a command that no test can run: {line}"
        if args[0] == "demo":
            args.append("--smoke")
        if args[0] == "train":
            args += [
                "--recipe.train.steps",
                "4",
                "--recipe.train.batch-size",
                "4",
                "--recipe.train.validation-tokens",
                "2048",
            ]
        if args[0] == "prune":
            args += [
                "--search.steps",
                "4",
                "--search.pairs",
                "4",
                "--search.pool",
                "16",
                "--search.measure",
                "16",
            ]
        if args[0] == "compress":
            args += ["--config.steps", "2", "--seeds", "1", "--d", "2", "6"]
        with contextlib.suppress(SystemExit) if "--help" in args else contextlib.nullcontext():
            main(args)  # an error ends in a SystemExit, which fails the test


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_snippets_print_what_the_page_says(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for code, said in re.findall(
        r"```python\n(.*?)```(?:\n+```text\n(.*?)```)?", page.read_text(), re.DOTALL
    ):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(code, page.name, "exec"), names)
        assert out.getvalue().strip() == said.strip()
