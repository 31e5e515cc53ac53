import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pellucid import LayerConfig, ModelConfig, Transformer
from pellucid.core.sites import stream_sites
from pellucid.lab.decodability import Decodability
from pellucid.lab.probe import Rows, balanced_accuracy, draw_control, probe
from tests.lab.toy import ToyTask, toy_model

MODEL, TASK = toy_model(), ToyTask()


def by_token(values):
    """Labels that are a function of the token."""
    table = torch.as_tensor(values)
    return lambda batch: {"feature": table[batch.tokens]}


def test_classes_and_numbers_that_are_linear_in_the_stream_score_one():
    is_filler = probe(MODEL, TASK, by_token([0] * 4 + [1] * 8), pairs=32)
    assert is_filler.features == ("feature",)
    assert is_filler.sites == ("embed", "0.resid.mid", "0.resid.post")
    torch.testing.assert_close(is_filler.scores, torch.ones(1, 3, dtype=torch.float64))
    held = probe(MODEL, TASK, by_token(MODEL.wte.weight[:, 0].double().tolist()), pairs=32)
    assert bool((held.scores > 0.99).all())


def test_labels_that_no_input_knows_score_nothing():
    def labels(batch):
        draw = torch.Generator().manual_seed(int(batch.tokens.sum()))
        shape = batch.tokens.shape
        classes = {f"class {i}": torch.randint(0, 3, shape, generator=draw) for i in range(5)}
        return classes | {f"number {i}": torch.randn(shape, generator=draw) for i in range(5)}

    found = probe(MODEL, TASK, labels, pairs=64)
    assert abs(float(found.scores.mean())) < 0.05
    assert bool((found.scores[5:] < 0.05).all())


def test_a_control_label_belongs_to_a_token_at_a_place():
    train, test = (Rows({}, np.arange(n) % 3, np.random.default_rng(n).integers(0, 9, n)) for n in (40, 30))
    drawn = np.concatenate(draw_control(train, test, np.random.default_rng(0)))
    kinds = np.concatenate([train.kinds, test.kinds])
    assert all(len(set(drawn[kinds == kind])) == 1 for kind in kinds)
    assert set(drawn) == {0, 1, 2}


def test_a_probe_that_learns_tokens_by_heart_is_not_selective():
    """With a direction for every token at every place, a random label is read as well as a true one."""

    class Placed(ToyTask):
        def pairs(self, n, seed=0, split="train"):
            batch = super().pairs(n, seed, split)
            return replace(batch, tokens=batch.tokens * 6 + torch.arange(6))

    config = ModelConfig(vocab_size=72, d_model=72, n_ctx=6, layers=(), norm="none")
    model = Transformer(config, device="cpu")
    with torch.no_grad():
        model.wte.weight.copy_(torch.eye(72))
    found = probe(model, Placed(), by_token([0] * 24 + [1] * 48), pairs=128)
    torch.testing.assert_close(found.selectivity, torch.zeros(1, 1, dtype=torch.float64), atol=0.05, rtol=0)


def test_nothing_to_decode_is_nan_and_no_label_an_error():
    constant = probe(MODEL, TASK, by_token([1] * 12), pairs=4)
    assert bool(constant.scores.isnan().all())
    with pytest.raises(ValueError, match="'feature' has a label in no position of the train inputs"):
        probe(MODEL, TASK, by_token([-1] * 12), pairs=4)
    with pytest.raises(ValueError, match="control labels"):
        _ = Decodability(("f",), ("embed",), torch.ones(1, 1)).selectivity


def test_positions_without_a_label_do_not_count():
    labels = by_token([0, 1] + [-1] * 10)  # A or B, nothing elsewhere
    noisy = probe(MODEL, TASK, lambda b: {"feature": labels(b)["feature"].where(b.mask, 7)}, pairs=16)
    assert bool((noisy.scores == 1).all())


def test_the_same_call_gives_the_same_numbers():
    first, second = (probe(MODEL, TASK, by_token(list(range(12))), pairs=8, seed=3) for _ in range(2))
    assert torch.equal(first.scores, second.scores)
    assert torch.equal(first.control, second.control)


@given(
    st.lists(st.integers(0, 4), min_size=2, max_size=30).filter(lambda x: len(set(x)) > 1), st.integers(0, 4)
)
def test_balanced_accuracy_is_one_for_the_truth_and_zero_for_any_one_class(right, guess):
    right = np.array(right)
    assert balanced_accuracy(right, right) == 1
    worst = -1 / (len(set(right.tolist())) - 1)
    known = guess in right
    assert balanced_accuracy(np.full(len(right), guess), right) == pytest.approx(0 if known else worst)


def test_without_scikit_learn_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ImportError, match=r"pellucid\[probe\]"):
        probe(MODEL, TASK, by_token(list(range(12))), pairs=4)


def test_sites_are_after_the_embedding_and_every_sublayer_there_is():
    layers = (LayerConfig(heads=(4,)), LayerConfig(d_mlp=3), LayerConfig(heads=(2, 2), d_mlp=1))
    config = ModelConfig(vocab_size=3, d_model=4, n_ctx=4, layers=layers)
    assert stream_sites(config) == ("embed", "0.resid.mid", "1.resid.post", "2.resid.mid", "2.resid.post")
