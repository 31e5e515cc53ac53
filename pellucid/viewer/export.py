"""One report as one HTML file that needs nothing else: styles, scripts and data are inside, and nothing is fetched."""

import base64
import hashlib
import html
from importlib.resources import files
from pathlib import Path
from string import Template

from pellucid.core.files import write_atomic
from pellucid.viewer.schema import Report

SCRIPTS = ("dom.js", "layout.js", "circuit.js", "report.js")
"""Joined in this order into one module, so that they share names with each other and with nobody else."""

# Inside a JSON string these escapes mean the same character, and HTML can no longer see a tag or an entity there.
_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def render(report: Report) -> str:
    """The page as one HTML text."""
    style, script = _static("report.css"), "\n".join(_static(name) for name in SCRIPTS)
    return Template(_static("report.html")).substitute(
        title=html.escape(report.title),
        policy=_policy(style, script),
        style=style,
        script=script,
        data=report.model_dump_json().translate(_ESCAPES),
    )


def write_report(report: Report, path: str | Path) -> Path:
    """Write the page at `path`, whole or not at all; OSError where the folder cannot be written."""
    write_atomic(path, render(report))
    return Path(path)


def _static(name: str) -> str:
    return (files("pellucid.viewer") / "static" / name).read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    """A content security policy that runs our own style and script, by hash, and loads nothing."""
    return (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
