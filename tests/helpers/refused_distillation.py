"""Overrides of the sort demo with a teacher that rules refuse or accept, as in `refused_configs`."""

from __future__ import annotations

from tests.helpers.refused_configs import CORRECTED, GPUS, LOCAL, PENALTY, Refused

TAUGHT = "loss_fn.distillation"
ADDED = (f"{TAUGHT}.enabled=true", f"{TAUGHT}.teacher.model_name=teacher", f"{TAUGHT}.mode=added")
ALONE = (*ADDED[:2], "grpo.drop_zero_advantage_groups=false", "loss_fn.ratio_clip_max=0.2")
MEGATRON_TEACHER = (*ADDED, f"{TAUGHT}.teacher.engine=megatron")

REFUSED_DISTILLATION: Refused = {
    "rule_distillation_keys_need_their_switch": [
        ((f"{TAUGHT}.top_k=8",), f"{TAUGHT}.top_k: 8 would be ignored, because {TAUGHT}.enabled is false"),
        ((f"{TAUGHT}.teacher.model_name=a",), f"{TAUGHT}.teacher.model_name: 'a' would be ignored"),
        ((*ADDED, f"{TAUGHT}.mixed_weight=0.2"), f"{TAUGHT}.mixed_weight: 0.2 would be ignored"),
    ],
    "rule_distillation_needs_a_teacher": [(ADDED[:1], f"{TAUGHT}.teacher.model_name: must be set to a model folder")],
    "rule_distillation_needs_a_loss_that_has_it": [
        ((*ADDED, "loss_fn.name=mine:Loss"), f"{TAUGHT}.enabled: it is a term of the built-in losses"),
        ((*ALONE, "loss_fn.ratio_clip_max=0.3"), "loss_fn.ratio_clip_max: 0.3 would be ignored, because"),
        ((*ALONE, *CORRECTED), "loss_fn.use_importance_sampling_correction: True would be ignored"),
        ((*ALONE, *PENALTY, "loss_fn.use_kl_in_reward=true"), f"would be ignored, because {TAUGHT}.mode is 'alone'"),
    ],
    "rule_distillation_alone_trains_every_row": [
        ((*ALONE, "grpo.drop_zero_advantage_groups=true"), "grpo.drop_zero_advantage_groups: "),
        ((*ALONE, "grpo.use_dynamic_sampling=true"), "grpo.use_dynamic_sampling: "),
    ],
    "rule_teacher_reads_text": [
        ((*ADDED, "data.train.image_key=picture"), f"{TAUGHT}.enabled: prompts have images, and a teacher gets")
    ],
    "rule_teacher_has_a_place": [
        ((*LOCAL, *ADDED, f"{TAUGHT}.teacher.num_workers=2"), "num_workers: cluster.launcher 'local' runs one"),
        ((*GPUS, *ADDED, f"{TAUGHT}.teacher.num_workers=4"), "share the GPUs of the policy's, of which there are 2"),
        (
            (
                *(*LOCAL, *MEGATRON_TEACHER, "~policy.optimizer", "~policy.scheduler"),
                *("policy.megatron_cfg.enabled=true", "policy.dtensor_cfg.enabled=false"),
            ),
            f"{TAUGHT}.teacher.engine: megatron-core has one set of groups in a process",
        ),
    ],
    "rule_teacher_engine_has_its_axes": [
        ((*ADDED, f"{TAUGHT}.teacher.pipeline_parallel_size=2"), "only the Megatron worker has this axis")
    ],
    "rule_teacher_layout_is_that_of_a_policy": [
        ((*ADDED, f"{TAUGHT}.teacher.tensor_parallel_size=4"), "dtensor_cfg.tensor_parallel_size: 4 x context"),
        ((*MEGATRON_TEACHER, f"{TAUGHT}.teacher.sequence_parallel=true"), "sequence_parallel: True would be ignored"),
    ],
}

ACCEPTED_DISTILLATION: list[tuple[str, ...]] = [
    ADDED,
    ALONE,
    (*LOCAL, *ALONE),
    (*GPUS, *ALONE, f"{TAUGHT}.teacher.tensor_parallel_size=2"),
    (*MEGATRON_TEACHER, f"{TAUGHT}.teacher.pipeline_parallel_size=2"),
    (*ADDED, f"{TAUGHT}.teacher.num_workers=4", f"{TAUGHT}.teacher.context_parallel_size=4"),
]
