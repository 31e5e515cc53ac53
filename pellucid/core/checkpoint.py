"""A model as a directory: `config.json`, `model.safetensors`, perhaps `tokenizer.json`. Never a pickle."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from tokenizers import Tokenizer
from torch import Tensor

from pellucid.core.config import ModelConfig, from_fields
from pellucid.core.errors import unknown
from pellucid.core.files import atomic_directory, leave_others_alone, settled
from pellucid.core.transformer import Transformer, pick_device

FORMAT = 1
SPARSE_BELOW = 0.1
HALVE_ABOVE = 65_536  # entries
PREFIX = "pellucid:"
BOX = Path(__file__).parent.parent / "box"
"""The models that come with the package, called `pellucid:NAME`."""


def save_model(
    model: Transformer,
    path: str | Path,
    *,
    tokenizer: Tokenizer | None = None,
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, bytes] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
) -> None:
    """Write `model` to the directory `path`, atomically: an older checkpoint there stays whole until the end.

    Matrices with under 10% nonzeros are stored as indices and values. `extra` holds further files by relative path;
    `tensors` are the model's where it holds only a share of them.
    Raises `ValueError` where something else than a checkpoint would be replaced.
    """
    leave_others_alone(path, "config.json", "a checkpoint")
    tensors = {name: t.detach().cpu().contiguous() for name, t in (tensors or model.state_dict()).items()}
    files = {"model.safetensors": pack(tensors), **(extra or {})}
    if tokenizer is not None:
        files["tokenizer.json"] = tokenizer.to_str(pretty=True).encode()
    config = {
        "format": FORMAT,
        "model": json.loads(model.config.to_json()),
        "sha256": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
        "metadata": dict(metadata or {}),
    }
    with atomic_directory(path) as fresh:
        for name, data in files.items():
            (fresh / name).parent.mkdir(parents=True, exist_ok=True)
            (fresh / name).write_bytes(data)
        (fresh / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def load_model(path: str | Path, *, device: str | torch.device = "auto") -> Transformer:
    """The model in the directory `path`, or in its `checkpoint/`; `pellucid:NAME` is one that comes with the package.

    It is in eval mode. Raises `ValueError`, naming the file, where something is missing, damaged or unknown.
    """
    path = find_checkpoint(path)
    config = read_config(path)
    weights = read_weights(path)
    model = Transformer(from_fields(ModelConfig, config["model"]), device="cpu")
    want, have = model.state_dict(), weights.keys()
    if missing := sorted(want.keys() - have):
        raise ValueError(f"{path / 'model.safetensors'} lacks {', '.join(missing)}")
    if surplus := sorted(have - want.keys()):
        raise ValueError(f"{path / 'model.safetensors'} has {', '.join(surplus)}, which the config does not")
    for name in want:
        tensor = weights[name]
        if tensor.shape != want[name].shape:
            raise ValueError(
                f"{path / 'model.safetensors'}: {name} has shape {tuple(tensor.shape)}, "
                f"the config says {tuple(want[name].shape)}"
            )
    model.load_state_dict(weights)
    return model.to(pick_device(device)).eval()


def load_metadata(path: str | Path) -> dict[str, Any]:
    """What was noted with the model in `path` when it was saved."""
    return read_config(find_checkpoint(path))["metadata"]


def find_checkpoint(path: str | Path) -> Path:
    """The checkpoint directory at `path` or at `path/checkpoint`, or of a model in the box."""
    if (name := boxed(path)) is not None:
        known = sorted(place.name for place in BOX.iterdir() if place.is_dir())
        if name not in known:
            raise unknown("model", f"{PREFIX}{name}", [PREFIX + k for k in known])
        return BOX / name
    path = Path(path)
    for place in (settled(path), settled(path / "checkpoint")):
        if (place / "config.json").exists():
            return place
    if path.suffix in (".pt", ".pth", ".bin", ".pkl", ".ckpt"):
        raise ValueError(f"{path} looks like a pickle, which is never read; expected a checkpoint directory")
    raise ValueError(f"no checkpoint at {path}: there is no {path / 'config.json'}")


def boxed(path: str | Path) -> str | None:
    """The name in `pellucid:NAME`, else None."""
    return str(path).removeprefix(PREFIX) if str(path).startswith(PREFIX) else None


def read_config(path: Path) -> dict[str, Any]:
    """The parsed `config.json` of a checkpoint directory."""
    file = path / "config.json"
    try:
        config = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is damaged: {error}") from None
    if not isinstance(config, dict) or not {"format", "model", "sha256", "metadata"} <= config.keys():
        raise ValueError(f"{file} is not a checkpoint's config: it lacks format, model, sha256 or metadata")
    if not isinstance(config["sha256"], dict) or not isinstance(config["model"], dict):
        raise ValueError(f"{file} is not a checkpoint's config: its model and sha256 must be tables")
    if config["format"] != FORMAT:
        raise ValueError(f"{file} has format {config['format']!r}; this version reads {FORMAT}")
    return config


def read_file(path: Path, name: str) -> bytes:
    """The content of the file `name` of a checkpoint directory, which must have the hash that the config says."""
    file, sha256 = path / name, read_config(path)["sha256"].get(name)
    if sha256 is None or not file.exists():
        raise ValueError(f"{file} is missing")
    data = file.read_bytes()
    if hashlib.sha256(data).hexdigest() != sha256:
        raise ValueError(f"{file} is damaged or truncated: its SHA-256 is not the one in config.json")
    return data


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint directory."""
    data = read_file(path, "model.safetensors")
    try:
        return unpack(data)
    except (SafetensorError, KeyError, RuntimeError) as error:
        raise ValueError(f"{path / 'model.safetensors'} is damaged: {error}") from None


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer that was saved with the model in `path`, or in its `checkpoint/`."""
    path = find_checkpoint(path)
    try:
        tokenizer = Tokenizer.from_str(read_file(path, "tokenizer.json").decode())
    except ValueError:
        raise
    except Exception as error:  # the library raises a bare Exception
        raise ValueError(f"{path / 'tokenizer.json'} is not a tokenizer: {error}") from None
    tokenizer.encode_special_tokens = True  # text cannot forge the end of a document; JSON does not keep this
    return tokenizer


def pack(tensors: Mapping[str, Tensor]) -> bytes:
    """safetensors bytes; a matrix `x` under 10% dense becomes `x@indices`, `x@values` and `x@shape`.

    A large float32 tensor that bfloat16 holds exactly becomes `x@bfloat16`.
    """
    out = {}
    for name, tensor in tensors.items():
        if stored_sparse(tensor):
            where = tensor.flatten().nonzero().squeeze(1)
            out[f"{name}@indices"] = where.to(torch.int32 if tensor.numel() < 2**31 else torch.int64)
            out[f"{name}@values"] = tensor.flatten()[where]
            out[f"{name}@shape"] = torch.tensor(tensor.shape)
        elif (
            tensor.dtype == torch.float32
            and tensor.numel() >= HALVE_ABOVE
            and tensor.equal(tensor.bfloat16().float())
        ):
            out[f"{name}@bfloat16"] = tensor.bfloat16()
        else:
            out[name] = tensor
    return save(out)


def stored_sparse(tensor: Tensor) -> bool:
    """Whether a tensor is stored as indices and values: a matrix with few nonzeros."""
    return tensor.dim() >= 2 and int(tensor.count_nonzero()) < SPARSE_BELOW * tensor.numel()


def unpack(data: bytes) -> dict[str, Tensor]:
    """The tensors that `pack` packed."""
    stored = load(data)
    out = {name: tensor for name, tensor in stored.items() if "@" not in name}
    for name in [n.removesuffix("@shape") for n in stored if n.endswith("@shape")]:
        values = stored[f"{name}@values"]
        flat = values.new_zeros(int(stored[f"{name}@shape"].prod()))
        flat[stored[f"{name}@indices"].long()] = values
        out[name] = flat.view(stored[f"{name}@shape"].tolist())
    for name in [n.removesuffix("@bfloat16") for n in stored if n.endswith("@bfloat16")]:
        out[name] = stored[f"{name}@bfloat16"].float()
    return out


def content_hash(model: Transformer) -> str:
    """A short hash of the model's config and weights: what a circuit or a table of means belongs to.

    Where few weights are left, -0.0 counts as 0: stored as indices and values, it comes back as 0.
    """
    digest = hashlib.sha256(model.config.to_json().encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        tensor = tensor.detach().cpu()
        tensor = tensor + 0 if stored_sparse(tensor) else tensor
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
