"""`nemo-rl inspect RUN step N mismatch`: what the KL between rollout and trainer of a kept step comes from."""
