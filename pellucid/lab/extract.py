"""Extraction: a circuit as a small model of its own, with the masked model's logits.

Weight-sparse transformers, section 2.2 and A.5. What frozen nodes send is folded into biases, and weights are cut to
the circuit's nodes. A residual channel that no node of the circuit writes depends on the token alone: its share of each
norm, and its value where it is read, are tables over tokens. Axes as in `core.transformer`, and: u known tokens, w
residual channels that the circuit writes, r channels that a sublayer reads, o output tokens.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pellucid.core.attention import allowed_keys, fused_attention
from pellucid.core.checkpoint import content_hash
from pellucid.core.circuit import Circuit, count_edges, kept_masks
from pellucid.core.config import ModelConfig
from pellucid.core.errors import unknown
from pellucid.core.sites import node_sites
from pellucid.core.transformer import ACTIVATIONS, MLP, Attention, Norm, Read, Transformer
from pellucid.lab.ablate import Kept


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
    kept = circuit_masks(circuit, model) if isinstance(circuit, Circuit) else circuit
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


def circuit_masks(circuit: Circuit, model: Transformer) -> dict[str, Tensor]:
    """`kept_masks` of a channel circuit of this very model."""
    if circuit.universe != "channel":
        raise ValueError(f"only channel circuits can be extracted, not those of {circuit.universe!r} nodes")
    if circuit.model != content_hash(model):
        raise ValueError(f"the circuit is of model {circuit.model}, this is model {content_hash(model)}")
    return kept_masks(circuit, model)


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


@dataclass(frozen=True)
class Stream:
    """The residual stream at one place, as far as it is known without a prompt."""

    carried: Tensor
    """(w,) the channels that the circuit writes."""
    alone: Tensor
    """(d - w,) the others."""
    fixed: Tensor
    """(u, d - w) their values after each known token."""

    def add(self, write: Tensor, activation: Callable[[Tensor], Tensor]) -> "Stream":
        """The stream after a write whose channels outside `carried` are constants."""
        return replace(self, fixed=activation(self.fixed + write[self.alone]))


@dataclass(frozen=True)
class Run:
    """What one forward pass carries beside the residual stream."""

    rows: Tensor
    """(b, t) the tokens' rows in the tables."""
    position: Tensor
    """(b or 1, t) the tokens' positions."""
    allowed: Tensor | None
    """(b, 1, t, s) which keys may be attended to; None is all, or all before where causal."""
    seen: dict[str, Tensor] | None = None
    """Where the nodes' activations go."""

    def at(self, only: Tensor) -> "Run":
        """The same for one position (b,) of each row, with no more attention to come."""
        position = self.position.expand(len(self.rows), -1)
        return Run(at(self.rows, only), at(position, only), None, self.seen)


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


class Constant(nn.Module):
    """A sublayer none of whose writes is in the circuit."""

    write: Tensor
    nodes: Mapping[str, Tensor] = {}

    def __init__(self, write: Tensor):
        super().__init__()
        hold(self, write=write)

    def forward(self, x: Tensor, run: Run) -> Tensor:
        return self.write


class CutNorm(nn.Module):
    """A norm over the whole residual stream, computed at some of its `channels` (r,), in that order."""

    inside: Tensor
    table: Tensor
    mean: Tensor | None
    square: Tensor | None
    gain: Tensor | None
    bias: Tensor | None

    def __init__(self, norm: Norm, wanted: Tensor, stream: Stream):
        """`wanted` (d,) is a mask of the channels to compute."""
        super().__init__()
        self.kind, self.eps, self.width = norm.kind, norm.eps, norm.width
        self.n_fixed = len(stream.alone)
        inside, outside = wanted[stream.carried], wanted[stream.alone]
        self.channels = torch.cat([stream.carried[inside], stream.alone[outside]])
        mean, square = None, None
        if self.kind == "layer":
            mean = stream.fixed.sum(1) / max(1, self.n_fixed)
            square = (stream.fixed - mean[:, None]).square().sum(1)
        elif self.kind == "rms":
            square = stream.fixed.square().sum(1)
        hold(
            self,
            inside=inside.nonzero()[:, 0],
            table=stream.fixed.index_select(1, outside.nonzero()[:, 0]),
            mean=mean,
            square=square,
            gain=None if norm.gain is None else norm.gain[self.channels],
            bias=None if norm.bias is None else norm.bias[self.channels],
        )

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        """Carried channels (b, t, w) -> norm(residual stream) at `channels` (b, t, r)."""
        y = torch.cat([x[..., self.inside], F.embedding(rows, self.table)], dim=-1)
        if self.square is None:
            return y
        square = self.square[rows]
        if self.mean is not None:
            fixed_mean = self.mean[rows]
            mean = (x.sum(-1) + self.n_fixed * fixed_mean) / self.width
            x, y = x - mean[..., None], y - mean[..., None]
            square = square + self.n_fixed * (fixed_mean - mean).square()
        square = square + torch.linalg.vecdot(x, x)
        y = y * torch.rsqrt(square / self.width + self.eps)[..., None]
        y = y if self.gain is None else y * self.gain
        return y if self.bias is None else y + self.bias


class CutRead(nn.Module):
    """What the kept channels of a sublayer's input site hold: norm(residual), beside it norm(position channels)."""

    position: Tensor | None

    def __init__(self, read: Read, kept: Tensor, stream: Stream, positions: Tensor | None):
        super().__init__()
        d = read.norm.width
        self.norm, beside = CutNorm(read.norm, kept[:d], stream), kept[d:].nonzero()[:, 0]
        self.channels = torch.cat([self.norm.channels, d + beside])
        position = None
        if read.position_norm is not None and len(beside):
            position = read.position_norm(positions)[:, beside]
        hold(self, position=position)

    def forward(self, x: Tensor, run: Run) -> Tensor:
        """Carried channels (b, t, w) -> (b, t, r)."""
        y = self.norm(x, run.rows)
        if self.position is None:
            return y
        return torch.cat([y, self.position[run.position].expand(*y.shape[:-1], -1)], dim=-1)


class CutAttention(nn.Module):
    """The heads that the circuit writes from, each with the channels that count in its scores and its mix.

    Every head's channels sit in m slots, the rest of which are 0. A score multiplies query by key channels; of a pair with
    one frozen, the mean is a bias. Under a sink a head's pattern does not add up to 1, so that what its frozen values send
    is not constant: it is one more value channel, always 1.
    """

    weight: Tensor
    bias: Tensor
    scale: Tensor
    sink: Tensor | None
    out_weight: Tensor
    out_bias: Tensor
    query_slots: Tensor
    key_slots: Tensor
    value_slots: Tensor
    writes: Tensor

    def __init__(
        self,
        attn: Attention,
        name: str,
        kept: Kept,
        means: Mapping[str, Tensor],
        stream: Stream,
        positions: Tensor | None,
    ):
        super().__init__()
        self.name, self.causal = name, attn.config.causal
        self.read = CutRead(attn.read, kept[f"{name}.in"], stream, positions)
        q, k, v = (kept[f"{name}.{site}"] for site in "qkv")
        mean_q, mean_k, mean_v = (means[f"{name}.{site}"] for site in "qkv")
        out, head = kept[f"{name}.out"], head_of(attn)
        writes, sent = out[stream.carried].nonzero()[:, 0], torch.where(v, 0, mean_v)
        write = attn.proj.weight.index_select(0, stream.carried[writes])
        mass = write * sent
        live = head_any(v if attn.sink is None else v | (mass != 0).any(0), attn)
        scored, valued = ((q | k) & live[head]).nonzero()[:, 0], v.nonzero()[:, 0]
        n_scored, n_valued = head[scored].bincount(minlength=attn.h), head[valued].bincount(minlength=attn.h)
        self.h = int(live.sum())
        self.m = int(torch.maximum(n_scored, n_valued + int(attn.sink is not None)).max())
        start = (live.cumsum(0) - 1) * self.m

        def slots(channels: Tensor, counts: Tensor) -> Tensor:
            first = counts.cumsum(0) - counts
            rank = torch.arange(len(channels), device=head.device) - first[head[channels]]
            return start[head[channels]] + rank

        a, slot, value_slot = self.h * self.m, slots(scored, n_scored), slots(valued, n_valued)
        frozen = torch.where(kept[f"{name}.in"], 0, means[f"{name}.in"])
        weight, bias = write.new_zeros(3, a, len(self.read.channels)), write.new_zeros(3, a)
        for i, (mask, mean, channels, at) in enumerate(
            ((q, mean_q, scored, slot), (k, mean_k, scored, slot), (v, mean_v, valued, value_slot))
        ):
            rows, moving = i * attn.width + channels, mask[channels]
            weight[i, at] = submatrix(attn.qkv.weight, rows, self.read.channels) * moving[:, None]
            bias[i, at] = torch.where(moving, received(attn.qkv, rows, frozen), mean[channels])
        out_weight = write.new_zeros(len(stream.carried), a)
        out_weight[writes[:, None], value_slot] = write.index_select(1, valued)
        sink, scale = None, head_scales(attn)
        if attn.sink is not None:
            extra = (start + n_valued)[live]
            bias[2, extra] = 1
            out_weight[writes[:, None], extra] = write.new_zeros(len(write), attn.h).index_add(1, head, mass)[
                :, live
            ]
            unscored = (mean_q * mean_k).index_fill(0, scored, 0)
            sink = (attn.sink - scale * torch.zeros_like(scale).index_add(0, head, unscored))[live]
            sent = torch.zeros_like(sent)
        out_bias = means[f"{name}.out"][stream.carried]
        out_bias[writes] = received(attn.proj, stream.carried[writes], sent)
        hold(
            self,
            weight=weight.flatten(0, 1),
            bias=bias.flatten(),
            scale=scale[live][:, None, None],
            sink=sink,
            out_weight=out_weight,
            out_bias=out_bias,
            query_slots=slot[q[scored]],
            key_slots=a + slot[k[scored]],
            value_slots=2 * a + value_slot,
            writes=writes,
        )
        self.nodes = {
            f"{name}.in": self.read.channels,
            f"{name}.q": scored[q[scored]],
            f"{name}.k": scored[k[scored]],
            f"{name}.v": valued,
            f"{name}.out": stream.carried[writes],
        }

    def forward(self, x: Tensor, run: Run, only: Tensor | None = None) -> Tensor:
        """Carried channels of the residual stream (b, t, w) -> what is added to them, at `only` one position or all."""
        y = self.read(x, run)
        qkv = F.linear(y, self.weight, self.bias)
        q, k, v = qkv.unflatten(-1, (3, self.h, self.m)).permute(2, 0, 3, 1, 4)
        allowed = run.allowed
        if only is not None:
            q = at(q.transpose(1, 2), only).transpose(1, 2)
            if allowed is not None:
                allowed = at(allowed.transpose(1, 2), only).transpose(1, 2)
            elif self.causal:
                allowed = (torch.arange(x.shape[1], device=x.device) <= only[:, None])[:, None, None]
        mix = fused_attention(
            q * self.scale,
            k,
            v,
            scale=1.0,
            sink=self.sink,
            allowed=allowed,
            causal=self.causal and only is None,
        )
        write = F.linear(mix.transpose(1, 2).flatten(-2), self.out_weight, self.out_bias)
        if run.seen is not None:
            values = (
                y,
                qkv[..., self.query_slots],
                qkv[..., self.key_slots],
                qkv[..., self.value_slots],
                write[..., self.writes],
            )
            run.seen.update(zip(self.nodes, values, strict=True))
        return write


class CutMLP(nn.Module):
    """The neurons of the circuit. A module that `mlp_input` names is copied, and reads its whole input."""

    weight: Tensor
    bias: Tensor | None
    out_weight: Tensor
    out_bias: Tensor
    fill: Tensor | None
    writes: Tensor

    def __init__(
        self,
        mlp: MLP,
        name: str,
        kept: Kept,
        means: Mapping[str, Tensor],
        stream: Stream,
        positions: Tensor | None,
    ):
        super().__init__()
        self.activation = mlp.activation
        self.read = CutRead(mlp.read, kept[f"{name}.in"], stream, positions)
        self.input = deepcopy(mlp.input)
        neurons = kept[f"{name}.act"].nonzero()[:, 0]
        writes = kept[f"{name}.out"][stream.carried].nonzero()[:, 0]
        written = stream.carried[writes]
        if self.input is None:
            weight = submatrix(mlp.fc.weight, neurons, self.read.channels)
            bias = received(mlp.fc, neurons, torch.where(kept[f"{name}.in"], 0, means[f"{name}.in"]))
        else:
            weight, bias = mlp.fc.weight[neurons], None if mlp.fc.bias is None else mlp.fc.bias[neurons]
        out_weight = weight.new_zeros(len(stream.carried), len(neurons))
        out_weight[writes] = submatrix(mlp.proj.weight, written, neurons)
        out_bias = means[f"{name}.out"][stream.carried]
        out_bias[writes] = received(
            mlp.proj, written, torch.where(kept[f"{name}.act"], 0, means[f"{name}.act"])
        )
        hold(
            self,
            weight=weight,
            bias=bias,
            out_weight=out_weight,
            out_bias=out_bias,
            fill=None if self.input is None else means[f"{name}.in"].clone(),
            writes=writes,
        )
        self.nodes = {
            f"{name}.in": self.read.channels,
            f"{name}.act": neurons,
            f"{name}.out": stream.carried[writes],
        }

    def forward(self, x: Tensor, run: Run) -> Tensor:
        """Carried channels of the residual stream (b, t, w) -> what is added to them (b, t, w)."""
        y = code = self.read(x, run)
        if self.input is not None and self.fill is not None:
            code, _ = self.input(self.fill.expand(*y.shape[:-1], -1).index_copy(-1, self.read.channels, y))
        act = self.activation(F.linear(code, self.weight, self.bias))
        write = F.linear(act, self.out_weight, self.out_bias)
        if run.seen is not None:
            run.seen.update(zip(self.nodes, (y, act, write[..., self.writes]), strict=True))
        return write


def simplify(
    model: Transformer, kept: Kept, means: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The same function with fewer nodes: one that nothing kept moves is frozen at its value, one that moves nothing falls."""
    kept, means = dict(kept), dict(means)
    for number, block in enumerate(model.blocks):
        if block.attn is not None:
            simplify_attention(block.attn, f"{number}.attn", kept, means)
        if block.mlp is not None:
            simplify_mlp(block.mlp, f"{number}.mlp", kept, means)
    return kept, means


def simplify_attention(attn: Attention, name: str, kept: dict[str, Tensor], means: dict[str, Tensor]) -> None:
    """`simplify` of one sublayer, in place."""
    source, out, reads = f"{name}.in", f"{name}.out", [f"{name}.{site}" for site in "qkv"]
    masks, values = settle(
        attn.qkv,
        kept[source],
        means[source],
        torch.cat([kept[site] for site in reads]),
        torch.cat([means[site] for site in reads]),
    )
    (q, k, v), (mean_q, mean_k, mean_v) = masks.split(attn.width), values.split(attn.width)
    # Under a sink even a frozen value's mix moves, with how much attention the sink leaves.
    moving = v if attn.sink is None else v | (mean_v != 0)
    kept[out], means[out] = settle(attn.proj, moving, mean_v, kept[out], means[out])
    moving = moving & sent_to(attn.proj, kept[out])
    live = head_any(moving, attn)[head_of(attn)]
    # A query channel whose key channel is frozen adds the same to all scores, which only a sink tells.
    q = q & live & (k if attn.sink is None else k | (mean_k != 0))
    k = k & live & (q | (mean_q != 0))
    masks = torch.cat([q, k, v & moving])
    kept[source] = kept[source] & sent_to(attn.qkv, masks)
    kept |= zip(reads, masks.split(attn.width), strict=True)
    means |= zip(reads, values.split(attn.width), strict=True)


def simplify_mlp(mlp: MLP, name: str, kept: dict[str, Tensor], means: dict[str, Tensor]) -> None:
    """`simplify` of one sublayer, in place."""
    source, act, out = f"{name}.in", f"{name}.act", f"{name}.out"
    if mlp.input is None:
        kept[act], means[act] = settle(
            mlp.fc, kept[source], means[source], kept[act], means[act], mlp.activation
        )
    kept[out], means[out] = settle(mlp.proj, kept[act], means[act], kept[out], means[out])
    kept[act] = kept[act] & sent_to(mlp.proj, kept[out])
    if mlp.input is None:
        kept[source] = kept[source] & sent_to(mlp.fc, kept[act])


def settle(
    linear: nn.Linear,
    moving: Tensor,
    sent: Tensor,
    kept: Tensor,
    means: Tensor,
    activation: Callable[[Tensor], Tensor] = ACTIVATIONS["identity"],
) -> tuple[Tensor, Tensor]:
    """The readers' `kept` and `means` with those nodes frozen that no `moving` writer reaches, at the value they have."""
    rows = kept.nonzero()[:, 0]
    weight = linear.weight.index_select(0, rows)
    still = ~((weight != 0) & moving).any(1)
    rows = rows[still]
    value = activation(received(linear, rows, torch.where(moving, 0, sent)))
    return kept.index_fill(0, rows, False), means.index_copy(0, rows, value)


def received(linear: nn.Linear, rows: Tensor, sent: Tensor) -> Tensor:
    """What the readers `rows` (n,) get, bias included, if the writers hold `sent`."""
    return F.linear(
        sent, linear.weight.index_select(0, rows), None if linear.bias is None else linear.bias[rows]
    )


def sent_to(linear: nn.Linear, readers: Tensor) -> Tensor:
    """Which writers have a weight to one of the `readers`, a mask."""
    return (linear.weight.index_select(0, readers.nonzero()[:, 0]) != 0).any(0)


def submatrix(weight: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """(rows, columns) of a matrix, as a copy."""
    return weight.index_select(0, rows).index_select(1, columns)


def at(x: Tensor, only: Tensor) -> Tensor:
    """(b, t, ...) -> (b, 1, ...): one position (b,) of each row."""
    return x[torch.arange(len(x), device=x.device), only][:, None]


def position_vectors(model: Transformer) -> Tensor | None:
    """(n_ctx, p) the model's position vectors, where it has any."""
    if model.config.positions == "none":
        return None
    return model.sinusoids if model.wpe is None else model.wpe.weight


def head_of(attn: Attention) -> Tensor:
    """(a,) the head of each channel."""
    sizes = torch.tensor(attn.sizes, device=attn.qkv.weight.device)
    return torch.arange(attn.h, device=sizes.device).repeat_interleave(sizes)


def head_any(channels: Tensor, attn: Attention) -> Tensor:
    """(h,) whether any of a head's channels is in the mask (a,)."""
    return head_of(attn)[channels].bincount(minlength=attn.h) > 0


def head_scales(attn: Attention) -> Tensor:
    """(h,) the factor on each head's scores."""
    return attn.qkv.weight.new_full((attn.h,), attn.scale) if attn.even else attn.scales.flatten()


def hold(module: nn.Module, **tensors: Tensor | None) -> None:
    """Make tensors a module's own, so that they are saved and moved with it."""
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
