"""Learned node pruning: a gate on every node's write, so that few nodes do what the whole model does.

As weight-sparse transformers learn their masks with HardConcrete gates (Appendix D), but on the writers of the component
universe, not on channels: nodes are those of every other method, and any ablation stands in for what is cut. The step
gates of A.5 find nothing here: where all start open and the loss is 0, all close in the same step.
"""

import torch
from torch import Tensor

from pellucid.core.edges import edge_table
from pellucid.core.taps import Tap
from pellucid.core.transformer import Transformer
from pellucid.lab.edge_masks import MaskConfig, learn
from pellucid.lab.fills import Ablation, Writes, writer_index
from pellucid.lab.gates import HardConcreteGate
from pellucid.lab.patch import draw
from pellucid.lab.scores import Scores
from pellucid.tasks.task import Task


class KeepNodes(Tap):
    """Every writer w writes `keep[:, w]` (b,) of what it would, and for the rest what it is ablated to."""

    def __init__(self, model: Transformer, replaced: Writes, keep: Tensor):
        self.index, self.replaced, self.keep = writer_index(model), replaced, keep
        super().__init__(self.index)

    def __call__(self, site: str, x: Tensor) -> Tensor:
        keep = self.keep[:, None, self.index[site]].to(x.dtype)
        return torch.lerp(self.replaced[site], x, keep[..., None] if x.dim() == 4 else keep)


def node_masks(
    model: Transformer,
    task: Task,
    *,
    pairs: int = 64,
    seed: int = 0,
    ablation: Ablation = "resample",
    config: MaskConfig | None = None,
) -> Scores:
    """A node's score is its mask parameter, the mean over tries and the learning's second half.

    `kept` are the fewest nodes of largest score that reach the target with all others ablated.
    """

    def tap(replaced: Writes, gates: Tensor) -> Tap:
        return KeepNodes(model, replaced, gates)

    config, parts = config or MaskConfig(), len(edge_table(model.config).writers)
    drawn = draw(model, task, pairs, seed)
    learned = learn(model, task, HardConcreteGate(), tap, parts, config, drawn, seed, ablation)
    return Scores("node", learned.values.float().cpu(), learned.passes, kept=learned.kept.cpu())
