"""The section `loss_fn.distillation`: a teacher whose distributions the policy learns, and the rules over it.

The teacher is a second policy without training: `teacher_policy` makes its `PolicyConfig` from the recipe's own, and
what is refused for a policy is refused for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from nemo_rl.config import dtensor, megatron, policy
from nemo_rl.config.base import Section, Text
from nemo_rl.config.dtensor import DTensorConfig
from nemo_rl.config.lora import LoraConfig
from nemo_rl.config.megatron import MegatronConfig
from nemo_rl.config.policy import PolicyConfig, TokenizerConfig
from nemo_rl.config.router_replay import RouterReplayConfig
from nemo_rl.config.rule import Rule, keys_besides_the_switch, rules_in, would_be_ignored

if TYPE_CHECKING:
    from nemo_rl.config.schema import MasterConfig

__all__ = ["DistillationConfig", "TeacherConfig", "num_teacher_workers", "teacher_config", "teacher_policy"]


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


_SECTION = "loss_fn.distillation"
_TEACHER = f"{_SECTION}.teacher"


def num_teacher_workers(config: MasterConfig) -> int:
    """Return the workers of the teacher; 0 without distillation."""
    distillation = config.loss_fn.distillation
    if not distillation.enabled:
        return 0
    return distillation.teacher.num_workers or config.cluster.num_workers


def teacher_policy(config: MasterConfig) -> PolicyConfig:
    """Return the teacher as a policy: its model and layout, with the batches and the temperature of the policy."""
    given, student = config.loss_fn.distillation.teacher, config.policy
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


def teacher_config(config: MasterConfig) -> MasterConfig:
    """Return the recipe as the workers of its teacher see it."""
    workers, cluster = num_teacher_workers(config), config.cluster
    size = {"gpus_per_node": workers} if cluster.gpus_per_node > 0 else {"cpu_workers_per_node": workers}
    return config.model_copy(
        update={
            "policy": teacher_policy(config),
            "cluster": cluster.model_copy(update={"num_nodes": 1, **size}),
        }
    )


# ---- rules


def rule_distillation_keys_need_their_switch(config: MasterConfig) -> Iterator[str]:
    section, switch = config.loss_fn.distillation, f"{_SECTION}.enabled"
    if section.enabled:
        if section.kl == "mixed":
            return
        because = f"{_SECTION}.kl is {section.kl!r}"
        yield from would_be_ignored(section, _SECTION, ["mixed_weight"], switch=f"{_SECTION}.kl", because=because)
        return
    names = keys_besides_the_switch(section)
    yield from would_be_ignored(section, _SECTION, names, switch=switch)


def rule_distillation_needs_a_teacher(config: MasterConfig) -> Iterator[str]:
    section = config.loss_fn.distillation
    if section.enabled and section.teacher.model_name is None:
        yield f"{_TEACHER}.model_name: must be set to a model folder when {_SECTION}.enabled is true"


def rule_distillation_alone_trains_every_row(config: MasterConfig) -> Iterator[str]:
    section, grpo = config.loss_fn.distillation, config.grpo
    if not section.enabled or section.mode != "alone":
        return
    lines, why = [], f"{_SECTION}.mode 'alone' learns from rows of equal rewards as well"
    if grpo.use_dynamic_sampling:
        lines.append(f"grpo.use_dynamic_sampling: {why}; set it to false")
    if grpo.drop_zero_advantage_groups is True:
        lines.append(f"grpo.drop_zero_advantage_groups: {why}; set it to false")
    yield from lines


def rule_teacher_reads_text(config: MasterConfig) -> Iterator[str]:
    if not config.loss_fn.distillation.enabled or not config.data.has_images:
        return
    yield (
        f"{_SECTION}.enabled: prompts have images, and a teacher gets the tokens of rows alone; set it to false, or "
        "take prompts of text"
    )


def rule_teacher_has_a_place(config: MasterConfig) -> Iterator[str]:
    section, cluster, workers = config.loss_fn.distillation, config.cluster, num_teacher_workers(config)
    if not section.enabled:
        return
    lines, key = [], f"{_TEACHER}.num_workers"
    if cluster.launcher == "local":
        if workers > 1:
            lines.append(
                f"{key}: cluster.launcher 'local' runs one worker in this process, got {workers}; set it to 1, or "
                "cluster.launcher=ray"
            )
        if section.teacher.engine == "megatron" and config.policy.megatron_cfg.enabled:
            lines.append(
                f"{_TEACHER}.engine: megatron-core has one set of groups in a process, which the policy's worker uses; "
                "set dtensor, or cluster.launcher=ray"
            )
    elif cluster.gpus_per_node > 0 and workers > cluster.num_workers:
        lines.append(
            f"{key}: the teacher's workers share the GPUs of the policy's, of which there are {cluster.num_workers}, "
            f"got {workers}; set a number of at most {cluster.num_workers}"
        )
    yield from lines


def rule_teacher_engine_has_its_axes(config: MasterConfig) -> Iterator[str]:
    section = config.loss_fn.distillation
    if not section.enabled or section.teacher.engine == "megatron":
        return
    yield from (
        f"{_TEACHER}.{name}: only the Megatron worker has this axis; set {_TEACHER}.engine=megatron, or leave it out"
        for name in ("pipeline_parallel_size", "expert_parallel_size")
        if getattr(section.teacher, name) > 1
    )


_OF_A_POLICY: tuple[Rule, ...] = (
    policy.rule_parallel_sizes_divide_the_workers,
    *(rule for name, rule in rules_in(vars(megatron)).items() if name.startswith("rule_megatron")),
    *(rule for name, rule in rules_in(vars(dtensor)).items() if "parallel" in name),
)
"""Rules over the layout of a policy, which a teacher has to keep as well."""


def rule_teacher_layout_is_that_of_a_policy(config: MasterConfig) -> Iterator[str]:
    section = config.loss_fn.distillation
    if not section.enabled or section.teacher.model_name is None:
        return
    seen = teacher_config(config)
    yield from (f"{_TEACHER}: as a policy of its own: {line}" for rule in _OF_A_POLICY for line in rule(seen))
