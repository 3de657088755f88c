"""BlurPool: anti-aliased strided convolutions and max pools."""

from kernel_plugin_blurpool.blur import binomial_blur
from kernel_plugin_blurpool.modules import BlurConv2d, BlurMaxPool2d
from kernel_plugin_blurpool.plugin import BlurPool
from kernel_plugin_blurpool.surgery import BlurChange, apply_blurpool, blurred_conv, blurred_maxpool

__all__ = [
    "BlurChange",
    "BlurConv2d",
    "BlurMaxPool2d",
    "BlurPool",
    "apply_blurpool",
    "binomial_blur",
    "blurred_conv",
    "blurred_maxpool",
]
