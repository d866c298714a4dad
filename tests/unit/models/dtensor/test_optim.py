"""Optimizers by name, the loss scale, and learning-rate curves against `SequentialLR` of torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import lr_scheduler

from nemo_rl.config.backends import OptimizerConfig, SchedulerConfig
from nemo_rl.config.load import load_config
from nemo_rl.distributed.collectives import RankSpec, destroy_process_group, init_process_group
from nemo_rl.errors import ConfigError
from nemo_rl.models.dtensor.train_step import (
    GROWTH_INTERVAL,
    LearningRate,
    LossScaler,
    build_optimizer,
    learning_rate_factor,
)


def test_lists_become_tuples_for_the_optimizer() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    config = OptimizerConfig(kwargs={"lr": 1e-3, "betas": [0.9, 0.95]})
    assert build_optimizer(config, [weight]).param_groups[0]["betas"] == (0.9, 0.95)


def test_any_optimizer_of_any_module_can_be_named() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    config = OptimizerConfig(name=f"{Halving.__module__}.Halving", kwargs={"lr": 0.5})
    assert isinstance(build_optimizer(config, [weight]), Halving)


class Halving(torch.optim.SGD):
    """An optimizer of one's own."""


def test_the_kernel_over_all_weights_is_chosen_by_device_and_kind() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    kwargs = {"lr": 1e-3}
    plain = build_optimizer(OptimizerConfig(kwargs=kwargs), [weight]).defaults
    assert not plain["fused"] and plain["foreach"] is None, "on the CPU torch decides"
    named = build_optimizer(OptimizerConfig(kwargs={**kwargs, "fused": True}), [weight]).defaults
    assert named["fused"] is True
    build_optimizer(OptimizerConfig(name="torch.optim.LBFGS", kwargs={"lr": 1.0}), [weight])


def test_sharded_and_plain_weights_are_stepped_one_by_one() -> None:
    init_process_group(RankSpec(rank=0, world_size=1), device=torch.device("cpu"), timeout_s=30.0)
    try:
        mesh = init_device_mesh("cpu", (1,))
        sharded = torch.nn.Parameter(distribute_tensor(torch.ones(2), mesh, [Shard(0)]))
        weights = [sharded, torch.nn.Parameter(torch.ones(2))]
        optimizer = build_optimizer(OptimizerConfig(kwargs={"lr": 0.1, "weight_decay": 0.0}), weights)
        assert optimizer.defaults["foreach"] is False
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        assert sharded.to_local()[0].item() == pytest.approx(0.9)
    finally:
        destroy_process_group()


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("torch.optim.AdamV", {}, "cannot find"),
        ("no_such_module.Adam", {}, "cannot find"),
        ("AdamW", {}, "expected a torch Optimizer"),
        ("torch.nn.Linear", {}, "expected a torch Optimizer"),
        ("torch.optim.AdamW", {"learning_rate": 1.0}, "refuses"),
    ],
)
def test_a_wrong_optimizer_is_a_config_error(name: str, kwargs: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_optimizer(OptimizerConfig(name=name, kwargs=kwargs), [torch.nn.Parameter(torch.zeros(2))])


def test_only_float16_scales_the_loss() -> None:
    assert LossScaler(precision="bfloat16").scale == 1.0
    assert not LossScaler(precision="bfloat16").can_retry()
    assert LossScaler(precision="float16").scale > 1.0


def test_the_scale_halves_on_overflow_down_to_one_and_doubles_after_clean_steps() -> None:
    scaler = LossScaler(precision="float16")
    scaler.scale = 2.0
    scaler.on_overflow()
    assert (scaler.scale, scaler.can_retry()) == (1.0, False)
    for _ in range(GROWTH_INTERVAL):
        scaler.on_clean_step()
    assert scaler.scale == 2.0


NUM_CALLS = 14
CHAIN = {
    "phases": [
        {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.1, "total_iters": 4}},
        {"name": "torch.optim.lr_scheduler.ConstantLR", "kwargs": {"factor": 1.0, "total_iters": 10000}},
        {"name": "torch.optim.lr_scheduler.CosineAnnealingLR", "kwargs": {"T_max": 5, "eta_min": 1e-4}},
    ],
    "milestones": [4, 8],
}


def _curve(config: SchedulerConfig, calls: int, num_steps: int = 10) -> list[float]:
    return [learning_rate_factor(config, calls_done=i, num_steps=num_steps) for i in range(calls)]


def test_warm_up_rises_to_one_and_constant_stays() -> None:
    assert _curve(SchedulerConfig(warmup_steps=4), 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_falls_in_a_straight_line_to_its_floor() -> None:
    config = SchedulerConfig(name="linear", decay_steps=4, min_factor=0.2)
    assert _curve(config, 7) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])


def test_cosine_passes_the_middle_half_way() -> None:
    curve = _curve(SchedulerConfig(name="cosine", warmup_steps=2, min_factor=0.1), 11)
    assert curve[2] == 1.0
    assert curve[6] == pytest.approx(0.55)
    assert curve[10] == pytest.approx(0.1)


def test_decay_ends_with_the_run_unless_it_is_named() -> None:
    assert _curve(SchedulerConfig(name="linear", min_factor=0.0), 11, num_steps=10)[10] == 0.0


def _adam(lr: float = 1e-3, **kwargs: object) -> torch.optim.AdamW:
    return torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=lr, **kwargs)  # type: ignore[arg-type]


def _rates(rate: LearningRate, calls: int) -> list[float]:
    seen = []
    for _ in range(calls):
        seen.append(rate.apply())
        rate.advance()
    return seen


def _torch_rates(optimizer: torch.optim.Optimizer, schedule: lr_scheduler.LRScheduler, calls: int) -> list[float]:
    seen = []
    for _ in range(calls):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return seen


def test_a_chain_is_torchs_sequential_schedule() -> None:
    optimizer = _adam()
    phases = [
        lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=4),
        lr_scheduler.ConstantLR(optimizer, factor=1.0, total_iters=10000),
        lr_scheduler.CosineAnnealingLR(optimizer, T_max=5, eta_min=1e-4),
    ]
    expected = _torch_rates(optimizer, lr_scheduler.SequentialLR(optimizer, phases, [4, 8]), NUM_CALLS)
    rate = LearningRate(SchedulerConfig(**CHAIN), _adam(), num_steps=NUM_CALLS)
    assert _rates(rate, NUM_CALLS) == expected
    assert len(set(expected)) > 8, "the curve has to move, or nothing was compared"


@pytest.mark.parametrize("stop", [0, 3, 4, 9])
@pytest.mark.parametrize("config", [CHAIN, {"name": "cosine", "warmup_steps": 2}], ids=["chain", "shape"])
def test_a_resumed_run_continues_the_curve_exactly(config: dict[str, object], stop: int) -> None:
    whole = _rates(LearningRate(SchedulerConfig(**config), _adam(), num_steps=NUM_CALLS), NUM_CALLS)
    first = LearningRate(SchedulerConfig(**config), _adam(), num_steps=NUM_CALLS)
    before = _rates(first, stop)
    # A loaded optimizer brings the learning rate of its last step; it must not become the base of the curve.
    optimizer = _adam()
    second = LearningRate(SchedulerConfig(**config), optimizer, num_steps=NUM_CALLS)
    optimizer.param_groups[0]["lr"] = 123.0
    second.load_state_dict(first.state_dict())
    assert second.calls_done == stop
    assert before + _rates(second, NUM_CALLS - stop) == whole


def test_one_scheduler_may_also_move_the_momentum() -> None:
    kwargs = {"max_lr": 1e-2, "total_steps": NUM_CALLS + 1}
    optimizer = _adam(betas=(0.9, 0.95))
    schedule = lr_scheduler.OneCycleLR(optimizer, **kwargs)
    ours = _adam(betas=(0.9, 0.95))
    phase = {"name": "torch.optim.lr_scheduler.OneCycleLR", "kwargs": kwargs}
    rate = LearningRate(SchedulerConfig.model_validate(phase), ours, num_steps=NUM_CALLS)
    for _ in range(NUM_CALLS):
        rate.apply()
        assert ours.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
        assert ours.param_groups[0]["betas"] == optimizer.param_groups[0]["betas"]
        optimizer.step()
        schedule.step()
        rate.advance()
    assert ours.param_groups[0]["betas"] != (0.9, 0.95)
    assert ours.param_groups[0].keys() == _adam().param_groups[0].keys(), "nothing of the schedule enters checkpoints"


def test_every_group_keeps_its_own_learning_rate() -> None:
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr} for lr in (1e-3, 1e-4)]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    rate = LearningRate(SchedulerConfig(**CHAIN), optimizer, num_steps=NUM_CALLS)
    rate.apply()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([1e-4, 1e-5])


@pytest.mark.parametrize(
    ("phase", "message"),
    [
        ({"name": "torch.optim.lr_scheduler.LinerLR"}, "policy.scheduler.phases: cannot find"),
        ({"name": "torch.optim.AdamW"}, "expected a torch LRScheduler"),
        ({"name": "torch.optim.lr_scheduler.StepLR", "kwargs": {"step": 3}}, "StepLR refuses"),
        ({"name": "torch.optim.lr_scheduler.ReduceLROnPlateau"}, "follows a metric"),
    ],
)
def test_a_wrong_scheduler_is_a_config_error(phase: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LearningRate(SchedulerConfig(phases=[phase]), _adam(), num_steps=3)


DEMO = Path(__file__).parents[4] / "configs" / "grpo_sort_cpu.yaml"
LIST = """
defaults: {demo}
policy:
  scheduler:
    - name: torch.optim.lr_scheduler.LinearLR
      kwargs: {{start_factor: 0.1, end_factor: 1.0, total_iters: 50}}
    - name: torch.optim.lr_scheduler.ConstantLR
      kwargs: {{factor: 1.0, total_iters: 10000000000}}
    - milestones: [50]
"""


def test_a_list_of_schedulers_in_a_recipe_is_a_chain(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(LIST.format(demo=DEMO))
    scheduler = load_config(recipe).policy.scheduler
    assert [phase.name.rpartition(".")[2] for phase in scheduler.phases] == ["LinearLR", "ConstantLR"]
    assert scheduler.milestones == [50]
    assert scheduler.phases[0].kwargs == {"start_factor": 0.1, "end_factor": 1.0, "total_iters": 50}
    assert isinstance(scheduler.phases[0].kwargs["total_iters"], int)


def test_a_misspelt_key_of_a_phase_is_named(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        LIST.format(demo=DEMO).replace("name: torch.optim.lr_scheduler.C", "nam: torch.optim.lr_scheduler.C")
    )
    with pytest.raises(ConfigError, match=r"policy\.scheduler\.1\.nam"):
        load_config(recipe)
