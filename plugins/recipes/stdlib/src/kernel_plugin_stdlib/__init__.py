"""The recipe ``stdlib``: predict the next byte of the standard library's sources.

Importing this package needs torch and kernel_core; transformers and torchmetrics are imported by the first model and
metric, and no source file is read before the first corpus.
"""

from kernel_plugin_stdlib.data import ByteBatch, ByteWindows, collate_windows, read_corpus, source_files, split_of
from kernel_plugin_stdlib.model import ByteGPT2, cross_entropy_bits, next_bytes
from kernel_plugin_stdlib.recipe import byte_gpt2, recipe, stdlib_bytes

__all__ = [
    "ByteBatch",
    "ByteGPT2",
    "ByteWindows",
    "byte_gpt2",
    "collate_windows",
    "cross_entropy_bits",
    "next_bytes",
    "read_corpus",
    "recipe",
    "source_files",
    "split_of",
    "stdlib_bytes",
]
