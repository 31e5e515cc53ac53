"""What a transformer is, as data: orthogonal parts, validated once, written as JSON."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from pellucid.core.errors import unknown

Norm = Literal["rms", "layer", "none"]
Positions = Literal["none", "learned", "sinusoidal"]
Activation = Literal["gelu", "gelu_tanh", "relu"]
ResidualActivation = Literal["identity", "relu"]
DType = Literal["float32", "bfloat16", "float64"]

ABS_TOPK_SITES = (
    "attn.in",
    "attn.q",
    "attn.k",
    "attn.v",
    "attn.out",
    "mlp.in",
    "mlp.act",
    "mlp.out",
    "resid.mid",
    "resid.post",
)
NODE_SITES = ABS_TOPK_SITES[:8]


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """One layer's sizes. A layer may have no heads, or no MLP."""

    heads: tuple[int, ...] = ()
    """The width of each head, in channels."""

    d_mlp: int = 0
    """The number of MLP neurons."""

    def __post_init__(self):
        object.__setattr__(self, "heads", tuple(self.heads))
        if any(not isinstance(h, int) or h < 1 for h in self.heads):
            raise ValueError(f"heads must be positive sizes, got {self.heads!r}")
        if not isinstance(self.d_mlp, int) or self.d_mlp < 0:
            raise ValueError(f"d_mlp must be 0 or more, got {self.d_mlp!r}")

    @property
    def d_attn(self) -> int:
        """The width of all heads side by side."""
        return sum(self.heads)


def uniform(n_layer: int, n_head: int, d_head: int, d_mlp: int) -> tuple[LayerConfig, ...]:
    """`n_layer` equal layers of `n_head` heads of `d_head` channels and `d_mlp` neurons."""
    return tuple(LayerConfig(heads=(d_head,) * n_head, d_mlp=d_mlp) for _ in range(n_layer))


@dataclass(frozen=True, kw_only=True)
class ActivationSparsity:
    """AbsTopK: at each of `sites`, keep the `int(fraction * width)` entries of largest magnitude."""

    fraction: float = 0.25
    """The fraction of a site's width that stays nonzero."""

    sites: tuple[str, ...] = NODE_SITES
    """Where, in every layer: site names without the layer's number."""

    def __post_init__(self):
        object.__setattr__(self, "sites", tuple(self.sites))
        if not 0 < self.fraction <= 1:
            raise ValueError(f"fraction must be in (0, 1], got {self.fraction!r}")
        for site in self.sites:
            if site not in ABS_TOPK_SITES:
                raise unknown("activation sparsity site", site, ABS_TOPK_SITES)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A transformer's parts. Each field is independent of the others."""

    vocab_size: int
    """Input tokens."""

    d_model: int
    """Width of the residual stream."""

    n_ctx: int
    """Longest sequence, in tokens."""

    layers: tuple[LayerConfig, ...]
    """Each layer's sizes; `uniform` makes equal ones."""

    output_vocab: int | None = None
    """Output tokens, where they differ from the input's."""

    norm: Norm = "rms"
    """Before every sublayer and before the unembedding."""

    norm_eps: float = 1e-5
    """Added to the mean square (or variance) inside the norm."""

    norm_gain: bool = True
    """Whether norms learn a gain. Without one, the gain is folded into the weights that read the norm."""

    norm_bias: bool = False
    """Whether layer norms learn a bias."""

    linear_bias: bool = True
    """Whether attention and MLP matrices have biases."""

    positions: Positions = "none"
    """Position vectors."""

    d_position: int | None = None
    """None: position vectors are added to the embedding. A width: they are extra channels beside the
    residual stream, with their own norm, that sublayers read and never write."""

    tied_embeddings: bool = False
    """Whether the unembedding is the embedding's transpose."""

    causal: bool = True
    """Whether a token sees only itself and those before it."""

    sink: bool = False
    """Whether each head has a learned logit that takes attention and gives nothing."""

    attention_scale: float | None = None
    """Factor on attention logits; None is 1/sqrt(head size)."""

    activation: Activation = "gelu"
    """The MLP's nonlinearity."""

    residual_activation: ResidualActivation = "identity"
    """Applied to the residual stream after each addition."""

    activation_sparsity: ActivationSparsity | None = None
    """AbsTopK at node sites; None is none."""

    bigram: bool = False
    """Whether a dense (vocab, output) table of the newest token is added to the logits."""

    logits_bias: bool = False
    """Whether the logits have a bias."""

    mlp_input: Mapping[str, Any] | None = None
    """A module between the norm and every MLP: its `kind` and that kind's own fields."""

    dtype: DType = "float32"
    """The parameters' type."""

    def __post_init__(self):
        layers = tuple(from_fields(LayerConfig, v) if isinstance(v, Mapping) else v for v in self.layers)
        object.__setattr__(self, "layers", layers)
        if isinstance(self.activation_sparsity, Mapping):
            object.__setattr__(
                self, "activation_sparsity", from_fields(ActivationSparsity, self.activation_sparsity)
            )
        for name in ("vocab_size", "d_model", "n_ctx"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if self.d_vocab_out < 1:
            raise ValueError(f"output_vocab must be positive, got {self.output_vocab!r}")
        for layer in layers:
            if not isinstance(layer, LayerConfig):
                raise ValueError(f"layers must be LayerConfigs, got {layer!r}")
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise unknown(name, getattr(self, name), choices)
        if not math.isfinite(self.norm_eps) or self.norm_eps < 0:
            raise ValueError(f"norm_eps must be 0 or more, got {self.norm_eps!r}")
        if self.d_position is not None and self.positions == "none":
            raise ValueError("d_position needs positions='learned' or 'sinusoidal'")
        if self.d_position is not None and self.d_position < 1:
            raise ValueError(f"d_position must be positive, got {self.d_position!r}")
        if self.norm_bias and self.norm != "layer":
            raise ValueError(f"norm_bias needs norm='layer', got norm={self.norm!r}")
        if self.tied_embeddings and self.d_vocab_out != self.vocab_size:
            raise ValueError(
                f"tied embeddings need equal vocabularies, got {self.vocab_size} and {self.d_vocab_out}"
            )
        if self.mlp_input is not None:
            if "kind" not in self.mlp_input:
                raise ValueError(f"mlp_input needs a 'kind', got {dict(self.mlp_input)!r}")
            object.__setattr__(self, "mlp_input", json.loads(json.dumps(dict(self.mlp_input))))

    @property
    def d_vocab_out(self) -> int:
        """The number of output tokens."""
        return self.vocab_size if self.output_vocab is None else self.output_vocab

    @property
    def d_read(self) -> int:
        """What a sublayer reads: the residual stream and the position channels beside it."""
        return self.d_model + (self.d_position or 0)

    def keeps(self, site: str) -> float | None:
        """The fraction that AbsTopK keeps at a layer's `site`, or None."""
        sparsity = self.activation_sparsity
        return sparsity.fraction if sparsity and site in sparsity.sites else None

    def to_json(self) -> str:
        """The config as JSON; `ModelConfig.from_json` gives it back equal."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> "ModelConfig":
        """The config in `text`. An unknown field is a `ValueError` that names it."""
        return from_fields(cls, json.loads(text))


def from_fields(cls: type, values: Mapping[str, Any]) -> Any:
    """`cls(**values)`, where an unknown or missing field is a `ValueError` with near matches."""
    known = {f.name: f for f in fields(cls)}
    for name in values:
        if name not in known:
            raise unknown(f"{cls.__name__} field", name, known)
    try:
        return cls(**values)
    except TypeError as error:
        raise ValueError(f"{cls.__name__}: {error}") from None


_FLAGS = (
    "norm_gain",
    "norm_bias",
    "linear_bias",
    "tied_embeddings",
    "causal",
    "sink",
    "bigram",
    "logits_bias",
)
_CHOICES = {
    "norm": get_args(Norm),
    "positions": get_args(Positions),
    "activation": get_args(Activation),
    "residual_activation": get_args(ResidualActivation),
    "dtype": get_args(DType),
}
