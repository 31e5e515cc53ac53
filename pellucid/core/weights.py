"""The component graph of a model's weights: which writer's matrix meets which reader's."""

import torch
from torch import Tensor

from pellucid.core.edges import edge_table
from pellucid.core.transformer import MLP, Norm, Transformer

TOLERANCE = 1e-5
"""A product counts as zero below so much of the lengths of its row and column."""


@torch.no_grad()
def weight_graph(model: Transformer, tolerance: float = TOLERANCE) -> Tensor:
    """(readers, writers), bool: whether the reader's matrix times the writer's is not zero.

    Zero is at most `tolerance` times the lengths of row and column. An MLP's output bias counts as what it writes. A module
    between an MLP's norm and the MLP (`mlp_input`) is taken to read every direction.
    """
    table = edge_table(model.config)
    reads, writes = read_matrices(model), write_matrices(model)
    found = torch.zeros(table.exists.shape, dtype=torch.bool)
    for r, w in table.exists.nonzero().tolist():
        found[r, w] = meets(reads[r], writes[w], tolerance)
    return found


def meets(read: Tensor, write: Tensor, tolerance: float) -> bool:
    """Whether (channels, d) @ (d, directions) is not zero, beside rounding."""
    rows, columns = read.norm(dim=1), write.norm(dim=0)
    rows, columns = (x.where(x > tolerance * x.max(), torch.inf) for x in (rows, columns))
    return bool(((read @ write).abs() > tolerance * rows[:, None] * columns).any())


def read_matrices(model: Transformer) -> list[Tensor]:
    """What every reader reads of the residual stream, (channels, d), in the order of the edge table."""
    d, found = model.config.d_model, []
    for block in model.blocks:
        if block.attn is not None:
            for side in block.attn.qkv.weight.split(block.attn.width):
                found += [gained(part[:, :d], block.attn.read.norm) for part in side.split(block.attn.sizes)]
        if block.mlp is not None:
            found.append(gained(neurons(block.mlp, d), block.mlp.read.norm))
    return [*found, gained(model.unembedding, model.norm)]


def neurons(mlp: MLP, d: int) -> Tensor:
    """(n, d): what an MLP's neurons read."""
    return mlp.fc.weight[:, :d] if mlp.input is None else torch.eye(d).to(mlp.fc.weight)


def gained(matrix: Tensor, norm: Norm) -> Tensor:
    return (matrix if norm.gain is None else matrix * norm.gain).cpu().double()


def write_matrices(model: Transformer) -> list[Tensor]:
    """What every writer can write, (d, directions), in the order of the edge table."""
    embedded = [model.wte.weight]
    if model.wpe is not None and model.config.d_position is None:
        embedded.append(model.wpe.weight)
    elif model.config.positions == "sinusoidal" and model.config.d_position is None:
        embedded.append(model.sinusoids)
    found = [torch.cat(embedded).T]
    for block in model.blocks:
        if block.attn is not None:
            whole = model.config.keeps("attn.out") is not None
            found += (
                [block.attn.proj.weight] if whole else block.attn.proj.weight.split(block.attn.sizes, dim=1)
            )
        if block.mlp is not None:
            bias = block.mlp.proj.bias
            weight = block.mlp.proj.weight
            found.append(weight if bias is None else torch.cat([weight, bias[:, None]], 1))
    return [matrix.cpu().double() for matrix in found]
