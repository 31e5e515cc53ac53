"""What a parity code looks like: its sign patterns and coherence in pictures, which features are used, and on which tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from pellucid.core.taps import Recorder
from pellucid.core.transformer import Transformer
from pellucid.parity.code import coherence_bound, directions, inner_products
from pellucid.recipes.figures import draw


def signs_figure(path: str | Path, d: int = 32, children: int = 8) -> Path:
    """The sign patterns of one parent's children, and of the first parents, as rows of black and white."""
    t = d.bit_length() - 1
    parents = directions(d, torch.arange(children))
    siblings = directions(d, 5 | torch.arange(children) << t)

    def plot(axis: Any) -> None:
        gap = np.full((1, d), np.nan)
        axis.imshow(
            np.concatenate([(parents > 0).numpy(), gap, (siblings > 0).numpy()]), cmap="gray", aspect="auto"
        )
        axis.set_yticks(
            [children / 2 - 0.5, 1.5 * children + 0.5],
            [f"directions 0 to {children - 1}", f"children of channel 5 ({children})"],
        )
        axis.set(xlabel=f"channel (d = {d})")
        axis.tick_params(length=0)

    return draw(path, plot, (6.5, 2.6))


def coherence_figure(path: str | Path, d: int = 256, seed: int = 0) -> Path:
    """|inner products| of all pairs of the d^2 directions, of as many random sign vectors, and the bound."""
    code = np.concatenate([inner_products(d, beta)[int(beta == 0) :].abs().numpy() for beta in range(d)])
    rng = np.random.default_rng(seed)
    random = np.abs(2 * rng.binomial(d, 0.5, len(code)) / d - 1)

    def plot(axis: Any) -> None:
        bins = (np.arange(0, 0.32, 4 / d) - 1 / d).tolist()
        axis.hist(random, bins, histtype="step", label=f"random signs (largest {random.max():.3f})")
        axis.hist(code, bins, histtype="step", label=f"computed directions (largest {code.max():.3f})")
        axis.axvline(coherence_bound(d), color="grey", linestyle="--", linewidth=0.8, label="the bound")
        axis.set(
            xlabel=f"|inner product| of two of the {d * d:,} directions (d = {d})",
            ylabel="pairs",
            yscale="log",
        )
        axis.yaxis.set_major_formatter("{x:,.0f}")
        axis.legend(frameon=False, fontsize=8)

    return draw(path, plot, (6.5, 3))


@torch.no_grad()
def codes(model: Transformer, tokens: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """(index, score), both (b, t, K), of a layer's bottleneck on token windows (b, t)."""
    sites = (f"{layer}.mlp.code.index", f"{layer}.mlp.code")
    recorder = Recorder(sites)
    model(tokens.to(model.device), tap=recorder)
    index, score = (recorder.values[site].cpu() for site in sites)
    return index, score


def firings_figure(
    path: str | Path, model: Transformer, tokenizer: Tokenizer, text: str, layer: int, n: int = 6
) -> Path:
    """Scores of a layer's features on a short text, tokens from left to right: the `n` channels and the `n` directions of
    largest |score| on any token, each in the order of those tokens."""
    ids = torch.tensor([tokenizer.encode(text).ids])
    index, score = (value[0] for value in codes(model, ids, layer))
    d, tokens = model.config.d_model, [tokenizer.decode([i]) for i in ids[0].tolist()]
    every = torch.zeros(len(tokens), int(index.max()) + 1).scatter(1, index, score.float())
    most, peak = every.abs().max(0)
    kinds = torch.arange(d), torch.arange(d, every.shape[1])
    top = [kind[most[kind].argsort(descending=True, stable=True)[:n]] for kind in kinds]
    chosen = torch.cat([kind[peak[kind].argsort(stable=True)] for kind in top])
    names = [
        f"channel {f}" if f < d else f"feature {f}: channel {f % d}, child {f // d - 1}"
        for f in chosen.tolist()
    ]

    def plot(axis: Any) -> None:
        largest = float(most.max())
        image = axis.imshow(
            every[:, chosen].T.numpy(), cmap="RdBu_r", vmin=-largest, vmax=largest, aspect="auto"
        )
        axis.set_yticks(range(len(names)), names)
        axis.set_xticks(
            range(len(tokens)),
            [token.replace("\n", "↵").replace(" ", "·") for token in tokens],
            rotation=90,
            family="monospace",
        )
        axis.set_xticks(np.arange(len(tokens)) - 0.5, minor=True)
        axis.set_yticks(np.arange(len(names)) - 0.5, minor=True)
        axis.grid(which="minor", color="0.9", linewidth=0.5)
        axis.tick_params(which="both", length=0, labelsize=8)
        axis.figure.colorbar(image, ax=axis, label=f"score in layer {layer}", shrink=0.8)

    return draw(path, plot, (7.5, 1 + 0.22 * len(names)))


def usage(model: Transformer, tokens: Any, n_tokens: int, rows: int = 16) -> Tensor:
    """(layers, features) how often each feature is active on the first `n_tokens` of `tokens`, in whole windows."""
    width, n = model.config.n_ctx, 0
    block: Any = model.blocks[0]
    features = block.mlp.input.config.features
    counts = torch.zeros(len(model.blocks), features, dtype=torch.int64)
    stop = min(n_tokens, len(tokens)) // width * width
    while n < stop:
        window = np.asarray(tokens[n : min(n + rows * width, stop)]).astype(np.int64)
        window = torch.from_numpy(window).view(-1, width)
        recorder = Recorder({f"{layer}.mlp.code.index" for layer in range(len(model.blocks))})
        with torch.no_grad():
            model(window.to(model.device), tap=recorder)
        for layer in range(len(model.blocks)):
            index = recorder.values[f"{layer}.mlp.code.index"].flatten().cpu()
            counts[layer] += torch.bincount(index, minlength=counts.shape[1])
        n += window.numel()
    return counts


@dataclass(frozen=True)
class Firing:
    """A feature of a layer, and where it was most active: (score, text before, the token)."""

    layer: int
    feature: int
    share: float
    """Of the tokens in which it is active."""
    places: tuple[tuple[float, str, str], ...]


def firings(
    model: Transformer,
    tokenizer: Tokenizer,
    tokens: Tensor,
    layer: int,
    features: Sequence[int],
    top: int = 4,
) -> list[Firing]:
    """Where each of `features` has its largest |score| on token windows (b, t)."""
    index, score = codes(model, tokens, layer)
    found = []
    for feature in features:
        rows, places, slots = torch.where(index == feature)
        order = score[rows, places, slots].abs().argsort(descending=True)[:top].tolist()
        found.append(
            Firing(
                layer,
                feature,
                len(rows) / index[..., 0].numel(),
                tuple(
                    (
                        round(float(score[rows[i], places[i], slots[i]]), 2),
                        tokenizer.decode(tokens[rows[i], max(0, int(places[i]) - 6) : places[i]].tolist()),
                        tokenizer.decode([int(tokens[rows[i], places[i]])]),
                    )
                    for i in order
                ),
            )
        )
    return found


def telling(model: Transformer, tokens: Tensor, layer: int, n: int = 12, least: int = 20) -> list[int]:
    """At most `n` directions (no channels) whose active tokens are least alike chance: the largest share of one token,
    among those active at least so many times."""
    index, _ = codes(model, tokens, layer)
    d = model.config.d_model
    flat, said = index.flatten(), tokens[..., None].expand_as(index).flatten()
    pairs, counts = torch.unique(torch.stack([flat, said]), dim=1, return_counts=True)
    total = torch.bincount(flat)
    most = torch.zeros(len(total)).scatter_reduce(0, pairs[0], counts.float(), "amax")
    share = torch.where(total >= least, most / total.clamp(min=1), 0)
    share[:d] = 0
    order = share.argsort(descending=True, stable=True)[:n]
    return order[share[order] > 0].tolist()
