"""`nemo-rl config import`: recipes of NeMo-RL as recipes of ours."""
