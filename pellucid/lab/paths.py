"""Which edges lie on a path from the embedding to the output."""

import torch
from torch import Tensor

from pellucid.core.config import ModelConfig
from pellucid.core.edges import edge_table
from pellucid.lab.fills import Ablation
from pellucid.tasks.task import Pairs


def fed(config: ModelConfig) -> list[int | None]:
    """For each reader the number of the writer that it feeds, such as a query's head; None is the output."""
    table = edge_table(config)
    found: list[int | None] = []
    for (_, head), before in zip(table.readers, table.exists.sum(1).tolist(), strict=True):
        if before == len(table.writers):
            found.append(None)
        else:
            several = table.writers[before][1] is not None
            found.append(before + (head or 0) if several else before)
    return found


def silent(batch: Pairs, ablation: Ablation) -> bool:
    """Whether a component that reads nothing writes what it does when ablated, so that cutting it changes nothing.

    So it is under resample ablation, unless the two inputs differ in length: attention then says so by itself.
    """
    return ablation == "resample" and torch.equal(batch.mask, batch.corrupt_mask)


def on_a_path(config: ModelConfig, edges: Tensor, *, from_embedding: bool = True) -> Tensor:
    """Those of the edges (..., readers, writers), bool, from which a path leads to the output.

    With `from_embedding` the path must also begin there: a component that reads nothing is left out as a writer.
    """
    feeds = fed(config)
    edges = edges & edge_table(config).exists.to(edges.device)
    if from_embedding:
        edges = edges & reached(feeds, edges)[..., None, :]
    useful = torch.ones(edges.shape[:-1], dtype=torch.bool, device=edges.device)
    for reader in reversed(range(len(feeds))):
        writer = feeds[reader]
        if writer is not None:
            useful[..., reader] = (edges[..., :, writer] & useful).any(-1)
    return edges & useful[..., None]


def reached(feeds: list[int | None], edges: Tensor) -> Tensor:
    """(..., writers): which writers the embedding, writer 0, reaches along the edges."""
    live = torch.zeros_like(edges[..., 0, :])
    live[..., 0] = True
    for writer in range(1, edges.shape[-1]):
        own = [reader for reader, fed_writer in enumerate(feeds) if fed_writer == writer]
        live[..., writer] = (edges[..., own, :] & live[..., None, :]).any((-1, -2))
    return live
