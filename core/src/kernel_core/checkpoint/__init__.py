"""Checkpoints: what is in one, how it gets to a storage and back. ``docs/checkpoint-format.md`` describes the files."""
