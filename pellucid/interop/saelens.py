"""Sparse autoencoders of SAELens, trained on our models' activations and scored like our own. Needs the extra `sae`."""

import warnings
from collections.abc import Iterator
from dataclasses import fields
from itertools import chain, count, islice
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from pellucid.core.errors import unknown
from pellucid.core.record import record
from pellucid.core.transformer import Transformer
from pellucid.data.batches import TokenBatches
from pellucid.data.shards import Shard
from pellucid.lab.dictionary import SALT, Dictionary, SparseCoder, check, stream
from pellucid.tasks.task import Task

try:
    with warnings.catch_warnings():  # SAELens imports a module that TransformerLens is about to drop
        warnings.simplefilter("ignore", DeprecationWarning)
        from sae_lens import SAE, SAETrainer, TopKSAE, TopKSAEConfig  # pyright: ignore[reportMissingImports]
        from sae_lens.config import SAETrainerConfig  # pyright: ignore[reportMissingImports]
        from sae_lens.registry import SAE_TRAINING_CLASS_REGISTRY  # pyright: ignore[reportMissingImports]
        from sae_lens.training.mixing_buffer import mixing_buffer  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise ImportError(
        "pellucid.interop.saelens needs the package `sae-lens`: pip install pellucid[sae]"
    ) from error

WINDOWS = 16  # of a shard, run through the model at once
MIXED = 16  # batches held by the buffer that mixes a shard's rows
SCALED = 32  # batches that say the mean and the scale of rows
DEAD = 100  # steps without a row after which a feature is pulled towards what is missed


class SAEDictionary(SparseCoder):
    """A SAELens autoencoder of any architecture, in the form that `lab.dictionary.recovery` scores."""

    def __init__(self, sae: SAE):
        self.sae = sae.eval()
        self.decoder = sae.W_dec.detach()

    @torch.no_grad()
    def encode(self, x: Tensor) -> Tensor:
        """(..., d) -> (..., n)."""
        return self.sae.encode(x)

    @torch.no_grad()
    def decode(self, code: Tensor) -> Tensor:
        """(..., n) -> (..., d)."""
        return self.sae.decode(code)


def to_saelens(dictionary: Dictionary) -> TopKSAE:
    """Our dictionary as a SAELens autoencoder of the same code and reconstruction. `SAEDictionary` is the way back."""
    n, d = dictionary.decoder.shape
    sae = TopKSAE(TopKSAEConfig(d_in=d, d_sae=n, k=dictionary.k, device=str(dictionary.decoder.device)))
    weights = {"W_enc": dictionary.encoder.T, "W_dec": dictionary.decoder, "b_dec": dictionary.centre}
    sae.load_state_dict({**weights, "b_enc": torch.zeros(n)})
    return sae


def activations(
    model: Transformer,
    source: Task | Shard,
    *,
    site: str = "final",
    batch_size: int = 256,
    pairs: int = 512,
    seed: int = 0,
) -> Iterator[Tensor]:
    """Batches (batch_size, d) of what passes `site`, without end.

    Of a task: rows drawn from all real tokens of so many pairs. Of a shard: its windows in a new order each epoch, mixed.
    """
    if isinstance(source, Shard):
        yield from mixing_buffer(MIXED * batch_size, batch_size, windows(model, source, site, seed))
    else:
        rows = stream(model, source, site, pairs, seed)
        draw = torch.Generator().manual_seed(seed + SALT)
        while True:
            yield rows[torch.randint(len(rows), (batch_size,), generator=draw).to(rows.device)]


def windows(model: Transformer, shard: Shard, site: str, seed: int) -> Iterator[Tensor]:
    """What passes `site` at all tokens of some of the shard's windows (r, d), without end."""
    batches = TokenBatches(shard, WINDOWS, model.config.n_ctx, seed=seed)
    for step in count():
        tokens = batches.at(step)[:, :-1].to(model.device)
        yield record(model, tokens, [site])[site].flatten(0, 1)


def fit(
    batches: Iterator[Tensor],
    *,
    size: int,
    architecture: str = "topk",
    steps: int = 1500,
    lr: float = 1e-2,
    seed: int = 0,
    **options: Any,
) -> SAEDictionary:
    """Train `size` features on one batch of rows (r, d) a step, by SAELens' own trainer.

    `options` are fields of the architecture's training config: `k`, `l1_coefficient`, `matryoshka_widths`. Rows are centred
    and scaled to a mean length of sqrt(d), so that coefficients mean the same anywhere; both are folded into the weights.
    Raises `ValueError` for unknown architectures and options, sizes that make no dictionary, and batches that run out.
    """
    if architecture not in SAE_TRAINING_CLASS_REGISTRY:
        raise unknown("architecture", architecture, SAE_TRAINING_CLASS_REGISTRY)
    trained, config = SAE_TRAINING_CLASS_REGISTRY[architecture]
    names = [field.name for field in fields(config)]
    for name in options:
        if name not in names:
            raise unknown(f"option of {architecture}", name, names)
    with torch.random.fork_rng(), TemporaryDirectory() as path:
        torch.manual_seed(seed + SALT)
        start = list(islice(batches, SCALED)) or [torch.empty(0)]
        rows, place = torch.cat(start).float(), {"device": str(start[0].device)}
        options = {"normalize_activations": "expected_average_only_in", **place, **options}
        settings = config(d_in=rows.shape[-1], d_sae=size, **options)
        check(rows, size, getattr(settings, "k", 1), "nothing")
        centre = rows.mean(0) * settings.apply_b_dec_to_input
        schedule = SAETrainerConfig(
            total_training_samples=steps * len(start[0]),
            train_batch_size_samples=len(start[0]),
            lr=lr,
            lr_end=lr,
            lr_decay_steps=steps // 2,
            dead_feature_window=DEAD,
            n_batches_for_norm_estimate=SCALED,
            **place,
        )
        centred = (x.float() - centre for x in chain(start, batches))
        trainer = SAETrainer(schedule, trained(settings), centred)
        try:
            trainer.fit().save_inference_model(path)
        except StopIteration:
            done = trainer.n_training_steps
            raise ValueError(f"the batches ran out after {done} of {steps} steps") from None
        sae = SAE.load_from_disk(path, **place)
    sae.b_dec.data += centre
    return SAEDictionary(sae)
