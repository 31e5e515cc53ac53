"""The leaderboard: results as tables, in Markdown and as one HTML file."""

import html
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean

import torch

from pellucid.bench.metrics import Number, between, bootstrap, sign_flip_p, spearman
from pellucid.bench.run import Cell
from pellucid.core.files import write_atomic

COLUMNS = {
    "ap_E": "AP, E",
    "auroc_E": "AUROC, E",
    "ap_S": "AP, S",
    "auroc_S": "AUROC, S",
    "recall_1pc": "recall at 1%",
    "precision_1pc": "precision at 1%",
    "jaccard": "Jaccard",
    "sufficiency": "sufficiency",
    "necessity": "necessity",
    "minimality": "minimality",
    "cpr": "CPR",
    "cmd": "CMD",
    "relative_error": "relative error",
    "sign": "sign",
    "spearman": "Spearman",
}
"""The numbers of the leaderboard and their names. The first is what methods are ordered and compared by."""
MAIN = next(iter(COLUMNS))
OVERVIEW = (MAIN, "auroc_S", "recall_1pc", "sufficiency")
"""The numbers that are compared between tiers."""
BY_PROGRAM = (MAIN, "recall_1pc", "sufficiency")
"""The numbers of which one is shown for each program."""
INTERVALS = (MAIN, "recall_1pc")
"""The numbers that are shown with an interval."""


@dataclass(frozen=True)
class Sheet:
    """A table with a title and a sentence on how to read it."""

    title: str
    note: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def by_program(cells: Iterable[Cell], metric: str) -> dict[tuple[str, str], dict[str, float]]:
    """For each (tier, method) its number for each program, the mean over seeds; programs without one are left out."""
    found: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for cell in cells:
        value = cell.metrics.get(metric)
        if value is not None:
            found[cell.tier, cell.method][cell.program].append(value)
    return {key: {p: mean(v) for p, v in programs.items()} for key, programs in found.items()}


def stability(cells: Sequence[Cell]) -> dict[tuple[str, str], float]:
    """For each (tier, method) the mean rank correlation of its scores between data seeds, over programs."""
    runs: dict[tuple[str, str, str], list[torch.Tensor]] = defaultdict(list)
    for cell in cells:
        if cell.values:
            runs[cell.tier, cell.method, cell.program].append(torch.tensor(cell.values))
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for (tier, method, _), values in runs.items():
        if (value := between(values, spearman)) is not None:
            found[tier, method].append(value)
    return {key: mean(values) for key, values in found.items()}


def unique(values: Iterable[str]) -> list[str]:
    """In the order in which they come first."""
    return list(dict.fromkeys(values))


def written(value: Number, interval: tuple[float, float] | None = None) -> str:
    if value is None:
        return ""
    text = f"{value:.2f}"
    return text if interval is None else f"{text} [{interval[0]:.2f}, {interval[1]:.2f}]"


def chance(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def sheets(cells: Sequence[Cell]) -> list[Sheet]:
    """All tables: for each tier and universe a leaderboard, a table by program and paired tests; then what failed."""
    failed, void = [c for c in cells if c.failed is not None], [c for c in cells if not c.certified]
    skipped = [c for c in cells if c.skipped is not None]
    cells = [c for c in cells if c.certified]
    numbers = {metric: by_program(cells, metric) for metric in COLUMNS}
    steady = stability(cells)
    made = overviews(cells, numbers)
    for tier in unique(c.tier for c in cells):
        for universe in unique(c.universe for c in cells if c.universe is not None):
            here = [c for c in cells if c.tier == tier and c.universe == universe]
            methods = unique(c.method for c in here)

            def macro(method: str, metric: str, tier: str = tier) -> Number:
                values = numbers[metric].get((tier, method))
                return mean(values.values()) if values else None

            methods.sort(key=lambda m: -(macro(m, MAIN) or 0.0))
            if universe == "reading":
                made.append(reading_sheet(tier, here))
                continue
            if methods:
                made.append(leaderboard(tier, universe, here, methods, numbers, steady))
                made.append(program_sheet(tier, universe, here, methods, numbers))
            if (pairs := paired_sheet(tier, universe, methods, numbers[MAIN])).rows:
                made.append(pairs)
    if void:
        places = unique(f"{c.tier}/{c.program}" for c in void)
        rows = tuple((*place.split("/"), "truth void") for place in places)
        made.append(Sheet("Left out of the means", "", ("tier", "program", "why"), rows))
    if skipped:
        rows = tuple(dict.fromkeys((c.tier, c.program, c.method, c.skipped or "") for c in skipped))
        made.append(Sheet("Does not apply", "", ("tier", "program", "method", "why"), rows))
    if failed:
        rows = tuple((c.tier, c.program, c.method, str(c.seed), c.failed or "") for c in failed)
        made.append(Sheet("What failed", "", ("tier", "program", "method", "seed", "why"), rows))
    return made


def overviews(
    cells: Sequence[Cell], numbers: dict[str, dict[tuple[str, str], dict[str, float]]]
) -> list[Sheet]:
    """For some numbers and each universe a table of methods by tier, where there is more than one tier."""
    tiers = unique(c.tier for c in cells)
    if len(tiers) < 2:
        return []
    made = []
    for universe in ("edge", "node"):
        methods = unique(c.method for c in cells if c.universe == universe)
        for metric in OVERVIEW:
            table = {m: [numbers[metric].get((tier, m), {}) for tier in tiers] for m in methods}
            rows = tuple(
                (m, *(written(mean(programs.values())) if programs else "" for programs in found))
                for m, found in table.items()
                if any(found)
            )
            if rows:
                note = "Means over programs; not all tiers have all programs."
                made.append(
                    Sheet(f"{COLUMNS[metric]}, {universe}s, by tier", note, ("method by tier", *tiers), rows)
                )
    return made


def leaderboard(
    tier: str,
    universe: str,
    cells: Sequence[Cell],
    methods: Sequence[str],
    numbers: dict[str, dict[tuple[str, str], dict[str, float]]],
    steady: dict[tuple[str, str], float],
) -> Sheet:
    rows = []
    for method in methods:
        row = [method]
        for metric in COLUMNS:
            values = list(numbers[metric].get((tier, method), {}).values())
            if not values:
                row.append("")
            else:
                row.append(
                    written(
                        mean(values), bootstrap(values) if metric in INTERVALS and len(values) > 1 else None
                    )
                )
        own = [c for c in cells if c.method == method]
        passes = [c.passes for c in own if c.passes is not None]
        row += [
            f"{mean(passes):.0f}" if passes else "",
            f"{mean(c.seconds for c in own if c.seconds is not None):.2f}",
            written(steady.get((tier, method))),
        ]
        rows.append(tuple(row))
    return Sheet(
        f"{tier}: {universe}s",
        f"Means over programs ({len({c.program for c in cells})}), with 95% bootstrap intervals over programs.",
        ("method", *COLUMNS.values(), "passes", "seconds", "stability"),
        tuple(rows),
    )


def reading_sheet(tier: str, cells: Sequence[Cell]) -> Sheet:
    """What methods that read representations say, against what the program holds."""
    rows = []
    for method in unique(c.method for c in cells):
        own = [c for c in cells if c.method == method]
        numbers = {name: by_program(own, name).get((tier, method), {}) for name in own[0].metrics}
        score = list(numbers.pop("score", {}).values())
        also = ", ".join(f"{name} {mean(v.values()):.2f}" for name, v in numbers.items() if v)
        seconds = f"{mean(c.seconds for c in own if c.seconds is not None):.2f}"
        text = written(mean(score), bootstrap(score)) if score else ""
        rows.append((method, text, str(len(score)), seconds, also))
    return Sheet(
        f"{tier}: readings",
        "Score: 1 is the truth, 0 chance; means over programs with 95% bootstrap intervals.",
        ("method", "score", "programs", "seconds", "also"),
        tuple(rows),
    )


def program_sheet(
    tier: str,
    universe: str,
    cells: Sequence[Cell],
    methods: Sequence[str],
    numbers: dict[str, dict[tuple[str, str], dict[str, float]]],
) -> Sheet:
    """One number by program and method: the first of `BY_PROGRAM` that at least half of the programs have."""
    programs = unique(c.program for c in cells)
    metric = next(
        (
            metric
            for metric in BY_PROGRAM
            if 2 * len({p for m in methods for p in numbers[metric].get((tier, m), {})}) >= len(programs)
        ),
        MAIN,
    )
    rows = tuple(
        (program, *(written(numbers[metric].get((tier, m), {}).get(program)) for m in methods))
        for program in programs
    )
    note = f"{COLUMNS[metric]}. Empty where it has no meaning: for AP, where all parts matter, or none."
    return Sheet(f"{tier}: {universe}s by program", note, ("program", *methods), rows)


def paired_sheet(
    tier: str, universe: str, methods: Sequence[str], numbers: dict[tuple[str, str], dict[str, float]]
) -> Sheet:
    """Every method against the next one of the leaderboard, on the programs that both have."""
    rows = []
    for better, worse in pairwise(methods):
        a, b = numbers.get((tier, better), {}), numbers.get((tier, worse), {})
        both = [a[p] - b[p] for p in a if p in b]
        if len(both) > 1:
            rows.append((better, worse, f"{mean(both):.3f}", str(len(both)), chance(sign_flip_p(both))))
    return Sheet(
        f"{tier}: {universe}s, each against the next",
        f"Difference in {COLUMNS[MAIN]} and its p by sign flips over programs (two-sided).",
        ("method", "next", "difference", "programs", "p"),
        tuple(rows),
    )


def markdown(parts: Sequence[Sheet]) -> str:
    """All tables as Markdown."""

    def cell(text: str) -> str:
        return text.replace("<", "&lt;").replace("|", "\\|").replace("\n", " ")

    lines = []
    for sheet in parts:
        lines += [f"## {sheet.title}", "", sheet.note, ""]
        lines += ["| " + " | ".join(map(cell, sheet.head)) + " |", "|" + "---|" * len(sheet.head)]
        lines += ["| " + " | ".join(map(cell, row)) + " |" for row in sheet.rows]
        lines.append("")
    return "\n".join(lines)


STYLE = """
:root { color-scheme: light dark; }
body { font: 14px/1.5 system-ui, sans-serif; margin: 1.5rem 1rem; color: #1a1a1a; background: #fff; }
table { border-collapse: collapse; margin: 0 0 2rem; display: block; overflow-x: auto; font-size: 13px; }
th, td { padding: 0.25rem 0.35rem; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top; }
th { border-bottom: 2px solid #888; vertical-align: bottom; }
.number { text-align: right; }
td.number, th:first-child, td:first-child { white-space: nowrap; }
th:first-child, td:first-child { position: sticky; left: 0; background: #fff; }
td:last-child { overflow-wrap: anywhere; }
nav { columns: 16rem; margin: 0.5rem 0 2rem; }
nav a { display: block; color: inherit; }
@media (prefers-color-scheme: dark) {
  body, th:first-child, td:first-child { background: #16181c; color: #e6e6e6; }
  th, td { border-color: #444; }
}
"""


def page(parts: Sequence[Sheet], title: str = "Which methods tell the truth?") -> str:
    """All tables as one HTML file that needs nothing else."""
    links = "".join(f"<a href='#t{i}'>{html.escape(sheet.title)}</a>" for i, sheet in enumerate(parts))
    body = [f"<h1>{html.escape(title)}</h1><details><summary>Tables</summary><nav>{links}</nav></details>"]
    for i, sheet in enumerate(parts):
        body.append(f"<h2 id='t{i}'>{html.escape(sheet.title)}</h2><p>{html.escape(sheet.note)}</p><table>")
        columns = zip(sheet.head, *sheet.rows, strict=True)
        kinds = [" class='number'" if numeric(cells) else "" for _, *cells in columns]
        for tag, row in (("th", sheet.head), *(("td", row) for row in sheet.rows)):
            cells = zip(kinds, row, strict=True)
            body.append(
                "<tr>" + "".join(f"<{tag}{kind}>{html.escape(x)}</{tag}>" for kind, x in cells) + "</tr>"
            )
        body.append("</table>")
    return (
        "<!doctype html><html lang='en'><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width'>"
        "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{html.escape(title)}</title><style>{STYLE}</style>{''.join(body)}</html>\n"
    )


def numeric(column: Iterable[str]) -> bool:
    """Whether a column holds numbers, with or without intervals, and nothing else."""
    return all(re.fullmatch(r"(< )?-?[\d.]+( \[.*\])?|", text) for text in column)


def write_leaderboard(cells: Sequence[Cell], out: str | Path) -> list[Sheet]:
    """`leaderboard.md` and `leaderboard.html` in the directory `out`; returns their tables."""
    parts = sheets(cells)
    write_atomic(Path(out) / "leaderboard.md", markdown(parts))
    write_atomic(Path(out) / "leaderboard.html", page(parts))
    return parts
