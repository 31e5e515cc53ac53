"""How well compressed models do what the compiled one does.

Axes: m model, b batch, t position, D compiled width.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pellucid.compiled.batched import Batched, Inputs
from pellucid.core.record import record


@dataclass(frozen=True)
class Scores:
    """How well a compressed model does what the compiled one does, over all inputs (or those drawn), without BOS."""

    accuracy: float
    """Share of inputs with the right value at every position."""
    position_accuracy: float
    """Share of positions with the right value."""
    balanced_accuracy: float
    """The same for each value of the output, averaged over values."""
    output_loss: float
    """Cross-entropy with the compiled model's value, or squared error of a numerical output."""
    layer_loss: float
    """Squared error of what the sublayers write, summed over these and over D."""
    write_cosine: dict[str, float]
    """Cosine similarity of what each sublayer writes, mapped back to D, with what it writes in the compiled model."""
    stream_cosine: dict[str, float]
    """The same of the residual stream, after the embedding and each sublayer."""


@torch.no_grad()
def measure(models: Batched, data: Inputs) -> list[Scores]:
    """Each model's scores on `data`."""
    model, m = models.model, len(models.widths)
    sums: dict[str, Tensor] = {}
    cosines = {s: [torch.zeros(m), 0] for s in (*models.writes, *models.streams)}
    hits, seen = torch.zeros(m, len(model.outputs)), torch.zeros(len(model.outputs))
    for part in data.parts():
        counted = part.counted
        n = counted.sum()
        wanted = record(models.original, part.tokens, [*cosines, "logits"], mask=part.real)
        logits, values = models(part, cosines)
        codes = model.codes(wanted["logits"])
        right = model.codes(logits) == codes
        hits.index_add_(1, codes[counted], right[:, counted].float())
        seen.index_add_(0, codes[counted], torch.ones(int(n)))
        for name, value in (
            ("accuracy", (right | ~counted).all(2).sum(1)),
            ("output_loss", n * models.output_loss(logits, wanted["logits"], part.share)),
            ("layer_loss", n * models.layer_loss(values, wanted, part.share)),
        ):
            sums[name] = sums.get(name, 0) + value
        for s, layer in (models.writes | models.streams).items():
            some = counted & (wanted[s].norm(dim=-1) > 1e-6)
            there = values[s][:, some] @ models.map_of(layer).mT
            cosines[s][0] += F.cosine_similarity(there, wanted[s][some], dim=-1).sum(1)
            cosines[s][1] += int(some.sum())
    positions, occur = seen.sum(), seen > 0
    recall = (hits / seen)[:, occur].mean(1)
    return [
        Scores(
            accuracy=float(sums["accuracy"][i] / len(data)),
            position_accuracy=float(hits[i].sum() / positions),
            balanced_accuracy=float(recall[i]),
            output_loss=float(sums["output_loss"][i] / positions),
            layer_loss=float(sums["layer_loss"][i] / positions),
            write_cosine={s: float(cosines[s][0][i] / max(1, cosines[s][1])) for s in models.writes},
            stream_cosine={s: float(cosines[s][0][i] / max(1, cosines[s][1])) for s in models.streams},
        )
        for i in range(m)
    ]
