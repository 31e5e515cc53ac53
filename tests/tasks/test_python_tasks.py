import ast
import math
from functools import cache

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from pellucid.data import END_OF_TEXT, train_tokenizer
from pellucid.data.tiny_python import document
from pellucid.data.words import in_split
from pellucid.tasks import TASKS, PairTask, Question, accuracy, make_task

NAMES = sorted(TASKS)
CLOSED = {  # completes a prompt and its answer to a program, where a line break does not
    "final_kwarg": ("None): pass\n", " pass\n"),
    "set_or_string": ("add(x)\n", " x\n"),
    "set_or_string_fixed_varname": ("add(x)\n", " x\n"),
    "with_as": (" x: pass\n", "x\n"),
    "bracket_brace": ("1}\n", "1]\n"),
    "with_open": ("QUOTE)\n", "QUOTE)\n"),
    "for_while": (" items: pass\n", " pass\n"),
    "else_elif": (" pass\n", " x: pass\n"),
    "fstring_brace": ('x}")\n', "\n"),
    "if_ternary": (" pass\n", " x\n"),
    "indent_for": ("pass\n", "pass\n"),
    "lambda_func": (" x\n", "x): pass\n"),
    "if_equals": (" x: pass\n", " x\n"),
    "enumerate_range": ("(x): pass\n", "(x): pass\n"),
    "var_if": (" pass\n", "x\n"),
    "while_return_true": (" pass\n", "x\n"),
}


def program(name: str, row: int, prompt: str, answer: str) -> str:
    end = CLOSED.get(name, ("\n", "\n"))[row % 2].replace("QUOTE", prompt[-1])
    opened = "with " if name == "with_open" and prompt.split("\n")[-1].startswith("with") else ""
    return prompt + answer + (end.replace(")\n", ") as x: pass\n") if opened else end)


@cache
def tokenizer(vocab_size: int = 768):
    return train_tokenizer([document(index) for index in range(4000)], vocab_size)


@cache
def task(name: str, vocab_size: int = 768):
    return make_task(name, tokenizer(vocab_size))


def prompts(batch, which=None) -> list[str]:
    which = batch.tokens if which is None else which
    rows = [row[: end + 1].tolist() for row, end in zip(which, batch.positions.tolist(), strict=True)]
    assert all(row[0] == 0 and 0 not in row[1:] for row in rows)
    return [tokenizer().decode(row[1:]) for row in rows]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("vocab_size", [768, 2048])
def test_tasks_work_at_both_vocabularies(name, vocab_size):
    batch = task(name, vocab_size).pairs(50)
    assert batch.tokens.shape[0] == len(batch) == 100
    assert batch.positions.float().mean() < 36


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("split", ["train", "test"])
def test_the_answer_continues_the_prompt_as_valid_python(name, split):
    batch = task(name).pairs(100, split=split)
    for row, prompt in enumerate(prompts(batch)):
        right, wrong = (tokenizer().decode([token]) for token in batch.answers[row].tolist())
        told = TASKS[name].answers
        expected = (
            told
            if not callable(told)
            else (told(prompts(batch)[row]), told(prompts(batch, batch.corrupt)[row]))
        )
        if callable(told):
            assert all(
                answer.startswith(token) for answer, token in zip(expected, (right, wrong), strict=True)
            )
        else:
            assert (right, wrong) == (expected[::-1] if row % 2 else expected)
        ast.parse(text := program(name, row, prompt, expected[0] if callable(told) else right))
        ids = tokenizer().encode(text).ids
        assert ids[: batch.positions[row]] == batch.tokens[row, 1 : batch.positions[row] + 1].tolist()
        assert ids[batch.positions[row]] == batch.answers[row, 0]


@pytest.mark.parametrize("name", NAMES)
def test_rows_come_in_pairs_of_one_length(name):
    batch = task(name).pairs(60, seed=3)
    assert torch.equal(batch.positions[::2], batch.positions[1::2])
    assert torch.equal(batch.corrupt[::2], batch.tokens[1::2])
    assert torch.equal(batch.corrupt[1::2], batch.tokens[::2])
    assert torch.equal(batch.mask.sum(1) - 1, batch.positions)
    assert torch.equal(batch.answers[::2], batch.answers[1::2].flip(1))
    assert (batch.tokens != batch.corrupt).any(1).all()


@pytest.mark.parametrize("name", NAMES)
def test_pairs_depend_on_seed_and_split_alone_and_more_only_adds(name):
    few, many = task(name).pairs(10, seed=1), PairTask(TASKS[name], tokenizer()).pairs(40, seed=1)
    assert prompts(few) == prompts(many)[:20]
    assert prompts(few) != prompts(task(name).pairs(10, seed=2))
    assert not set(prompts(task(name).pairs(200))) & set(prompts(task(name).pairs(200, split="test")))


def test_names_and_literals_of_a_split_are_its_own():
    for split, own in (("train", "train"), ("test", "validation")):
        for prompt in prompts(task("for_while").pairs(100, split=split))[::2]:
            assert in_split(prompt.split()[-1], own)
        for prompt in prompts(task("single_double_quote").pairs(100, split=split))[::2]:
            assert in_split(prompt.rsplit('"', 1)[1], own)
        for prompt in prompts(task("bracket_counting").pairs(100, split=split))[::2]:
            assert in_split(prompt.rsplit("[", 1)[1], own)


def test_bracket_counting_has_several_rows_often():
    n_rows = [
        prompt.split("\n")[-1].count("[") - 1 for prompt in prompts(task("bracket_counting").pairs(200))[1::2]
    ]
    assert 0.2 < sum(n > 1 for n in n_rows) / len(n_rows) < 0.8


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_accuracy_equal_a_hand_computation(name):
    batch = task(name).pairs(5)
    logits = torch.randn(
        *batch.tokens.shape, 768, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    losses, hits = task(name).metric(logits, batch), accuracy(logits, batch)
    for row in range(len(batch)):
        right, wrong = (logits[row, batch.positions[row], token].item() for token in batch.answers[row])
        assert losses[row].item() == pytest.approx(
            -math.log(math.exp(right) / (math.exp(right) + math.exp(wrong)))
        )
        assert hits[row].item() == float(right > wrong)
    assert torch.allclose(
        task(name).metric(0 * logits, batch), torch.tensor(math.log(2), dtype=torch.float64)
    )
    assert task(name).metric(logits.bfloat16(), batch).dtype == torch.float32


def test_a_batch_moves_whole():
    batch = task("for_while").pairs(3).to("meta")
    assert {
        t.device.type for t in (batch.tokens, batch.corrupt, batch.mask, batch.positions, batch.answers)
    } == {"meta"}


@pytest.mark.parametrize(
    ("name", "pieces"), [("single_double_quote", r"'\"', '\)'"), ("bracket_counting", r"'\]', '\]'")]
)
def test_a_tokenizer_that_splits_an_answer_is_told_how(name, pieces):
    with pytest.raises(ValueError, match=rf"task '{name}': its answers .* must be single tokens, .*{pieces}"):
        make_task(name, train_tokenizer([], 257))


def test_a_tokenizer_that_glues_an_answer_to_its_prompt_is_told_so():
    glued = Tokenizer(models.WordLevel({"?": 0, END_OF_TEXT: 1, "for": 2, "x in": 3}, unk_token="?"))
    glued.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    with pytest.raises(ValueError, match="task 'for_while': its answers"):
        make_task("for_while", glued)


def test_a_tokenizer_without_end_of_text_is_refused():
    with pytest.raises(ValueError, match=r"no '<\|endoftext\|>' token"):
        make_task("for_while", Tokenizer(models.BPE()))


def question(draw, answers=(" in", ":")) -> Question:
    return Question("mine", "a question of this test", draw, answers)


def test_pairs_that_never_have_equal_lengths_are_an_error():
    unequal = PairTask(question(lambda rng, split: ("for x", "while x or y")), tokenizer())
    with pytest.raises(
        ValueError, match=r"task 'mine': 100 of 100 draws were rejected, because .* different lengths"
    ):
        unequal.pairs(3)


def test_equal_answers_are_an_error():
    with pytest.raises(ValueError, match=r"task 'mine': its answers .* are the same token"):
        PairTask(question(lambda rng, split: ("for x", "for y"), (" in", " in")), tokenizer())


def test_wrong_requests_are_named():
    with pytest.raises(ValueError, match="unknown task 'for_whilst'; did you mean 'for_while'"):
        make_task("for_whilst", tokenizer())
    with pytest.raises(ValueError, match="unknown split 'tests'; did you mean 'test'"):
        task("for_while").pairs(2, split="tests")
    with pytest.raises(ValueError, match="n of at least 1, not 0"):
        task("for_while").pairs(0)
