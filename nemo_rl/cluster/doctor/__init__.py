"""`nemo-rl doctor`: whether this machine is in order for a run."""
