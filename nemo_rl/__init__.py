"""GRPO post-training with a data plane in the middle."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_rl.training import Run, train

__all__ = ["Run", "__version__", "train"]

__version__ = "0.1.0"


_MOVED = {
    "nemo_rl.cluster": "nemo_rl_tools (nemo_rl.cluster.slurm is nemo_rl.slurm)",
    "nemo_rl.diagnostics": "nemo_rl_tools",
    **{
        f"nemo_rl.cli.{name}": f"nemo_rl_tools.cli.{name}"
        for name in ("compare", "inspect", "probe", "recipes", "view")
    },
    **{f"nemo_rl.tracer.{name}": f"nemo_rl_tools.tracer.{name}" for name in ("client", "hub", "playback", "summary")},
    **{f"nemo_rl.models.hf_{name}": f"nemo_rl.models.hf.{name}" for name in ("files", "folder", "modules", "writing")},
    **{f"nemo_rl.models.{name}": f"nemo_rl.models.hf.{name}" for name in ("loading", "tiny_model")},
    "nemo_rl.models.hub": "nemo_rl.models.hf.loading",
    "nemo_rl.models.shards": "nemo_rl.models.hf.files",
    **{f"nemo_rl.models.{name}": "nemo_rl.models.head.logprobs" for name in ("logprobs", "top_k", "head.top_k")},
    **{f"nemo_rl.models.{name}": "nemo_rl.models.head.logits" for name in ("support", "head.support")},
    "nemo_rl.models.checkpoint_folder": "nemo_rl.models.hf.checkpoint_folder",
    "nemo_rl.models.adapter_folder": "nemo_rl.models.adapters.folder",
    "nemo_rl.models.expert_adapters": "nemo_rl.models.adapters.lora",
    "nemo_rl.models.lora": "nemo_rl.models.adapters.lora",
    "nemo_rl.models.segment_attention": "nemo_rl.models.attention.varlen",
    "nemo_rl.models.varlen_attention": "nemo_rl.models.attention.varlen",
    "nemo_rl.models.vision_processor": "nemo_rl.models.vision.processor",
    "nemo_rl.algorithms.losses.normalization": "nemo_rl.algorithms.losses.policy_loss",
    **{
        f"nemo_rl.config.{name}": "nemo_rl.config.run"
        for name in ("checkpointing", "cluster", "diagnostics", "evaluation", "logger")
    },
    **{f"nemo_rl.config.{name}": "nemo_rl.config.backends" for name in ("dtensor", "lora", "megatron")},
    "nemo_rl.config.conversation": "nemo_rl.config.env",
    "nemo_rl.config.render": "nemo_rl.config.yaml_text",
    "nemo_rl.config.router_replay": "nemo_rl.config.policy",
    "nemo_rl.data.shapes": "nemo_rl.data.sources",
    "nemo_rl.environments.factory": "nemo_rl.environments.process_environment",
    "nemo_rl.models.policy.lm_policy": "nemo_rl.models.policy.tq_policy",
    "nemo_rl.models.weights_digest": "nemo_rl.models.weight_sync.weights_digest",
}
"""Modules that were moved -> where they are. TODO(two-roots): remove with release 0.2."""


class _Moved:
    """The last finder of imports: says where a module lies now that nothing else found."""

    @staticmethod
    def find_spec(name: str, *_: object) -> None:
        if name in _MOVED:
            raise ModuleNotFoundError(f"{name} has moved: import {_MOVED[name]} instead", name=name)


sys.meta_path.append(_Moved)  # type: ignore[arg-type]


def __getattr__(name: str) -> Any:
    """Import `train` and `Run` when they are asked for, so that importing the package costs nothing."""
    if name not in ("Run", "train"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return vars(import_module("nemo_rl.training"))[name]
