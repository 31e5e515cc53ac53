"""The logit lens: how much of the output can the unembedding already read at each layer? (nostalgebraist, 2020.)"""

import torch
from torch import Tensor

from pellucid.core.transformer import Transformer
from pellucid.lab.decodability import Decodability, streams
from pellucid.tasks.task import Outputs, Pairs, Task, learning_loss


@torch.no_grad()
def lens(model: Transformer, task: Task, *, pairs: int = 64, seed: int = 0) -> Decodability:
    """The share of the task that the unembedding does when it reads each site of the residual stream, for "output".

    1 is the model's own loss, 0 that of the best guess without input: its mean logits. Below 0 is worse than that.
    Raises `ValueError` where the model's loss is no better than that guess.
    """
    batch = task.pairs(pairs, seed=seed).to(model.device)
    logits = {site: unembed(model, stream, batch) for site, stream in streams(model, batch).items()}
    final = next(reversed(logits.values()))
    guess = mean_logits(final, batch).expand_as(final)
    loss = learning_loss(task)
    best, worst, *at_sites = (loss(x, batch.last()).mean() for x in (final, guess, *logits.values()))
    if not best < worst:
        raise ValueError(
            f"{task.name}: the model's loss {best:.3g} is no better than {worst:.3g}, that of its mean logits"
        )
    shares = torch.stack([(worst - x) / (worst - best) for x in at_sites])
    return Decodability(("output",), tuple(logits), shares[None].float().cpu())


def unembed(model: Transformer, stream: Tensor, batch: Pairs) -> Tensor:
    """Logits of a residual stream (b, t, d), at the positions that the batch asks for."""
    tokens = batch.tokens
    if batch.only is not None:
        rows = torch.arange(len(batch), device=stream.device)
        stream, tokens = stream[rows, batch.only][:, None], tokens[rows, batch.only][:, None]
    return model.unembed(stream, tokens)


def mean_logits(logits: Tensor, batch: Pairs) -> Tensor:
    """(v,): the mean over the positions that the batch asks for."""
    if batch.only is not None:
        return logits.mean((0, 1))
    return logits[batch.scored if isinstance(batch, Outputs) else batch.mask].mean(0)
