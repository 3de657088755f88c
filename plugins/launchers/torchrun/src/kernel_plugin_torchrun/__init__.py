"""Start a training script on several processes and machines, on torchrun's elastic agent."""
