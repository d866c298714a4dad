"""What becomes of `data`, `env`, `cluster`, `checkpointing`, `logger` and `data_plane` of NeMo-RL."""

from __future__ import annotations

from nemo_rl.cluster.recipe_import.key_rule import (
    Table,
    moved,
    no_effect,
    not_supported,
    refused,
    same,
    with_others,
)

__all__ = ["RUN"]

PROMPTS = "becomes data.train, data.validation and env.name"
GYM = "NeMo-Gym is not here"
_DATASET = (
    *("dataset_name", "data_path", "input_key", "output_key", "split", "split_validation_size", "seed"),
    *("prompt_file", "system_prompt_file", "processor", "env_name"),
)


def _metric(value: object) -> object:
    """`val_reward` and `val:reward` mean the same."""
    text = str(value)
    for area in ("val", "train"):
        if text.startswith((f"{area}_", f"{area}/")):
            return f"{area}:{text[len(area) + 1 :]}"
    return value


_DATA: Table = {
    "data.max_input_seq_length": with_others("prompt and response together fit policy.max_total_sequence_length"),
    "data.shuffle": same(),
    "data.num_workers": no_effect("prompts are read once, before the first step"),
    "data.use_multiple_dataloader": refused("one source of prompts"),
    "data.num_prompts_per_dataloader": no_effect("belongs to use_multiple_dataloader"),
    "data.custom_dataloader": refused("write a dataset of your own (data.train.dataset_name=module:function)"),
    **{f"data.{part}": with_others(PROMPTS) for part in ("train", "validation", "default")},
    **{f"data.{part}.{name}": with_others(PROMPTS) for part in ("train", "validation", "default") for name in _DATASET},
    **{f"data.{part}download_dir": no_effect("nothing is downloaded here") for part in ("", "train.", "default.")},
    "data.validation.download_dir": no_effect("nothing is downloaded here"),
    # Older recipes have these beside the sections.
    **{f"data.{name}": with_others(PROMPTS) for name in _DATASET},
    **{f"data.{name}": not_supported("the chat template decides") for name in ("add_bos", "add_eos")},
    "data.add_generation_prompt": refused("the chat template's generation prompt is always added", off=(None, True)),
}

_ENV: Table = {
    "env.should_use_nemo_gym": refused(GYM),
    "env.should_log_nemo_gym_responses": no_effect("belongs to should_use_nemo_gym"),
    "env.nemo_gym.*": no_effect("belongs to should_use_nemo_gym"),
    "env.nemo_gym": no_effect("belongs to should_use_nemo_gym"),
    "env.*": with_others("of the environments that data sets name"),
    "env": no_effect("an empty section"),
}

_CLUSTER: Table = {
    "cluster.gpus_per_node": same(),
    "cluster.num_nodes": same(),
    "cluster.master_port_range_low": no_effect("ports are bound before they are announced"),
    "cluster.master_port_range_high": no_effect("ports are bound before they are announced"),
    "cluster.segment_size": not_supported("nodes are taken as Ray offers them"),
    "cluster.env_vars": same(),
    "cluster.env_vars.*": same(),
}

_CHECKPOINTING: Table = {
    **{
        f"checkpointing.{name}": same()
        for name in ("enabled", "checkpoint_dir", "higher_is_better", "keep_top_k", "save_period", "save_optimizer")
    },
    "checkpointing.metric_name": same(convert=_metric, why="val:NAME or train:NAME"),
    "checkpointing.checkpoint_must_save_by": moved("checkpointing.must_save_by"),
    "checkpointing.ft_save_period": not_supported("one period of saving: checkpointing.save_period"),
    "checkpointing.ft_keep_latest_k": not_supported("the latest checkpoint is always kept", off=(None, 0, 1)),
    "checkpointing.model_save_format": not_supported(
        "weights are saved as Hugging Face safetensors", off=(None, "safetensors")
    ),
    "checkpointing.save_consolidated": no_effect("weights are always one Hugging Face folder"),
    "checkpointing.is_peft": refused("adapters (LoRA) are not here"),
    "checkpointing.peft_config": no_effect("belongs to is_peft"),
    "checkpointing.peft_config.*": no_effect("belongs to is_peft"),
    "checkpointing.pretrained_checkpoint": refused("policy.model_name is a Hugging Face folder", off=(None, {})),
    "checkpointing.pretrained_checkpoint.*": refused("policy.model_name is a Hugging Face folder"),
}

_LOGGER: Table = {
    **{
        f"logger.{name}": same()
        for name in (
            *("log_dir", "wandb_enabled", "tensorboard_enabled", "mlflow_enabled", "wandb.project", "wandb.name"),
            *("mlflow.experiment_name", "mlflow.run_name", "mlflow.tracking_uri"),
        )
    },
    "logger.wandb.*": not_supported("wandb has project, name and mode here"),
    "logger.mlflow.*": not_supported("mlflow has experiment_name, run_name and tracking_uri here"),
    "logger.swanlab_enabled": not_supported("write a tracker of your own (logger.trackers)"),
    "logger.swanlab": no_effect("belongs to swanlab_enabled"),
    "logger.swanlab.*": no_effect("belongs to swanlab_enabled"),
    "logger.tensorboard": no_effect("events lie in tensorboard/ of logger.log_dir"),
    "logger.tensorboard.*": no_effect("events lie in tensorboard/ of logger.log_dir"),
    "logger.num_val_samples_to_print": no_effect(
        "nothing is printed: rollouts are written to files (logger.num_rollouts_to_log)"
    ),
    "logger.monitor_gpus": no_effect("memory of the workers is always logged"),
    "logger.gpu_monitoring.*": no_effect("memory of the workers is always logged"),
    "logger.gpu_monitoring": no_effect("memory of the workers is always logged"),
}

_DATA_PLANE: Table = {
    "data_plane.enabled": with_others("there is one trainer; false takes the store that fits, with its defaults"),
    "data_plane.impl": same(),
    "data_plane.backend": same(),
    "data_plane.storage_capacity": moved("data_plane.storage_capacity.rows", why="a limit that holds: puts wait"),
    "data_plane.num_storage_units": moved("data_plane.simple.num_storage_units"),
    "data_plane.simple.num_storage_units": same(),
    "data_plane.simple.storage_capacity": moved("data_plane.storage_capacity.rows", why="a limit that holds"),
    "data_plane.claim_meta_poll_interval_s": no_effect("a claim is answered when rows are there, without polling"),
    "data_plane.global_segment_size": moved("data_plane.mooncake.segment_bytes"),
    "data_plane.local_buffer_size": moved("data_plane.mooncake.local_buffer_bytes"),
    "data_plane.mooncake_cpu.global_segment_size": moved("data_plane.mooncake.segment_bytes"),
    "data_plane.mooncake_cpu.local_buffer_size": moved("data_plane.mooncake.local_buffer_bytes"),
    "data_plane.observability.enabled": same(),
    "data_plane.observability.callback": same(),
    "data_plane.controller_address": no_effect("NeMo-RL never reads it"),
    "data_plane.ack_timeout_ms": no_effect("NeMo-RL never reads it"),
}

RUN: Table = {**_DATA, **_ENV, **_CLUSTER, **_CHECKPOINTING, **_LOGGER, **_DATA_PLANE}
"""By key; `.*` ends one that stands for all below it."""
