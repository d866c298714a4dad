"""The whole config tree, with every default; YAML recipes hold only values that differ.

Key names follow the field's (NeMo-RL's), so that its users find their way. Every key that is accepted has an
effect; combinations that would be ignored are refused in `nemo_rl.config.rules`. Sections do not
import this module: what is decided by several of them is a property here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field

from nemo_rl.config.base import AUTO, Section
from nemo_rl.config.data import CurriculumConfig, DataConfig, DatasetConfig, History
from nemo_rl.config.data_plane import DataPlaneConfig
from nemo_rl.config.distillation import teacher_policy
from nemo_rl.config.env import EnvConfig, ExperienceConfig
from nemo_rl.config.generation import ColocatedConfig, DeviceSharing, GenerationConfig, RefitTransport
from nemo_rl.config.grpo import ESTIMATORS_BY_STEP, GRPOConfig
from nemo_rl.config.loss import LossConfig
from nemo_rl.config.parts import ENGINE_CAPABILITIES, PROGRAM, EngineCapabilities
from nemo_rl.config.policy import PolicyConfig, RouterReplayConfig
from nemo_rl.config.run import CheckpointingConfig, ClusterConfig, DiagnosticsConfig, EvaluationConfig, LoggerConfig
from nemo_rl.config.sft import LOOP_KEYS, SUPERVISED_LOSS, SFTConfig

__all__ = ["MasterConfig"]

MOST_LOGPROB_GROWTH = 2.0
"""A microbatch without gradients keeps no activations of its layers: up to so many times the tokens of a training
microbatch, with the optimizer beside it, need no more memory than a training pass."""


class MasterConfig(Section):
    """Everything a run needs."""

    stages: tuple[Literal["sft", "grpo"], ...] = ("grpo",)
    """`[sft, grpo]` trains the model on finished conversations first, by `sft.settings` in the folder `warm_start` of
    `logger.log_dir`, and goes on from its last checkpoint; see docs/sft.md."""
    grpo: GRPOConfig = Field(default_factory=GRPOConfig)
    sft: SFTConfig = Field(default_factory=SFTConfig)
    loss_fn: LossConfig = Field(default_factory=LossConfig)
    policy: PolicyConfig
    data: DataConfig = Field(default_factory=DataConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    experience: ExperienceConfig = Field(default_factory=ExperienceConfig)
    env: EnvConfig = Field(default_factory=EnvConfig)
    data_plane: DataPlaneConfig = Field(default_factory=DataPlaneConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    checkpointing: CheckpointingConfig = Field(default_factory=CheckpointingConfig)
    logger: LoggerConfig = Field(default_factory=LoggerConfig)
    diagnostics: DiagnosticsConfig = Field(default_factory=DiagnosticsConfig)

    @property
    def active_data_plane(self) -> DataPlaneConfig:
        """Return the data plane with the store that this run uses."""
        return self.data_plane.resolved(has_actors=self.cluster.launcher == "ray")

    @property
    def has_continuous_engines(self) -> bool:
        """Return whether rows join and leave the engines' batches one by one: in asynchronous runs, and in
        conversations."""
        return self.grpo.samples_ahead or self.experience.conversation.enabled

    @property
    def envs(self) -> dict[str, EnvConfig]:
        """Return the environments that score rows by the dotted paths of their sections, with `env` where a section of
        `data` has none of its own."""
        return self._envs_of(self.data.sections)

    @property
    def measuring_envs(self) -> dict[str, EnvConfig]:
        """Return those of `envs` that score held-out rows; all where there are none."""
        held_out = {self.data.held_out_key(name): section for name, section in self.data.held_out.items()}
        return self._envs_of(held_out or self.data.sections)

    def _envs_of(self, sections: Mapping[str, DatasetConfig]) -> dict[str, EnvConfig]:
        own = {f"{where}.env": section.env for where, section in sections.items() if section.env is not None}
        return own if len(own) == len(sections) else {"env": self.env, **own}

    @property
    def is_accuracy(self) -> bool:
        """Return whether every reward that is measured is 1 for right or 0 for wrong, so that a mean is an accuracy."""
        return all(env.is_accuracy for env in self.measuring_envs.values())

    @property
    def measure(self) -> str:
        """Return the name of what a validation measures: a mean of rewards, or the loss of supervised training."""
        return "loss" if self.sft.enabled else "accuracy" if self.is_accuracy else "reward"

    @property
    def has_prev_logprobs_pass(self) -> bool:
        """Return whether workers compute the log-probabilities of the policy before its update."""
        return not (self.grpo.use_generation_logprobs_as_prev or self.loss_fn.force_on_policy_ratio)

    @property
    def num_teacher_workers(self) -> int:
        """Return the workers of the teacher; 0 without distillation."""
        distillation = self.loss_fn.distillation
        return (distillation.teacher.num_workers or self.cluster.num_workers) if distillation.enabled else 0

    @property
    def teacher_policy(self) -> PolicyConfig:
        """Return the policy that the teacher of a distillation is."""
        return teacher_policy(self.loss_fn.distillation.teacher, self.policy)

    @property
    def as_teacher(self) -> MasterConfig:
        """Return the recipe as the workers of its teacher see it."""
        workers = self.num_teacher_workers
        size = {"gpus_per_node": workers} if self.cluster.gpus_per_node > 0 else {"cpu_workers_per_node": workers}
        cluster = self.cluster.model_copy(update={"num_nodes": 1, **size})
        return self.model_copy(update={"policy": self.teacher_policy, "cluster": cluster})

    @property
    def as_supervised(self) -> MasterConfig:
        """Return a recipe of supervised training as its processes see it: a group is one finished row, of which all
        tokens count under the whole vocabulary, and there is no engine."""
        policy, loop = self.policy, {name: getattr(self.grpo, name) for name in LOOP_KEYS}
        grpo = GRPOConfig().model_copy(
            update={
                **loop,
                "num_prompts_per_step": policy.train_global_batch_size,
                "num_generations_per_prompt": 1,
                "drop_zero_advantage_groups": False,
                "use_generation_logprobs_as_prev": True,
            }
        )
        generation = GenerationConfig().model_copy(
            update={
                "num_replicas": 0,
                "colocated": ColocatedConfig(enabled=False),
                "stop_token_ids": policy.generation.stop_token_ids,
            }
        )
        loss = LossConfig().model_copy(update={"name": SUPERVISED_LOSS, "reference_policy_kl_penalty": 0.0})
        ranking: dict[str, object] = {"metric_name": self.checkpoint_metric}
        if self.checkpoint_metric.endswith(":loss"):
            ranking["higher_is_better"] = False
        return self.model_copy(
            update={
                "grpo": grpo,
                "loss_fn": loss,
                "data": self.data.model_copy(update={"curriculum": CurriculumConfig()}),
                "policy": policy.model_copy(update={"generation": generation, "router_replay": RouterReplayConfig()}),
                "env": EnvConfig(),
                "experience": ExperienceConfig(),
                "checkpointing": self.checkpointing.model_copy(update=ranking),
            }
        )

    @property
    def smallest_group(self) -> int:
        """Return the samples of a prompt of the source that has the fewest."""
        sizes = (source.num_generations_per_prompt for source in self.data.train.named.values())
        return min(filter(None, sizes), default=self.grpo.num_generations_per_prompt)

    @property
    def rows_per_conversation(self) -> int:
        """Return the most rows of one sample of a prompt."""
        section, history = self.experience.conversation, self.history
        if not section.enabled or history == "append":
            return 1
        return section.max_turns if history == "new_row" else min(section.max_turns, section.max_rows)

    @property
    def history(self) -> History:
        """Return `data.history` with `auto` decided."""
        if self.data.history != "auto":
            return self.data.history
        batching = self.policy.sequence_packing.is_on or self.policy.dynamic_batching.enabled
        return "branch" if self.env.name == PROGRAM and batching else "append"

    @property
    def scoring(self) -> GRPOConfig:
        """Return `grpo` with `drop_zero_advantage_groups` decided."""
        if self.grpo.drop_zero_advantage_groups != AUTO:
            return self.grpo
        loss = self.loss_fn
        teaches = loss.reference_policy_kl_penalty > 0 or loss.entropy_coefficient > 0 or loss.distillation.enabled
        teaches = teaches or self.grpo.adv_estimator.name in ESTIMATORS_BY_STEP
        return self.grpo.model_copy(update={"drop_zero_advantage_groups": not teaches})

    @property
    def has_validation(self) -> bool:
        """Return whether held-out prompts are measured at any time of the run."""
        grpo = self.grpo
        return self.data.validation is not None and (grpo.val_period > 0 or grpo.val_at_start or grpo.val_at_end)

    @property
    def checkpoint_metric(self) -> str:
        """Return `checkpointing.metric_name`, or its counterpart of training where nothing is validated."""
        name = self.checkpointing.metric_name
        if self.sft.enabled and name.endswith((":reward", ":accuracy")):
            return "val:loss" if self.has_validation else "train:loss"
        return "train:reward" if name in ("val:reward", "val:accuracy") and not self.has_validation else name

    @property
    def checkpoint_dir(self) -> Path:
        """Return the folder that checkpoints are written into; see `CheckpointingConfig.folder`."""
        return self.checkpointing.folder(self.logger.log_dir)

    @property
    def sleep_level(self) -> int:
        """Return the level at which engines sleep while the policy trains: `policy.generation.sleep_level`, with null
        decided."""
        generation = self.policy.generation
        if generation.sleep_level is not None:
            return generation.sleep_level
        takes_turns = self.cluster.launcher == "ray" and self.cluster.gpus_per_node > 0 and generation.colocated.enabled
        can_sleep = ENGINE_CAPABILITIES.get(generation.backend, EngineCapabilities()).can_sleep
        if not takes_turns or not can_sleep or self.grpo.samples_ahead:
            return 0
        keeps_weights = generation.refit_delta.enabled and generation.backend == "torch"
        return 1 if keeps_weights or self.policy.lora.is_native else 2

    @property
    def device_sharing(self) -> DeviceSharing:
        """Return who else wants the memory of the policy workers' GPUs."""
        if self.cluster.gpus_per_node == 0:
            return "alone"
        if self.num_teacher_workers or self.policy.logprob_growth > MOST_LOGPROB_GROWTH:
            return "crowded"
        return "turns" if self.sleep_level else "alone"

    @property
    def refit_transport(self) -> RefitTransport:
        """Return the transport of weights to the engines: `policy.generation.refit_transport`, with `auto` decided."""
        chosen = self.policy.generation.refit_transport
        if chosen != "auto":
            return chosen
        if self.cluster.gpus_per_node == 0 or self.cluster.launcher == "local":
            return "payload"
        if self.policy.generation.colocated.enabled:
            return "ipc"
        sends_whole = self.policy.generation.refit_delta.enabled or (
            self.policy.lora.enabled and not self.policy.lora.is_native
        )
        several = self.cluster.num_workers > 1 or self.policy.generation.ranks_per_engine > 1
        return "shards" if several and not sends_whole else "broadcast"
