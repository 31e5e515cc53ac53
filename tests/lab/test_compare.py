"""Two models side by side."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pellucid import ModelConfig, Transformer
from pellucid.data.batches import TokenBatches
from pellucid.lab.compare import jaccard, loss_correlation, token_losses
from tests.core.strategies import scrambled
from tests.lab.toy import toy_model

TEXT = np.random.default_rng(0).integers(0, 12, 2000).astype(np.uint16)


def test_token_losses_are_each_tokens_own():
    model = scrambled(toy_model().config)
    losses = token_losses(model, TEXT, n_tokens=64, seq_len=8, rows=8)
    windows = TokenBatches(TEXT, 8, 8, seed=0).at(0)
    p = model(windows[:, :-1]).softmax(-1)
    expected = -p.gather(-1, windows[:, 1:, None]).log()
    torch.testing.assert_close(losses, expected.flatten().detach(), atol=1e-5, rtol=0)
    assert losses.mean() == pytest.approx(
        F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten()).item(), abs=1e-5
    )


def test_a_model_agrees_with_itself_and_not_with_another():
    a, b = scrambled(toy_model().config, 0), scrambled(toy_model().config, 1)
    assert loss_correlation(a, a, TEXT, seq_len=8) == pytest.approx(1)
    assert abs(loss_correlation(a, b, TEXT, seq_len=8)) < 0.5
    other = Transformer(ModelConfig(vocab_size=5, d_model=4, n_ctx=8, layers=()), device="cpu")
    with pytest.raises(ValueError, match="different vocabularies: 12 and 5"):
        loss_correlation(a, other, TEXT)


def test_jaccard_is_the_mean_over_pairs():
    a, b, c = (
        {"x": torch.tensor(bits[:2], dtype=torch.bool), "y": torch.tensor(bits[2:], dtype=torch.bool)}
        for bits in ([1, 1, 0], [1, 0, 0], [1, 0, 1])
    )
    assert jaccard([a, a]) == 1
    assert jaccard([a, b, c]) == pytest.approx((1 / 2 + 1 / 3 + 1 / 2) / 3)
    with pytest.raises(ValueError, match="two circuits"):
        jaccard([a])
