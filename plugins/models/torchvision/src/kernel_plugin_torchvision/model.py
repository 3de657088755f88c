"""The model function: one of torchvision's classifiers, by name, as something that can be trained."""

from __future__ import annotations

from typing import Annotated, Any

from kernel_core import Classifier
from kernel_core.errors import ConfigError, OptionError
from kernel_core.naming import did_you_mean
from pydantic import Field
from torch import Tensor, nn

from kernel_plugin_torchvision.compat import import_torchvision

# In training they return a tuple of scores unless told otherwise.
WITH_AUXILIARY_HEADS = frozenset({"googlenet", "inception_v3"})


def torchvision(
    model: str,
    num_classes: Annotated[int, Field(gt=0)] = 1000,
    weights: str | None = None,
    options: dict[str, Any] | None = None,
) -> Classifier:
    """Build one of torchvision's image classifiers; batches are ``(images, targets)``.

    Args:
        model: Its name, as ``torchvision.models.list_models`` writes it: ``resnet18``.
        num_classes: How many classes it scores.
        weights: Trained weights to start from: ``DEFAULT``, ``IMAGENET1K_V1``, …; None draws them anew. With another
            number of classes than they were trained for, the last layer is drawn anew.
        options: More arguments of the model's own function, such as ``{"zero_init_residual": True}``.

    Returns:
        The classifier, with accuracy as its metric in training, and accuracy and cross entropy in evaluation. The
        torchvision model is its ``module``.

    Raises:
        OptionError: the name, the weights or an option is unknown.
        ConfigError: the weights cannot be fetched.

    Example:
        >>> torchvision("resnet18", num_classes=10).module.fc.out_features
        10
    """
    models = import_torchvision().models
    _check_name(models, model)
    network = _build(models, model, num_classes, options or {})
    if weights is not None:
        load_matching(network, _fetch(models, model, weights))
    from torchmetrics.classification import MulticlassAccuracy

    from kernel_plugin_torchvision.metrics import CrossEntropy

    accuracy = {"MulticlassAccuracy": MulticlassAccuracy(num_classes=num_classes, average="micro")}
    evaluation = {"MulticlassAccuracy": accuracy["MulticlassAccuracy"].clone(), "CrossEntropy": CrossEntropy()}
    return Classifier(network, num_classes, train_metrics=accuracy, val_metrics=evaluation)


def load_matching(network: nn.Module, weights: dict[str, Tensor]) -> list[str]:
    """Load those of ``weights`` that fit ``network`` in name and shape.

    Returns:
        The names in ``network`` that keep their own values, sorted.
    """
    own = network.state_dict()
    fitting = {name: value for name, value in weights.items() if name in own and own[name].shape == value.shape}
    network.load_state_dict(fitting, strict=False)
    return sorted(set(own) - set(fitting))


def _check_name(models: Any, name: str) -> None:
    known = models.list_models(module=models)
    if name not in known:
        raise OptionError(
            f"torchvision.model: there is no image classifier {name!r}.{did_you_mean(name, known)} Expected one of "
            f"torchvision's {len(known)}. torchvision.models.list_models(module=torchvision.models) lists them."
        )


def _build(models: Any, name: str, num_classes: int, options: dict[str, Any]) -> nn.Module:
    if name in WITH_AUXILIARY_HEADS:
        options = {"aux_logits": False, "init_weights": True, **options}
    try:
        network: nn.Module = models.get_model(name, weights=None, num_classes=num_classes, **options)
    except TypeError as error:
        raise OptionError(
            f"torchvision.options: got {options!r}, which {name} does not take: {error}. Expected arguments of "
            f"torchvision.models.{name}."
        ) from error
    return network


def _fetch(models: Any, name: str, weights: str) -> dict[str, Tensor]:
    known = models.get_model_weights(name)
    if weights not in known.__members__:
        raise OptionError(
            f"torchvision.weights: {name} has no weights {weights!r}.{did_you_mean(weights, known.__members__)} "
            f"Expected {', '.join(known.__members__) or 'None: it has none'}."
        )
    try:
        loaded: dict[str, Tensor] = known[weights].get_state_dict(progress=False)
    except OSError as error:
        raise ConfigError(
            f"torchvision.weights: cannot fetch {known[weights].url}: {error}. Expected it in torch's cache or on the "
            "network. Put the file into the folder checkpoints of torch.hub.get_dir(), or set weights to None."
        ) from error
    return loaded
