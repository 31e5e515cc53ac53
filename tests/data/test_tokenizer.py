import random
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pellucid.data import END_OF_TEXT, train_tokenizer
from pellucid.data.tiny_python import document

SINGLE = [
    '("',
    "('",
    '")',
    "')",
    "]",
    "]]",
    "],",
    " in",
    ":",
    " [",
    " [[",
    "for",
    "while",
    "\n",
    "\n    ",
    "\n        ",
]


@cache
def tokenizer(vocab_size: int):
    return train_tokenizer([document(index) for index in range(4000)], vocab_size)


@pytest.mark.parametrize("vocab_size", [512, 2048])
@pytest.mark.parametrize("text", SINGLE)
def test_what_the_tasks_ask_about_is_one_token(vocab_size, text):
    assert tokenizer(vocab_size).get_vocab_size() == vocab_size
    assert len(tokenizer(vocab_size).encode(text).ids) == 1


def test_pieces_do_not_glue_answers_to_their_surroundings():
    def pieces(text):
        return [tokenizer(2048).decode([token]) for token in tokenizer(2048).encode(text).ids]

    assert pieces('print("a"))\n')[-3:] == ['")', ")", "\n"]
    assert pieces("x = [[1, 2], [3]]\n")[2:] == [" [[", "1", ",", " 2", "],", " [", "3", "]]", "\n"]
    assert pieces("x = [12]\n")[-4:] == ["1", "2", "]", "\n"]
    assert pieces("while x:\n")[-2:] == [":", "\n"]


@given(st.text())
def test_any_text_comes_back(text):
    assert tokenizer(512).decode(tokenizer(512).encode(text).ids) == text


@pytest.mark.parametrize(
    "text", [END_OF_TEXT, f"a {END_OF_TEXT} b", "\r\n\t x  ", "héllo 🙂 e\u0301", "don't\n\n\n  y"]
)
def test_hard_text_comes_back(text):
    ids = tokenizer(512).encode(text).ids
    assert tokenizer(512).decode(ids) == text
    assert tokenizer(512).token_to_id(END_OF_TEXT) == 0
    assert 0 not in ids  # a text cannot forge a document's end


def test_training_is_deterministic():
    texts = [document(index) for index in range(300)]
    assert train_tokenizer(texts, 400).to_str() == train_tokenizer(iter(texts), 400).to_str()


def test_untrained_bytes_are_enough():
    small = train_tokenizer([], 257)
    text = "".join(map(chr, random.Random(0).sample(range(0x10000, 0x20000), 50)))
    assert small.decode(small.encode(text).ids) == text
    with pytest.raises(ValueError, match="vocab_size 256 is too small"):
        train_tokenizer([], 256)
