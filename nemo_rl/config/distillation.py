"""The section `loss_fn.distillation`: a teacher whose distributions the policy learns.

The teacher is a second policy without training: `teacher_policy` makes its `PolicyConfig` from the recipe's own, and
what is refused for a policy is refused for it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from nemo_rl.config.backends import DTensorConfig, LoraConfig, MegatronConfig
from nemo_rl.config.base import Section, Text
from nemo_rl.config.policy import PolicyConfig, RouterReplayConfig, TokenizerConfig

__all__ = ["DistillationConfig", "TeacherConfig", "teacher_policy"]


class TeacherConfig(Section):
    """The model that teaches, and its workers. Batches, temperature and sequence lengths are those of `policy`."""

    model_name: Text | None = None
    """Folder of a Hugging Face causal language model with the tokenizer of `policy.model_name`."""
    num_workers: PositiveInt | None = None
    """Workers of the teacher; null: as many as the policy has. On GPUs they share those of the policy's workers."""
    engine: Literal["dtensor", "megatron"] = "dtensor"
    """Worker that runs it."""
    precision: Literal["float32", "bfloat16", "float16"] | None = None
    """Computation dtype; null: `policy.precision`."""
    tensor_parallel_size: PositiveInt = 1
    """Ranks over which its layers are split."""
    context_parallel_size: PositiveInt = 1
    """Ranks over which its sequences are split."""
    pipeline_parallel_size: PositiveInt = 1
    """Megatron only."""
    expert_parallel_size: PositiveInt = 1
    """Megatron only."""
    sequence_parallel: bool = False
    """Split activations between the blocks over the tensor axis."""


class DistillationConfig(Section):
    """On-policy distillation: the KL between the teacher's and the policy's distributions at every sampled token."""

    enabled: bool = False
    """Have a teacher, and add its term to the loss."""
    mode: Literal["alone", "added"] = "alone"
    """`alone`: in place of the policy-gradient term, so that rewards only measure; `added`: beside it."""
    coefficient: PositiveFloat = 1.0
    """Weight of the term."""
    kl: Literal["forward", "reverse", "mixed"] = "reverse"
    """forward: KL(teacher, policy); reverse: KL(policy, teacher); mixed: both, by `mixed_weight`."""
    mixed_weight: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of the forward KL in `mixed`."""
    top_k: PositiveInt = 64
    """Most likely tokens of the teacher that are compared; with the whole vocabulary it is the full KL."""
    tail: Literal["bucket", "renormalize"] = "bucket"
    """All tokens outside the top-k. bucket: they are one event on both sides, so that the KL is a lower bound of
    the full one; renormalize: both are taken as distributions on the top-k alone."""
    teacher: TeacherConfig = Field(default_factory=TeacherConfig)


def teacher_policy(given: TeacherConfig, student: PolicyConfig) -> PolicyConfig:
    """Return the teacher as a policy: its model and layout, with the batches and the temperature of the student."""
    is_megatron = given.engine == "megatron"
    return student.model_copy(
        update={
            "model_name": given.model_name,
            # Rows are padded with the policy's own pad token.
            "tokenizer": TokenizerConfig(name=student.tokenizer.name or student.model_name),
            "precision": given.precision or student.precision,
            "dtensor_cfg": DTensorConfig(
                enabled=not is_megatron,
                tensor_parallel_size=given.tensor_parallel_size,
                context_parallel_size=given.context_parallel_size,
                sequence_parallel=given.sequence_parallel,
            ),
            "megatron_cfg": MegatronConfig(
                enabled=is_megatron,
                tensor_model_parallel_size=given.tensor_parallel_size,
                context_parallel_size=given.context_parallel_size,
                pipeline_model_parallel_size=given.pipeline_parallel_size,
                expert_model_parallel_size=given.expert_parallel_size,
                sequence_parallel=given.sequence_parallel,
            ),
            # Routes of the rollout are those of another model.
            "router_replay": RouterReplayConfig(),
            "lora": LoraConfig(),
        }
    )
