"""Imported once by the server that ranks of gloo jobs are forked off; see `gloo`."""

from __future__ import annotations

import transformers.models.qwen3.modeling_qwen3
import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401

import nemo_rl.data_plane.factory
import nemo_rl.models.policy.workers.dtensor_tq_worker  # noqa: F401
