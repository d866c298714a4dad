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


def test_keys_set_beside_the_switch_go_before_what_is_carried(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"defaults: {Path('configs/grpo_sort_cpu.yaml').resolve()}\n"
        "policy: {optimizer: {kwargs: {lr: 0.25, betas: [0.5, 0.75], weight_decay: 0.125}},"
        " scheduler: {name: cosine, warmup_steps: 5, decay_steps: 50}}"
    )
    switch = ("policy.dtensor_cfg.enabled=false", "policy.megatron_cfg.enabled=true")
    optimizer, scheduler = "policy.megatron_cfg.optimizer", "policy.megatron_cfg.scheduler"
    found = load_config(recipe, (*switch, f"{optimizer}.lr=0.75", f"{optimizer}.adam_beta1=0.625")).policy.megatron_cfg
    assert (found.optimizer.lr, found.optimizer.adam_beta1, found.optimizer.adam_beta2) == (0.75, 0.625, 0.75)
    assert found.optimizer.weight_decay == 0.125 and found.scheduler.lr_decay_iters == 50
    found = load_config(recipe, (*switch, f"{scheduler}.lr_decay_iters=70")).policy.megatron_cfg
    assert (found.scheduler.lr_decay_style, found.scheduler.lr_decay_iters) == ("cosine", 70)
    assert found.scheduler.lr_warmup_iters == 4 and found.optimizer.lr == 0.25
    found = load_config(recipe, (*switch, f"{optimizer}.optimizer=sgd", f"{optimizer}.lr=0.5")).policy.megatron_cfg
    assert (found.optimizer.optimizer, found.optimizer.lr, found.optimizer.weight_decay) == ("sgd", 0.5, 0.01)


@pytest.mark.parametrize(
    ("policy", "lost"),
    [
        ("megatron_cfg: {optimizer: {lr: 0.5}}", "policy.megatron_cfg.optimizer"),
        ("megatron_cfg: {optimizer: {adam_beta2: 0.5, weight_decay: 0.25}}", "policy.megatron_cfg.optimizer"),
        ("megatron_cfg: {scheduler: {lr_decay_style: cosine}}", "policy.megatron_cfg.scheduler"),
    ],
)
def test_megatrons_optimizer_is_not_lost_with_a_switch_to_dtensor(policy: str, lost: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    # A recipe whose DTensor sections have the defaults: one that sets them has said what that worker trains with.
    parent = tmp_path / "parent.yaml"
    parent.write_text(
        f"defaults: {Path('configs/grpo_base.yaml').resolve()}\n"
        "data: {train: {dataset_name: sort_digits, size: 512}, validation: null}\n"
        "env: {name: sort}\n"
        "policy: {model_name: model, dtensor_cfg: {enabled: false}, megatron_cfg: {enabled: true}}"
    )
    recipe.write_text(f"defaults: parent.yaml\npolicy: {{{policy}}}")
    load_config(recipe)
    back = ("policy.dtensor_cfg.enabled=true", "policy.megatron_cfg.enabled=false")
    with pytest.raises(ConfigError, match=rf"{lost}: would be lost.*; set policy\.\w+, or drop it with ~{lost}"):
        load_config(recipe, back)
    load_config(recipe, (*back, f"~{lost}"))


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
