"""Files that are whole or not there: written beside their place, then moved into it; and where caches are."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


def cache_root() -> Path:
    """Where what can be made again is kept: `$PELLUCID_CACHE`, `$XDG_CACHE_HOME/pellucid` or `~/.cache/pellucid`."""
    if chosen := os.environ.get("PELLUCID_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pellucid"


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


def leave_others_alone(path: str | os.PathLike[str], sign: str, what: str) -> None:
    """Raises `ValueError` where `path` is neither free nor `what`, which has a file named `sign`."""
    path = Path(path)
    if path.exists() and not (path / sign).exists() and (path.is_file() or any(path.iterdir())):
        raise ValueError(f"{path} exists and is not {what}: it is left alone")


@contextlib.contextmanager
def atomic_directory(path: str | os.PathLike[str], *, replace: bool = True) -> Iterator[Path]:
    """A fresh directory to fill, which takes the place of `path` when the block ends without an error.

    The directory that was there stays whole until then; after a crash in between `settled` finds it. Without `replace`
    one that is there by then is kept and the fresh one dropped: for content that is the same whoever writes it.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    _recover(path)
    fresh = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        os.chmod(fresh, 0o777 & ~_umask())
        yield fresh
        for file in fresh.rglob("*"):
            _sync(file)
        if not replace:
            with contextlib.suppress(OSError):  # another process was first
                fresh.rename(path)
            shutil.rmtree(fresh, ignore_errors=True)
            return
        if path.exists():
            path.rename(_old(path))
        fresh.rename(path)
        _sync(path.parent)
        shutil.rmtree(_old(path), ignore_errors=True)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        _recover(path)
        raise


def settled(path: str | os.PathLike[str]) -> Path:
    """`path`, or where its content stands while a writer, or a crash of one, has moved it aside. Changes nothing."""
    path = Path(path)
    return path if path.exists() or not _old(path).exists() else _old(path)


def _recover(path: Path) -> None:
    """If a crash left `path` moved aside and nothing in its place, move it back."""
    old = _old(path)
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
