import json
from itertools import islice

import pytest

from pellucid.data import documents
from pellucid.data.tiny_python import document


def write_files(root, n: int) -> list[str]:
    texts = [f"x = {number}\n" for number in range(n)]
    for number, text in enumerate(texts):
        folder = root / f"part{number % 3}"
        folder.mkdir(exist_ok=True)
        (folder / f"file{number}.py").write_text(text)
    return texts


def test_tiny_python_has_no_end():
    assert list(islice(documents("tiny-python", seed=3), 3)) == [
        document(index, seed=3) for index in range(3)
    ]


def test_the_standard_library_is_split_and_ordered_by_the_seed():
    first = list(islice(documents("python-stdlib"), 5))
    assert first == list(islice(documents("python-stdlib"), 5))
    assert first != list(islice(documents("python-stdlib", seed=1), 5))
    assert not set(first) & set(islice(documents("python-stdlib", "validation"), 30))


def test_files_are_all_read_once_in_one_of_the_splits(tmp_path):
    texts = write_files(tmp_path, 60)
    (tmp_path / "part0" / "latin.py").write_bytes(b"# caf\xe9\n")
    (tmp_path / "part0" / "empty.py").write_text("")
    train, validation = (
        list(documents(f"files:{tmp_path}/**/*.py", split)) for split in ("train", "validation")
    )
    assert sorted(train + validation) == sorted(texts)
    assert 0 < len(validation) < 20
    assert (
        list(documents(f"files:{tmp_path}/part*/*.py")) == train
    )  # the rule sees paths after the fixed folders


def test_files_that_match_nothing_are_an_error(tmp_path):
    with pytest.raises(ValueError, match="matches no file"):
        documents(f"files:{tmp_path}/*.py")


@pytest.fixture
def offline(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


def write_rows(path, rows: list[dict]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.usefixtures("offline")
def test_a_data_set_without_validation_keeps_one_row_in_a_hundred(tmp_path):
    write_rows(tmp_path / "set" / "train.jsonl", [{"text": f"row {number}"} for number in range(250)])
    validation = list(documents(f"hf:{tmp_path}/set", "validation"))
    assert validation == ["row 0", "row 100", "row 200"]
    train = list(documents(f"hf:{tmp_path}/set"))
    assert len(train) == 247
    assert train[0] == "row 1"


@pytest.mark.usefixtures("offline")
def test_a_data_set_with_a_validation_split_keeps_it(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "set").mkdir()
    for split in ("train", "test"):
        table = pa.table({"id": [1, 2], "content": [f"{split} a", f"{split} b"]})
        pq.write_table(table, tmp_path / "set" / f"{split}-00000-of-00001.parquet")
    assert list(documents(f"hf:{tmp_path}/set")) == ["train a", "train b"]
    assert list(documents(f"hf:{tmp_path}/set", "validation")) == ["test a", "test b"]


@pytest.mark.usefixtures("offline")
def test_a_data_set_without_text_lists_its_columns(tmp_path):
    write_rows(tmp_path / "set" / "train.jsonl", [{"body": "a", "label": 1}] * 3)
    with pytest.raises(ValueError, match=r"no column text or content; it has \['body', 'label'\]"):
        next(documents(f"hf:{tmp_path}/set"))


def test_without_datasets_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(ImportError, match=r"pip install pellucid\[hf\]"):
        next(documents("hf:some/name"))


@pytest.mark.parametrize(
    ("corpus", "message"),
    [
        ("tinypython", "unknown corpus 'tinypython'; did you mean 'tiny-python'"),
        ("python_stdlib", "did you mean 'python-stdlib'"),
        ("files:", "unknown corpus 'files:'; did you mean 'files:GLOB'"),
    ],
)
def test_an_unknown_corpus_is_named_with_the_nearest(corpus, message):
    with pytest.raises(ValueError, match=message):
        documents(corpus)


def test_an_unknown_split_is_named():
    with pytest.raises(ValueError, match="unknown split 'test'"):
        documents("tiny-python", "test")
