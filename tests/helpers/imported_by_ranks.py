"""Imported once by the server that ranks of gloo jobs are forked off; see `gloo`."""

from __future__ import annotations

import importlib

import transformers.models.qwen3.modeling_qwen3
import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401

import nemo_rl.data_plane.factory
import nemo_rl.models.policy.workers.launch  # noqa: F401
from nemo_rl.config.parts import TRAINING_ENGINES

importlib.import_module(TRAINING_ENGINES.builtin["dtensor"].partition(":")[0])
