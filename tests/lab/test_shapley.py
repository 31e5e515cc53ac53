import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pellucid import LayerConfig, ModelConfig, Transformer
from pellucid.bench.task import ProgramTask
from pellucid.compiled.library import PROGRAMS
from pellucid.compiled.model import compile_program
from pellucid.lab.shapley import all_subsets, drawn_orders, one_position, shapley
from pellucid.tasks.task import Outputs, answer_logits
from tests.lab.toy import ToyTask, toy_model


class Linear(ToyTask):
    """The toy task with a metric that is linear in the logits, on inputs that differ everywhere."""

    def pairs(self, n, seed=0, split="train"):
        batch = super().pairs(n, seed, split)
        tokens = batch.tokens.clone()
        tokens[1::2] = (tokens[1::2] + 5) % 12
        changed = {"tokens": tokens, "corrupt": tokens.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)}
        return type(batch)(**{**batch.__dict__, **changed})

    def metric(self, logits, batch):
        right, wrong = answer_logits(logits, batch).unbind(1)
        return wrong - right


def linear_model():
    """Heads that attend to all tokens alike, and no neurons: linear in the embeddings."""
    layers = (LayerConfig(heads=(4, 4)),) * 2
    model = Transformer(
        ModelConfig(vocab_size=12, d_model=8, n_ctx=8, norm="none", layers=layers), device="cpu"
    )
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight[:16] = 0
    return model.double()


def game(worth, n):
    """Shapley values by their definition: each player's average gain, over all orders."""
    orders = list(itertools.permutations(range(n)))
    gains = torch.zeros(n, dtype=torch.float64)
    for order in orders:
        present = 0
        for player in order:
            joined = present | 1 << player
            gains[player] += worth[joined] - worth[present]
            present = joined
    return gains / len(orders)


@given(st.integers(1, 5), st.integers(0, 1000))
def test_weights_of_all_subsets_are_the_average_over_all_orders(n, seed):
    worth = torch.randn(2**n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    subsets, weights = all_subsets(n)
    place = (subsets * 2 ** torch.arange(n)).sum(1)
    torch.testing.assert_close(worth[place] @ weights, game(worth, n))


def test_drawn_orders_come_near_and_sum_to_the_whole():
    n, draw = 5, torch.Generator().manual_seed(0)
    worth = torch.randn(2**n, generator=draw, dtype=torch.float64)
    subsets, weights = drawn_orders(n, 2000, draw)
    found = worth[(subsets * 2 ** torch.arange(n)).sum(1)] @ weights
    torch.testing.assert_close(found.sum(), worth[-1] - worth[0])
    assert float((found - game(worth, n)).abs().max()) < 0.1


def test_shares_sum_to_the_total_effect():
    """Every token differs, so that putting in all corrupt tokens is the corrupt input."""
    task, model = Linear(), toy_model(noise=0.3).double()
    found, batch = shapley(model, task), task.pairs(8)
    assert found.exact
    with torch.no_grad():
        clean, corrupt = (task.metric(model(x), batch) for x in (batch.tokens, batch.corrupt))
    torch.testing.assert_close(found.shapley.sum(1), corrupt - clean)
    assert bool((found.shapley[~batch.mask] == 0).all())


def test_in_a_linear_model_the_gradient_says_the_same():
    found = shapley(linear_model(), Linear())
    torch.testing.assert_close(found.gradient, found.shapley)
    assert found.correlation == pytest.approx(1)
    assert found.same_top == 1


def test_more_tokens_than_subsets_can_be_tried(monkeypatch):
    exact = shapley(linear_model(), Linear())
    monkeypatch.setattr("pellucid.lab.shapley.EXACT", 2)
    drawn = shapley(linear_model(), Linear(), permutations=8)
    assert not drawn.exact
    torch.testing.assert_close(drawn.shapley, exact.shapley)  # in a linear model the order does not matter


def test_where_attention_saturates_the_gradient_is_blind():
    case = PROGRAMS["hist"]
    made = compile_program(case.program, case.vocab, case.max_len, dtype="float64")
    found = shapley(made.transformer, ProgramTask(made, "hist"))
    torch.testing.assert_close(found.shapley.sum(1), torch.ones(16, dtype=torch.float64))
    assert found.correlation == 0
    assert found.same_top == 0


def test_one_position_is_one_that_differs():
    case = PROGRAMS["hist"]
    made = compile_program(case.program, case.vocab, case.max_len)
    batch = ProgramTask(made, "hist").pairs(16)
    one = one_position(batch, torch.Generator().manual_seed(0))
    assert isinstance(one, Outputs)
    assert bool((one.scored.sum(1) == 1).all())
    assert bool((one.wanted != one.other).any(-1)[one.scored].all())


def test_equal_inputs_are_an_error():
    class Same(ToyTask):
        def pairs(self, n, seed=0, split="train"):
            batch = super().pairs(n, seed, split)
            return type(batch)(**{**batch.__dict__, "corrupt": batch.tokens})

    with pytest.raises(ValueError, match="toy: no token differs"):
        shapley(toy_model(), Same())
