"""The house: which way imports point, what is public, and what importing costs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import pellucid

ROOT = Path(pellucid.__file__).parent
# What each room may import beside itself. Families (sparse, compiled, parity) never import each other or `lab`.
ALLOWED = {
    "core": {"kernels"},
    "kernels": set(),
    "data": {"core"},
    "tasks": {"core", "data"},
    "training": {"core", "kernels", "data", "tasks"},
    "sparse": {"core", "kernels", "data", "tasks", "training"},
    "compiled": {"core", "kernels", "data", "tasks", "training"},
    "parity": {"core", "kernels", "data", "tasks", "training"},
    "lab": {"core", "kernels", "data", "tasks", "training"},
    "viewer": {"core", "tasks"},
    "interop": {"core", "kernels", "data", "tasks", "training", "lab"},
    "bench": {"core", "kernels", "data", "tasks", "training", "compiled", "sparse", "lab"},
    "recipes": {
        "bench",
        "core",
        "kernels",
        "data",
        "tasks",
        "training",
        "sparse",
        "compiled",
        "parity",
        "lab",
        "viewer",
    },
}
# A page is made of result JSON only: these never see a model.
PAGES = {
    "viewer/schema.py": {"core.errors"},
    "viewer/export.py": {"core.files"},
    "viewer/compare.py": {"core.errors", "tasks"},
}


def imports(file):
    for node in ast.walk(ast.parse(file.read_text())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            assert node.module != "pellucid", f"{file}: import from the module that defines the name"
            names.append(node.module or "")
        yield from (name.removeprefix("pellucid.") for name in names if name.startswith("pellucid."))


@pytest.mark.parametrize("file", sorted(ROOT.rglob("*.py")), ids=lambda f: str(f.relative_to(ROOT)))
def test_imports_point_down(file):
    room = file.relative_to(ROOT).parts[0]
    if room in ("cli", "__init__.py", "__main__.py"):
        return
    assert room in ALLOWED, f"{room} has no place in the house yet: say in ALLOWED what it may import"
    for name in imports(file):
        assert name.split(".")[0] in ALLOWED[room] | {room}, f"{file} imports {name}"
    own = PAGES.get(str(file.relative_to(ROOT)))
    if own is not None:
        for name in imports(file):
            assert name in own or name.startswith("viewer."), f"{file} imports {name}"


def test_the_public_names_are_these():
    assert set(pellucid.__all__) == {
        "Ablate", "ActivationSparsity", "Circuit", "Edge", "EdgeTap", "LayerConfig", "Mask", "ModelConfig", "Node",
        "Patch", "Recorder", "Tap", "Transformer", "chain", "edge_table", "generate", "load_model", "record",
        "save_model", "uniform",
    }  # fmt: skip
    for name in pellucid.__all__:
        assert getattr(pellucid, name).__doc__, name


def test_importing_brings_no_extra_and_no_command_line():
    """What `import pellucid` loads beside torch and its own light core."""
    code = "import sys, pellucid; print(*{m.split('.')[0] for m in sys.modules})"
    loaded = set(
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.split()
    )
    heavy = {
        "datasets",
        "lm_eval",
        "transformers",
        "tensorboard",
        "optuna",
        "sklearn",
        "triton",
        "tyro",
        "pandas",
        "pyarrow",
    }
    assert not loaded & heavy
