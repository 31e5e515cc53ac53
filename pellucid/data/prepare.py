"""A mixture of corpora as one cached token shard."""

import json
import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from pellucid.core.files import cache_root
from pellucid.data import tiny_python
from pellucid.data.corpora import corpus_files, documents
from pellucid.data.shards import Progress, Shard, encoded, write_shard

Mixture = Sequence[tuple[str, float]]


def prepare(
    mixture: Mixture,
    tokenizer: Tokenizer,
    n_tokens: int,
    split: str,
    *,
    seed: int = 0,
    cache_dir: str | os.PathLike | None = None,
    progress: Progress | None = None,
) -> Shard:
    """A shard of `n_tokens` tokens of the corpora in `mixture` (name, weight), interleaved by weight in tokens.

    Kept in `cache_dir` (default: `cache_root()`) under a hash of everything that it depends on: generated text is known by
    its version, the standard library by Python's, files by size and time, a data set on a hub by its name alone. A corpus
    that ends starts again, with a warning that says how often.
    Raises ValueError for an unknown corpus, one without text, or a weight that is not positive.
    """
    if not mixture or any(not weight > 0 for _, weight in mixture):
        raise ValueError(f"a mixture needs corpora with positive weights, not {list(mixture)}")
    source = _source(mixture, tokenizer, n_tokens, split, seed)
    key = blake2b(json.dumps(source, sort_keys=True).encode(), digest_size=12).hexdigest()
    path = Path(cache_dir or cache_root()) / "shards" / f"{split}-{key}"
    if path.exists():
        shard = Shard.open(path)
    else:
        source["passes"] = passes = Counter()  # counted while the shard is written, before its meta is
        stream = _interleaved(mixture, tokenizer, split, seed, passes)
        shard = write_shard(
            stream,
            tokenizer.get_vocab_size(),
            n_tokens,
            path,
            source=source,
            progress=progress,
            replace=False,
        )
    for corpus, n_passes in shard.meta["source"]["passes"].items():
        if n_passes > 1:
            message = f"corpus {corpus!r} ({split}) is too small for its share: it was begun {n_passes} times"
            warnings.warn(message, stacklevel=2)
    return shard


def _source(mixture: Mixture, tokenizer: Tokenizer, n_tokens: int, split: str, seed: int) -> dict[str, Any]:
    """All that the tokens depend on, as JSON."""
    return {
        "mixture": [[corpus, float(weight)] for corpus, weight in mixture],
        "corpora": [_state(corpus) for corpus, _ in mixture],
        "tokenizer": blake2b(tokenizer.to_str().encode(), digest_size=16).hexdigest(),
        "n_tokens": n_tokens,
        "split": split,
        "seed": seed,
    }


def _state(corpus: str) -> Any:
    if corpus == "tiny-python":
        return tiny_python.VERSION
    if corpus == "python-stdlib":
        return sys.version
    root, paths = corpus_files(corpus)
    stats = [(path, (root / path).stat()) for path in paths]
    return [[path.as_posix(), stat.st_size, stat.st_mtime_ns] for path, stat in stats]


def _interleaved(
    mixture: Mixture, tokenizer: Tokenizer, split: str, seed: int, passes: Counter[str]
) -> Iterator[list[int]]:
    """Documents without end; the next one is from the corpus that is furthest behind its share."""
    streams = [_repeated(corpus, tokenizer, split, seed, passes) for corpus, _ in mixture]
    shares = [0.0] * len(mixture)
    while True:
        behind = min(range(len(mixture)), key=shares.__getitem__)
        document = next(streams[behind])
        shares[behind] += len(document) / mixture[behind][1]
        yield document


def _repeated(
    corpus: str, tokenizer: Tokenizer, split: str, seed: int, passes: Counter[str]
) -> Iterator[list[int]]:
    while True:
        n_documents = 0
        for document in encoded(documents(corpus, split, seed=seed), tokenizer):
            passes[corpus] += not n_documents
            n_documents += 1
            yield document
        if not n_documents:
            raise ValueError(f"corpus {corpus!r} has no documents in the split {split!r}")
