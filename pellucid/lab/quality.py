"""How legible a circuit's nodes are: what they respond to over a corpus, how sparsely, and how connected they are.

Weight-sparse transformers, Figures 10, 38 and 39. The corpus is streamed twice: moments and quantiles first (the
quantiles of a uniform sample of tokens), then densities and examples. Memory is that of one batch of activations, the
sample, and the examples.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from pellucid.core.circuit import Circuit, Frozen, Node, kept_masks, matrices
from pellucid.core.taps import Recorder
from pellucid.core.transformer import Transformer
from pellucid.lab.examples import Example, Nearest, fitted, record_nodes, stream
from pellucid.training.optim import kurtosis

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
"""0 is a node's lowest activations, 1 its highest."""
SAMPLE = 8192
"""Tokens that inner quantiles are taken from; in a smaller corpus all of them."""


class QuantileExamples(Frozen):
    """The activation at a quantile, and snippets of text where the node is nearest to it."""

    quantile: float
    activation: float
    examples: tuple[Example, ...]


class NodeQuality(Frozen):
    """A node over a corpus, and its weights inside and outside the circuit."""

    node: Node
    mean: float
    std: float
    kurtosis: float | None
    """Over tokens, not in excess: 3 for a Gaussian, large for a node that is rarely far from its mean; None if constant."""
    active: float
    """The share of tokens on which the node is more than `away` standard deviations from its mean."""
    nonzero: float
    """The share of tokens on which it is not exactly 0."""
    edges_in: int
    """Nonzero weights from the circuit's nodes to this one."""
    edges_out: int
    """Nonzero weights from this node to the circuit's."""
    model_edges_in: int
    """All nonzero weights to this node."""
    model_edges_out: int
    """All nonzero weights from this node."""
    quantiles: tuple[QuantileExamples, ...]


@torch.no_grad()
def node_quality(
    model: Transformer,
    tokens,
    circuit: Circuit,
    *,
    quantiles: Sequence[float] = QUANTILES,
    n: int = 4,
    away: float = 2.0,
    sequences: int = 1024,
    seq_len: int = 96,
    window: int = 12,
) -> list[NodeQuality]:
    """Each of the circuit's nodes on corpus `tokens`, in the whole model: `n` examples a quantile, one a sequence.

    Raises `ValueError` for a circuit of another model, a quantile outside 0..1 and a corpus of under `2 * n` tokens.
    """
    kept_masks(circuit, model)
    if not all(0 <= q <= 1 for q in quantiles):
        raise ValueError(f"quantiles must lie in 0..1, got {tuple(quantiles)}")
    if not circuit.nodes:
        return []
    nodes, (seq_len, window) = circuit.nodes, fitted(model, tokens, n, seq_len, window)

    def corpus() -> Iterable[tuple[Tensor, Tensor]]:
        for part in stream(tokens, sequences=max(n, sequences), seq_len=seq_len):
            yield part, record_nodes(model, part, nodes)

    total = min(max(n, sequences), (len(tokens) - 1) // seq_len) * seq_len
    moments, sample = Moments(len(nodes)), []
    draw = torch.Generator().manual_seed(0)
    for _, values in corpus():
        flat = values.flatten(1)
        moments.see(flat)
        share = math.ceil(flat.shape[1] * min(1.0, SAMPLE / total))
        sample.append(flat[:, torch.randperm(flat.shape[1], generator=draw)[:share]])
    ranked = torch.cat(sample, dim=1).sort(dim=1).values
    last = ranked.shape[1] - 1
    at = torch.stack([ranked[:, round(q * last)] for q in quantiles], dim=1)
    ends = {0.0: (moments.least, -torch.inf), 1.0: (moments.most, torch.inf)}
    targets = at.clone()
    for i, q in enumerate(quantiles):
        if q in ends:
            at[:, i], targets[:, i] = ends[q]

    found = Nearest(targets, n, window)
    far, nonzero = torch.zeros(len(nodes)), torch.zeros(len(nodes))
    for part, values in corpus():
        found.see(part, values)
        distance = (values - moments.mean.float()[:, None, None]).abs()
        far += (distance > away * moments.std.float()[:, None, None]).sum((1, 2))
        nonzero += (values != 0).sum((1, 2))

    inside = degrees((e.writer, e.reader) for e in circuit.edges)
    outside = model_degrees(model, nodes)
    return [
        NodeQuality(
            node=node,
            mean=moments.mean[i].item(),
            std=moments.std[i].item(),
            kurtosis=moments.kurtosis(i),
            active=far[i].item() / total,
            nonzero=nonzero[i].item() / total,
            edges_in=inside[0].get(node, 0),
            edges_out=inside[1].get(node, 0),
            model_edges_in=outside[i][0],
            model_edges_out=outside[i][1],
            quantiles=tuple(
                QuantileExamples(quantile=q, activation=at[i, j].item(), examples=examples)
                for j, (q, examples) in enumerate(zip(quantiles, per_node, strict=True))
            ),
        )
        for i, (node, per_node) in enumerate(zip(nodes, found.examples(), strict=True))
    ]


class Moments:
    """Running moments and bounds of `n` variables, in float64, around each one's first mean."""

    def __init__(self, n: int):
        self.count, self.centre = 0, torch.zeros(n, 1, dtype=torch.float64)
        self.powers = torch.zeros(4, n, dtype=torch.float64)
        self.least, self.most = torch.full((n,), torch.inf), torch.full((n,), -torch.inf)

    def see(self, x: Tensor) -> None:
        """Take in values (n, samples)."""
        self.least = torch.minimum(self.least, x.amin(1))
        self.most = torch.maximum(self.most, x.amax(1))
        x = x.double()
        if not self.count:
            self.centre = x.mean(1, keepdim=True)
        x, power = x - self.centre, torch.ones_like(x)
        for total in self.powers:
            power = power * x
            total += power.sum(1)
        self.count += x.shape[1]

    @property
    def mean(self) -> Tensor:
        return self.centre[:, 0] + self.powers[0] / self.count

    @property
    def variance(self) -> Tensor:
        m1, m2, _, _ = self.powers / self.count
        return (m2 - m1**2).clamp(min=0)

    @property
    def std(self) -> Tensor:
        return self.variance.sqrt()

    def kurtosis(self, i: int) -> float | None:
        """The fourth central moment of variable `i` over its squared variance; None if it never changes."""
        if self.least[i] == self.most[i]:
            return None
        m1, m2, m3, m4 = (self.powers[:, i] / self.count).tolist()
        return (m4 - 4 * m1 * m3 + 6 * m1**2 * m2 - 3 * m1**4) / (m2 - m1**2) ** 2


def degrees(edges: Iterable[tuple[Node, Node]]) -> tuple[dict[Node, int], dict[Node, int]]:
    """How many edges (writer, reader) end and begin at each node."""
    into: dict[Node, int] = {}
    out: dict[Node, int] = {}
    for writer, reader in edges:
        into[reader] = into.get(reader, 0) + 1
        out[writer] = out.get(writer, 0) + 1
    return into, out


def model_degrees(model: Transformer, nodes: Sequence[Node]) -> list[tuple[int, int]]:
    """For each node the nonzero weights to and from it in the attention and MLP matrices."""
    into: dict[str, Tensor] = {}
    out: dict[str, Tensor] = {}
    for writer, reader, weight in matrices(model):
        into[reader] = into.get(reader, 0) + (weight != 0).sum(1)
        out[writer] = out.get(writer, 0) + (weight != 0).sum(0)
    return [
        tuple(int(counts[node.site][node.channel]) if node.site in counts else 0 for counts in (into, out))  # type: ignore[misc]
        for node in nodes
    ]


@torch.no_grad()
def kurtosis_by_site(
    model: Transformer,
    tokens,
    sites: Sequence[str] | None = None,
    *,
    sequences: int = 1024,
    seq_len: int = 96,
) -> dict[str, float]:
    """log of the mean over tokens of the kurtosis over channels, not in excess: of the residual stream at each site.

    `sites` are by default all of the residual stream; `final` is the one of Figure 10.
    """
    if sites is None:
        sites = [name for name in model.sites if ".resid." in name or name == "final"]
    recorder = Recorder(sites)
    seq_len = fitted(model, tokens, 1, seq_len, 1)[0]
    total, count = dict.fromkeys(sites, 0.0), 0
    for part in stream(tokens, sequences=sequences, seq_len=seq_len):
        model(part.to(model.device), tap=recorder)
        for site in total:
            total[site] += math.exp(kurtosis(recorder.values[site])) * part.numel()
        count += part.numel()
    return {site: math.log(x / count) for site, x in total.items()}
