"""Steps of a run kept as facts: written by the trainer, read by `nemo-rl compare RUN replay`."""
