"""Random small models."""

import torch
from hypothesis import strategies as st

from pellucid import ActivationSparsity, LayerConfig, ModelConfig, Transformer
from pellucid.core.config import ABS_TOPK_SITES

VOCAB, CONTEXT = 11, 12


@st.composite
def configs(draw, **fixed) -> ModelConfig:
    """Any model config, small; `fixed` fields are as given."""
    layers = draw(
        st.lists(
            st.builds(
                LayerConfig,
                heads=st.lists(st.sampled_from([2, 3, 4]), max_size=3).map(tuple),
                d_mlp=st.sampled_from([0, 5, 8]),
            ),
            min_size=1,
            max_size=2,
        )
    )
    norm = draw(st.sampled_from(["rms", "layer", "none"]))
    positions = draw(st.sampled_from(["none", "learned", "sinusoidal"]))
    values: dict = {
        "vocab_size": VOCAB,
        "d_model": 8,
        "n_ctx": CONTEXT,
        "layers": tuple(layers),
        "norm": norm,
        "norm_gain": draw(st.booleans()),
        "norm_bias": norm == "layer" and draw(st.booleans()),
        "linear_bias": draw(st.booleans()),
        "positions": positions,
        "d_position": draw(st.sampled_from([None, 4])) if positions != "none" else None,
        "tied_embeddings": draw(st.booleans()),
        "causal": draw(st.booleans()),
        "sink": draw(st.booleans()),
        "attention_scale": draw(st.sampled_from([None, 0.7])),
        "activation": draw(st.sampled_from(["gelu", "gelu_tanh", "relu"])),
        "residual_activation": draw(st.sampled_from(["identity", "relu"])),
        "activation_sparsity": draw(
            st.none()
            | st.builds(
                ActivationSparsity,
                fraction=st.sampled_from([0.3, 0.5]),
                sites=st.lists(st.sampled_from(ABS_TOPK_SITES), unique=True).map(tuple),
            )
        ),
        "bigram": draw(st.booleans()),
        "logits_bias": draw(st.booleans()),
        "dtype": "float64",
    }
    return ModelConfig(**(values | fixed))


def scrambled(config: ModelConfig, seed: int = 0) -> Transformer:
    """A model whose every parameter is random, also those that begin at 0 or 1."""
    model = Transformer(config, device="cpu")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.5)
    return model


def some_tokens(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))
