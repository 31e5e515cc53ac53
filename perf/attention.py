"""Why attention is computed in float32 on a CPU under bfloat16, and why sinks stay fused: forward and backward.

PyTorch's CPU kernel takes several times longer backward in bfloat16 than in float32.
"""

import torch
import torch.nn.functional as F
from timing import medians, record

from pellucid.core.attention import attention_pattern, fused_attention

B, H, T, M = 32, 8, 128, 16


def main() -> None:
    leaves = [torch.randn(B, H, T, M, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    q, k, v = leaves
    wide = [x.detach().float().requires_grad_() for x in leaves]
    sink = torch.zeros(H, requires_grad=True)
    how = {"scale": 0.25, "allowed": None, "causal": True}

    def additive(q, k, v):
        """A sink as most write it: explicit attention with one more column."""
        return attention_pattern(q, k, sink=sink, **how) @ v

    contestants = {
        "ours": lambda: fused_attention(*leaves, sink=None, **how).sum().backward(),
        "torch_bfloat16": lambda: (
            F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.25).sum().backward()
        ),
        "ours_with_sink": lambda: fused_attention(*wide, sink=sink, **how).sum().backward(),
        "explicit_with_sink": lambda: additive(*wide).sum().backward(),
    }
    s = medians(contestants)
    record(
        "attention",
        times_faster_than_torch_bfloat16=round(s["torch_bfloat16"] / s["ours"], 2),
        sink_times_faster_than_explicit=round(s["explicit_with_sink"] / s["ours_with_sink"], 2),
    )


if __name__ == "__main__":
    main()
