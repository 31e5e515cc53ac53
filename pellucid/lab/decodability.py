"""What a method says of representations: how well each feature is read from the residual stream at each site."""

from dataclasses import dataclass

from torch import Tensor

from pellucid.core.record import record
from pellucid.core.sites import stream_sites
from pellucid.core.transformer import Transformer
from pellucid.lab.fills import real
from pellucid.tasks.task import Pairs


@dataclass(frozen=True, eq=False)
class Decodability:
    """How well each feature is read at each site: 1 is always right, 0 is chance, NaN where there is nothing to tell."""

    features: tuple[str, ...]
    sites: tuple[str, ...]
    scores: Tensor
    """(feature, site)."""
    control: Tensor | None = None
    """(feature, site): the same for labels drawn at random for each token and position; None: without."""

    @property
    def selectivity(self) -> Tensor:
        """(feature, site): by how much the feature is read better than its control (Hewitt and Liang, 2019)."""
        if self.control is None:
            raise ValueError("selectivity needs control labels, and there were none")
        return self.scores - self.control


def streams(model: Transformer, batch: Pairs) -> dict[str, Tensor]:
    """The residual stream (b, t, d) at each of `stream_sites` on the batch's tokens, without gradients."""
    return record(model, batch.tokens, stream_sites(model.config), mask=real(model, batch.mask))
