"""The plugin."""

from collections.abc import Callable

from kernel_core import Algorithm, hookimpl
from torch import nn

from kernel_plugin_blurpool.surgery import blurpool_replacements


class BlurPool(Algorithm):
    """Anti-alias strided convolutions and max pools with a binomial blur, so that small shifts change less.

    Args:
        replace_convs: blur convolutions with a stride above 1.
        replace_maxpools: blur max pools with a stride above 1.
        blur_first: blur before the strided convolution (cheap) instead of after a dense one (the paper's order).
        min_channels: fewest input channels of a convolution worth blurring.

    Raises:
        OptionError: nothing is to be replaced, or ``min_channels`` is negative.

    Example:
        >>> BlurPool(min_channels=32)
        BlurPool(replace_convs=True, replace_maxpools=True, blur_first=True, min_channels=32)

    Source:
        Zhang, Making Convolutional Networks Shift-Invariant Again (ICML 2019).
    """

    name = "blurpool"
    roles = {"replaces-modules", "replaces-convs", "anti-aliases"}
    structural = True
    # Factors are what remains of a strided convolution; blurring first would hide it from whoever factorizes.
    after = {"role:factorizes-weights"}

    def __init__(
        self,
        replace_convs: bool = True,
        replace_maxpools: bool = True,
        blur_first: bool = True,
        min_channels: int = 16,
    ) -> None:
        self._replacements = blurpool_replacements(replace_convs, replace_maxpools, blur_first, min_channels)

    @hookimpl
    def module_replacements(self) -> dict[type[nn.Module], Callable[[nn.Module, str], nn.Module | None]]:
        """Offer a blurred twin for each strided convolution and max pool."""
        return self._replacements
