"""Optimizers by name, and the loss scale."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from nemo_rl.config.dtensor import OptimizerConfig
from nemo_rl.distributed.collectives import RankSpec, destroy_process_group, init_process_group
from nemo_rl.errors import ConfigError
from nemo_rl.models.dtensor.optim import GROWTH_INTERVAL, LossScaler, build_optimizer


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
