"""What a family adds to training, as one object that the loop calls."""

from torch import nn


class Constraint:
    """What the loop asks of a family at each turn. This one asks for nothing: a dense model is trained with it."""

    def trained(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """What the optimiser trains, by name: the model's own parameters, or others that its weights are made of.

        A checkpoint's training state holds the values of those that the model does not.
        """
        return dict(model.named_parameters())

    def begin(self) -> None:
        """What training starts or resumes from is in place; called once."""

    def lr_factor(self, progress: float) -> float:
        """What the learning rate is multiplied by."""
        return 1.0

    def before(self, step: int) -> None:
        """A step's forward pass is next: put the weights that it uses into the model."""

    def backward(self) -> None:
        """The model's parameters have their gradients: make those of what is trained from them."""

    def apply(self, progress: float) -> None:
        """The optimiser has stepped: put the weights that the model is now into it. Progress is in 0..1."""

    def metrics(self) -> dict[str, float]:
        """Numbers for the log."""
        return {}
