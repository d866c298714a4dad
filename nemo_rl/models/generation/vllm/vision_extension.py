"""`VisionRefitExtension`: what runs of ours in the workers of vLLM that serve a vision-language model.

vLLM imports it in every process of a rank before it makes the model, and so every rank knows that images come as
tensors.
"""

from __future__ import annotations

from nemo_rl.models.generation.vllm.extension import RefitExtension
from nemo_rl.models.generation.vllm.images import use_tensors
from nemo_rl.models.generation.vllm.start import VISION_MODELS

__all__ = ["VisionRefitExtension"]

for _kind in VISION_MODELS:
    use_tensors(_kind)


class VisionRefitExtension(RefitExtension):
    """The methods of `RefitExtension`, in processes that have imported this module."""
