"""Sizes and schedules that a config says, whichever worker trains."""

from __future__ import annotations

import pytest

from nemo_rl.config.backends import DTensorConfig, MegatronConfig, MegatronSchedulerConfig
from nemo_rl.config.load import load_config
from nemo_rl.config.policy import ParallelSizes, PolicyConfig

MEGATRON_TP2 = "configs/recipes/grpo_sort_megatron_tp2_cpu.yaml"


@pytest.mark.parametrize(
    ("sizes", "replica_size", "length_multiple"),
    [
        (ParallelSizes(), 1, 1),
        (ParallelSizes(tensor=4), 4, 1),
        (ParallelSizes(tensor=4, sequence_parallel=True), 4, 4),
        (ParallelSizes(context=2), 2, 4),
        (ParallelSizes(pipeline=3, expert=5, expert_tensor=7), 3, 1),
        (ParallelSizes(tensor=2, pipeline=2, context=2, sequence_parallel=True), 8, 8),
    ],
)
def test_a_replica_is_tensor_x_pipeline_x_context_ranks(sizes, replica_size, length_multiple):
    assert (sizes.replica_size, sizes.length_multiple) == (replica_size, length_multiple)


def test_sizes_come_from_the_worker_that_is_enabled() -> None:
    dtensor = DTensorConfig(tensor_parallel_size=2, context_parallel_size=3, sequence_parallel=True)
    megatron = MegatronConfig(
        tensor_model_parallel_size=4,
        pipeline_model_parallel_size=5,
        context_parallel_size=6,
        expert_model_parallel_size=7,
        sequence_parallel=True,
    )
    policy = PolicyConfig(model_name="m", dtensor_cfg=dtensor, megatron_cfg=megatron)
    assert policy.parallel_sizes == ParallelSizes(tensor=2, context=3, expert_tensor=2, sequence_parallel=True)
    assert policy.replica_keys == (
        "policy.dtensor_cfg.tensor_parallel_size",
        "policy.dtensor_cfg.context_parallel_size",
    )
    chosen = {"dtensor_cfg": dtensor.model_copy(update={"enabled": False})}
    for given, expected in ((None, 4), (1, 1)):
        update = {"enabled": True, "expert_tensor_parallel_size": given}
        other = policy.model_copy(update={**chosen, "megatron_cfg": megatron.model_copy(update=update)})
        assert other.parallel_sizes == ParallelSizes(
            tensor=4, pipeline=5, context=6, expert=7, expert_tensor=expected, sequence_parallel=True
        )
        assert other.parallel_section == "policy.megatron_cfg"
        assert other.replica_keys == (
            "policy.megatron_cfg.tensor_model_parallel_size",
            "policy.megatron_cfg.pipeline_model_parallel_size",
            "policy.megatron_cfg.context_parallel_size",
        )


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        (MegatronSchedulerConfig(lr_decay_style="linear"), 60),
        (MegatronSchedulerConfig(lr_decay_style="linear", lr_decay_iters=7), 7),
        (MegatronSchedulerConfig(lr_decay_style="linear", lr_warmup_iters=80), 81),
        (MegatronSchedulerConfig(lr_warmup_iters=80), 81),
        (MegatronSchedulerConfig(lr_decay_iters=7), 60),
    ],
)
def test_a_decay_ends_with_the_run_and_after_the_warmup(scheduler: MegatronSchedulerConfig, expected: int) -> None:
    assert scheduler.decay_iters(60) == expected


def test_the_megatron_demo_has_the_settings_of_the_demo() -> None:
    demo, megatron = load_config("configs/grpo_sort_cpu.yaml"), load_config(MEGATRON_TP2)
    torch_kwargs, optimizer = demo.policy.optimizer.kwargs, megatron.policy.megatron_cfg.optimizer
    assert torch_kwargs == {
        "lr": optimizer.lr,
        "betas": [optimizer.adam_beta1, optimizer.adam_beta2],
        "weight_decay": optimizer.weight_decay,
    }
    schedule, ours = demo.policy.scheduler, megatron.policy.megatron_cfg.scheduler
    assert (schedule.name, schedule.min_factor * optimizer.lr) == (ours.lr_decay_style, pytest.approx(optimizer.min_lr))
    # The demo counts its first step as one of the warm-up's; Megatron counts from the learning rate before it.
    assert schedule.warmup_steps == ours.lr_warmup_iters + 1
    assert ours.lr_warmup_init == pytest.approx(optimizer.lr / schedule.warmup_steps)
    ignored = {"policy", "checkpointing", "logger"}
    assert demo.model_dump(exclude=ignored) == megatron.model_dump(exclude=ignored)
