"""Training batches as a pure function of the step."""

from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from pellucid.data.shards import Shard


class TokenBatches:
    """Batches of windows of `seq_len + 1` tokens that overlap by one, in a new order each epoch.

    `batch_size` counts the windows of all `world_size` ranks; a rank gets its contiguous slice of the rows.
    Raises ValueError if the tokens do not fill one window or the ranks do not divide the batch.
    """

    def __init__(
        self,
        tokens: Shard | np.ndarray,
        batch_size: int,
        seq_len: int,
        *,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ):
        self.tokens = tokens.tokens if isinstance(tokens, Shard) else tokens
        if len(self.tokens) < seq_len + 1:
            raise ValueError(
                f"{len(self.tokens)} tokens do not fill one window of seq_len + 1 = {seq_len + 1}"
            )
        if batch_size < 1 or batch_size % world_size:
            raise ValueError(f"batch_size {batch_size} is not a positive multiple of world_size {world_size}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not in 0..{world_size - 1}")
        self.batch_size, self.seq_len, self.seed = batch_size, seq_len, seed
        self.rank, self.world_size = rank, world_size
        self.n_windows = (len(self.tokens) - 1) // seq_len
        self._order = lru_cache(maxsize=2)(self._permutation)

    def _permutation(self, epoch: int) -> np.ndarray:
        return np.random.default_rng((self.seed, epoch)).permutation(self.n_windows)

    def at(self, step: int) -> Int64[Tensor, "b t"]:
        """This rank's rows of batch `step`: (batch_size / world_size, seq_len + 1) token ids."""
        rows = self.batch_size // self.world_size
        first = step * self.batch_size + self.rank * rows
        epochs, places = np.divmod(np.arange(first, first + rows), self.n_windows)
        windows = np.empty(rows, dtype=np.int64)
        for epoch in np.unique(epochs):
            now = epochs == epoch
            windows[now] = self._order(int(epoch))[places[now]]
        index = windows[:, None] * self.seq_len + np.arange(self.seq_len + 1)
        return torch.from_numpy(self.tokens[index].astype(np.int64))
