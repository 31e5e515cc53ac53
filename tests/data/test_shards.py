import json
import os
from functools import cache
from itertools import islice

import numpy as np
import pytest

from pellucid.core.files import cache_root
from pellucid.data import Shard, build_shard, documents, prepare, train_tokenizer
from pellucid.data.tiny_python import document

TEXTS = [document(index) for index in range(40)]


@cache
def tokenizer():
    return train_tokenizer([document(index) for index in range(500)], 400)


def texts_in(tokens) -> list[str]:
    """The documents of a shard, which must begin with an end-of-text token."""
    tokens = np.asarray(tokens)
    assert tokens[0] == 0
    return [
        tokenizer().decode(part[1:].tolist()) for part in np.split(tokens, np.flatnonzero(tokens == 0)[1:])
    ]


def test_a_shard_holds_the_documents(tmp_path):
    shard = build_shard(TEXTS, tokenizer(), 10**6, tmp_path / "shard")
    assert texts_in(shard.tokens) == TEXTS
    again = Shard.open(tmp_path / "shard")
    assert again.tokens.dtype == np.uint16
    assert len(again) == len(shard) == again.meta["count"]
    assert isinstance(again.tokens, np.memmap)
    assert np.array_equal(again.tokens, shard.tokens)
    assert [path.name for path in tmp_path.iterdir()] == ["shard"]


def test_a_shard_is_cut_at_its_size_and_replaces_an_older_one(tmp_path):
    whole = build_shard(TEXTS, tokenizer(), 10**6, tmp_path / "shard")
    tokens = np.array(whole.tokens)
    part = build_shard(TEXTS, tokenizer(), 1000, tmp_path / "shard")
    assert np.array_equal(part.tokens, tokens[:1000])
    assert [path.name for path in tmp_path.iterdir()] == ["shard"]


def test_a_shard_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match="no documents"):
        build_shard([], tokenizer(), 1000, tmp_path / "shard")
    with pytest.raises(ValueError, match="n_tokens must be at least 1, not 0"):
        build_shard(TEXTS, tokenizer(), 0, tmp_path / "shard")
    assert not list(tmp_path.iterdir())


def truncate(directory):
    os.truncate(directory / "tokens.npy", 500)


def shorten(directory):
    np.save(directory / "tokens.npy", np.load(directory / "tokens.npy")[:-1])


def change(directory):
    data = bytearray((directory / "tokens.npy").read_bytes())
    data[-1] ^= 1
    (directory / "tokens.npy").write_bytes(data)


def remove(directory):
    (directory / "tokens.npy").unlink()


def objects(directory):
    np.save(directory / "tokens.npy", np.array([{}]), allow_pickle=True)


def matrix(directory):
    np.save(directory / "tokens.npy", np.load(directory / "tokens.npy").reshape(-1, 1))


def no_meta(directory):
    (directory / "meta.json").unlink()


def half_meta(directory):
    (directory / "meta.json").write_text((directory / "meta.json").read_text()[:30])


def other_meta(directory):
    (directory / "meta.json").write_text("[1]")


def old_format(directory):
    meta = json.loads((directory / "meta.json").read_text())
    (directory / "meta.json").write_text(json.dumps(meta | {"format": 0}))


@pytest.mark.parametrize(
    ("damage", "file"),
    [(damage, "tokens.npy") for damage in (truncate, shorten, change, remove, objects, matrix)]
    + [(damage, "meta.json") for damage in (no_meta, half_meta, other_meta, old_format)],
)
def test_damage_is_found_and_the_file_named(tmp_path, damage, file):
    build_shard(TEXTS, tokenizer(), 1000, tmp_path / "shard")
    damage(tmp_path / "shard")
    with pytest.raises(
        ValueError, match=rf"shard/{file} cannot be used: .*delete the directory .*shard and build"
    ):
        Shard.open(tmp_path / "shard")


def test_prepare_reads_its_cache_and_keys_it_by_what_matters(tmp_path):
    def path(mixture=(("tiny-python", 1.0),), n_tokens=1000, split="train", **options):
        return prepare(mixture, tokenizer(), n_tokens, split, cache_dir=tmp_path, **options).path

    calls = []
    first = path(progress=lambda done, total: calls.append((done, total)))
    assert calls == [(1000, 1000)]
    written = (first / "tokens.npy").stat().st_mtime_ns
    assert path(progress=lambda done, total: calls.append((done, total))) == first
    assert (first / "tokens.npy").stat().st_mtime_ns == written
    assert len(calls) == 1
    assert len({first, path(n_tokens=1001), path(seed=1), path(split="validation")}) == 4
    other = train_tokenizer([], 257)
    assert prepare([("tiny-python", 1.0)], other, 1000, "train", cache_dir=tmp_path).path != first


def test_prepare_notices_changed_files(tmp_path):
    for number in range(5):
        (tmp_path / f"{number}.txt").write_text(f"text {number} " * 50)
    mixture = [(f"files:{tmp_path}/*.txt", 1.0)]
    first = prepare(mixture, tokenizer(), 100, "train", cache_dir=tmp_path)
    (tmp_path / "0.txt").write_text("something else " * 50)
    second = prepare(mixture, tokenizer(), 100, "train", cache_dir=tmp_path)
    assert first.path != second.path


def test_corpora_are_mixed_by_weight_in_tokens(tmp_path):
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text("zzz " * (20 + number))
    mixture = [("tiny-python", 3.0), (f"files:{tmp_path}/*.txt", 1.0)]
    for _ in range(2):  # the cached shard says it too
        with pytest.warns(
            UserWarning, match=r"corpus 'files:.*' \(train\) is too small .* begun \d+ times"
        ) as warned:
            shard = prepare(mixture, tokenizer(), 20_000, "train", cache_dir=tmp_path)
        assert len(warned) == 1
    from_files = sum(
        len(tokenizer().encode(text).ids) + 1 for text in texts_in(shard.tokens) if "zzz" in text
    )
    assert from_files / len(shard) == pytest.approx(0.25, abs=0.01)
    tiny = [text for text in texts_in(shard.tokens) if "zzz" not in text]
    assert tiny[:-1] == list(islice(documents("tiny-python"), len(tiny) - 1))


def test_prepare_says_what_is_wrong(tmp_path):
    def attempt(*mixture):
        prepare(mixture, tokenizer(), 100, "train", cache_dir=tmp_path)

    with pytest.raises(ValueError, match="unknown corpus 'tiny-pyton'; did you mean 'tiny-python'"):
        attempt(("tiny-pyton", 1.0))
    with pytest.raises(ValueError, match="positive weights, not"):
        attempt(("tiny-python", 0.0))
    with pytest.raises(ValueError, match="positive weights, not"):
        attempt()
    (tmp_path / "blank.txt").write_text(" ")
    with pytest.raises(ValueError, match="has no documents in the split 'train'"):
        attempt((f"files:{tmp_path}/*.txt", 1.0))


def test_the_cache_root_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("PELLUCID_CACHE", raising=False)
    assert cache_root() == tmp_path / "xdg" / "pellucid"
    monkeypatch.setenv("PELLUCID_CACHE", str(tmp_path / "own"))
    assert cache_root() == tmp_path / "own"
    shard = prepare([("tiny-python", 1.0)], tokenizer(), 100, "train")
    assert shard.path.is_relative_to(tmp_path / "own")
