"""The ``kernel`` command."""
