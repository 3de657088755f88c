"""Batches: what they hold, how they are counted, split and moved."""
