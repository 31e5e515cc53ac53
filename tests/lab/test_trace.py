"""Causal tracing: what a node's clean write brings back."""

import pytest
import torch

from pellucid.lab.trace import trace
from tests.lab.test_sanity import small
from tests.lab.two_heads import Anything, TwoTokens, two_heads


def test_two_heads_by_hand():
    """Noise in channel 0 reaches the logit twice over through head 0, that in channel 1 three times through head 1, both as
    a mean over positions; that in channel 2 of the last token reaches it as it is."""
    found = trace(two_heads(), TwoTokens(), pairs=1, draws=1, noise=2.0, seed=5).values
    embedded = torch.eye(3, dtype=torch.float64)[[0, 1]][:, None].expand(2, 3, 3)
    drawn = torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(5)).double()
    noise = drawn * 2.0 * embedded.std()
    heads = torch.stack([2 * noise[..., 0].mean(1), 3 * noise[..., 1].mean(1)])
    sign = torch.tensor([1, -1])
    wanted = torch.cat([(heads.sum(0) + noise[:, -1, 2])[None], heads])
    torch.testing.assert_close(found, (wanted * sign).mean(1).abs().float())


def test_restoring_all_the_model_reads_restores_the_metric():
    """The embedding is all that a model without attention's help reads: its clean write gives the clean run."""
    model, task = small(), Anything()
    quiet = trace(model, task, pairs=3, noise=1e-6).values
    loud = trace(model, task, pairs=3, noise=3.0).values
    assert quiet.max() < 1e-3
    assert loud[0] > 1e-2


def test_noise_and_draws_must_be_positive():
    with pytest.raises(
        ValueError, match=r"noise must be positive and draws at least 1, got noise=0 and draws=4"
    ):
        trace(two_heads(), TwoTokens(), noise=0)
    with pytest.raises(ValueError, match="draws=0"):
        trace(two_heads(), TwoTokens(), draws=0)
    assert torch.isfinite(trace(two_heads(), TwoTokens(), pairs=1).values).all()
