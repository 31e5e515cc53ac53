"""Files that are whole or not there: written beside their place, then moved into it."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


def write_atomic(path: str | os.PathLike[str], data: bytes | str) -> None:
    """Write `data` to `path`; a crash leaves the old file or the new one, never half of one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def atomic_directory(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A fresh directory to fill, which takes the place of `path` when the block ends without an error.

    The directory that was there stays whole until then, and can be found by `recover` after a crash in between.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    recover(path)
    fresh = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        os.chmod(fresh, 0o777 & ~_umask())
        yield fresh
        for file in fresh.rglob("*"):
            _sync(file)
        old = _old(path)
        if path.exists():
            path.rename(old)
        fresh.rename(path)
        _sync(path.parent)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        recover(path)
        raise


def recover(path: str | os.PathLike[str]) -> None:
    """If a crash left `path` moved aside and nothing in its place, move it back."""
    path, old = Path(path), _old(Path(path))
    if old.exists():
        if path.exists():
            shutil.rmtree(old)
        else:
            old.rename(path)


def _old(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
