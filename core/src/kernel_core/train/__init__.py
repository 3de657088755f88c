"""A run: the trainer, the loop, the state they share."""
