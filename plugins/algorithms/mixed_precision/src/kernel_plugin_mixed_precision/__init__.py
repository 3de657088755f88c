"""Train in mixed precision, in the format that suits the hardware."""
