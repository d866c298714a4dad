"""The embedded generation engine: a batched KV-cache loop on the Hugging Face model."""

from nemo_rl.models.generation.torch_engine.engine import TorchEngine

__all__ = ["TorchEngine"]
