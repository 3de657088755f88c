"""Helps to test plugins. Nothing here is imported by a run."""
