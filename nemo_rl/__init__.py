"""GRPO post-training with a data plane in the middle."""

__version__ = "0.1.0"
