"""Text from a model, one token at a time, with keys and values kept."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pellucid.core.attention import Cache
from pellucid.core.taps import Tap
from pellucid.core.transformer import Transformer


@torch.no_grad()
def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int = 0,
    stop: int | None = None,
    use_cache: bool = True,
    tap: Tap | None = None,
) -> list[list[int]]:
    """The tokens that follow each prompt, up to `max_new_tokens` or the token `stop` (not included).

    `temperature=0` takes the likeliest token. A `tap` sees the prompts, then one token a call; without a cache it
    sees everything so far at each call.
    """
    if not prompts or not all(len(p) for p in prompts):
        raise ValueError("prompts must be non-empty, and each must have a token")
    if temperature < 0:
        raise ValueError(f"temperature must be 0 or more, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be 1 or more, got {top_k}")
    longest = max(len(p) for p in prompts)
    if longest + max_new_tokens - 1 > model.config.n_ctx:
        raise ValueError(
            f"{longest} prompt and {max_new_tokens} new tokens do not fit into n_ctx = {model.config.n_ctx}"
        )
    device, draw = model.device, torch.Generator(model.device).manual_seed(seed)
    tokens = torch.zeros(len(prompts), longest, dtype=torch.long, device=device)
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    for row, prompt in enumerate(prompts):  # padded on the left, so that all continue in the same column
        tokens[row, longest - len(prompt) :] = torch.as_tensor(list(prompt), device=device)
        mask[row, longest - len(prompt) :] = True
    out: list[Tensor] = []
    cache, feed, feed_mask = Cache() if use_cache else None, tokens, mask
    done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    for _ in range(max_new_tokens):
        logits = model(feed, mask=feed_mask, cache=cache, tap=tap)[:, -1]
        new = pick(logits, temperature, top_k, draw)
        out.append(new)
        done |= torch.zeros_like(done) if stop is None else new == stop
        if done.all():
            break
        feed, feed_mask = new[:, None], torch.ones(len(prompts), 1, dtype=torch.bool, device=device)
        if not use_cache:
            tokens, mask = torch.cat([tokens, feed], dim=1), torch.cat([mask, feed_mask], dim=1)
            feed, feed_mask = tokens, mask
    rows = torch.stack(out, dim=1).tolist() if out else [[] for _ in prompts]
    return [row[: row.index(stop)] if stop in row else row for row in rows]


def pick(logits: Tensor, temperature: float, top_k: int | None, draw: torch.Generator) -> Tensor:
    """One token (b,) from each row of logits (b, v)."""
    if temperature == 0:
        return logits.argmax(-1)
    if top_k is not None:
        least = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return torch.multinomial((logits.float() / temperature).softmax(-1), 1, generator=draw)[:, 0]
