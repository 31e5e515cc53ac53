import numpy as np
import pytest
import torch

from pellucid.data import TokenBatches

TOKENS = np.arange(1, 102, dtype=np.uint16)  # 100 transitions: 10 windows of 10


def test_an_epoch_covers_every_transition_once():
    batches = TokenBatches(TOKENS, batch_size=4, seq_len=10)
    assert batches.n_windows == 10
    rows = torch.cat([batches.at(step) for step in range(5)])  # two epochs; step 2 spans both
    for epoch in (rows[:10], rows[10:]):
        targets = epoch[:, 1:].flatten().sort().values
        assert targets.tolist() == list(range(2, 102))
    assert not torch.equal(rows[:10], rows[10:])
    assert rows.dtype == torch.int64
    assert torch.equal(rows[:, 1:], rows[:, :-1] + 1)


def test_a_batch_is_a_function_of_seed_and_step():
    one, two = (TokenBatches(TOKENS, 4, 10, seed=5) for _ in range(2))
    forward = [one.at(step) for step in range(12)]
    backward = [two.at(step) for step in reversed(range(12))][::-1]
    assert all(torch.equal(a, b) for a, b in zip(forward, backward, strict=True))
    assert not torch.equal(forward[0], TokenBatches(TOKENS, 4, 10, seed=6).at(0))


def test_a_batch_may_be_larger_than_an_epoch():
    rows = TokenBatches(TOKENS, 25, 10).at(3)
    assert rows.shape == (25, 11)
    assert set(rows[:, 0].tolist()) == set(range(1, 101, 10))


def test_ranks_share_the_global_batch():
    whole = TokenBatches(TOKENS, 6, 10, seed=2)
    ranks = [TokenBatches(TOKENS, 6, 10, seed=2, rank=rank, world_size=3) for rank in range(3)]
    for step in range(7):
        assert torch.equal(torch.cat([rank.at(step) for rank in ranks]), whole.at(step))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 4, "seq_len": 101}, "101 tokens do not fill one window of seq_len . 1 = 102"),
        (
            {"batch_size": 4, "seq_len": 10, "world_size": 3},
            "batch_size 4 is not a positive multiple of world_size 3",
        ),
        ({"batch_size": 0, "seq_len": 10}, "batch_size 0 is not a positive multiple"),
        ({"batch_size": 4, "seq_len": 10, "world_size": 2, "rank": 2}, r"rank 2 is not in 0\.\.1"),
    ],
)
def test_what_cannot_be_batched_is_an_error(options, message):
    with pytest.raises(ValueError, match=message):
        TokenBatches(TOKENS, **options)
