"""`nemo-rl compare RUN replay`: kept steps run again through the optimizer, and compared stage by stage."""
