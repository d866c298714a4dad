"""Imports that the server of gloo jobs makes once, before ranks are forked off it; see `gloo`. None may import Ray."""

from __future__ import annotations

import importlib

import nemo_rl.data_plane.factory  # noqa: F401
import nemo_rl.models.policy.workers.compose  # noqa: F401
from nemo_rl.config.parts import TRAINING_ENGINES

# Each rank would spend seconds on megatron-core, with its adaptation to this machine, and on the models of the cases.
for _engine in TRAINING_ENGINES.builtin.values():
    importlib.import_module(_engine.partition(":")[0])
for _family in ("glm4_moe", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"):
    importlib.import_module(f"transformers.models.{_family}.modeling_{_family}")
for _jobs in (
    "pytest",
    "tests.helpers.megatron_layouts",
    "tests.helpers.megatron_models",
    "tests.helpers.model_families",
):
    importlib.import_module(_jobs)
