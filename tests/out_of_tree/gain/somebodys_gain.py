"""Scale gradients; clipping, by whomever, comes later because of the role this provides."""

from kernel_core import Algorithm, hookimpl


class Gain(Algorithm):
    """Multiply every gradient by ``factor``."""

    roles = {"scales-gradients"}

    def __init__(self, factor: float = 2.0) -> None:
        self.factor = factor

    @hookimpl
    def after_train_batch(self, state):
        for parameter in state.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(self.factor)
