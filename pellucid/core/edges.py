"""Edges of the component universe: every path from one component's write to a later one's read."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from pellucid.core.config import ModelConfig
from pellucid.core.taps import Recorder, Tap
from pellucid.core.transformer import Transformer


@dataclass(frozen=True)
class EdgeTable:
    """The writers and readers of a model, in the order of the computation, and which writer comes before which reader."""

    writers: tuple[tuple[str, int | None], ...]
    """(site, head); head is None where the site is one writer."""
    readers: tuple[tuple[str, int | None], ...]
    exists: Tensor
    """(readers, writers), bool."""

    @property
    def n_edges(self) -> int:
        return int(self.exists.sum())


def edge_table(config: ModelConfig) -> EdgeTable:
    """All residual-path edges of a model. A `ValueError` where the residual stream is not a plain sum."""
    if config.residual_activation != "identity" or config.keeps("resid.mid") or config.keeps("resid.post"):
        raise ValueError(
            "edges need a residual stream that is a plain sum: it has a residual activation or AbsTopK here"
        )
    writers: list[tuple[str, int | None]] = [("embed", None)]
    readers: list[tuple[str, int | None]] = []
    before: list[int] = []
    for number, layer in enumerate(config.layers):
        heads = range(len(layer.heads))
        for reader in ("q", "k", "v"):
            readers += [(f"{number}.attn.{reader}.read", head) for head in heads]
            before += [len(writers)] * len(heads)
        if layer.heads and config.keeps("attn.out") is not None:
            writers.append((f"{number}.attn.out", None))
        else:
            writers += [(f"{number}.attn.head", head) for head in heads]
        if layer.d_mlp:
            readers.append((f"{number}.mlp.read", None))
            before.append(len(writers))
            writers.append((f"{number}.mlp.out", None))
    readers.append(("final.read", None))
    before.append(len(writers))
    exists = torch.arange(len(writers)) < torch.tensor(before)[:, None]
    return EdgeTable(tuple(writers), tuple(readers), exists)


def record_writes(model: Transformer, tokens: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
    """What every writer writes on `tokens` (b, t), by site: heads stacked as (b, t, h, d)."""
    recorder = Recorder({site for site, _ in edge_table(model.config).writers})
    model(tokens, mask=mask, tap=recorder)
    return recorder.values


class EdgeTap(Tap):
    """Cuts edges: each reader gets, for every edge into it, (1 - keep) * (corrupt write - current write) added.

    `keep` is (readers, writers) or, with one mask for each row of the batch, (b, readers, writers), in the order of
    `edge_table(config)`. All ones leave the model as it is; all zeros give the corrupt run, except for what a bigram table
    adds: it reads the tokens and is no writer.
    """

    def __init__(
        self,
        config: ModelConfig,
        corrupt: dict[str, Tensor],
        keep: Float[Tensor, "*b readers writers"],
    ):
        table = edge_table(config)
        if keep.shape[-2:] != table.exists.shape:
            raise ValueError(f"keep must end in {tuple(table.exists.shape)}, got {tuple(keep.shape)}")
        super().__init__({site for site, _ in table.writers} | {site for site, _ in table.readers})
        self.corrupt, self.cut = corrupt, 1 - (keep if keep.dim() == 3 else keep[None])
        self.write_sites = {site for site, _ in table.writers}
        self.rows = {
            site: [i for i, (s, _) in enumerate(table.readers) if s == site] for site, _ in table.readers
        }
        self.differences: list[Tensor] = []

    def __call__(self, site: str, x: Tensor) -> Tensor:
        if site in self.write_sites:
            if site == "embed":
                self.differences = []
            difference = self.corrupt[site] - x
            self.differences += difference.unbind(2) if difference.dim() == 4 else [difference]
            return x
        so_far = torch.stack(self.differences)
        cut = self.cut[:, self.rows[site], : len(so_far)].to(x.dtype)
        added = torch.einsum("brw,wbtd->btrd", cut.expand(x.shape[0], -1, -1), so_far)
        return x + (added if x.dim() == 4 else added[:, :, 0])
