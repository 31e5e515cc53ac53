"""GPT-2-shaped Hugging Face models as Transformers, and any causal Transformer as a Hugging Face model.

Importing this module registers `PellucidConfig` and `PellucidForCausalLM`, so that `AutoModelForCausalLM` opens what
they save. Needs the extra `hf`.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from pellucid.core.config import ModelConfig, from_fields, uniform
from pellucid.core.errors import unknown
from pellucid.core.likelihood import check_language_model
from pellucid.core.transformer import Transformer, pick_device
from pellucid.data.tokenizer import END_OF_TEXT, end_of_text_id
from pellucid.interop.gpt2_names import fill

try:
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        GenerationMixin,
        GPT2LMHeadModel,
        PreTrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerFast,
    )
    from transformers.modeling_outputs import CausalLMOutput
except ImportError as error:
    raise ImportError(
        "pellucid.interop.huggingface needs the package `transformers`: pip install pellucid[hf]"
    ) from error

ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float64: "float64"}


def load_gpt2(model: GPT2LMHeadModel | str | Path, *, device: str | torch.device = "auto") -> Transformer:
    """A GPT-2-shaped model, or the one in a local directory, as a Transformer of the same logits. Dropout is left out.

    Raises `ValueError` for other models, directories that do not load, and options that a Transformer has not.
    """
    if isinstance(model, str | Path):
        model = read_gpt2(Path(model))
    if not isinstance(model, GPT2LMHeadModel):
        raise ValueError(f"expected a GPT2LMHeadModel or its directory, got {type(model).__name__}")
    theirs = model.config
    for option in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if getattr(theirs, option):
            raise ValueError(f"{option}=True has no counterpart in a Transformer")
    if theirs.activation_function not in ACTIVATIONS:
        raise unknown("activation_function", theirs.activation_function, ACTIVATIONS)
    if model.dtype not in DTYPES:
        raise ValueError(f"a Transformer cannot be {model.dtype}; convert the model with .float() first")
    d_head = theirs.n_embd // theirs.n_head
    config = ModelConfig(
        vocab_size=theirs.vocab_size,
        d_model=theirs.n_embd,
        n_ctx=theirs.n_positions,
        layers=uniform(theirs.n_layer, theirs.n_head, d_head, theirs.n_inner or 4 * theirs.n_embd),
        norm="layer",
        norm_eps=theirs.layer_norm_epsilon,
        norm_bias=True,
        positions="learned",
        tied_embeddings=theirs.tie_word_embeddings,
        attention_scale=None if theirs.scale_attn_weights else 1.0,
        activation=ACTIVATIONS[theirs.activation_function],  # type: ignore[arg-type]
        dtype=DTYPES[model.dtype],  # type: ignore[arg-type]
    )
    tensors = {
        name: x.T
        if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
        else x  # Conv1D: (in, out)
        for name, x in model.state_dict().items()
    }
    if config.tied_embeddings:
        tensors.pop("lm_head.weight")
    return fill(config, tensors, type(model).__name__).to(pick_device(device))


def read_gpt2(path: Path) -> GPT2LMHeadModel:
    """The GPT-2 model in a local directory; nothing is fetched, and no weight is made up."""
    if not (path / "config.json").is_file():
        raise ValueError(f"no model at {path}: there is no {path / 'config.json'}")
    try:
        kind = json.loads((path / "config.json").read_text()).get("model_type")
        if kind != "gpt2":
            raise ValueError(f"its model_type is {kind!r}, not 'gpt2'")
        loaded: Any = GPT2LMHeadModel.from_pretrained(
            path, local_files_only=True, output_loading_info=True, dtype="auto"
        )
    except Exception as error:  # the library raises many kinds
        raise ValueError(f"{path} cannot be loaded: {error}") from None
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise ValueError(f"{path} lacks {', '.join(missing)}")
    return model


class PellucidConfig(PreTrainedConfig):
    """A `ModelConfig` as Hugging Face stores it."""

    model_type = "pellucid"

    transformer: dict[str, Any] | None = None
    """The `ModelConfig`'s fields."""

    def to_model(self) -> ModelConfig:
        """The `ModelConfig`, of the type that the weights are loaded in."""
        if self.transformer is None:
            raise ValueError("a PellucidConfig needs `transformer`: the fields of a ModelConfig")
        config = from_fields(ModelConfig, self.transformer)
        dtype: Any = str(self.dtype or config.dtype).removeprefix("torch.")
        return replace(config, dtype=dtype)

    @property
    def vocab_size(self) -> int:
        return self.to_model().vocab_size

    @property
    def hidden_size(self) -> int:
        return self.to_model().d_model

    @property
    def num_hidden_layers(self) -> int:
        return len(self.to_model().layers)

    @property
    def max_position_embeddings(self) -> int:
        return self.to_model().n_ctx


class PellucidForCausalLM(PreTrainedModel, GenerationMixin):
    """A Transformer behind Hugging Face's interface; `.transformer` is it. Generation recomputes the whole text."""

    config_class = PellucidConfig
    base_model_prefix = "transformer"

    def __init__(self, config: PellucidConfig):
        super().__init__(config)
        where = torch.empty(0).device  # "meta" while from_pretrained has yet to read the weights
        self.transformer = Transformer(config.to_model(), seed=None, device=where)
        self.generation_config.use_cache = False
        self.post_init()

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Fill in what no file held: tables that follow from the config, and weights that were not loaded."""
        tensors = (*self.transformer.named_parameters(), *self.transformer.named_buffers())
        empty = [(name, x) for name, x in tensors if not getattr(x, "_is_hf_initialized", False)]
        if empty:
            fresh = Transformer(self.transformer.config, seed=0, device="cpu")
            made = dict(fresh.named_parameters()) | dict(fresh.named_buffers())
            for name, x in empty:
                x.copy_(made[name])

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
    ) -> CausalLMOutput | tuple[Tensor, ...]:
        """Logits (b, t, v) and, with `labels` (b, t), the mean loss of each next token; labels of -100 do not count."""
        logits, loss = self.transformer(input_ids, mask=attention_mask), None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        if return_dict is False:
            return (logits,) if loss is None else (loss, logits)
        return CausalLMOutput(loss=loss, logits=logits)  # type: ignore[arg-type]

    def prepare_inputs_for_generation(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_):
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    def get_input_embeddings(self) -> torch.nn.Embedding:
        return self.transformer.wte

    def get_output_embeddings(self) -> torch.nn.Linear | None:
        return self.transformer.head


AutoConfig.register("pellucid", PellucidConfig, exist_ok=True)
AutoModelForCausalLM.register(PellucidConfig, PellucidForCausalLM, exist_ok=True)


def to_huggingface(model: Transformer, tokenizer: Tokenizer | None = None) -> PellucidForCausalLM:
    """A copy of `model` that saves, loads and generates as Hugging Face models do, with the same logits.

    With a `tokenizer` generation ends at its end of text. Raises `ValueError` for a model that predicts no next token:
    one that is not causal, or whose output is another vocabulary.
    """
    check_language_model(model)
    fields = json.loads(model.config.to_json())
    out = PellucidForCausalLM(PellucidConfig(transformer=fields, dtype=model.config.dtype))
    out.transformer.load_state_dict(model.state_dict())
    if tokenizer is not None:
        end = end_of_text_id(tokenizer)
        out.generation_config.eos_token_id = out.generation_config.pad_token_id = end
    return out.to(model.device).eval()  # type: ignore[arg-type]


def to_huggingface_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """`tokenizer` as Hugging Face's, with the same token ids; text cannot forge the end of a document."""
    end_of_text_id(tokenizer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        padding_side="left",
        split_special_tokens=True,
        model_input_names=["input_ids", "attention_mask"],
    )
