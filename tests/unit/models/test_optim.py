"""Learning-rate curves, loss scale and optimizers by name."""

from __future__ import annotations

import pytest
import torch

from nemo_rl.config.policy import OptimizerConfig, SchedulerConfig
from nemo_rl.errors import ConfigError
from nemo_rl.models.dtensor.optim import GROWTH_INTERVAL, LossScaler, build_optimizer, learning_rate_factor


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


def test_lists_become_tuples_for_the_optimizer() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    config = OptimizerConfig(kwargs={"lr": 1e-3, "betas": [0.9, 0.95]})
    assert build_optimizer(config, [weight]).param_groups[0]["betas"] == (0.9, 0.95)


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("torch.optim.AdamV", {}, "cannot find"),
        ("no_such_module.Adam", {}, "cannot find"),
        ("AdamW", {}, "expected a torch optimizer"),
        ("torch.nn.Linear", {}, "expected a torch optimizer"),
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
