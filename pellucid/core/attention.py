"""Softmax attention with sinks, fused and explicit, and the cache for generation.

Axes: b batch, h heads, t queries, s keys, m head width.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor


class Cache:
    """Keys and values of the tokens seen so far, per layer, and which of them are real."""

    def __init__(self):
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.real: Tensor | None = None

    @property
    def length(self) -> int:
        """Tokens seen so far."""
        return 0 if self.real is None else self.real.shape[1]

    def see(self, real: Bool[Tensor, "b t"]) -> Bool[Tensor, "b s"]:
        """Note which of the next tokens are real; returns that for all tokens so far."""
        self.real = real if self.real is None else torch.cat([self.real, real], dim=1)
        return self.real

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append a layer's new keys and values (b, h, t, m); returns all of them."""
        if layer in self.layers:
            past_k, past_v = self.layers[layer]
            k, v = torch.cat([past_k, k], dim=2), torch.cat([past_v, v], dim=2)
        self.layers[layer] = (k, v)
        return k, v


def allowed_keys(real: Bool[Tensor, "b s"], t: int, causal: bool) -> Bool[Tensor, "b 1 t s"]:
    """Which keys each of the last `t` tokens may attend to. Padding attends to itself, so that no row is empty."""
    s = real.shape[1]
    key, query = torch.arange(s, device=real.device), torch.arange(s - t, s, device=real.device)
    allowed = real[:, None, :].expand(-1, t, -1)
    if causal:
        allowed = allowed & (key <= query[:, None])
    return (allowed | (key == query[:, None]))[:, None]


def fused_attention(
    q: Float[Tensor, "b h t m"],
    k: Float[Tensor, "b h s m"],
    v: Float[Tensor, "b h s m"],
    *,
    scale: float,
    sink: Float[Tensor, "h"] | None,
    allowed: Bool[Tensor, "b 1 t s"] | None,
    causal: bool,
) -> Float[Tensor, "b h t m"]:
    """Attention's mix through PyTorch's fused kernel.

    A sink is a key in front whose logit sits in an extra channel, with value 0; a dummy query in front keeps
    the causal diagonal where it was. `causal` counts only where `allowed` is None.
    """
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:
        # The CPU kernel's backward is over four times slower in bfloat16 than in float32 (perf/attention.py).
        with torch.autocast("cpu", enabled=False):
            how = {"scale": scale, "sink": sink, "allowed": allowed, "causal": causal}
            return fused_attention(q.float(), k.float(), v.float(), **how).to(q.dtype)
    if sink is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=allowed, is_causal=causal and allowed is None, scale=scale
        )
    m, dummy = q.shape[-1], int(allowed is None)
    key = F.pad((sink / scale)[:, None, None], (m, 0)).to(q).expand(q.shape[0], -1, -1, -1)
    mix = F.scaled_dot_product_attention(
        F.pad(q, (0, 1, dummy, 0), value=1.0),
        torch.cat([key, F.pad(k, (0, 1))], dim=2),
        F.pad(v, (0, 1, 1, 0)),
        attn_mask=None if allowed is None else F.pad(allowed, (1, 0), value=True),
        is_causal=causal and allowed is None,
        scale=scale,
    )
    return mix[:, :, dummy:, :m]


def attention_pattern(
    q: Float[Tensor, "b h t m"],
    k: Float[Tensor, "b h s m"],
    *,
    scale: float,
    sink: Float[Tensor, "h"] | None,
    allowed: Bool[Tensor, "b 1 t s"] | None,
    causal: bool,
) -> Float[Tensor, "b h t s"]:
    """The attention pattern, explicitly. With a sink, rows sum to less than 1: its share is left out."""
    logits = q @ k.transpose(-1, -2) * scale
    t, s = logits.shape[-2:]
    if allowed is None and causal:
        allowed = torch.ones(t, s, dtype=torch.bool, device=q.device).tril()
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -torch.inf)
    if sink is None:
        return logits.softmax(-1)
    column = sink.to(logits)[:, None, None].expand(*logits.shape[:-1], 1)
    return torch.cat([logits, column], dim=-1).softmax(-1)[..., :-1]
