"""Perplexity is the plain mean over a corpus' tokens, and bits a byte do not depend on the tokenizer's cuts."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid import ModelConfig, Transformer, save_model, uniform
from pellucid.cli import main
from pellucid.core.checkpoint import load_metadata
from pellucid.data.tiny_python import document
from pellucid.data.tokenizer import train_tokenizer
from pellucid.recipes.perplexity import held_out, measure, perplexity
from tests.core.strategies import scrambled

TOKENIZER = train_tokenizer([document(i, seed=0) for i in range(40)], vocab_size=320)
CONFIG = ModelConfig(vocab_size=320, d_model=16, n_ctx=8, layers=uniform(1, 2, 8, 16), dtype="float64")
BOX = "pellucid:sparse-python-4l"


def test_it_is_over_every_token_of_every_document_from_its_window():
    model, texts = scrambled(CONFIG, 0), ["def get(a):", "x = 'é'", ""]
    nats = 0.0
    for text in texts:
        ids = [0, *TOKENIZER.encode(text).ids]
        for i in range(1, len(ids)):
            end = min(-(-i // 8) * 8, len(ids) - 1)
            nats -= model(torch.tensor([ids[max(0, end - 8) : i]]))[0, -1].log_softmax(-1)[ids[i]].item()
    found = perplexity(model, TOKENIZER, texts)
    n = sum(len(TOKENIZER.encode(text).ids) for text in texts)
    assert (found.documents, found.tokens, found.bytes) == (3, n, 11 + 8)
    assert found.perplexity == pytest.approx(math.exp(nats / n))
    assert found.bits_per_byte == pytest.approx(nats / math.log(2) / 19)


@settings(deadline=None, max_examples=20)
@given(texts=st.lists(st.text(max_size=30), min_size=1).filter(any), batch_size=st.integers(1, 40))
def test_a_model_that_knows_nothing_has_the_vocabulary_for_its_perplexity(texts, batch_size):
    model = Transformer(CONFIG, device="cpu")
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    found = perplexity(model, TOKENIZER, texts, batch_size=batch_size)
    assert found.perplexity == pytest.approx(320)
    assert found.bits_per_byte == pytest.approx(found.tokens * math.log2(320) / found.bytes)


def test_whole_documents_are_read_until_there_are_tokens_enough():
    texts, lengths = [document(i) for i in range(9)], []
    for text in texts:
        lengths.append(len(TOKENIZER.encode(text).ids))
    found = perplexity(Transformer(CONFIG, device="cpu"), TOKENIZER, texts, tokens=lengths[0] + 1)
    assert (found.documents, found.tokens) == (2, sum(lengths[:2]))
    with pytest.raises(ValueError, match="no text"):
        perplexity(Transformer(CONFIG, device="cpu"), TOKENIZER, ["", ""])


def test_a_run_is_measured_on_the_held_out_split_of_its_own_corpora():
    """It comes out near the loss that training noted, which was over windows across documents."""
    assert list(held_out(BOX, [])) == ["tiny-python", "python-stdlib"]
    assert next(iter(held_out(BOX, [])["tiny-python"])) == document(0, seed=0, split="validation")
    found = measure(BOX, ["tiny-python"], tokens=8192, device="cpu")["tiny-python"]
    assert math.log(found.perplexity) == pytest.approx(
        load_metadata(BOX)["validation"]["tiny-python"], abs=0.1
    )


def test_the_command_measures_files_and_corpora_and_writes_json(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pellucid.cli.results.width", 160)
    Path("some.txt").write_text("def get(moon):\n    return moon\n" * 3)
    main(["eval", BOX, "--perplexity", "some.txt", "tiny-python", "--tokens", "500", "--out", "r.json"])
    said = capsys.readouterr().out
    assert "some.txt" in said
    assert "bits a byte" in said
    written = json.loads(Path("r.json").read_text())["perplexity"]
    assert written["some.txt"]["documents"] == 1
    assert written["some.txt"]["bytes"] == 93
    assert written["tiny-python"]["tokens"] >= 500
    assert f"{written['some.txt']['perplexity']:.3f}" in said
    main(["eval", BOX, "--tokens", "200"])
    assert "python-stdlib" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("sources", "tokens", "message"),
    [
        (["tiny-pyhton"], 9, "unknown corpus 'tiny-pyhton'; did you mean 'tiny-python'"),
        (["files:nowhere/*.txt"], 9, "matches no file"),
        ([], 0, "tokens must be 1 or more, got 0"),
    ],
)
def test_bad_input_is_named(sources, tokens, message):
    with pytest.raises(ValueError, match=message):
        measure(BOX, sources, tokens=tokens)


def test_a_run_that_does_not_say_its_corpora_needs_a_source(tmp_path):
    save_model(Transformer(CONFIG, device="cpu"), tmp_path, tokenizer=TOKENIZER)
    with pytest.raises(ValueError, match="does not say what it was trained on"):
        measure(tmp_path)
    (tmp_path / "text").write_text("def get(a):")
    assert measure(tmp_path, [str(tmp_path / "text")])[str(tmp_path / "text")].bytes == 11
