"""With which config a kept step is replayed: what was set over it, one process, the other worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_rl.algorithms.kept_steps.folder import RunFacts, StepSnapshot
from nemo_rl.errors import ConfigError
from nemo_rl_tools.step_replay.chain import ReplayProblem, ReplayRequest
from nemo_rl_tools.step_replay.settings import ReplaySettings, replay_settings
from nemo_rl_tools.verdict import Verdict
from tests.helpers.runs import ROOT, load_recipe

RECIPES = ("grpo_sort_tp2_cpu", "grpo_sort_megatron_pp2_cpu", "grpo_sort_moe_r3_megatron_cpu")


def settings_of(recipe: str, **request: object) -> ReplaySettings:
    config = load_recipe(ROOT / "configs" / "recipes" / f"{recipe}.yaml")
    facts = RunFacts(config=config.model_dump(mode="json"), world_size=2, stages=(), train_fields=())
    step = StepSnapshot(number=1, partition="train", prompts=(), uids=(), keys=(), policy_version=0, run=facts)
    return replay_settings(ReplayRequest(run=Path("run"), step=1, **request), step)


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_key_is_set_over_a_resolved_config_and_nothing_else_changes(recipe: str) -> None:
    kept, changed = settings_of(recipe), settings_of(recipe, overrides=("loss_fn.ratio_clip_max=0.05",))
    assert changed.config.loss_fn.ratio_clip_max == 0.05 and changed.is_exact
    loss = kept.config.loss_fn.model_copy(update={"ratio_clip_max": 0.05})
    assert changed.config == kept.config.model_copy(update={"loss_fn": loss})
    with pytest.raises(ConfigError, match=r"did you mean 'ratio_clip_max'\?$"):
        settings_of(recipe, overrides=("loss_fn.ratio_clip_mx=1",))


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("loss_fn.name", "stranger.losses:Loss"),
        ("grpo.adv_estimator.name", "os.path:join"),
        ("policy.optimizer.name", "stranger.optim.Adam"),
        ("policy.generation.backend", "stranger:engine"),
        ("policy.dtensor_cfg.custom_parallel_plan", "stranger:PLAN"),
        ("policy.dtensor_cfg.custom_parallel_plan", "stranger.plans.PLAN"),
    ],
)
def test_code_of_strangers_is_named_and_not_imported(key: str, name: str) -> None:
    config = load_recipe(ROOT / "configs" / "recipes" / "grpo_sort_tp2_cpu.yaml").model_dump(mode="json")
    *sections, last = key.split(".")
    section = config
    for part in sections:
        section = section[part]
    section[last] = name
    facts = RunFacts(config=config, world_size=2, stages=(), train_fields=())
    step = StepSnapshot(number=1, partition="train", prompts=(), uids=(), keys=(), policy_version=0, run=facts)
    with pytest.raises(ReplayProblem, match=rf"step.json: .*{key}: '{name}'. Add --allow-code") as caught:
        replay_settings(ReplayRequest(run=Path("run"), step=1), step)
    assert caught.value.verdict is Verdict.USAGE
    assert replay_settings(ReplayRequest(run=Path("run"), step=1, allows_code=True), step).worker == "dtensor"


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_process_has_every_size_1(recipe: str) -> None:
    alone = settings_of(recipe, in_one_process=True)
    assert alone.layout.world_size == 1 and alone.policy.parallel_sizes.replica_size == 1
    assert alone.policy.parallel_sizes.expert == 1 and alone.run_layout.world_size == 2 and not alone.is_exact


def test_the_other_worker_has_the_same_adam() -> None:
    there = settings_of("grpo_sort_tp2_cpu", worker="megatron").policy
    adam = there.megatron_cfg.optimizer
    assert (adam.lr, adam.adam_beta1, adam.adam_beta2, adam.weight_decay) == (5e-4, 0.9, 0.95, 0)
    assert there.parallel_sizes.tensor == 2 and there.parallel_sizes.sequence_parallel
    back = settings_of("grpo_sort_megatron_pp2_cpu", worker="dtensor", in_one_process=True).policy.optimizer
    assert back.name == "torch.optim.AdamW" and back.kwargs["betas"] == [0.9, 0.95] and back.kwargs["lr"] == 5e-4
    with pytest.raises(ReplayProblem, match="has no pipeline; add --layout one") as caught:
        settings_of("grpo_sort_megatron_pp2_cpu", worker="dtensor")
    assert caught.value.verdict is Verdict.UNSUPPORTED
