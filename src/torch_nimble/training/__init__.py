"""The whole training step ahead of time: forward, backward and update as one plan."""
