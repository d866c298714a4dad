"""`nemo-rl shrink`: a recipe of a cluster, run for a few steps on this machine."""
