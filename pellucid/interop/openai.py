"""Checkpoints and circuits of OpenAI's circuit_sparsity release, read and written.

A model is a directory with `beeg_config.json` and `final_model.pt`, a circuit a `viz_data.pt`. The `.pt` files are
read with `weights_only=True`: code in one is an error, never run.
"""

import io
import json
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from tokenizers import Tokenizer
from torch import Tensor

from pellucid.core.checkpoint import content_hash
from pellucid.core.circuit import Circuit, channel_circuit, kept_masks
from pellucid.core.config import ActivationSparsity, LayerConfig, ModelConfig, uniform
from pellucid.core.errors import places, unknown
from pellucid.core.files import atomic_directory, leave_others_alone, write_atomic
from pellucid.core.sites import model_sites, node_sites
from pellucid.core.transformer import Norm, Transformer, pick_device
from pellucid.interop.gpt2_names import fill, gpt2_name

RMS_EPS = torch.finfo(torch.float32).eps  # torch.nn.RMSNorm's own where none is given
LAYER_EPS = 1e-5
LOCTYPES = {
    "attn_in": "attn.in",
    "attn_q": "attn.q",
    "attn_k": "attn.k",
    "attn_v": "attn.v",
    "attn_out": "attn.out",
    "mlp_in": "mlp.in",
    "mlp_neuron": "mlp.act",
    "mlp_out": "mlp.out",
    "resid_post_attn": "resid.mid",
    "resid_post_mlp": "resid.post",
}

NO_EFFECT = {  # known keys that change neither the weights nor what they compute
    "debug_nans",
    "dropout",
    "dropout_cat_pos_emb",
    "enable_sparse_kernels",
    "flash",
    "grad_checkpointing",
    "sinusoidal_cat_pos_emb",
    "tokenizer_name",
}

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

Size = Annotated[int, Field(gt=0, le=2**24)]
Count = Annotated[int, Field(gt=0, le=2**12)]


class Dropped(UserWarning):
    """Something in a released file has no counterpart here and was left out."""


class ReleasedConfig(BaseModel):
    """What `beeg_config.json` says of the architecture, with the release's own defaults; the rest is `model_extra`."""

    model_config = ConfigDict(frozen=True, strict=True, extra="allow", allow_inf_nan=False)

    block_size: Size = 1024
    vocab_size: Size = 50304
    n_layer: Count = 12
    n_head: Count = 12
    d_head: Size | None = None
    """None is d_model // n_head."""
    d_model: Size = 768
    bias: bool = True
    ln_bias: bool = True
    rms_norm: bool = False
    residual_activation_type: Literal["identity", "relu"] = "identity"
    activation_type: Literal["gelu", "relu"] = "gelu"
    afrac: Annotated[float, Field(gt=0, le=1)] | None = None
    afrac_loctypes: str = "attn_in,attn_out,mlp_in,mlp_out"
    tied_unembed: bool = True
    d_mlp: Size | None = None
    """None is 4 d_model."""
    enable_bigram_table: bool = False
    learnable_bigram_table: bool = False
    d_pos_emb: Size | None = None
    sink: bool = False
    """The release's own loader heeds it only with `flash=True`."""

    def to_model(self) -> ModelConfig:
        """The same architecture as a `ModelConfig`. Position vectors count as learned: the checkpoint holds them."""
        sparsity = None
        if self.afrac is not None:
            names = [name for name in self.afrac_loctypes.split(",") if name]
            for name in names:
                if name not in LOCTYPES:
                    raise unknown("place in afrac_loctypes", name, LOCTYPES)
            sparsity = ActivationSparsity(fraction=self.afrac, sites=tuple(LOCTYPES[n] for n in names))
        d_head = self.d_model // self.n_head if self.d_head is None else self.d_head
        d_mlp = 4 * self.d_model if self.d_mlp is None else self.d_mlp
        config = ModelConfig(
            vocab_size=self.vocab_size,
            d_model=self.d_model,
            n_ctx=self.block_size,
            layers=uniform(self.n_layer, self.n_head, d_head, d_mlp),
            norm="rms" if self.rms_norm else "layer",
            norm_eps=RMS_EPS if self.rms_norm else LAYER_EPS,
            norm_bias=self.ln_bias and not self.rms_norm,
            linear_bias=self.bias,
            positions="learned",
            d_position=self.d_pos_emb,
            tied_embeddings=self.tied_unembed,
            sink=self.sink,
            activation=self.activation_type,
            residual_activation=self.residual_activation_type,
            activation_sparsity=sparsity,
            bigram=self.enable_bigram_table,
            logits_bias=True,
        )
        if nothing := kept_nothing(config):
            raise ValueError(f"afrac {self.afrac} keeps no channel at {', '.join(nothing)}")
        return config

    @classmethod
    def of_model(cls, config: ModelConfig) -> "ReleasedConfig":
        """The released form of `config`. A `ValueError` lists all that it cannot express."""
        layer = config.layers[0] if config.layers else LayerConfig()
        heads, n_head = layer.heads, max(1, len(layer.heads))
        eps = {"rms": RMS_EPS, "layer": LAYER_EPS}.get(config.norm)
        problems = {
            "no layers": not config.layers,
            "layers of unequal sizes": len(set(config.layers)) > 1,
            "a layer without heads": not all(x.heads for x in config.layers),
            "a layer without an MLP": not all(x.d_mlp for x in config.layers),
            "heads of unequal sizes": any(len(set(x.heads)) > 1 for x in config.layers),
            f"{n_head} heads that do not divide d_model={config.d_model}": config.d_model % n_head != 0,
            f"norm={config.norm!r}": eps is None,
            f"norm_eps={config.norm_eps} (only {eps}: see with_their_eps)": eps is not None
            and config.norm_eps != eps,
            f"activation={config.activation!r}": config.activation not in ("gelu", "relu"),
            f"attention_scale={config.attention_scale}": config.attention_scale is not None,
            f"output_vocab={config.output_vocab}": config.d_vocab_out != config.vocab_size,
            "causal=False": not config.causal,
            "mlp_input": config.mlp_input is not None,
            f"dtype={config.dtype!r}": config.dtype != "float32",
            "activation_sparsity that rounds to no channel": bool(config.layers and kept_nothing(config)),
        }
        if found := [what for what, wrong in problems.items() if wrong]:
            raise ValueError(f"circuit_sparsity's format cannot express {', '.join(found)}")
        sparsity = config.activation_sparsity
        names = {site: name for name, site in LOCTYPES.items()}
        activation: Any = config.activation
        return cls(
            block_size=config.n_ctx,
            vocab_size=config.vocab_size,
            n_layer=len(config.layers),
            n_head=n_head,
            d_head=heads[0],
            d_model=config.d_model,
            bias=config.linear_bias,
            ln_bias=config.norm_bias,
            rms_norm=config.norm == "rms",
            residual_activation_type=config.residual_activation,
            activation_type=activation,
            afrac=None if sparsity is None else sparsity.fraction,
            afrac_loctypes="" if sparsity is None else ",".join(names[site] for site in sparsity.sites),
            tied_unembed=config.tied_embeddings,
            d_mlp=layer.d_mlp,
            enable_bigram_table=config.bigram,
            learnable_bigram_table=config.bigram,
            d_pos_emb=config.d_position,
            sink=config.sink,
        )


def kept_nothing(config: ModelConfig) -> list[str]:
    """The layer sites where the release's AbsTopK, `int(fraction * width)` of them, keeps none; ours keeps one."""
    layer = config.layers[0]
    widths = dict.fromkeys(LOCTYPES.values(), config.d_model)
    widths |= {"attn.in": config.d_read, "mlp.in": config.d_read, "mlp.act": layer.d_mlp}
    widths |= dict.fromkeys(("attn.q", "attn.k", "attn.v"), layer.d_attn)
    return [site for site, width in widths.items() if (f := config.keeps(site)) and int(f * width) == 0]


def read_config(path: str | Path) -> tuple[ReleasedConfig, tuple[str, ...]]:
    """The config in the directory `path`, and a word on each key of it that is legacy or unknown.

    Raises `ValueError`, naming the file and the key, where something is missing, damaged or out of range.
    """
    file = Path(path) / "beeg_config.json"
    if not file.is_file():
        raise ValueError(f"no released checkpoint at {path}: there is no {file}")
    try:
        values = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{file} is not a config: it holds no table")
    notes = []
    if "n_mlp" in values:
        if values.get("d_mlp", values["n_mlp"]) != values["n_mlp"]:
            raise ValueError(f"{file}: n_mlp={values['n_mlp']!r} but d_mlp={values['d_mlp']!r}")
        values["d_mlp"] = values.pop("n_mlp")
        notes.append("legacy key n_mlp (read as d_mlp)")
    if "use_tied_aux_matrix" in values:
        if values.pop("use_tied_aux_matrix") is not False:
            raise ValueError(f"{file}: use_tied_aux_matrix must be false, such models are not supported")
        notes.append("legacy key use_tied_aux_matrix")
    try:
        config = ReleasedConfig.model_validate(values)
    except ValidationError as error:
        wrong = (f"{e['loc'][0]}={e['input']!r}: {e['msg']}" for e in error.errors())
        raise ValueError(f"{file}: {'; '.join(wrong)}") from None
    extra = sorted((config.model_extra or {}).keys() - NO_EFFECT)
    return config, (*notes, *(f"unknown key {name}" for name in extra))


def read_pt(file: Path) -> dict[str, Any]:
    """The table in a `.pt` file, on the CPU. A `ValueError` if it is missing, damaged or holds code."""
    if not file.is_file():
        raise ValueError(f"{file} is missing")
    try:
        with warnings.catch_warnings(
            action="ignore"
        ):  # about pickle protocols it may not know: then it raises
            values = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle raises anything
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{file} is damaged or holds more than tensors: {reason}") from None
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise ValueError(f"{file} holds no table of names")
    return values


def load_checkpoint(path: str | Path, *, device: str | torch.device = "auto") -> Transformer:
    """The released model in the directory `path`.

    Keys and tensors that are legacy or unknown are listed in one `Dropped` warning. Raises `ValueError`, naming the file
    and what is wrong in it, where something is missing, damaged or does not fit.
    """
    config, notes = read_config(path)
    file = Path(path) / "final_model.pt"
    tensors = read_pt(file)
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{file}: {name} is not a tensor")
    buffers = {f"transformer.h.{layer}.attn.bias" for layer in range(config.n_layer)} & tensors.keys()
    if buffers:
        notes = (*notes, "causal masks attn.bias")
        tensors = {name: tensor for name, tensor in tensors.items() if name not in buffers}
    if config.tied_unembed and "lm_head.weight" in tensors:
        head, wte = tensors.pop("lm_head.weight"), tensors.get("transformer.wte.weight")
        if wte is not None and not torch.equal(head, wte):
            raise ValueError(
                f"{file}: tied_unembed, but lm_head.weight is not equal to transformer.wte.weight"
            )
    try:
        model_config = config.to_model()
    except ValueError as error:
        raise ValueError(f"{Path(path) / 'beeg_config.json'}: {error}") from None
    if "final_logits_bias" not in tensors:
        tensors = tensors | {"final_logits_bias": torch.zeros(config.vocab_size)}
    model = fill(model_config, tensors, file)
    if notes:
        warnings.warn(f"{path}: not used: {', '.join(notes)}", Dropped, stacklevel=2)
    return model.to(pick_device(device))


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer in the `tokenizer.json` of the directory `path`; nothing is fetched."""
    file = Path(path) / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"{file} is missing")
    try:
        tokenizer = Tokenizer.from_str(file.read_text())
    except Exception as error:  # the library raises a bare Exception
        raise ValueError(f"{file} is not a tokenizer: {error}") from None
    tokenizer.encode_special_tokens = True  # text cannot forge the end of a document
    return tokenizer


def with_their_eps(model: Transformer) -> Transformer:
    """A copy of `model` with the constant in its norms that the format has. Its logits are other ones, as much as the norms'
    inputs are small beside the constants; say so where it is used."""
    eps = {"rms": RMS_EPS, "layer": LAYER_EPS}.get(model.config.norm, model.config.norm_eps)
    made = Transformer(replace(model.config, norm_eps=eps), seed=None, device=model.device)
    made.load_state_dict(model.state_dict())
    return made.train(model.training)


def export_checkpoint(model: Transformer, path: str | Path, *, tokenizer: Tokenizer | None = None) -> None:
    """Write `model` to the directory `path` as the release lays it out, atomically; `load_checkpoint` computes the same.

    Norms without a gain get ones, models without positions zeros, and sinusoids become a table. A `ValueError` lists
    what the format cannot express, or says that `path` holds something else.
    """
    path, config = Path(path), ReleasedConfig.of_model(model.config)
    leave_others_alone(path, "beeg_config.json", "a released checkpoint")
    tensors = {gpt2_name(name): t.detach().cpu().clone() for name, t in model.state_dict().items()}
    for name, module in model.named_modules():
        if isinstance(module, Norm) and module.gain is None:
            tensors[gpt2_name(f"{name}.gain")] = torch.ones(module.width)
    if model.config.positions == "none":
        tensors["transformer.wpe.weight"] = torch.zeros(model.config.n_ctx, model.config.d_model)
    elif model.config.positions == "sinusoidal":
        tensors["transformer.wpe.weight"] = model.sinusoids.cpu().clone()
    if model.config.tied_embeddings:
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"]
    tensors.setdefault("final_logits_bias", torch.zeros(model.config.vocab_size))
    with atomic_directory(path) as fresh:
        (fresh / "beeg_config.json").write_text(config.model_dump_json(indent=1) + "\n")
        torch.save(tensors, fresh / "final_model.pt")
        if tokenizer is not None:
            (fresh / "tokenizer.json").write_text(tokenizer.to_str(pretty=True))


def hook_names(config: ModelConfig) -> dict[str, str]:
    """The release's hook name of each of a model's sites that has one, by site."""
    return {
        name: site.circuit_sparsity.format(l=name.split(".")[0])
        for name, site in model_sites(config).items()
        if site.circuit_sparsity is not None
    }


def site_names(config: ModelConfig) -> dict[str, str]:
    """The site of each of the release's hook names: `hook_names` the other way round."""
    return {hook: site for site, hook in hook_names(config).items()}


def mask_widths(config: ModelConfig) -> dict[str, int]:
    """The sites that the release masks, and their widths: our node sites, and the residual stream at the end."""
    return node_sites(config) | {"final": config.d_model}


def read_masks(path: str | Path, model: Transformer) -> dict[str, Tensor]:
    """The bool mask (width,) of every site that the circuit in a `viz_data.pt` masks, `final` among them.

    `Mask(masks, means)` is then the release's ablation. Raises `ValueError`, naming the file and the place, where the
    circuit does not fit `model`.
    """
    return _masks(read_pt(Path(path)), path, model)


def _masks(values: Mapping[str, Any], path: str | Path, model: Transformer) -> dict[str, Tensor]:
    kept, widths, hooks = values.get("circuit_data"), mask_widths(model.config), hook_names(model.config)
    if not isinstance(kept, Mapping):
        raise ValueError(f"{path} has no circuit_data")
    places = {hooks[site]: site for site in widths}
    for place in kept:
        if place not in places:
            raise unknown(f"place in {path}", place, places)
    if missing := sorted(places.keys() - kept.keys()):
        raise ValueError(f"{path}: circuit_data lacks {', '.join(missing)}")
    masks = {}
    for place, site in places.items():
        try:
            index = torch.as_tensor(kept[place])
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise ValueError(f"{path}: {place} is not a list of channels") from None
        if index.numel() == 0:
            index = torch.zeros(0, dtype=torch.long)
        plain = index.layout == torch.strided and not index.is_meta
        if index.dim() != 1 or index.dtype not in INTEGERS or not plain:
            raise ValueError(f"{path}: {place} is not a list of channels")
        if not bool(((index >= 0) & (index < widths[site])).all()):
            raise ValueError(f"{path}: channels of {place} must be in 0..{widths[site] - 1}")
        masks[site] = torch.zeros(widths[site], dtype=torch.bool, device=model.device)
        masks[site][index.long().to(model.device)] = True
    return masks


def read_viz(path: str | Path, model: Transformer, *, task: str | None = None) -> Circuit:
    """The circuit in a `viz_data.pt`: its nodes, and as edges the nonzero weights of `model` between them.

    `task` names the task where the file does not, as released ones do not. The release masks the residual stream at the
    end as well, which is not a node here: channels cut there are reported in a `Dropped` warning, and `read_masks` has
    them. Raises `ValueError` as `read_masks` does, and where `write_viz` made the file for another model.
    """
    values = read_pt(Path(path))
    masks, own = _masks(values, path, model), values.get("pellucid", {})
    if not isinstance(own, Mapping):
        raise ValueError(f"{path}: pellucid is not a table")
    final, model_hash = masks.pop("final"), content_hash(model)
    if own.get("model", model_hash) != model_hash:
        raise ValueError(f"{path} is a circuit of the model {own['model']}, not of {model_hash}")
    if not bool(final.all()):
        message = (
            f"{path}: final_resid keeps {int(final.sum())} of {len(final)} channels; a Circuit keeps all"
        )
        warnings.warn(message, Dropped, stacklevel=2)
    fields = {name: own[name] for name in ("token_edges", "metrics") if name in own}
    task = task or own.get("task", "unknown")
    try:
        return channel_circuit(model, masks, task=task, model_hash=model_hash, **fields)
    except ValidationError as error:
        raise ValueError(f"{path} is not a circuit: {places(error)}") from None


def write_viz(circuit: Circuit, path: str | Path, model: Transformer) -> None:
    """Write a channel circuit of `model` as a `viz_data.pt`, atomically; `read_viz` gives it back.

    It holds the kept channels, all of them at the end, and none of the viewer's samples and losses. Raises `ValueError`
    for another model's circuit, and for one that lacks edges between its nodes or changes their weights, which
    the format cannot say.
    """
    masks = kept_masks(circuit, model)
    whole = channel_circuit(model, masks, task=circuit.task, model_hash=circuit.model)
    if set(whole.edges) != set(circuit.edges):
        raise ValueError(
            f"circuit_sparsity's circuits have all {len(whole.edges)} edges between their nodes with the model's "
            f"weights; this one has {len(circuit.edges)}, {len(set(circuit.edges) & set(whole.edges))} of them alike"
        )
    masks["final"] = torch.ones(model.config.d_model, dtype=torch.bool)
    hooks, widths = hook_names(model.config), mask_widths(model.config)
    values = {
        "circuit_data": {hooks[site]: masks[site].nonzero()[:, 0].cpu() for site in widths},
        "num_total_nodes": sum(widths.values()),
        "samples": {},
        "all_loss": [],
        "prune_config": {},
        "importances": {},
        "pellucid": circuit.model_dump(include={"task", "model", "token_edges", "metrics"}),
    }
    buffer = io.BytesIO()
    torch.save(values, buffer)
    write_atomic(path, buffer.getvalue())
