"""A model before it has weights: built without memory for its parameters, filled one tensor at a time.

Used by the DTensor worker, whose ranks must not hold a whole model each. Invariant: buffers are real from the start,
because libraries compute some of them and store them nowhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from nemo_rl.data.tokenizer import GENERATION_CONFIG
from nemo_rl.errors import ModelFolderError, boundary
from nemo_rl.models.loading import CONFIG_FILE, fit_experts, load_model_config

__all__ = ["build_skeleton"]


def build_skeleton(folder: str | Path) -> PreTrainedModel:
    """The model of a folder in float32 and evaluation mode; its parameters are on the meta device.

    Raises:
        ModelFolderError: the folder is missing or unreadable, or its config describes no causal language model.
    """
    config = load_model_config(folder)
    what = f"model folder {str(folder)!r}: {CONFIG_FILE} of {config.model_type!r} describes no causal language model"
    with boundary(ModelFolderError, what), _parameters_on_meta():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
        if (Path(folder) / GENERATION_CONFIG).is_file():
            model.generation_config = GenerationConfig.from_pretrained(str(folder), local_files_only=True)
    fit_experts(model, torch.float32)
    model.eval()
    return model


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Each parameter moves as soon as its module has it, so that no more than one is ever held."""
    register = torch.nn.Module.register_parameter

    def on_meta(self: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        register(self, name, param)
        if param is not None and not param.is_meta:
            kept: Any = self._parameters[name]
            self._parameters[name] = torch.nn.Parameter(kept.to("meta"), requires_grad=kept.requires_grad)

    torch.nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]
