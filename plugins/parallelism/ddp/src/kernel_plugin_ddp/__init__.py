"""Distributed data parallel: every rank holds the whole model, reads its share of each batch, and gradients are averaged."""

from kernel_plugin_ddp.engine import DDPEngine

__all__ = ["DDPEngine"]
