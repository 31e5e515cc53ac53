"""The parts of an extracted circuit: each sublayer cut to the circuit's nodes, what is frozen folded into its biases.

Axes as in `lab.extract`.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pellucid.core.attention import fused_attention
from pellucid.core.transformer import MLP, Attention, Norm, Read
from pellucid.lab.ablate import Kept
from pellucid.lab.simplify import head_any, head_of, received


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


def head_scales(attn: Attention) -> Tensor:
    """(h,) the factor on each head's scores."""
    return attn.qkv.weight.new_full((attn.h,), attn.scale) if attn.even else attn.scales.flatten()


def submatrix(weight: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """(rows, columns) of a matrix, as a copy."""
    return weight.index_select(0, rows).index_select(1, columns)


def at(x: Tensor, only: Tensor) -> Tensor:
    """(b, t, ...) -> (b, 1, ...): one position (b,) of each row."""
    return x[torch.arange(len(x), device=x.device), only][:, None]


def hold(module: nn.Module, **tensors: Tensor | None) -> None:
    """Make tensors a module's own, so that they are saved and moved with it."""
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
