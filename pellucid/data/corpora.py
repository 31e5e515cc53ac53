"""Where text comes from: a corpus is named by a string and read as a stream of documents."""

import glob
import os
import random
import sysconfig
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from zlib import crc32

from pellucid.core.errors import unknown
from pellucid.data import tiny_python
from pellucid.data.words import SPLITS

CORPORA = ("tiny-python", "python-stdlib", "files:GLOB", "hf:NAME")
FILES_HELD_OUT = 10  # one file in 10 belongs to the validation split
ROWS_HELD_OUT = 100  # one row in 100, where a data set has no validation split of its own
TEXT_COLUMNS = ("text", "content")
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def documents(corpus: str, split: str = "train", *, seed: int = 0) -> Iterator[str]:
    """The documents of one split of a corpus, in an order that depends on `seed` alone.

    `tiny-python` never ends; the others end after one pass. `hf:` data sets keep their own order.
    Raises ValueError for an unknown corpus or split, or one that holds no text.
    """
    if split not in SPLITS:
        raise unknown("split", split, SPLITS)
    kind, _, argument = corpus.partition(":")
    if corpus == "tiny-python":
        return (tiny_python.document(index, seed=seed, split=split) for index in count())
    if kind == "hf" and argument:
        return _dataset(argument, split)
    if corpus == "python-stdlib" or (kind == "files" and argument):
        return _texts(*corpus_files(corpus), split, seed)
    raise unknown("corpus", corpus, CORPORA)


def corpus_files(corpus: str) -> tuple[Path, list[Path]]:
    """The root and the sorted files, relative to it, that a corpus is read from; no files for a generated one."""
    kind, _, argument = corpus.partition(":")
    if corpus == "python-stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        found = [path.relative_to(root) for path in root.rglob("*.py")]
        return root, sorted(path for path in found if not NOT_LIBRARY.intersection(path.parts))
    if kind == "files":
        return _matches(argument)
    if kind == "hf" and os.path.isdir(argument):
        root = Path(argument)
        return root, sorted(path.relative_to(root) for path in root.rglob("*") if path.is_file())
    return Path(), []


def _matches(pattern: str) -> tuple[Path, list[Path]]:
    pattern = os.path.expanduser(pattern)
    paths = [Path(path) for path in glob.glob(pattern, recursive=True) if os.path.isfile(path)]
    if not paths:
        raise ValueError(f"corpus 'files:{pattern}' matches no file (working directory: {os.getcwd()})")
    fixed: list[str] = []  # the folders before the first wildcard: a file's split does not depend on them
    for part in Path(pattern).parts[:-1]:
        if glob.has_magic(part):
            break
        fixed.append(part)
    root = Path(*fixed)
    return root, sorted(path.relative_to(root) for path in paths)


def _texts(root: Path, paths: Sequence[Path], split: str, seed: int) -> Iterator[str]:
    held_out = split == "validation"
    chosen = [path for path in paths if (crc32(path.as_posix().encode()) % FILES_HELD_OUT == 0) == held_out]
    random.Random(seed).shuffle(chosen)
    for path in chosen:
        try:
            text = (root / path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            yield text


def _dataset(name: str, split: str) -> Iterator[str]:
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            f"corpus 'hf:{name}' needs the package `datasets`: pip install pellucid[hf]"
        ) from error
    splits = datasets.load_dataset(name, streaming=True)
    own = next((known for known in ("validation", "test") if known in splits), None)
    wanted = own if split == "validation" and own else "train"
    if wanted not in splits:
        raise ValueError(f"data set {name!r} has no split 'train'; it has {sorted(splits)}")
    for index, row in enumerate(splits[wanted]):
        if own is None and (index % ROWS_HELD_OUT == 0) != (split == "validation"):
            continue
        column = next((known for known in TEXT_COLUMNS if known in row), None)
        if column is None:
            raise ValueError(
                f"data set {name!r} has no column {' or '.join(TEXT_COLUMNS)}; it has {sorted(row)}"
            )
        if row[column]:
            yield row[column]
