"""The LM Evaluation Harness measures our models as it measures the same models behind its own Hugging Face class."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from pellucid import ModelConfig, Transformer, generate, save_model, uniform
from pellucid.cli import main
from pellucid.core.likelihood import windows
from pellucid.data.tiny_python import document
from pellucid.data.tokenizer import train_tokenizer
from pellucid.interop.huggingface import to_huggingface, to_huggingface_tokenizer
from pellucid.interop.lm_eval import PellucidLM, evaluate, find_tasks, task_table
from tests.core.strategies import scrambled

ROOT = Path(__file__).parent.parent.parent
TASKS = ROOT / "tests" / "data" / "eval"
BOX = "pellucid:sparse-python-4l"
TOKENIZER = train_tokenizer([document(i, seed=0) for i in range(40)], vocab_size=320)
CONFIG = ModelConfig(
    vocab_size=320, d_model=16, n_ctx=32, layers=uniform(2, 2, 8, 16), positions="learned", dtype="float64"
)
MODEL = scrambled(CONFIG, 0)
LONG = document(3, seed=1) + document(4, seed=1)
texts = st.text(st.sampled_from("ab(\"')] \n=é"), max_size=12) | st.sampled_from(
    ["def ", "return", " return", "    ", "print(", LONG, LONG[:200]]
)


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """No test reaches a network or leaves data behind; task files name their data from the root of the repository."""

    def refuse(*_):
        raise OSError("a test tried to reach the network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.chdir(ROOT)


def requests(kind, *args):
    return [Instance(kind, {}, arg, i) for i, arg in enumerate(args)]


def theirs():
    """The same model behind the harness' own class."""
    make: Any = HFLM
    return make(
        pretrained=to_huggingface(MODEL, TOKENIZER),
        tokenizer=to_huggingface_tokenizer(TOKENIZER),
        max_length=CONFIG.n_ctx,
        batch_size=4,
        device="cpu",
    )


def ours(batch_size=4):
    return PellucidLM(MODEL, TOKENIZER, batch_size=batch_size)


HFLM_OF_MODEL = theirs()


def scorable(context, continuation):
    """Whether the continuation has tokens of its own, and few enough."""
    lm = ours()
    if not context.strip():
        return not context and 1 <= len(lm.tok_encode(continuation)) <= CONFIG.n_ctx
    return 1 <= len(lm._encode_pair(context, continuation)[1]) <= CONFIG.n_ctx


@pytest.mark.filterwarnings("ignore:.*beginnings are left out")
@settings(deadline=None, max_examples=30)
@given(asked=st.lists(st.tuples(texts, texts).filter(lambda pair: scorable(*pair)), min_size=1, max_size=5))
def test_log_likelihoods_are_those_of_the_harness_own_class(asked):
    """Also where tokens merge across the boundary, contexts are empty, or contexts are too long."""
    found = ours().loglikelihood(requests("loglikelihood", *asked))
    want = HFLM_OF_MODEL.loglikelihood(requests("loglikelihood", *asked), disable_tqdm=True)
    assert [logprob for logprob, _ in found] == pytest.approx([logprob for logprob, _ in want], abs=1e-5)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in want]


def test_a_log_likelihood_is_the_sum_of_the_models_log_probabilities():
    context, continuation = "def get(a):\n    return", " a\n"
    ids = TOKENIZER.encode(context + continuation).ids
    n = len(TOKENIZER.encode(context).ids)
    logprobs = MODEL(torch.tensor([ids])).log_softmax(-1)[0]
    want = sum(logprobs[i - 1, ids[i]].item() for i in range(n, len(ids)))
    ((found, _),) = ours().loglikelihood(requests("loglikelihood", (context, continuation)))
    assert found == pytest.approx(want, abs=1e-5)


@settings(deadline=None, max_examples=20)
@given(asked=st.lists(texts, min_size=1, max_size=4))
def test_rolling_log_likelihoods_are_those_of_the_harness_own_class(asked):
    args = [(text,) for text in asked]
    want = [
        0.0
        if not text
        else HFLM_OF_MODEL.loglikelihood_rolling(
            requests("loglikelihood_rolling", (text,)), disable_tqdm=True
        )[0]
        for text in asked
    ]
    assert ours().loglikelihood_rolling(requests("loglikelihood_rolling", *args)) == pytest.approx(
        want, abs=1e-4
    )


def test_a_text_longer_than_n_ctx_is_the_plain_sum_over_its_tokens():
    text = LONG + "# the end"
    ids = [0, *TOKENIZER.encode(text).ids]
    n, n_ctx = len(ids) - 1, CONFIG.n_ctx
    assert n > 2 * n_ctx
    assert n % n_ctx
    total = 0.0
    for i in range(1, n + 1):
        end = min(-(-i // n_ctx) * n_ctx, n)  # where this token's window ends
        seen = ids[max(0, end - n_ctx) : i]
        total += MODEL(torch.tensor([seen]))[0, -1].log_softmax(-1)[ids[i]].item()
    (found,) = ours().loglikelihood_rolling(requests("loglikelihood_rolling", (text,)))
    assert found == pytest.approx(total, abs=1e-5)


@given(tokens=st.lists(st.integers(1, 9), max_size=40), n_ctx=st.integers(1, 9))
def test_windows_are_the_harness_own(tokens, n_ctx):
    want = map(make_disjoint_window, get_rolling_token_windows(tokens, 0, n_ctx, 1))
    assert windows(tokens, 0, n_ctx) == list(want)


@pytest.mark.filterwarnings("ignore:.*beginnings are left out")
def test_batch_size_changes_no_result():
    pairs = [(LONG[:i], " a" * (1 + i % 5)) for i in range(0, 60, 3)]
    rolling = [(LONG[:i],) for i in range(0, 200, 30)]
    ways = [({"until": ["\n"], "max_gen_toks": 9}, 0), ({"until": [], "max_gen_toks": 5}, 3)]
    prompts = [(LONG[i : i + 10 + i % 7], ways[i % 2][0]) for i in range(20)]
    first = None
    for batch_size in (1, 3, 64):
        lm = ours(batch_size)
        found = (
            lm.loglikelihood(requests("loglikelihood", *pairs)),
            lm.loglikelihood_rolling(requests("loglikelihood_rolling", *rolling)),
            lm.generate_until(requests("generate_until", *prompts)),
        )
        first = first or found
        assert [a for a, _ in found[0]] == pytest.approx([a for a, _ in first[0]], abs=1e-9)
        assert [b for _, b in found[0]] == [b for _, b in first[0]]
        assert found[1] == pytest.approx(first[1], abs=1e-9)
        assert found[2] == first[2]


@pytest.mark.parametrize("max_gen_toks", [1, 7, 31])
def test_generation_ends_at_the_number_of_tokens(max_gen_toks):
    prompt = "d"
    (found,) = ours().generate_until(
        requests("generate_until", (prompt, {"until": [], "max_gen_toks": max_gen_toks}))
    )
    want = generate(MODEL, [TOKENIZER.encode(prompt).ids], max_gen_toks, stop=0)[0]
    assert found == TOKENIZER.decode(want)


@pytest.mark.filterwarnings("ignore:.*beginnings are left out")
@settings(deadline=None, max_examples=15)
@given(prompt=texts.filter(bool), stop=st.sampled_from(["\n", "e", " ", "(", "nothing says this"]))
def test_generation_stops_at_the_first_stop_string_as_the_harness_own_class_does(prompt, stop):
    asked = (prompt, {"until": [stop, "in"], "max_gen_toks": 12, "do_sample": False})
    (found,) = ours().generate_until(requests("generate_until", asked))
    (want,) = HFLM_OF_MODEL.generate_until(requests("generate_until", asked), disable_tqdm=True)
    assert found == want
    assert stop not in found
    assert "in" not in found


def test_long_generation_goes_on_where_it_was(monkeypatch):
    """The pieces that stop strings are looked for in join to what one call generates."""
    prompt = "while "
    whole = TOKENIZER.decode(generate(MODEL, [TOKENIZER.encode(prompt).ids], 20, stop=0)[0])
    monkeypatch.setattr("pellucid.interop.lm_eval.CHUNK", 3)
    asked = requests("generate_until", (prompt, {"until": [], "max_gen_toks": 20}))
    assert ours().generate_until(asked) == [whole]


def test_contexts_that_are_cut_are_counted_and_said():
    lm = ours()
    with pytest.warns(UserWarning, match="1 of 2 contexts do not fit into n_ctx = 32"):
        lm.loglikelihood(requests("loglikelihood", (LONG, " a"), ("def", " a")))
    assert lm.truncated == 1
    with pytest.warns(UserWarning, match="1 of 1 contexts"):
        lm.generate_until(requests("generate_until", (LONG, {"until": ["\n"], "max_gen_toks": 4})))
    assert lm.truncated == 2
    with pytest.warns(UserWarning, match="400 new tokens do not fit into n_ctx = 32: 16 are generated"):
        lm.generate_until(requests("generate_until", ("d", {"until": ["\n"], "max_gen_toks": 400})))


def test_a_context_of_spaces_is_an_end_of_text():
    asked = requests("loglikelihood", (" ", "a"), ("", " a"))
    first, second = ours().loglikelihood(asked)
    assert first == second


def test_text_cannot_forge_the_end_of_a_document():
    assert 0 not in ours().tok_encode("<|endoftext|>")


def test_a_continuation_without_tokens_of_its_own_is_an_error():
    merged = next(
        text
        for text, _ in TOKENIZER.get_vocab().items()
        if len(text) == 2 and text.isascii() and text.isalpha()
    )
    with pytest.raises(ValueError, match=r"no token of .* belongs to the continuation alone"):
        ours().loglikelihood(requests("loglikelihood", (merged[0], merged[1])))


def test_models_that_cannot_be_asked_are_refused(tmp_path):
    with pytest.raises(ValueError, match="needs a tokenizer"):
        PellucidLM(MODEL)
    save_model(MODEL, tmp_path / "bare")
    with pytest.raises(ValueError, match=r"tokenizer.json is missing"):
        PellucidLM(tmp_path / "bare")
    small = Transformer(ModelConfig(vocab_size=50, d_model=8, n_ctx=8, layers=()), device="cpu")
    with pytest.raises(ValueError, match="320 tokens do not fit the model's vocabulary of 50"):
        PellucidLM(small, TOKENIZER)
    with pytest.raises(ValueError, match="top_p is not supported"):
        ours().generate_until(
            requests("generate_until", ("d", {"do_sample": True, "temperature": 1.0, "top_p": 0.5}))
        )


def test_the_items_are_what_the_code_makes():
    from tests.data.eval.make import files

    for name, content in files().items():
        assert (TASKS / name).read_text() == content


@pytest.mark.filterwarnings("ignore:.*beginnings are left out")
def test_a_trained_model_knows_how_lines_end_and_an_untrained_one_does_not(capsys):
    """The sparse model of the box matches quotes and brackets; it cannot copy names that it never saw."""
    names = ["pellucid_last_word", "pellucid_line_end", "pellucid_whole_text", "pellucid_say_word"]
    found = evaluate(BOX, names, include_path=TASKS)
    capsys.readouterr()
    assert found["n-samples"]["pellucid_line_end"] == {"original": 32, "effective": 32}
    trained = found["results"]
    assert trained["pellucid_line_end"]["acc,none"] > 0.9
    assert trained["pellucid_last_word"]["acc_stderr,none"] >= 0
    assert 1 < trained["pellucid_whole_text"]["bits_per_byte,none"] < 2
    untrained = evaluate(MODEL, names[1:3], tokenizer=TOKENIZER, include_path=TASKS, limit=16)
    assert untrained["results"]["pellucid_line_end"]["acc,none"] < 0.8
    assert untrained["n-samples"]["pellucid_line_end"]["effective"] == 16
    assert untrained["results"]["pellucid_whole_text"]["bits_per_byte,none"] > 2
    assert json.loads(json.dumps(found)) == found
    table = task_table(found)
    assert [c.header for c in table.columns][:4] == ["task", "shots", "items", "metric"]
    assert list(table.columns[3].cells) == [
        "perplexity", "acc", "acc", "acc_norm", "word_perplexity", "bits_per_byte", "exact_match",
    ]  # fmt: skip


def test_the_command_prints_a_table_and_writes_the_results(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("pellucid.cli.results.width", 160)
    out = tmp_path / "made" / "results.json"
    common = ["--include-path", str(TASKS), "--limit", "4"]
    main(["eval", BOX, "--tasks", "pellucid_line_end", *common, "--out", str(out)])
    said = capsys.readouterr().out
    for word in ("pellucid_line_end", "acc_norm", "standard error", str(out)):
        assert word in said
    written = json.loads(out.read_text())
    assert written["model"] == BOX
    assert written["limit"] == 4
    assert written["results"]["pellucid_line_end"]["acc,none"] == 1.0
    assert "perplexity" not in written


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": ["pellucid_line_ends"], "include_path": "nowhere"}, "there is no directory nowhere"),
        ({"tasks": []}, "name at least one task"),
        (
            {"tasks": ["pellucid_line_end"], "include_path": TASKS, "limit": 0},
            "limit must be 1 or more, got 0",
        ),
    ],
)
def test_bad_input_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        evaluate(BOX, **options)


@pytest.mark.slow
def test_unknown_tasks_get_near_names_and_real_ones_without_a_network_a_reason(monkeypatch):
    with pytest.raises(
        ValueError, match="unknown task 'pellucid_line_ends'; did you mean 'pellucid_line_end'"
    ):
        find_tasks(["pellucid_line_ends"], TASKS)
    assert "hellaswag" in find_tasks(["hellaswag", "pellucid_line_end"], TASKS).all_tasks
    monkeypatch.setattr("time.sleep", lambda _: None)  # between retries
    with pytest.raises(ValueError, match=r"the data of lambada_openai cannot be loaded: .*needs a network"):
        evaluate(MODEL, ["lambada_openai"], tokenizer=TOKENIZER)
