"""Compressed models of one compiled model, folded into ordinary weights and run all at once.

Axes: m model, b batch, t position, D compiled width, d compressed width (the widest; narrower models are zero beyond
their own), k matrix, v output.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, vmap

from pellucid.compiled.model import CompiledModel
from pellucid.compiled.rasp.interpreter import Interpreter
from pellucid.compiled.rasp.values import Value
from pellucid.compiled.verify import inputs
from pellucid.core.errors import unknown
from pellucid.core.sites import stream_sites
from pellucid.core.taps import Recorder, Tap, chain
from pellucid.core.transformer import Transformer

Variant = Literal["shared", "per-layer", "ends", "all", "pca"]
LIMIT = 20_000
"""Programs with more inputs are trained and measured on so many that are drawn."""
EVALUATED = 256
"""Inputs at once when measuring."""


@dataclass(frozen=True, kw_only=True)
class CompressConfig:
    """How a model is compressed."""

    variant: Variant = "shared"
    """What is trained: one W (shared); one for each layer, the first also for the embedding and the last for the
    unembedding (per-layer); one for the embedding, one for all layers, one for the unembedding (ends); all weights of
    the compressed model, and W for the layer loss (all); nothing: W is the principal directions (pca)."""

    layer_weight: float = 1.0
    """Weight of the layer loss. 0 is without it."""

    steps: int = 2000
    """Training steps."""

    batch_size: int = 64
    """Inputs a step, the same for all models."""

    lr: float = 3e-2
    """The largest learning rate: it rises over the first 2% of the steps and falls linearly to 0."""

    weight_decay: float = 0.01
    """AdamW's, with betas 0.9 and 0.99."""

    clip: float = 0.1
    """The largest norm of a model's gradient."""

    warm: tuple[float, ...] = (1.0, 0.05)
    """Attention logits are this many times themselves at first, and grow geometrically to 1 over half of the steps: a
    compiled softmax is so cold that it hardly has a gradient. Each model is trained from each, and that with the least
    loss is kept, for what helps long averages can keep MLPs from starting."""

    forced: float = 0.5
    """Over this share of the steps sublayers read the compiled model's stream through W, less and less of it."""

    coldness: float = 10.0
    """Factor on the logits of a categorical output in its cross-entropy. At 1, as in the seed, the compiled model's
    logits of 0 and 1 are far from certain, and the loss asks for others than these."""

    def __post_init__(self):
        if self.variant not in get_args(Variant):
            raise unknown("variant", self.variant, get_args(Variant))
        for name in ("steps", "batch_size"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name} must be a positive integer, got {getattr(self, name)!r}")
        for name in ("layer_weight", "weight_decay"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)!r}")
        for name in ("lr", "clip"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be positive, got {getattr(self, name)!r}")
        object.__setattr__(self, "warm", tuple(self.warm))
        if not self.warm or not all(0 < w <= 1 for w in self.warm):
            raise ValueError(f"warm must be numbers above 0 and at most 1, got {self.warm!r}")
        if not 0 <= self.forced <= 1:
            raise ValueError(f"forced must be a share between 0 and 1, got {self.forced!r}")


@dataclass(frozen=True, eq=False)
class Inputs:
    """What models are trained and measured on."""

    tokens: Tensor
    """(b, t), BOS first."""
    real: Tensor
    """(b, t): which of them are no padding."""

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, rows: Tensor | slice) -> "Inputs":
        return Inputs(self.tokens[rows], self.real[rows])

    def parts(self) -> Iterator["Inputs"]:
        for start in range(0, len(self), EVALUATED):
            yield self[start : start + EVALUATED]

    @property
    def counted(self) -> Tensor:
        """(b, t): the positions that count, which are those with a value."""
        return self.real & (torch.arange(self.real.shape[1], device=self.real.device) > 0)

    @property
    def share(self) -> Tensor:
        """(b, t): each position's part of a mean over those that count."""
        return self.counted / self.counted.sum()


def defined_inputs(model: CompiledModel, sequences: Iterable[Sequence[Value]] | None = None) -> Inputs:
    """`sequences`, else all inputs or `LIMIT` drawn, less those on which the program is undefined (if it is there)."""
    found = list(inputs(model, LIMIT)[0] if sequences is None else sequences)
    if model.program is not None:
        chunks = Interpreter(model.program, causal=model.causal).chunks(found)
        found = [
            s for chunk, _, why in chunks for s, reason in zip(chunk, why, strict=True) if reason is None
        ]
    if not found:
        raise ValueError("there are no inputs on which the program is defined")
    return Inputs(*model.encode(found))


def write_sites(model: Transformer) -> dict[str, int]:
    """The sites where sublayers write, with their layers."""
    kinds = (("attn.out", "heads"), ("mlp.out", "d_mlp"))
    return {
        f"{n}.{site}": n
        for n, layer in enumerate(model.config.layers)
        for site, part in kinds
        if getattr(layer, part)
    }


def stream_layers(model: Transformer) -> dict[str, int]:
    """The sites of the residual stream after the embedding (layer -1) and after each sublayer, with their layers."""
    return {s: -1 if s == "embed" else int(s.partition(".")[0]) for s in stream_sites(model.config)}


def map_places(variant: Variant, layers: int) -> tuple[int, ...]:
    """Which matrix the embedding, each of the layers, and the unembedding go through."""
    if variant == "per-layer" and layers:
        return (0, *range(layers), layers - 1)
    if variant == "ends":
        return (0, *[1] * layers, 2)
    return (0,) * (layers + 2)


def fold(model: Transformer, maps: Tensor, places: Sequence[int]) -> dict[str, Tensor]:
    """The weights of the transformers of width d that compute what `model` does through maps (m, k, D, d): (m, ...)."""
    weights = model.state_dict()
    w = [maps[:, place] for place in places]
    folded = {name: weights[name] @ w[0] for name in ("wte.weight", "wpe.weight") if name in weights}
    for n, block in enumerate(model.blocks):
        for part, reads in (("attn", "qkv"), ("mlp", "fc")):
            if getattr(block, part) is not None:
                name = f"blocks.{n}.{part}"
                folded[f"{name}.{reads}.weight"] = weights[f"{name}.{reads}.weight"] @ w[n + 1]
                folded[f"{name}.{reads}.bias"] = weights[f"{name}.{reads}.bias"].expand(len(maps), -1)
                folded[f"{name}.proj.weight"] = w[n + 1].mT @ weights[f"{name}.proj.weight"]
                folded[f"{name}.proj.bias"] = weights[f"{name}.proj.bias"] @ w[n + 1]
    folded["head.weight"] = model.unembedding @ w[-1]
    return folded


class Batched:
    """Compressed models of one compiled model, run at once."""

    def __init__(
        self,
        model: CompiledModel,
        widths: Sequence[int],
        maps: Tensor,
        config: CompressConfig,
        warm: Sequence[float] = (),
    ):
        """`maps` (m, k, D, d) are where training starts, `warm` how many times themselves attention logits are there."""
        self.warm = torch.tensor(list(warm) or [1.0] * len(maps)).to(maps)
        self.model, self.widths, self.config = model, tuple(widths), config
        self.original = model.transformer
        self.places = map_places(config.variant, len(self.original.config.layers))
        shape = replace(self.original.config, d_model=maps.shape[-1])
        self.template = Transformer(shape, seed=None, device=self.original.device).eval()
        self.writes, self.streams = write_sites(self.original), stream_layers(self.original)
        self.patterns = [s.replace(".out", ".pattern") for s in self.writes if s.endswith("attn.out")]
        self.within = (torch.arange(maps.shape[-1]) < torch.tensor(widths)[:, None]).to(maps)[:, None, None]
        self.trained = {"maps": torch.nn.Parameter(maps * self.within)}
        if config.variant == "all":
            start = fold(self.original, self.maps, self.places)
            self.trained |= {name: torch.nn.Parameter(w.detach().clone()) for name, w in start.items()}

    @property
    def maps(self) -> Tensor:
        """(m, k, D, d)."""
        return self.trained["maps"] * self.within

    def weights(self) -> dict[str, Tensor]:
        """The folded weights, (m, ...)."""
        if self.config.variant == "all":
            return {name: w for name, w in self.trained.items() if name != "maps"}
        return fold(self.original, self.maps, self.places)

    def warmed(self, step: int) -> dict[str, Tensor]:
        """The weights at a step of training, when queries are still short."""
        factor = self.warm ** max(0.0, 1 - 2 * step / self.config.steps)
        weights = self.weights()
        for name in [n for n in weights if ".qkv." in n]:
            q, k, v = weights[name].chunk(3, dim=1)
            weights[name] = torch.cat([q * factor.view(-1, *[1] * (q.dim() - 1)), k, v], dim=1)
        return weights

    def map_of(self, layer: int) -> Tensor:
        """(m, D, d): what the stream after that layer (-1: the embedding) is written through."""
        return self.maps[:, self.places[layer + 1]]

    def compressed(self, streams: dict[str, Tensor]) -> dict[str, Tensor]:
        """The compiled model's streams (b, t, D) through W: (m, b, t, d)."""
        return {
            site: (streams[site].flatten(0, 1) @ self.map_of(layer)).unflatten(1, streams[site].shape[:2])
            for site, layer in self.streams.items()
        }

    def __call__(
        self,
        data: Inputs,
        sites: Iterable[str] = (),
        *,
        weights: dict[str, Tensor] | None = None,
        patch: Mapping[str, Tensor] | None = None,
        strength: float = 1.0,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Logits (m, b, t, v) and what passes `sites` (m, b, t, ...).

        What is at the sites of `patch` is moved towards the tensors there (m, b, t, d), by `strength` of the way.
        """
        sites, patch = list(sites), dict(patch or {})

        def run(weights: dict[str, Tensor], patch: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
            # Asked for its patterns, attention is explicit; the fused kernel cannot be batched over models.
            recorder = Recorder([*sites, *self.patterns])
            tap = chain(Tap.at(lambda site, x: torch.lerp(x, patch[site], strength), patch), recorder)
            logits = functional_call(self.template, weights, (data.tokens,), {"mask": data.real, "tap": tap})
            return logits, [recorder.values[s] for s in sites]

        logits, values = vmap(run)(weights or self.weights(), patch)
        return logits, dict(zip(sites, values, strict=True))

    def output_loss(self, logits: Tensor, wanted: Tensor, share: Tensor) -> Tensor:
        """(m,): of logits (m, b, t, v) against the compiled model's (b, t, v); positions weigh `share` (b, t)."""
        if self.model.encoding == "categorical":
            label = wanted.argmax(-1).expand(logits.shape[:-1])
            logits = logits * self.config.coldness
            errors = F.cross_entropy(logits.flatten(0, -2), label.flatten(), reduction="none")
            return errors.view_as(label).mul(share).sum((1, 2))
        return (logits - wanted).square().sum(-1).mul(share).sum((1, 2))

    def layer_loss(self, values: dict[str, Tensor], wanted: dict[str, Tensor], share: Tensor) -> Tensor:
        """(m,): of the sublayers' writes (m, b, t, d) against the compiled model's (b, t, D)."""
        total = self.within.new_zeros(len(self.widths))
        for site, layer in self.writes.items():
            back = values[site].flatten(1, 2) @ self.map_of(layer).mT  # (m, b * t, D)
            total = total + (back - wanted[site].flatten(0, 1)).square().sum(-1) @ share.flatten()
        return total

    @torch.no_grad()
    def transformer(self, i: int) -> Transformer:
        """Model `i` alone, at its own width."""
        d = self.widths[i]
        made = Transformer(replace(self.template.config, d_model=d), seed=None, device=self.original.device)
        own = made.state_dict()
        for name, w in self.weights().items():
            own[name].copy_(w[i][tuple(slice(n) for n in own[name].shape)])
        return made.eval()
