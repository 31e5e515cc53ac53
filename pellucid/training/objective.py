"""What training minimises, as one module: the thing that DDP, FSDP and compile wrap."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from pellucid.core.transformer import Transformer


class Objective(nn.Module):
    """Next-token cross-entropy in nats plus the model's auxiliary loss."""

    def __init__(self, model: Transformer):
        super().__init__()
        self.model = model

    def forward(self, windows: Int[Tensor, "b t+1"]) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """Token windows -> (loss to minimise, cross-entropy alone)."""
        logits, aux = self.model.outputs(windows[:, :-1])
        wide = logits if logits.dtype == torch.float64 else logits.float()
        nll = F.cross_entropy(wide.flatten(0, 1), windows[:, 1:].flatten())
        return nll + aux, nll
