"""Every key of `loss_fn` changes what it names, from the recipe to the loss that the driver sends."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from nemo_rl.algorithms.losses.policy_loss import PolicyLoss, build_loss
from nemo_rl.algorithms.stages.columns import stage_columns
from nemo_rl.config.load import load_config
from nemo_rl.config.loss import LossConfig
from nemo_rl.config.schema_walk import iter_fields, section_class
from nemo_rl.models.policy.interfaces import (
    ENTROPY,
    POLICY_TOPK,
    TOPK_IDS,
    TOPK_LOGPROBS,
    UNFILTERED_LOGPROBS,
)
from nemo_rl.utils.metrics import values
from tests.helpers.hf_reference import global_scale
from tests.helpers.loss_reference import loss_batch, loss_config
from tests.helpers.runs import write_recipe

COMMON = ("grpo.use_generation_logprobs_as_prev=false",)
NO_KL = ("loss_fn.reference_policy_kl_penalty=0",)
ROWS = ("loss_fn.token_level_loss=false",)
KL = ("loss_fn.reference_policy_kl_penalty=0.5",)
CORRECTED = ("loss_fn.use_importance_sampling_correction=true",)
TIS = (*CORRECTED, "loss_fn.truncated_importance_sampling_type=tis", "loss_fn.truncated_importance_sampling_ratio=1.3")
VESPO = ("loss_fn.name=vespo",)
TAUGHT = "loss_fn.distillation"
TEACHER = (f"{TAUGHT}.enabled=true", f"{TAUGHT}.teacher.model_name=teacher", "grpo.drop_zero_advantage_groups=false")
MIXED = (*TEACHER, f"{TAUGHT}.kl=mixed")

CHANGES: list[tuple[str, Sequence[str], Sequence[str], str]] = [
    ("name", (), ("loss_fn.name=cispo",), "gradient"),
    ("ratio_clip_min", (), ("loss_fn.ratio_clip_min=0.01",), "gradient"),
    ("ratio_clip_max", (), ("loss_fn.ratio_clip_max=0.01",), "gradient"),
    ("ratio_clip_c", (), ("loss_fn.ratio_clip_c=1.1",), "gradient"),
    (
        "force_on_policy_ratio",
        ("policy.train_global_batch_size=16",),
        ("loss_fn.force_on_policy_ratio=true",),
        "gradient",
    ),
    ("sapo.tau_positive", ("loss_fn.name=sapo",), ("loss_fn.sapo.tau_positive=3",), "gradient"),
    ("sapo.tau_negative", ("loss_fn.name=sapo",), ("loss_fn.sapo.tau_negative=3",), "gradient"),
    ("dppo.delta_low", ("loss_fn.name=dppo_tv",), ("loss_fn.dppo.delta_low=0.001",), "gradient"),
    ("dppo.delta_high", ("loss_fn.name=dppo_kl",), ("loss_fn.dppo.delta_high=1e-6",), "gradient"),
    *((f"vespo.{key}", VESPO, (f"loss_fn.vespo.{key}=1.5",), "gradient")
      for key in ("k_positive", "lambda_positive", "k_negative", "lambda_negative")),
    ("dro.beta", ("loss_fn.name=dro", "loss_fn.dro.beta=0.1"), ("loss_fn.dro.beta=1",), "gradient"),
    ("token_level_loss", (), ROWS, "gradient"),
    ("constant_length", (), ("loss_fn.constant_length=5",), "gradient"),
    ("use_importance_sampling_correction", (), CORRECTED, "gradient"),
    ("truncated_importance_sampling_type", CORRECTED, TIS[1:], "gradient"),
    ("truncated_importance_sampling_ratio", TIS, ("loss_fn.truncated_importance_sampling_ratio=1.05",), "gradient"),
    (
        "truncated_importance_sampling_ratio_min",
        TIS,
        ("loss_fn.truncated_importance_sampling_ratio_min=0.95",),
        "gradient",
    ),
    ("reference_policy_kl_penalty", KL, ("loss_fn.reference_policy_kl_penalty=1",), "gradient"),
    ("use_kl_in_reward", KL, ("loss_fn.use_kl_in_reward=true",), "gradient"),
    ("reference_policy_kl_type", KL, ("loss_fn.reference_policy_kl_type=k2",), "gradient"),
    ("reference_policy_kl_gradient", KL, ("loss_fn.reference_policy_kl_gradient=straight_through",), "gradient"),
    ("use_on_policy_kl_approximation", KL, ("loss_fn.use_on_policy_kl_approximation=true",), "gradient"),
    ("kl_input_clamp_value", KL, ("loss_fn.kl_input_clamp_value=0.2",), "kl_clamped_tokens"),
    ("kl_output_clamp_value", KL, ("loss_fn.kl_output_clamp_value=0.01",), "kl_clamped_tokens"),
    ("entropy_coefficient", (), ("loss_fn.entropy_coefficient=0.1",), "entropy_bonus"),
    ("distillation.enabled", (), TEACHER, "gradient"),
    ("distillation.mode", TEACHER, (f"{TAUGHT}.mode=added",), "gradient"),
    ("distillation.coefficient", TEACHER, (f"{TAUGHT}.coefficient=2",), "gradient"),
    ("distillation.kl", TEACHER, (f"{TAUGHT}.kl=forward",), "gradient"),
    ("distillation.mixed_weight", MIXED, (f"{TAUGHT}.mixed_weight=0.9",), "gradient"),
    ("distillation.tail", TEACHER, (f"{TAUGHT}.tail=renormalize",), "gradient"),
]  # fmt: skip
"""Key, what it needs, the change, and what must differ."""


def behaviour(folder: Path, overrides: Sequence[str]) -> dict[str, object]:
    """Loss, gradient and metrics of the loss that a recipe makes."""
    no_kl = () if any("kl_penalty" in override for override in overrides) else NO_KL
    config = load_config(write_recipe(folder, Path("model")), (*COMMON, *no_kl, *overrides))
    loss_fn = build_loss(config.loss_fn, config.grpo)
    batch = loss_batch()
    now, entropy = batch.tensor("now").clone().requires_grad_(), batch.tensor("now").abs()
    events = torch.stack([now, 0.5 * now, now - now.detach(), 2 * now], -1).log_softmax(-1)
    taught = torch.tensor([0.6, 0.2, 0.1, 0.1]).log().expand(*now.shape, 4)
    computed = {ENTROPY: entropy, UNFILTERED_LOGPROBS: now, POLICY_TOPK: events}
    computed |= {TOPK_LOGPROBS: taught, TOPK_IDS: torch.zeros(*now.shape, 3, dtype=torch.int32)}
    columns = {name: {**batch, **computed}[name] for name in loss_fn.input_fields}
    output = loss_fn(now, columns, scale=global_scale(batch))
    output.loss.backward()
    assert now.grad is not None
    return {**values(output.metrics), "gradient": now.grad}


@pytest.mark.parametrize(("key", "needs", "change", "what"), CHANGES, ids=[change[0] for change in CHANGES])
def test_the_key_changes_what_it_names(key, needs, change, what, tmp_path):
    before, after = (behaviour(tmp_path / str(i), overrides) for i, overrides in enumerate((needs, (*needs, *change))))
    if what == "gradient":
        assert not torch.allclose(before["gradient"], after["gradient"], rtol=1e-3, atol=1e-6)
    else:
        assert before.get(what) != after[what]


def test_the_table_has_every_key() -> None:
    keys = {path for path, field in iter_fields(LossConfig) if section_class(field.annotation) is None}
    # `options` are those of a loss of one's own: tests/e2e runs one, and distillations with a teacher's passes.
    of_the_pass = {key for key in keys if key.startswith("distillation.teacher.")} | {"distillation.top_k"}
    assert keys - {"options"} - of_the_pass == {change[0] for change in CHANGES}


def test_a_class_that_derives_from_the_built_in_loss_has_its_term_and_may_name_another() -> None:
    batch = loss_batch()

    def loss_of(loss_fn: PolicyLoss) -> float:
        return loss_fn(batch.tensor("now"), batch, scale=global_scale(batch)).loss.item()

    own = LossConfig(name="mine:Loss", reference_policy_kl_penalty=0)
    assert loss_of(PolicyLoss(config=own)) == loss_of(PolicyLoss(config=loss_config("clipped_pg")))
    assert loss_of(OwnReinforce(config=own)) == loss_of(PolicyLoss(config=loss_config("reinforce")))


class OwnReinforce(PolicyLoss):
    @property
    def term_name(self) -> str:
        return "reinforce"


@pytest.mark.parametrize("is_forced", [False, True])
def test_a_forced_ratio_leaves_the_pass_for_the_old_policy_out(is_forced: bool, tmp_path: Path) -> None:
    overrides = ("policy.train_global_batch_size=16", f"loss_fn.force_on_policy_ratio={str(is_forced).lower()}")
    config = load_config(write_recipe(tmp_path, Path("model")), (*COMMON, *overrides))
    names = [stage.name for stage in stage_columns(config, build_loss(config.loss_fn, config.grpo))]
    assert ("prev_logprobs" in names) != is_forced


def test_entropies_are_asked_of_the_workers_and_never_fetched(tmp_path: Path) -> None:
    make = partial(load_config, write_recipe(tmp_path, Path("model")))
    [plain, asked] = [make((*COMMON, *more)) for more in ((), ("loss_fn.entropy_coefficient=0.1",))]
    [before, after] = [stage_columns(config, build_loss(config.loss_fn, config.grpo)) for config in (plain, asked)]
    assert [stage.reads for stage in before] == [stage.reads for stage in after]
