"""Which layers are replaced, and by what."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from kernel_core.errors import OptionError
from torch import nn

from kernel_plugin_blurpool.modules import BlurConv2d, BlurMaxPool2d, subsampled_axes

ModuleT = TypeVar("ModuleT", bound=nn.Module)
Replacement = Callable[[nn.Module, str], nn.Module | None]


class BlurChange(NamedTuple):
    """One replaced layer: its path in the model, and the type names before and after."""

    path: str
    old: str
    new: str


def blurred_conv(module: nn.Module, blur_first: bool = True, min_channels: int = 16) -> BlurConv2d | None:
    """Make the blurred twin of a strided convolution.

    Subclasses of ``Conv2d``, blurred ones and parametrized ones among them, are left alone: their ``forward`` is
    their own.

    Args:
        module: any module; its parameters and hooks are shared with the twin, not copied.
        blur_first: see ``BlurConv2d``.
        min_channels: fewest input channels of a convolution worth blurring.

    Returns:
        The twin, or None where there is nothing to blur.
    """
    if type(module) is not nn.Conv2d or max(module.stride) == 1 or module.in_channels < min_channels:
        return None
    twin = _twin(module, BlurConv2d)
    twin.blur_first = blur_first
    return twin


def blurred_maxpool(module: nn.Module) -> BlurMaxPool2d | None:
    """Make the blurred twin of a max pool with a stride above 1.

    Args:
        module: any module; subclasses of ``MaxPool2d`` are left alone.

    Returns:
        The twin, or None where there is nothing to blur.
    """
    if type(module) is not nn.MaxPool2d:
        return None
    stride = module.stride if isinstance(module.stride, tuple) else (module.stride, module.stride)
    return _twin(module, BlurMaxPool2d) if any(subsampled_axes(stride)) else None


def blurpool_replacements(
    replace_convs: bool = True, replace_maxpools: bool = True, blur_first: bool = True, min_channels: int = 16
) -> dict[type[nn.Module], Replacement]:
    """Map each module type to the function that makes its twin: ``(module, path)`` to a module, or None to keep it.

    Raises:
        OptionError: nothing is to be replaced, or ``min_channels`` is negative.
    """
    if not (replace_convs or replace_maxpools):
        raise OptionError(
            "blurpool: replace_convs and replace_maxpools are both False. Expected at least one of them to be True. "
            "Leave the plugin out to blur nothing."
        )
    if min_channels < 0:
        raise OptionError(f"blurpool.min_channels: got {min_channels}. Expected 0 (every convolution) or more.")
    replacements: dict[type[nn.Module], Replacement] = {}
    if replace_convs:
        replacements[nn.Conv2d] = lambda module, path: blurred_conv(module, blur_first, min_channels)
    if replace_maxpools:
        replacements[nn.MaxPool2d] = lambda module, path: blurred_maxpool(module)
    return replacements


def apply_blurpool(
    model: nn.Module,
    replace_convs: bool = True,
    replace_maxpools: bool = True,
    blur_first: bool = True,
    min_channels: int = 16,
) -> list[BlurChange]:
    """Replace the strided convolutions and max pools inside a model, in place.

    Parameters stay the same objects under the same names: optimizers and checkpoints stay valid. A layer used in several
    places stays one layer. The model itself, should it be such a layer, cannot be replaced in place and is kept.

    Args:
        model: the model to change.
        replace_convs: blur convolutions with a stride above 1.
        replace_maxpools: blur max pools with a stride above 1.
        blur_first: blur before the strided convolution (cheap) instead of after a dense one.
        min_channels: fewest input channels of a convolution worth blurring.

    Returns:
        What changed, in the order of ``named_modules``; empty when there was nothing to blur.

    Raises:
        OptionError: nothing is to be replaced, or ``min_channels`` is negative.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(), nn.MaxPool2d(2))
        >>> [change.path for change in apply_blurpool(model)]
        ['0', '2']

    Source:
        Zhang, Making Convolutional Networks Shift-Invariant Again (ICML 2019).
    """
    replacements = blurpool_replacements(replace_convs, replace_maxpools, blur_first, min_channels)
    twins: dict[nn.Module, nn.Module | None] = {}
    changes = []
    for path, module in list(model.named_modules(remove_duplicate=False)):
        replace = replacements.get(type(module))
        if replace is None or not path:
            continue
        if module not in twins:
            twins[module] = replace(module, path)
        twin = twins[module]
        if twin is not None:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, twin)
            changes.append(BlurChange(path, type(module).__name__, type(twin).__name__))
    return changes


def _twin(module: nn.Module, twin_type: type[ModuleT]) -> ModuleT:
    """Make an object of another class that takes over everything a module holds.

    Not through ``__init__``: that would draw initial weights and lose hooks. The containers are shared too, so that the
    handles of hooks still remove them.
    """
    twin = twin_type.__new__(twin_type)
    vars(twin).update(vars(module))
    return twin
