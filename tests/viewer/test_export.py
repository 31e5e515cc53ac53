"""The exported page: one closed file, whatever the data says, written whole or not at all."""

import base64
import hashlib
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pellucid.viewer.export import render, write_report
from pellucid.viewer.schema import Report
from tests.viewer.examples import HOSTILE, dense_circuit, hostile_report, report, sparse_circuit

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Page(HTMLParser):
    """The tags of a page, and the text inside its script, style and title tags."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style", "title"):
            self.texts.append((tag, ""))

    def handle_data(self, data: str) -> None:
        if self.tags and self.texts and self.tags[-1][0] == self.texts[-1][0]:
            tag, text = self.texts[-1]
            self.texts[-1] = (tag, text + data)

    def handle_endtag(self, tag: str) -> None:
        self.tags.append((f"/{tag}", {}))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    def inside(self, tag: str) -> list[str]:
        return [text for name, text in self.texts if name == tag]


REPORTS = {
    "full": lambda: report(sparse_circuit(), dense_circuit(), None),
    "no circuit": lambda: report(None),
    "no model": lambda: report(),
    "hostile": hostile_report,
}


@pytest.mark.parametrize("name", REPORTS)
def test_page_holds_its_data_and_nothing_breaks_out(name: str):
    made = REPORTS[name]()
    page = Page(render(made))
    assert page.all("script") == [{"type": "application/json", "id": "report-data"}, {"type": "module"}]
    assert [tag for tag, _ in page.tags if not tag.startswith("/")] == [
        *("html", "head", "meta", "meta", "meta", "meta", "meta", "title", "style"),
        *("body", "main", "noscript", "p", "script", "script"),
    ]
    assert not [
        key for _, attributes in page.tags for key in attributes if key.startswith("on") or key == "style"
    ]
    assert Report.model_validate_json(page.inside("script")[0]) == made
    assert page.inside("title") == [made.title]


def test_hostile_data_leaves_no_character_that_html_or_javascript_could_read():
    data = render(hostile_report()).split('id="report-data">')[1].split("</script>")[0]
    assert not set(data) & set("<>&\u2028\u2029")
    assert "onerror" in data
    assert HOSTILE[0] in Page(render(hostile_report())).inside("title")[0]


def test_page_fetches_nothing():
    text = render(report(sparse_circuit(), None))
    assert re.findall(r"https?://[^\s\"'<>]*", text) == ["http://www.w3.org/2000/svg"]
    assert not re.search(
        r"\bimport\b|\bfetch\(|XMLHttpRequest|@import|url\(|innerHTML|outerHTML|document\.write", text
    )
    assert not {"link", "img", "iframe", "base"} & {tag for tag, _ in Page(text).tags}


def test_policy_allows_only_our_style_and_script():
    page = Page(render(hostile_report()))
    policy = next(meta["content"] for meta in page.all("meta") if "http-equiv" in meta) or ""
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    for directive, text in (("style-src", page.inside("style")[0]), ("script-src", page.inside("script")[1])):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy


def test_write_makes_folders_and_leaves_one_file(tmp_path: Path):
    made = report(sparse_circuit())
    path = write_report(made, tmp_path / "new" / "report.html")
    assert path.read_text(encoding="utf-8") == render(made)
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("broken", ["os.fsync", "os.replace"])
def test_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str):
    path = tmp_path / "report.html"
    path.write_text("old")

    def fail(*_):
        raise OSError("no room")

    monkeypatch.setattr(f"pellucid.core.files.{broken}", fail)
    with pytest.raises(OSError, match="no room"):
        write_report(report(None), path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def open_in_browser(path: Path, profile: Path, fragment: str = "") -> tuple[Page, list[str]]:
    """The page as the browser built it, and what its console said."""
    assert CHROMIUM
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--no-first-run",
    ]
    flags += ["--disable-component-update", f"--user-data-dir={profile}", "--enable-logging=stderr"]
    command = [CHROMIUM, *flags, "--virtual-time-budget=5000", "--dump-dom", path.as_uri() + fragment]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return Page(done.stdout), [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def having(page: Page, name: str) -> int:
    """How many elements carry a class."""
    return sum(name in (attributes.get("class") or "").split() for _, attributes in page.tags)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium to draw the page")
def test_browser_draws_every_node_and_edge(tmp_path: Path):
    sparse, dense = sparse_circuit(), dense_circuit()
    path = write_report(report(sparse, dense, None), tmp_path / "report.html")
    page, console = open_in_browser(path, tmp_path / "profile")
    assert console == []
    assert (having(page, "node"), having(page, "edge")) == (len(sparse.nodes), len(sparse.edges))

    page, console = open_in_browser(path, tmp_path / "profile", f"#node=sparse/{sparse.nodes[0].id}")
    assert console == []
    assert having(page, "selected") == 1
    node = sparse.nodes[0]
    assert having(page, "snippet") == len(node.top) + len(node.bottom) + len(node.task)

    page, console = open_in_browser(path, tmp_path / "profile", "#model=dense")
    assert console == []
    # The sparse drawing is there too: it was shown before the link was followed.
    assert having(page, "node") == len(sparse.nodes) + len(dense.nodes)
    assert having(page, "edge") == len(sparse.edges) + 1500 + dense.token_edges

    path = write_report(hostile_report(), tmp_path / "hostile.html")
    page, console = open_in_browser(path, tmp_path / "profile")
    assert console == []
    assert not page.all("img")
    assert having(page, "node") == 3
