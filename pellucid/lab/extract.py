"""Extraction: a circuit as a small model of its own, with the masked model's logits.

Weight-sparse transformers, section 2.2 and A.5. What frozen nodes send is folded into biases, and weights are cut to
the circuit's nodes. A residual channel that no node of the circuit writes depends on the token alone: its share of each
norm, and its value where it is read, are tables over tokens. Axes as in `core.transformer`, and: u known tokens, w
residual channels that the circuit writes, r channels that a sublayer reads, o output tokens.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pellucid.core.attention import allowed_keys
from pellucid.core.circuit import Circuit, count_edges, kept_masks
from pellucid.core.config import ModelConfig
from pellucid.core.errors import unknown
from pellucid.core.sites import node_sites
from pellucid.core.transformer import ACTIVATIONS, Attention, Transformer
from pellucid.lab.ablate import Kept
from pellucid.lab.extracted import Constant, CutAttention, CutMLP, CutNorm, Run, Stream, at, hold, submatrix
from pellucid.lab.simplify import simplify


@torch.no_grad()
def extract(
    model: Transformer,
    circuit: Circuit | Kept,
    means: Mapping[str, Tensor],
    *,
    tokens: Tensor | None = None,
    outputs: Tensor | None = None,
) -> "ExtractedCircuit":
    """The circuit as a stand-alone model: its logits are those of `model(..., tap=keep_only(kept, means))`.

    `tokens` are the input tokens that it will meet, which makes it smaller and quicker to extract; None is all.
    `outputs` (o,) are the output tokens that it gives logits of; None is all. Raises `ValueError` for a circuit of
    another model, for masks and means that do not fit the model, and for a model with AbsTopK, where channels outside
    the circuit compete with it for places.
    """
    config = model.config
    sparsity = config.activation_sparsity
    if sparsity is not None and competes(config):
        raise ValueError(
            "a circuit of a model with AbsTopK cannot be extracted: channels outside it compete for places at "
            f"{', '.join(sparsity.sites)}; run the whole model with keep_only(kept, means)"
        )
    kept = kept_masks(circuit, model) if isinstance(circuit, Circuit) else circuit
    check_fit("mask", kept, config)
    check_fit("mean", means, config)
    for site, mask in kept.items():
        if mask.dtype != torch.bool:
            raise ValueError(f"the mask of {site!r} must be of bools, got {mask.dtype}")
    kept = {site: mask.to(model.device) for site, mask in kept.items()}
    means = {site: mean.to(model.wte.weight) for site, mean in means.items()}
    tokens = vocabulary("token", tokens, config.vocab_size, model.device)
    outputs = vocabulary("output", outputs, config.d_vocab_out, model.device)
    return ExtractedCircuit(model, kept, means, tokens, outputs)


def competes(config: ModelConfig) -> bool:
    """Whether channels outside a circuit compete with it for places: under AbsTopK."""
    sparsity = config.activation_sparsity
    return sparsity is not None and bool(sparsity.sites) and sparsity.fraction < 1


def can_extract(config: ModelConfig, means: Mapping[str, Tensor]) -> bool:
    """Whether circuits of a model can be extracted: it has no AbsTopK, and its means are the same at every position."""
    return not competes(config) and all(mean.dim() == 1 for mean in means.values())


def check_fit(kind: str, values: Mapping[str, Tensor], config: ModelConfig) -> None:
    """Raise a `ValueError` unless `values` has a tensor (width,) for every node site of the model, and no other."""
    widths = node_sites(config)
    for site in values:
        if site not in widths:
            raise unknown("node site", site, widths)
    for site, width in widths.items():
        if site not in values:
            raise ValueError(f"{site!r} has no {kind}")
        if values[site].shape != (width,):
            raise ValueError(
                f"the {kind} of {site!r} must have shape ({width},), got {tuple(values[site].shape)}"
            )


def vocabulary(kind: str, some: Tensor | None, size: int, device: torch.device) -> Tensor:
    """The tokens in `some`, None being all of the vocabulary."""
    if some is None:
        return torch.arange(size, device=device)
    some = some.flatten().to(device)
    wrong = some[(some < 0) | (some >= size)]
    if len(wrong):
        raise ValueError(f"{kind} {int(wrong[0])} is not in the vocabulary of {size}")
    return some.unique() if kind == "token" else some


class ExtractedCircuit(nn.Module):
    """A circuit alone, made by `extract`.

    `nodes[site]` are the channels of a site that it computes: those of the circuit, less those that nothing in it moves,
    which are constants, and those that move nothing. `edges` is the number of nonzero weights between the circuit's nodes.
    """

    row: Tensor
    """(vocab,) each token's row in the tables, -1 for those that it was not extracted for."""
    embedding: Tensor
    unembedding: Tensor
    positions: Tensor | None
    bigram: Tensor | None
    logits_bias: Tensor | None

    def __init__(
        self, model: Transformer, kept: Kept, means: Mapping[str, Tensor], tokens: Tensor, outputs: Tensor
    ):
        super().__init__()
        self.config, self.edges = model.config, count_edges(model, kept)
        self.activation = ACTIVATIONS[self.config.residual_activation]
        kept, means = simplify(model, kept, means)
        positions = position_vectors(model)
        added = positions is not None and self.config.d_position is None
        written = torch.full((self.config.d_model,), added, device=model.device)
        for site, mask in kept.items():
            if site.endswith(".out"):
                written = written | mask
        carried, alone = written.nonzero()[:, 0], (~written).nonzero()[:, 0]
        values = model.wte.weight.index_select(0, tokens)
        stream = Stream(carried, alone, values.index_select(1, alone))
        nothing = values.new_zeros(self.config.d_model)
        self.nodes: dict[str, Tensor] = {}
        self.sublayers = nn.ModuleList()
        for number, block in enumerate(model.blocks):
            for kind, part in (("attn", block.attn), ("mlp", block.mlp)):
                name = f"{number}.{kind}"
                write = nothing if part is None else means[f"{name}.out"]
                if part is None or not bool(kept[f"{name}.out"].any()):
                    sublayer = Constant(write[carried])
                elif isinstance(part, Attention):
                    sublayer = CutAttention(part, name, kept, means, stream, positions)
                else:
                    sublayer = CutMLP(part, name, kept, means, stream, positions)
                self.nodes |= sublayer.nodes
                self.sublayers.append(sublayer)
                stream = stream.add(write, self.activation)
        attends = [i for i, sublayer in enumerate(self.sublayers) if isinstance(sublayer, CutAttention)]
        self.last = max(attends, default=-1)
        self.norm = CutNorm(model.norm, torch.ones_like(written), stream)
        row = torch.full((self.config.vocab_size,), -1, device=model.device)
        row[tokens] = torch.arange(len(tokens), device=model.device)
        hold(
            self,
            row=row,
            embedding=values.index_select(1, carried),
            positions=positions.clone() if positions is not None and added else None,
            unembedding=submatrix(model.unembedding, outputs, self.norm.channels),
            bigram=None if model.bigram is None else submatrix(model.bigram, tokens, outputs),
            logits_bias=None if model.logits_bias is None else model.logits_bias[outputs],
        )

    def forward(self, tokens: Tensor, *, mask: Tensor | None = None, only: Tensor | None = None) -> Tensor:
        """tokens (b, t) -> logits (b, t, o); with `only` (b,), of just that position of each row, (b, 1, o).

        `mask` (b, t) marks real tokens. Raises `ValueError` for tokens that the circuit was not extracted for and for
        sequences longer than `n_ctx`.
        """
        x, run = self.stream(self.begin(tokens, mask), only)
        logits = F.linear(self.norm(x, run.rows), self.unembedding, self.logits_bias)
        return logits if self.bigram is None else logits + F.embedding(run.rows, self.bigram)

    def activations(self, tokens: Tensor, *, mask: Tensor | None = None) -> dict[str, Tensor]:
        """Each site's (b, t, n) values of its `nodes`."""
        seen: dict[str, Tensor] = {}
        self.stream(self.begin(tokens, mask, seen))
        return seen

    def stream(self, run: Run, only: Tensor | None = None) -> tuple[Tensor, Run]:
        """The residual stream's carried channels (b, t, w) before the last norm, or from the last attention on `only`
        one position of each row (b, 1, w); and what the run then carries."""
        x = F.embedding(run.rows, self.embedding)
        if self.positions is not None:
            x = x + self.positions[run.position]
        if only is not None:
            only = torch.arange(x.shape[1], device=x.device)[only]  # negative ones count from the end
            if self.last < 0:
                x, run = at(x, only), run.at(only)
        for number, sublayer in enumerate(self.sublayers):
            if only is not None and number == self.last:
                write = sublayer(x, run, only)
                x, run = at(x, only), run.at(only)
            else:
                write = sublayer(x, run)
            x = self.activation(x + write)
        return x, run

    def begin(self, tokens: Tensor, mask: Tensor | None, seen: dict[str, Tensor] | None = None) -> Run:
        """The tokens looked up, with a `ValueError` for those that the circuit cannot take."""
        if tokens.dim() != 2 or tokens.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"tokens must be integers of shape (batch, position), got {tokens.dtype} {tuple(tokens.shape)}"
            )
        t, vocab, n_ctx = tokens.shape[1], self.config.vocab_size, self.config.n_ctx
        if t > n_ctx:
            raise ValueError(f"{t} tokens do not fit into n_ctx = {n_ctx}")
        if mask is not None and mask.shape != tokens.shape:
            raise ValueError(f"mask has shape {tuple(mask.shape)}, tokens {tuple(tokens.shape)}")
        rows = self.row[tokens.clamp(0, vocab - 1)]
        wrong = (rows < 0) | (tokens < 0) | (tokens >= vocab)
        if wrong.any():
            raise ValueError(f"token {int(tokens[wrong][0])} is not one that the circuit was extracted for")
        if mask is None:
            return Run(rows, torch.arange(t, device=tokens.device)[None], None, seen)
        real = mask.bool()
        return Run(rows, (real.cumsum(1) - 1).clamp(min=0), allowed_keys(real, t, self.config.causal), seen)


def position_vectors(model: Transformer) -> Tensor | None:
    """(n_ctx, p) the model's position vectors, where it has any."""
    if model.config.positions == "none":
        return None
    return model.sinusoids if model.wpe is None else model.wpe.weight
