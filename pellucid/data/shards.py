"""Token shards: a stream of documents, tokenized once and memory-mapped ever after."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from pellucid.core.files import atomic_directory
from pellucid.data.tokenizer import end_of_text_id

FORMAT = 1
BATCH = 256  # documents encoded at once
CHUNK = 1 << 20  # tokens hashed at once
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Shard:
    """A directory of tokens: `tokens` (count,) is read from disk as needed, `meta` says what it was made from."""

    path: Path
    tokens: np.ndarray
    meta: dict[str, Any]

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def open(cls, path: str | os.PathLike) -> "Shard":
        """The shard at `path`; raises ValueError naming the file that is missing, truncated or changed."""
        path = Path(path)
        meta_file, token_file = path / "meta.json", path / "tokens.npy"
        try:
            meta = json.loads(meta_file.read_text(encoding="utf-8"))
            if meta["format"] != FORMAT:
                raise ValueError(f"format {meta['format']} is not {FORMAT}")
            expected = meta["count"], meta["dtype"], meta["blake2b"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _damaged(meta_file, repr(error)) from error
        try:
            tokens = np.load(token_file, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise _damaged(token_file, str(error)) from error
        if tokens.shape != (expected[0],) or tokens.dtype.name != expected[1]:
            found = f"{tokens.dtype.name} {tokens.shape}"
            raise _damaged(token_file, f"it holds {found}, not {expected[1]} ({expected[0]},)")
        if _digest(tokens) != expected[2]:
            raise _damaged(token_file, "its content has changed since it was written")
        return cls(path, tokens, meta)


def _damaged(file: Path, reason: str) -> ValueError:
    return ValueError(
        f"{file} cannot be used: {reason}; delete the directory {file.parent} and build the shard again"
    )


def _digest(tokens: np.ndarray) -> str:
    digest = blake2b(digest_size=16)
    for start in range(0, len(tokens), CHUNK):
        digest.update(tokens[start : start + CHUNK].tobytes())
    return digest.hexdigest()


def encoded(documents: Iterable[str], tokenizer: Tokenizer) -> Iterator[list[int]]:
    """The tokens of each document, after one `END_OF_TEXT`."""
    first = [end_of_text_id(tokenizer)]
    stream = iter(documents)
    while texts := list(islice(stream, BATCH)):
        for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
            yield first + encoding.ids


def build_shard(
    documents: Iterable[str], tokenizer: Tokenizer, n_tokens: int, path: str | os.PathLike
) -> Shard:
    """The first `n_tokens` tokens of `documents` (fewer if they end before), written to the directory `path`.

    `END_OF_TEXT` stands before each document. Raises ValueError if there is no text at all.
    """
    return write_shard(encoded(documents, tokenizer), tokenizer.get_vocab_size(), n_tokens, path)


def write_shard(
    documents: Iterable[Sequence[int]],
    vocab_size: int,
    n_tokens: int,
    path: str | os.PathLike,
    *,
    source: dict[str, Any] | None = None,
    progress: Progress | None = None,
    replace: bool = True,
) -> Shard:
    """Like `build_shard`, from documents that are tokens already; `source` is kept in the shard's `meta`, and without
    `replace` a shard that is there already is kept.

    `progress(done, n_tokens)` is called about every million tokens and at the end.
    """
    if n_tokens < 1:
        raise ValueError(f"n_tokens must be at least 1, not {n_tokens}")
    with atomic_directory(path, replace=replace) as fresh:
        dtype = np.uint16 if vocab_size <= np.iinfo(np.uint16).max else np.uint32
        count = _write_tokens(fresh / "tokens.npy", n_tokens, dtype, documents, progress)
        if not count:
            raise ValueError(f"no documents to build the shard {path} from")
        tokens = np.load(fresh / "tokens.npy", mmap_mode="r", allow_pickle=False)
        meta = {
            "format": FORMAT,
            "count": count,
            "dtype": tokens.dtype.name,
            "blake2b": _digest(tokens),
            "source": source or {},
        }
        (fresh / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")
    return Shard.open(path)


def _write_tokens(
    path: Path, n_tokens: int, dtype: type, documents: Iterable[Sequence[int]], progress: Progress | None
) -> int:
    """Writes at most `n_tokens` tokens of `documents` to a file as large as needed; the number written."""
    tokens = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=(n_tokens,))
    done = told = 0
    for document in documents:
        piece = document[: n_tokens - done]
        tokens[done : done + len(piece)] = piece
        done += len(piece)
        if progress and done - told >= CHUNK:
            progress(done, n_tokens)
            told = done
        if done == n_tokens:
            break
    if progress:
        progress(done, n_tokens)
    if done < n_tokens:
        shorter = path.with_name("shorter.npy")
        np.save(shorter, tokens[:done], allow_pickle=False)
        os.replace(shorter, path)
    else:
        tokens.flush()
    return done
