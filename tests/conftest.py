"""Shapes that jaxtyping names are checked at these public edges; compiled code is left alone."""

from jaxtyping import install_import_hook

from tests import typecheck  # noqa: F401  the hook looks it up by name

install_import_hook(
    ["pellucid.core.edges", "pellucid.sparse.projection", "pellucid.tasks"],
    "tests.typecheck.check",
)
