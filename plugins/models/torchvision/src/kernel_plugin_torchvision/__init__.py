"""Image classifiers of torchvision, beside a CPU build of torch too.

Importing this package needs torch and kernel_core; torchvision and torchmetrics are imported by the first model.
"""

from kernel_plugin_torchvision.compat import import_torchvision
from kernel_plugin_torchvision.model import load_matching, torchvision

__all__ = ["import_torchvision", "load_matching", "torchvision"]
