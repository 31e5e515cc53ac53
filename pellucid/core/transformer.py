"""The one transformer that all families share.

Axes: b batch, t position, d residual width, h heads, m head width, a all heads' channels, n neurons, v vocabulary.
Shapes and sites are in `sites.py`; `tests/core` checks what is promised there.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pellucid.core.attention import Cache, allowed_keys, attention_pattern, fused_attention
from pellucid.core.config import LayerConfig, ModelConfig
from pellucid.core.parts import make_part
from pellucid.core.sites import Site, model_sites
from pellucid.core.taps import LiveTap, Tap
from pellucid.kernels.abs_topk import abs_topk

ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "identity": lambda x: x,
}


@dataclass
class Run:
    """What one forward pass carries beside the residual stream."""

    tap: LiveTap | None = None
    allowed: Tensor | None = None
    """(b, 1, t, s): which keys may be attended to; None is all, or all before where causal."""
    cache: Cache | None = None
    position: Tensor | None = None
    """(b or 1, t, p): position channels beside the residual stream."""

    def wants(self, *sites: str) -> bool:
        return self.tap is not None and not self.tap.sites.isdisjoint(sites)

    def at(self, site: str, x: Tensor) -> Tensor:
        return x if self.tap is None else self.tap(site, x)


class Norm(nn.Module):
    """RMS norm, layer norm or none, over the last axis."""

    def __init__(self, config: ModelConfig, width: int):
        super().__init__()
        self.kind, self.eps, self.width = config.norm, config.norm_eps, width
        gain = config.norm_gain and config.norm != "none"
        self.gain = nn.Parameter(torch.ones(width)) if gain else None
        self.bias = nn.Parameter(torch.zeros(width)) if config.norm_bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "none":
            return x
        if self.kind == "layer":
            return F.layer_norm(x, (self.width,), self.gain, self.bias, self.eps)
        mean_square = torch.linalg.vecdot(x, x)[..., None] / self.width  # half the time of x.square().mean()
        x = x * torch.rsqrt(mean_square + self.eps)
        return x if self.gain is None else x * self.gain


class Read(nn.Module):
    """What a sublayer reads: norm(residual), beside it norm(position channels)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.norm = Norm(config, config.d_model)
        self.position_norm = Norm(config, config.d_position) if config.d_position else None

    def forward(self, x: Tensor, run: Run) -> Tensor:
        x = self.norm(x)
        if self.position_norm is None:
            return x
        position = self.position_norm(run.position)
        position = position if x.dim() == 3 else position[:, :, None]
        return torch.cat([x, position.expand(*x.shape[:-1], -1)], dim=-1)


class Sublayer(nn.Module):
    """A part of a layer: its sites' names and the AbsTopK that may follow them."""

    def __init__(self, config: ModelConfig, number: int):
        super().__init__()
        self.config, self.number = config, number

    def name(self, site: str) -> str:
        return f"{self.number}.{site}"

    def sparse(self, site: str, x: Tensor) -> Tensor:
        fraction = self.config.keeps(site)
        return x if fraction is None else abs_topk(x, max(1, int(fraction * x.shape[-1])))

    def at(self, site: str, x: Tensor, run: Run) -> Tensor:
        """AbsTopK where the config has it, then the tap."""
        return run.at(self.name(site), self.sparse(site, x))


class Attention(Sublayer):
    """softmax(q k^T) v, with per-head sinks, from what it reads to what it writes."""

    slots: Tensor
    scales: Tensor

    def __init__(self, config: ModelConfig, number: int, layer: LayerConfig):
        super().__init__(config, number)
        self.sizes, self.width = layer.heads, layer.d_attn
        self.h, self.m = len(layer.heads), max(layer.heads)
        self.even = len(set(layer.heads)) == 1
        self.read = Read(config)
        self.qkv = nn.Linear(config.d_read, 3 * self.width, bias=config.linear_bias)
        self.proj = nn.Linear(self.width, config.d_model, bias=config.linear_bias)
        self.sink = nn.Parameter(torch.zeros(self.h)) if config.sink else None
        scales = [
            1 / math.sqrt(m) if config.attention_scale is None else config.attention_scale for m in self.sizes
        ]
        self.scale = scales[0] if self.even else 1.0
        if not self.even:
            # Where in (h * m) padded channels each of the a channels sits, and each head's own scale.
            slots = [head * self.m + c for head, size in enumerate(self.sizes) for c in range(size)]
            self.register_buffer("slots", torch.tensor(slots), persistent=False)
            self.register_buffer("scales", torch.tensor(scales)[:, None, None], persistent=False)

    def split(self, x: Tensor) -> Tensor:
        """(b, t, a) -> (b, h, t, m); narrow heads are padded with zeros."""
        if not self.even:
            x = x.new_zeros(*x.shape[:-1], self.h * self.m).index_copy(-1, self.slots, x)
        return x.unflatten(-1, (self.h, self.m)).transpose(1, 2)

    def merge(self, x: Tensor) -> Tensor:
        """(b, h, t, m) -> (b, t, a)."""
        x = x.transpose(1, 2).flatten(-2)
        return x if self.even else x.index_select(-1, self.slots)

    def project(self, x: Tensor, run: Run) -> tuple[Tensor, Tensor, Tensor]:
        """Residual stream (b, t, d) -> queries, keys, values (b, t, a)."""
        reads = [self.name(f"attn.{r}.read") for r in "qkv"]
        if not run.wants(*reads):
            q, k, v = self.qkv(self.at("attn.in", self.read(x, run), run)).split(self.width, dim=-1)
            return q, k, v
        # Each head of each reader has its own copy of the residual stream.
        weights = self.qkv.weight.split(self.width)
        biases = self.qkv.bias.split(self.width) if self.qkv.bias is not None else [None] * 3
        copies = x[:, :, None].expand(-1, -1, self.h, -1)
        return tuple(  # type: ignore[return-value]
            self.read_heads(run.at(site, copies), weight, bias, run)
            for site, weight, bias in zip(reads, weights, biases, strict=True)
        )

    def read_heads(self, copies: Tensor, weight: Tensor, bias: Tensor | None, run: Run) -> Tensor:
        """(b, t, h, d) and one reader's weight (a, d) -> (b, t, a)."""
        x = self.sparse("attn.in", self.read(copies, run))
        parts = [xh @ w.T for xh, w in zip(x.unbind(2), weight.split(self.sizes), strict=True)]
        out = torch.cat(parts, dim=-1)
        return out if bias is None else out + bias

    def forward(self, x: Tensor, run: Run) -> Tensor:
        q, k, v = self.project(x, run)
        q, k, v = self.at("attn.q", q, run), self.at("attn.k", k, run), self.at("attn.v", v, run)
        q, k, v = self.split(q), self.split(k), self.split(v)
        if not self.even:
            q = q * self.scales.to(q)
        if run.cache is not None:
            k, v = run.cache.extend(self.number, k, v)
        how = {
            "scale": self.scale,
            "sink": self.sink,
            "allowed": run.allowed,
            "causal": self.config.causal,
        }
        if run.wants(self.name("attn.pattern")):
            mix = run.at(self.name("attn.pattern"), attention_pattern(q, k, **how)) @ v
        else:
            mix = fused_attention(q, k, v, **how)
        mix = self.at("attn.mix", self.merge(mix), run)
        return self.at("attn.out", self.write(mix, run), run)

    def write(self, mix: Tensor, run: Run) -> Tensor:
        """(b, t, a) -> (b, t, d), through each head's own write where a tap wants those."""
        if not run.wants(self.name("attn.head")):
            return self.proj(mix)
        pairs = zip(mix.split(self.sizes, dim=-1), self.proj.weight.split(self.sizes, dim=1), strict=True)
        heads = torch.stack([x @ w.T for x, w in pairs], dim=2)
        out = run.at(self.name("attn.head"), heads).sum(2)
        return out if self.proj.bias is None else out + self.proj.bias


class MLP(Sublayer):
    """One hidden layer of neurons, over an optional module named by `mlp_input`."""

    def __init__(self, config: ModelConfig, number: int, layer: LayerConfig):
        super().__init__(config, number)
        self.read = Read(config)
        self.input = make_part(config.mlp_input, config.d_read) if config.mlp_input else None
        self.fc = nn.Linear(config.d_read, layer.d_mlp, bias=config.linear_bias)
        self.proj = nn.Linear(layer.d_mlp, config.d_model, bias=config.linear_bias)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor, run: Run) -> tuple[Tensor, Tensor]:
        x = self.at("mlp.in", self.read(run.at(self.name("mlp.read"), x), run), run)
        aux = x.new_zeros(())
        if self.input is not None:
            x, aux = self.input(x, at=lambda site, value: run.at(self.name(site), value))
            x = self.at("mlp.decoded", x, run)
        act = self.at("mlp.act", self.activation(self.fc(x)), run)
        return self.at("mlp.out", self.proj(act), run), aux


class Block(Sublayer):
    """One layer: attention, then MLP, each added to the residual stream."""

    def __init__(self, config: ModelConfig, number: int, layer: LayerConfig):
        super().__init__(config, number)
        self.attn = Attention(config, number, layer) if layer.heads else None
        self.mlp = MLP(config, number, layer) if layer.d_mlp else None
        self.activation = ACTIVATIONS[config.residual_activation]

    def forward(self, x: Tensor, run: Run) -> tuple[Tensor, Tensor]:
        x, aux = self.at("resid.pre", x, run), x.new_zeros(())
        if self.attn is not None:
            x = x + self.attn(x, run)
        x = self.at("resid.mid", self.activation(x), run)
        if self.mlp is not None:
            write, aux = self.mlp(x, run)
            x = x + write
        return self.at("resid.post", self.activation(x), run), aux


class Transformer(nn.Module):
    """A decoder or encoder of the parts that `config` names.

    `model(tokens) -> logits`; `outputs` also gives the auxiliary loss. `embed`, `blocks` and `unembed` are public.
    """

    sinusoids: Tensor

    def __init__(self, config: ModelConfig, *, seed: int | None = 0, device: str | torch.device = "auto"):
        """`seed` draws the weights; None leaves them to whoever fills them."""
        super().__init__()
        self.config = config
        with torch.random.fork_rng(devices=[]):  # torch's own initialisation draws from the global generator
            self.build(config)
        if seed is not None:
            self.reset(seed)
        self.to(device=pick_device(device), dtype=getattr(torch, config.dtype))

    def build(self, config: ModelConfig) -> None:
        """Make the modules."""
        self.wte = nn.Embedding(config.vocab_size, config.d_model)
        self.wpe = None
        d_position = config.d_position or config.d_model
        if config.positions == "learned":
            self.wpe = nn.Embedding(config.n_ctx, d_position)
        elif config.positions == "sinusoidal":
            self.register_buffer("sinusoids", sinusoids(config.n_ctx, d_position), persistent=False)
        blocks = nn.ModuleList(Block(config, i, layer) for i, layer in enumerate(config.layers))
        self.blocks = cast(Sequence[Block], blocks)
        self.norm = Norm(config, config.d_model)
        tied = config.tied_embeddings
        self.head = None if tied else nn.Linear(config.d_model, config.d_vocab_out, bias=False)
        self.logits_bias = nn.Parameter(torch.zeros(config.d_vocab_out)) if config.logits_bias else None
        self.bigram = None
        if config.bigram:
            self.bigram = nn.Parameter(torch.zeros(config.vocab_size, config.d_vocab_out))

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """Draw all weights anew from `seed`: N(0, 1/fan_in), writes shrunk by sqrt(2 layers); biases 0."""
        generator = torch.Generator().manual_seed(seed)
        depth = math.sqrt(2 * max(1, len(self.blocks)))
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                std = 1 / math.sqrt(module.in_features) / (depth if name.endswith("proj") else 1)
                module.weight.copy_(torch.randn(module.weight.shape, generator=generator) * std)
                if module.bias is not None:
                    module.bias.zero_()
            elif isinstance(module, nn.Embedding):
                module.weight.copy_(torch.randn(module.weight.shape, generator=generator) * 0.1)
        for module in self.modules():
            if callable(draw := getattr(module, "draw", None)):
                draw(generator)

    @property
    def sites(self) -> dict[str, Site]:
        """This model's sites by name, in the order of the computation."""
        return model_sites(self.config)

    @property
    def device(self) -> torch.device:
        return self.wte.weight.device

    @property
    def unembedding(self) -> Tensor:
        """(v, d): the embedding where it is tied."""
        return self.wte.weight if self.head is None else self.head.weight

    def positions(self, real: Tensor | None, start: int, t: int) -> Tensor | None:
        """(b or 1, t, p) position vectors of the `t` tokens from `start` on; only real tokens count."""
        if self.config.positions == "none":
            return None
        if real is None:
            index = torch.arange(start, start + t, device=self.device)[None]
        else:
            index = (real.cumsum(1) - 1).clamp(min=0)[:, -t:]
        return self.sinusoids[index] if self.wpe is None else self.wpe(index)

    def embed(self, tokens: Tensor, position: Tensor | None = None, run: Run | None = None) -> Tensor:
        """tokens (b, t) -> residual stream (b, t, d)."""
        x = self.wte(tokens)
        if position is not None and self.config.d_position is None:
            x = x + position
        return x if run is None else run.at("embed", x)

    def unembed(self, x: Tensor, tokens: Tensor | None = None, run: Run | None = None) -> Tensor:
        """Residual stream (b, t, d) -> logits (b, t, v); the bigram table needs the `tokens` (b, t)."""
        run = run or Run()
        x = self.norm(run.at("final.read", run.at("final", x)))
        logits = F.linear(x, self.unembedding)
        if self.logits_bias is not None:
            logits = logits + self.logits_bias
        if self.bigram is not None and tokens is not None:
            logits = logits + F.embedding(tokens, self.bigram)
        return run.at("logits", logits)

    def forward(
        self,
        tokens: Tensor,
        *,
        mask: Tensor | None = None,
        cache: Cache | None = None,
        tap: Tap | None = None,
        only: Tensor | None = None,
        resume: tuple[int, Tensor] | None = None,
    ) -> Tensor:
        """tokens (b, t) -> logits (b, t, v). `mask` (b, t) marks real tokens; padding is never attended to.

        With a `cache`, `tokens` continue those it has seen. With `only` (b,), from the last norm on just that position
        of each row is computed: logits are (b, 1, v). With `resume` (l, x) the run begins before layer l (of n layers; n is
        the last norm), where the residual stream is x (b, t, d). Raises `ValueError` for unknown sites, tokens out of the
        vocabulary and sequences longer than `n_ctx`.
        """
        return self.outputs(tokens, mask=mask, cache=cache, tap=tap, only=only, resume=resume)[0]

    def outputs(
        self,
        tokens: Tensor,
        *,
        mask: Tensor | None = None,
        cache: Cache | None = None,
        tap: Tap | None = None,
        only: Tensor | None = None,
        resume: tuple[int, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As `forward`, and the sum of the layers' auxiliary losses."""
        start = 0 if cache is None else cache.length
        self.check(tokens, mask, start)
        t, real = tokens.shape[1], None if mask is None else mask.bool()
        if cache is not None:
            real = cache.see(torch.ones_like(tokens, dtype=torch.bool) if real is None else real)
        position = self.positions(real, start, t)
        allowed = None if real is None else allowed_keys(real, t, self.config.causal)
        live = None if tap is None else LiveTap(tap, self.config)
        run = Run(live, allowed, cache, position if self.config.d_position else None)
        first, x = resume or (0, self.embed(tokens, position, run))
        aux = 0.0
        for block in islice(self.blocks, first, None):
            x, block_aux = block(x, run)
            aux = aux + block_aux
        if only is not None:
            rows = torch.arange(len(x), device=x.device)
            x, tokens = x[rows, only][:, None], tokens[rows, only][:, None]
        logits = self.unembed(x, tokens, run)
        if live is not None:
            live.finish()
        return logits, torch.as_tensor(aux, device=logits.device)

    def check(self, tokens: Tensor, mask: Tensor | None, start: int) -> None:
        """Raise a `ValueError` for inputs that the model cannot take."""
        if tokens.dim() != 2 or tokens.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"tokens must be integers of shape (batch, position), got {tokens.dtype} {tuple(tokens.shape)}"
            )
        if start + tokens.shape[1] > self.config.n_ctx:
            raise ValueError(f"{start + tokens.shape[1]} tokens do not fit into n_ctx = {self.config.n_ctx}")
        if not (torch.compiler.is_compiling() or tokens.is_meta) and tokens.numel():
            for token in (int(tokens.min()), int(tokens.max())):
                if not 0 <= token < self.config.vocab_size:
                    raise ValueError(f"token {token} is not in the vocabulary of {self.config.vocab_size}")
        if mask is not None and mask.shape != tokens.shape:
            raise ValueError(f"mask has shape {tuple(mask.shape)}, tokens {tuple(tokens.shape)}")


def sinusoids(n: int, width: int) -> Tensor:
    """(n, width) sines and cosines of geometrically falling frequencies."""
    angle = torch.arange(n)[:, None] / 10_000 ** (torch.arange(0, width, 2) / width)
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)[:, :width]


def pick_device(device: str | torch.device = "auto") -> torch.device:
    """A torch device; "auto" is the accelerator if there is one, else the CPU."""
    if str(device) != "auto":
        try:
            torch.empty(0, device=device)
            return torch.device(device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"device {device!r} cannot be used: {reason}; 'auto' takes what there is"
            ) from None
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found or torch.device("cpu")
