"""Loading a Hugging Face causal language model from a folder.

Called by the policy worker, the embedded engine and the starter. Invariant: a folder that is missing or incomplete is
a `ModelFolderError` that names the file, before any process group or engine exists.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from nemo_rl.errors import ModelFolderError

__all__ = ["DTYPES", "check_model_folder", "load_causal_lm", "load_model_config", "named_weights"]

# Bars of every process would run through each other, and through the trainer's panel.
transformers_logging.disable_progress_bar()

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CONFIG_FILE = "config.json"
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def check_model_folder(folder: str | Path) -> Path:
    """The folder as a path, if it holds a config and weights.

    Raises:
        ModelFolderError: it does not.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ModelFolderError(
            f"model folder {str(path)!r}: no such folder; set policy.model_name to a folder with config.json and "
            "safetensors (the demo's is written by examples/make_starter.py)"
        )
    if not (path / CONFIG_FILE).is_file():
        raise ModelFolderError(f"model folder {str(path)!r}: expected {CONFIG_FILE}, which is missing")
    if not any((path / name).is_file() for name in WEIGHT_FILES):
        raise ModelFolderError(f"model folder {str(path)!r}: expected weights ({' or '.join(WEIGHT_FILES)}), got none")
    return path


def load_model_config(folder: str | Path) -> PretrainedConfig:
    """The architecture of a model folder.

    Raises:
        ModelFolderError: the folder is missing, incomplete or unreadable.
    """
    path = check_model_folder(folder)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelFolderError(f"model folder {str(path)!r}: {CONFIG_FILE} cannot be read: {error}") from error
    return config


def load_causal_lm(folder: str | Path, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model on the CPU in evaluation mode.

    Raises:
        ModelFolderError: the folder is missing, incomplete or unreadable, or lacks some of the weights.
    """
    path = check_model_folder(folder)
    load_model_config(path)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            str(path), dtype=dtype, local_files_only=True, attn_implementation="sdpa", output_loading_info=True
        )
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise ModelFolderError(f"model folder {str(path)!r}: cannot be loaded: {error}") from error
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise ModelFolderError(f"model folder {str(path)!r}: {len(missing)} weights are missing, first {missing[0]!r}")
    model.eval()
    return model  # type: ignore[no-any-return]


def named_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers by Hugging Face name; tied ones once, under their first name."""
    seen: set[int] = set()
    for name, weight in model.state_dict(keep_vars=True).items():
        if id(weight) not in seen:
            seen.add(id(weight))
            yield name, weight
