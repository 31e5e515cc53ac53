"""Writes the items of the tasks here: python -m tests.data.eval.make"""

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

from pellucid.data.tiny_python import document

HERE = Path(__file__).parent
ITEMS = 32


def functions(start: int = 0) -> Iterator[str]:
    """Functions of tiny-python's held-out documents, from document `start` on."""
    for index in range(start, start + 4000):
        text = document(index, seed=0, split="validation")
        yield from re.findall(r"^def .*(?:\n    .*)+", text, re.MULTILINE)


def last_word() -> list[dict]:
    """Which of its names a function returns, as LAMBADA asks for a passage's last word."""
    items = []
    for text in functions():
        *lines, last = text.split("\n")
        name = last.removeprefix("    return ")
        if len(lines) >= 3 and name.isidentifier() and name in re.findall(r"\w+", "\n".join(lines)):
            items.append({"text": text})
    return items[:ITEMS]


def line_end() -> list[dict]:
    """How a line ends that ends in a string, as HellaSwag asks how a story goes on: with which quote and bracket."""
    items, draw = [], random.Random(0)
    for text in functions(4000):
        found = re.search(r"([\"'])([)\]])\n", text)
        if found is None or text[: found.start()].count(found[1]) % 2 == 0:
            continue
        endings = [quote + bracket for quote in "\"'" for bracket in (found[2], 2 * found[2])]
        endings = [ending + "\n" for ending in endings]
        draw.shuffle(endings)
        items.append({"context": text[: found.start()], "endings": endings, "label": endings.index(found[0])})
    return items[:ITEMS]


def files() -> dict[str, str]:
    """The content of each file of items."""
    made = {"last_word.jsonl": last_word(), "line_end.jsonl": line_end()}
    return {name: "".join(json.dumps(item) + "\n" for item in items) for name, items in made.items()}


if __name__ == "__main__":
    for name, content in files().items():
        (HERE / name).write_text(content)
