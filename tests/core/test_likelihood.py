"""Log-probabilities in batches and windows are those of one plain forward pass at a time."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid import ModelConfig, Transformer, uniform
from pellucid.core.likelihood import loglikelihoods, windows
from tests.core.strategies import CONTEXT, VOCAB, configs, scrambled

CONFIG = ModelConfig(vocab_size=VOCAB, d_model=8, n_ctx=CONTEXT, layers=uniform(1, 2, 4, 8))
some_ids = st.integers(0, VOCAB - 1)
pairs = st.tuples(
    st.lists(some_ids, min_size=1, max_size=2 * CONTEXT), st.lists(some_ids, min_size=1, max_size=CONTEXT)
)


def plain(model, context, continuation):
    """One token at a time, each seeing all that fits."""
    text = ([*context, *continuation])[-CONTEXT - 1 :]
    total, greedy = 0.0, True
    for at in range(len(text) - len(continuation), len(text)):
        logits = model(torch.tensor([text[:at]]))[0, -1]
        total += logits.log_softmax(-1)[text[at]].item()
        greedy &= logits.argmax().item() == text[at]
    return total, greedy


@settings(deadline=None, max_examples=40)
@given(
    config=configs(causal=True),
    asked=st.lists(pairs, max_size=6),
    batch_size=st.integers(1, 7),
    seed=st.integers(0, 9),
)
def test_a_batch_gives_what_each_pair_gives_alone(config, asked, batch_size, seed):
    model = scrambled(config, seed)
    found = loglikelihoods(model, asked, batch_size=batch_size)
    assert len(found) == len(asked)
    for (logprob, greedy), pair in zip(found, asked, strict=True):
        want, want_greedy = plain(model, *pair)
        assert logprob == pytest.approx(want, abs=1e-9)
        assert greedy == want_greedy


@settings(deadline=None)
@given(seed=st.integers(0, 20), context=st.lists(some_ids, min_size=1, max_size=4), n=st.integers(1, 6))
def test_what_the_model_would_say_is_greedy_and_nothing_else_is(seed, context, n):
    model, text = scrambled(replace(CONFIG, dtype="float64"), seed), list(context)
    for _ in range(n):
        text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
    said = text[len(context) :]
    other = [*said[:-1], (said[-1] + 1) % VOCAB]
    (_, first), (_, second) = loglikelihoods(model, [(context, said), (context, other)])
    assert first
    assert not second


@given(tokens=st.lists(some_ids, max_size=50), n_ctx=st.integers(1, 12))
def test_windows_predict_each_token_once_from_all_that_fits(tokens, n_ctx):
    found = windows(tokens, 0, n_ctx)
    assert [t for _, continuation in found for t in continuation] == tokens
    done = 0
    for context, continuation in found:
        done += len(continuation)
        assert len(context) + len(continuation) - 1 == min(n_ctx, done)
        assert [*context, *continuation] == [0, *tokens][done - min(n_ctx, done) : done + 1]


def test_progress_reaches_the_number_of_pairs():
    told = []
    loglikelihoods(Transformer(CONFIG, device="cpu"), [([1], [2])] * 5, batch_size=2, progress=told.append)
    assert told == [2, 4, 5]


@pytest.mark.parametrize(
    ("config", "pair", "batch_size", "message"),
    [
        (
            CONFIG,
            ([], [1]),
            1,
            "a context needs a token and a continuation 1 to n_ctx = 12 of them, got 0 and 1",
        ),
        (CONFIG, ([1], []), 1, "got 1 and 0"),
        (CONFIG, ([1], [1] * 13), 1, "got 1 and 13"),
        (CONFIG, ([1], [1]), 0, "batch_size must be 1 or more, got 0"),
        (replace(CONFIG, causal=False), ([1], [1]), 1, "causal=False"),
        (
            replace(CONFIG, output_vocab=3, tied_embeddings=False),
            ([1], [1]),
            1,
            "vocab_size=11, output_vocab=3",
        ),
    ],
)
def test_bad_input_is_named(config, pair, batch_size, message):
    with pytest.raises(ValueError, match=message):
        loglikelihoods(Transformer(config, device="cpu"), [pair], batch_size=batch_size)
