"""What the loop asks of a model."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

log = logging.getLogger(__name__)


class TrainableModel(nn.Module, ABC):
    """A model that computes its own loss. ``batch`` is what the dataloader gives, on the model's device.

    Example:
        >>> class Line(TrainableModel):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.line = nn.Linear(1, 1)
        ...
        ...     def forward(self, batch):
        ...         return self.line(batch[0])
        ...
        ...     def loss(self, outputs, batch):
        ...         return nn.functional.mse_loss(outputs, batch[1])
    """

    @abstractmethod
    def forward(self, batch: Any) -> Any:
        """Return the outputs for ``batch``."""

    @abstractmethod
    def loss(self, outputs: Any, batch: Any) -> Tensor:
        """Return the mean loss over ``batch``: a scalar tensor."""

    def eval_forward(self, batch: Any, outputs: Any | None = None) -> Any:
        """Return what the metrics are computed from; the default is ``forward``'s outputs."""
        return self(batch) if outputs is None else outputs

    def loss_weight(self, batch: Any) -> Tensor | float | None:
        """Return how much ``batch`` counts in a mean over several: the number of terms that ``loss`` averages.

        Asked only when a batch is split; ``batch`` is then a microbatch as the loader gave it, not yet on the device.
        None, the default, means the number of samples. A language model returns the number of labels that count.
        """
        return None

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        """Return metrics by name, objects with ``update``, ``compute`` and ``reset``, as torchmetrics has them."""
        return {}

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
        """Give ``metric`` one batch.

        Raises:
            NotImplementedError: the model has metrics and does not say what they are computed from.
        """
        raise NotImplementedError(f"{type(self).__name__} has metrics but does not define update_metric.")

    def export_form(self) -> Mapping[str, Any] | None:
        """Return how another library reads this model, for ``kernel checkpoint export``. Every checkpoint keeps it.

        ``{"format": the library, "prefix": what its names of tensors lack, "files": {file name: document}}``, documents being
        what JSON holds. None, the default, if no other library reads it.
        """
        return None


class Classifier(TrainableModel):
    """Wraps a module that maps inputs to class scores; batches are ``(inputs, targets)``.

    Args:
        module: Maps inputs (B, ...) to scores (B, K).
        num_classes: K; needed for the default metrics.
        train_metrics, val_metrics: torchmetrics objects by name. The default is accuracy if ``num_classes`` is given and
            torchmetrics is installed.
        loss_fn: Maps (scores (B, K), targets (B,)) to a scalar mean; the default is cross entropy.
    """

    def __init__(
        self,
        module: nn.Module,
        num_classes: int | None = None,
        train_metrics: dict[str, Any] | None = None,
        val_metrics: dict[str, Any] | None = None,
        loss_fn: Callable[..., Tensor] = nn.functional.cross_entropy,
    ) -> None:
        super().__init__()
        self.module = module
        self.num_classes = num_classes
        self.loss_fn = loss_fn
        self._train_metrics = train_metrics
        self._val_metrics = val_metrics

    def forward(self, batch: Any) -> Tensor:
        """Return scores (B, K)."""
        return self.module(batch[0])  # type: ignore[no-any-return]

    def loss(self, outputs: Tensor, batch: Any, reduction: str = "mean") -> Tensor:
        """Return the mean of ``loss_fn`` over the batch, or with ``reduction="none"`` the loss of each row (B,)."""
        if reduction == "mean":
            return self.loss_fn(outputs, batch[1])
        return self.loss_fn(outputs, batch[1], reduction=reduction)

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        """Return the metrics given to the constructor, else accuracy."""
        chosen = self._train_metrics if is_train else self._val_metrics
        if chosen is not None:
            return chosen
        if self.num_classes is None:
            return {}
        try:
            from torchmetrics.classification import MulticlassAccuracy
        except ImportError:
            return {}
        except RuntimeError as error:  # torchmetrics imports torchvision, whose build may not fit that of torch
            log.warning("classifier: no accuracy is measured, because importing torchmetrics failed: %s", error)
            return {}
        return {"MulticlassAccuracy": MulticlassAccuracy(num_classes=self.num_classes, average="micro")}

    def update_metric(self, batch: Any, outputs: Tensor, metric: Any) -> None:
        """Give ``metric`` scores (B, K) and targets (B,)."""
        metric.update(outputs, batch[1])
