"""The recipe ``numbers``: read handwritten numbers.

Importing this package needs torch and kernel_core; transformers, torchmetrics and scikit-learn are imported by the first
model, metric and strip.
"""

from kernel_plugin_numbers.data import DigitStrips, Strip, StripBatch, StripCollator
from kernel_plugin_numbers.model import DigitReader, ReaderOutputs
from kernel_plugin_numbers.reading import greedy_reading, to_numbers
from kernel_plugin_numbers.recipe import digit_reader, digit_strips, recipe

__all__ = [
    "DigitReader",
    "DigitStrips",
    "ReaderOutputs",
    "Strip",
    "StripBatch",
    "StripCollator",
    "digit_reader",
    "digit_strips",
    "greedy_reading",
    "recipe",
    "to_numbers",
]
