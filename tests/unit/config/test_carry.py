"""An optimizer and its schedule go with the worker that a later layer selects, or are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_rl.config.load import load_config
from nemo_rl.errors import ConfigError


def test_an_optimizer_goes_with_the_worker_that_a_later_layer_selects(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    base = f"defaults: {Path('configs/grpo_sort_cpu.yaml').resolve()}\n"
    recipe.write_text(
        base + "policy: {optimizer: {kwargs: {lr: 0.25, betas: [0.5, 0.75], weight_decay: 0.125, eps: 0.5}},"
        " scheduler: {name: cosine, warmup_steps: 5, decay_steps: 50, min_factor: 0.5}}"
    )
    switch = ("policy.dtensor_cfg.enabled=false", "policy.megatron_cfg.enabled=true")
    megatron = load_config(recipe, switch).policy.megatron_cfg
    optimizer, scheduler = megatron.optimizer, megatron.scheduler
    assert (optimizer.lr, optimizer.min_lr, optimizer.weight_decay, optimizer.adam_eps) == (0.25, 0.125, 0.125, 0.5)
    assert (optimizer.adam_beta1, optimizer.adam_beta2) == (0.5, 0.75)
    shape = (scheduler.lr_decay_style, scheduler.lr_warmup_iters, scheduler.lr_warmup_init, scheduler.lr_decay_iters)
    assert shape == ("cosine", 4, 0.05, 50)
    # A section of the worker that trains wins, and null drops what the parent has set.
    assert (
        load_config(recipe, (*switch, "policy.megatron_cfg.optimizer.lr=0.75")).policy.megatron_cfg.optimizer.lr == 0.75
    )
    dropped = load_config(recipe, (*switch, "policy.optimizer=null", "policy.scheduler=null")).policy.megatron_cfg
    assert dropped.optimizer.lr == 1e-6 and dropped.scheduler.lr_decay_style == "constant"


@pytest.mark.parametrize(
    ("policy", "lost"),
    [
        ("optimizer: {name: torch.optim.SGD, kwargs: {lr: 0.5}}", "policy.optimizer"),
        ("optimizer: {kwargs: {lr: 0.5, amsgrad: true}}", "policy.optimizer"),
        ("scheduler: [{name: torch.optim.lr_scheduler.ConstantLR, kwargs: {factor: 0.5}}]", "policy.scheduler"),
    ],
)
def test_an_optimizer_that_cannot_go_along_is_named(policy: str, lost: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"defaults: {Path('configs/grpo_sort_cpu.yaml').resolve()}\npolicy: {{{policy}}}")
    with pytest.raises(ConfigError, match=rf"{lost}: would be lost"):
        load_config(recipe, ("policy.dtensor_cfg.enabled=false", "policy.megatron_cfg.enabled=true"))
