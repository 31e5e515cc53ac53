"""How likely a language model finds a text: log-probabilities of tokens, in batches and in windows of `n_ctx`."""

from collections.abc import Callable, Sequence

import torch

from pellucid.core.transformer import Transformer

Pair = tuple[Sequence[int], Sequence[int]]
"""Tokens of a context and of what continues it."""


def check_language_model(model: Transformer) -> None:
    """Raise a `ValueError` for a model that does not predict the next token of what it reads."""
    if not model.config.causal:
        raise ValueError("only a causal model predicts the next token, and this one has causal=False")
    if model.config.d_vocab_out != model.config.vocab_size:
        raise ValueError(
            f"only a model that predicts its own tokens gives a text a probability, and this one has "
            f"vocab_size={model.config.vocab_size}, output_vocab={model.config.d_vocab_out}"
        )


def windows(tokens: Sequence[int], first: int, n_ctx: int) -> list[Pair]:
    """`tokens` after the token `first` as pairs for `loglikelihoods`: each token is in one continuation only.

    Every window is as full as it can be: the last one reaches back into what was predicted before it.
    """
    whole, pairs = [first, *tokens], []
    for start in range(0, len(tokens), n_ctx):
        end = min(start + n_ctx, len(tokens))
        pairs.append((whole[max(0, end - n_ctx) : start + 1], whole[start + 1 : end + 1]))
    return pairs


@torch.no_grad()
def loglikelihoods(
    model: Transformer,
    pairs: Sequence[Pair],
    *,
    batch_size: int = 16,
    progress: Callable[[int], None] | None = None,
) -> list[tuple[float, bool]]:
    """For each pair the continuation's log-probability in nats, and whether each of its tokens is the likeliest.

    A context that does not fit into `n_ctx` with its continuation loses its beginning. `progress` is told how many
    are done. Raises `ValueError` for an empty context or continuation and for a continuation over `n_ctx`.
    """
    check_language_model(model)
    if batch_size < 1:
        raise ValueError(f"batch_size must be 1 or more, got {batch_size}")
    n_ctx = model.config.n_ctx
    for context, continuation in pairs:
        if not len(context) or not 1 <= len(continuation) <= n_ctx:
            raise ValueError(
                f"a context needs a token and a continuation 1 to n_ctx = {n_ctx} of them, "
                f"got {len(context)} and {len(continuation)}"
            )
    rows = [([*context, *continuation][-n_ctx - 1 :], len(continuation)) for context, continuation in pairs]
    order = sorted(
        range(len(rows)), key=lambda i: -len(rows[i][0])
    )  # the longest first, with the like of them
    out: list[tuple[float, bool]] = [(0.0, True)] * len(rows)
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        for i, result in zip(batch, score(model, [rows[i] for i in batch]), strict=True):
            out[i] = result
        if progress is not None:
            progress(start + len(batch))
    return out


def score(model: Transformer, rows: Sequence[tuple[list[int], int]]) -> list[tuple[float, bool]]:
    """One batch of `loglikelihoods`: rows of (tokens, how many of the last are scored), the longest first."""
    width = len(rows[0][0])
    tokens = torch.zeros(len(rows), width, dtype=torch.long)
    scored = torch.zeros(len(rows), width, dtype=torch.bool)
    for row, (text, n) in enumerate(rows):  # padded on the right, which a causal model does not see
        tokens[row, : len(text)] = torch.as_tensor(text)
        scored[row, len(text) - n : len(text)] = True
    tokens, scored = tokens.to(model.device), scored.to(model.device)[:, 1:]
    logits = model(tokens[:, :-1])[scored]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    targets = tokens[:, 1:][scored]
    logprobs = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0].cpu().double()
    likeliest = (logits.argmax(-1) == targets).cpu()
    sizes = [n for _, n in rows]
    return [
        (float(a.sum()), bool(b.all()))
        for a, b in zip(logprobs.split(sizes), likeliest.split(sizes), strict=True)
    ]
