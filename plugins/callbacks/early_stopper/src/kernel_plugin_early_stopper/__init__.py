"""Stop training when a metric no longer gets better."""
