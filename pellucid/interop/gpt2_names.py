"""GPT-2's names of tensors, which circuit_sparsity's and Hugging Face's checkpoints share, for ours."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from pellucid.core.config import ModelConfig
from pellucid.core.transformer import Transformer

MODEL = {
    "wte.weight": "transformer.wte.weight",
    "wpe.weight": "transformer.wpe.weight",
    "norm.gain": "transformer.ln_f.weight",
    "norm.bias": "transformer.ln_f.bias",
    "head.weight": "lm_head.weight",
    "logits_bias": "final_logits_bias",
    "bigram": "bigram_table",
}
LAYER = {
    "attn.read.norm.gain": "ln_1.weight",
    "attn.read.norm.bias": "ln_1.bias",
    "attn.read.position_norm.gain": "ln_p1.weight",
    "attn.read.position_norm.bias": "ln_p1.bias",
    "attn.qkv.weight": "attn.c_attn.weight",
    "attn.qkv.bias": "attn.c_attn.bias",
    "attn.proj.weight": "attn.c_proj.weight",
    "attn.proj.bias": "attn.c_proj.bias",
    "attn.sink": "attn.attn_imp.sink_logit",
    "mlp.read.norm.gain": "ln_2.weight",
    "mlp.read.norm.bias": "ln_2.bias",
    "mlp.read.position_norm.gain": "ln_p2.weight",
    "mlp.read.position_norm.bias": "ln_p2.bias",
    "mlp.fc.weight": "mlp.c_fc.weight",
    "mlp.fc.bias": "mlp.c_fc.bias",
    "mlp.proj.weight": "mlp.c_proj.weight",
    "mlp.proj.bias": "mlp.c_proj.bias",
}


def gpt2_name(name: str) -> str:
    """GPT-2's name of the tensor that a `Transformer` calls `name`."""
    if not name.startswith("blocks."):
        return MODEL[name]
    _, layer, part = name.split(".", 2)
    return f"transformer.h.{layer}.{LAYER[part]}"


def fill(config: ModelConfig, tensors: Mapping[str, Tensor], where: str | Path) -> Transformer:
    """The model of `config` on the CPU with a copy of `tensors`, which have GPT-2's names; matrices are (out, in).

    Nothing is allocated before all fit. Raises `ValueError`, naming `where` they are from and the tensors, where some
    are missing, misshapen, no floating-point numbers or not in such a model.
    """
    with torch.device("meta"):
        model = Transformer(config, seed=None, device="meta")
    want = {gpt2_name(name): tensor for name, tensor in model.state_dict().items()}
    if missing := sorted(want.keys() - tensors.keys()):
        raise ValueError(f"{where} lacks {', '.join(missing)}")
    if surplus := sorted(tensors.keys() - want.keys()):
        raise ValueError(f"{where} has {', '.join(surplus)}, which the config does not")
    for name, tensor in want.items():
        have = tensors[name]
        if have.shape != tensor.shape:
            raise ValueError(
                f"{where}: {name} has shape {tuple(have.shape)}, the config says {tuple(tensor.shape)}"
            )
        if not have.is_floating_point() or have.layout != torch.strided or have.is_meta:
            raise ValueError(f"{where}: {name} is not a dense tensor of floating-point numbers")
    weights = {
        name: tensors[gpt2_name(name)].detach().to("cpu", tensor.dtype, copy=True).contiguous()
        for name, tensor in model.state_dict().items()
    }
    model.load_state_dict(weights, assign=True)
    return model
