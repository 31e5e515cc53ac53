"""What results depend on, hashed; and where models that the benchmark trains are kept under it."""

import ast
import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib.util import resolve_name
from pathlib import Path
from typing import Any

from pellucid.core.files import cache_root


def kept_at(*what: Any) -> Path:
    """A directory beside prepared corpora, named by a hash of everything that a model depends on."""
    return cache_root() / "bench" / digest(*what)


def digest(*what: Any) -> str:
    """A hash of JSON."""
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


def code_of(*functions: Callable[..., Any]) -> str:
    """A hash of the code that functions may run: of their modules and all that these import, directly or not, of
    Pellucid's and the functions' own packages. Comments and docstrings do not count, nor does what has no source.

    Files are read once a process.
    """
    roots = [module_of(function) for function in functions]
    own = {"pellucid", *(root.partition(".")[0] for root in roots)}
    found: dict[str, str] = {}
    while roots:
        name = roots.pop()
        file = source(name)
        if file is None or name in found:
            continue
        found[name], imported = parsed(file, package_of(name, file))
        roots += [x for x in imported if x.partition(".")[0] in own]
    return digest(sorted(found.items()))


def module_of(function: Callable[..., Any]) -> str:
    """The module that a function, a partial one, or the class of a callable object is in."""
    function = inspect.unwrap(function.func if isinstance(function, partial) else function)
    return (function if inspect.isroutine(function) else type(function)).__module__


def source(name: str) -> Path | None:
    """The file of a module of an imported package, the module itself imported or not; None where there is none."""
    top, *parts = name.split(".")
    places = getattr(sys.modules.get(top), "__path__", ())
    files = [Path(place, *parts) for place in places]
    files = [x for file in files for x in (file.with_name(f"{file.name}.py"), file / "__init__.py")]
    if not parts and (file := getattr(sys.modules.get(top), "__file__", None)):
        files = [Path(file)]
    return next((file for file in files if file.suffix == ".py" and file.is_file()), None)


def package_of(name: str, file: Path) -> str:
    """What relative imports of a module are relative to."""
    return name if file.name == "__init__.py" else name.rpartition(".")[0]


@cache
def parsed(file: Path, package: str) -> tuple[str, tuple[str, ...]]:
    """A hash of a file's code, and the names of all that may be a module among what it imports."""
    tree = ast.parse(file.read_bytes())
    names = tuple(imports(tree, package))
    code = ast.dump(WithoutDocstrings().visit(tree))
    return hashlib.sha256(code.encode()).hexdigest(), names


def imports(tree: ast.Module, package: str) -> Iterator[str]:
    """The modules that a file imports, also inside of functions; `from a import b` may mean a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = resolve_name("." * node.level + (node.module or ""), package)
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


class WithoutDocstrings(ast.NodeTransformer):
    """Drops statements that are nothing but a constant."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        return None if isinstance(node.value, ast.Constant) else node
