"""Optimizers, the schedules of their learning rates, and how they are kept pointing at the model's parameters.

``from kernel_core.optim import DecoupledAdamW, CosineAnnealingWithWarmupScheduler``
"""
