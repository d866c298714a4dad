"""`nemo-rl replay --explain-mismatch`: what the KL between rollout and trainer of a kept step comes from."""
