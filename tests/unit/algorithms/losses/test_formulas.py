"""Every policy loss equals an independent float64 reference, in value and gradient, and numbers worked out by hand."""

from __future__ import annotations

from math import exp, log

import pytest
import torch

from nemo_rl.algorithms.losses.policy_loss import PolicyLoss
from nemo_rl.config.loss import LOSS_PROPERTIES, LossConfig
from nemo_rl.config.parts import LOSSES
from nemo_rl.models.policy.interfaces import LossScale
from nemo_rl.utils.metrics import values
from tests.helpers.hf_reference import global_scale
from tests.helpers.loss_reference import (
    REFERENCES,
    all_configs,
    loss_batch,
    loss_config,
    reference_gradient,
    reference_loss,
)

CONFIGS = all_configs()


def label(config: LossConfig) -> str:
    changed = {k: v for k, v in config.model_dump(exclude_defaults=True).items() if k != "name"}
    return f"{config.name}-{'-'.join(f'{k}={v}' for k, v in changed.items())}"


def test_every_loss_has_a_reference_and_traits() -> None:
    assert set(LOSSES.builtin) == set(REFERENCES) == set(LOSS_PROPERTIES)


@pytest.mark.parametrize("config", CONFIGS, ids=label)
def test_value_and_gradient_equal_the_reference(config: LossConfig) -> None:
    batch = loss_batch()
    now = batch.tensor("now").clone().requires_grad_()
    loss = PolicyLoss(config=config)(now, batch, scale=global_scale(batch)).loss
    loss.backward()
    at = batch.tensor("now")
    expected = reference_loss(batch, at, at, config)
    assert loss.item() == pytest.approx(expected, rel=1e-12, abs=1e-14)
    gradient = reference_gradient(batch, at, config, prev_field="prev_logprobs")
    torch.testing.assert_close(now.grad, gradient, rtol=1e-6, atol=1e-9)
    assert gradient.abs().max() > 1e-4


@pytest.mark.parametrize("config", CONFIGS, ids=label)
def test_rows_with_replies_between_their_turns_equal_the_reference(config: LossConfig) -> None:
    batch = loss_batch(rows=8, width=14)
    # Two or three turns a row, and rubbish between them.
    is_reply = torch.zeros(8, 14, dtype=torch.bool)
    is_reply[:, 4:6], is_reply[::2, 9:12] = True, True
    batch["token_mask"] = batch.tensor("token_mask") & ~is_reply
    for name in ("prev_logprobs", "generation_logprobs"):
        batch[name] = torch.where(is_reply, -40.0, batch.tensor(name))
    now = batch.tensor("now").clone().requires_grad_()
    loss = PolicyLoss(config=config)(now, batch, scale=global_scale(batch)).loss
    loss.backward()
    at = batch.tensor("now")
    assert loss.item() == pytest.approx(reference_loss(batch, at, at, config), rel=1e-12, abs=1e-14)
    gradient = reference_gradient(batch, at, config, prev_field="prev_logprobs")
    torch.testing.assert_close(now.grad, gradient, rtol=1e-6, atol=1e-9)
    assert not now.grad[is_reply].any()


@pytest.mark.parametrize("name", sorted(LOSSES.builtin))
def test_a_number_for_each_row_is_that_number_for_each_token(name: str) -> None:
    batch = loss_batch(per_row=True)
    loss_fn = PolicyLoss(config=loss_config(name), prev_field="generation_logprobs")
    by_row = loss_fn(batch.tensor("now"), batch, scale=global_scale(batch)).loss
    batch["advantages"] = batch.tensor("advantages")[:, None].expand(batch.tensor("now").shape)
    by_token = loss_fn(batch.tensor("now"), batch, scale=global_scale(batch)).loss
    assert by_row.item() == pytest.approx(by_token.item(), rel=1e-12)


RATIOS = [[1.5, 0.9], [2.0, 0.5, 4.0]]
PROBABILITIES = [[0.3, 0.45], [0.4, 0.1, 0.8]]
SCALE = LossScale(valid_tokens=5.0, valid_sequences=2.0)


def example() -> dict[str, torch.Tensor]:
    """Two rows, of 2 and 3 tokens, with advantages of 1 and -1."""
    now, mask, old = torch.zeros(2, 4, dtype=torch.float64), torch.zeros(2, 4, dtype=torch.bool), None
    old = now.clone()
    for i, (ratios, chances) in enumerate(zip(RATIOS, PROBABILITIES, strict=True)):
        for t, (ratio, chance) in enumerate(zip(ratios, chances, strict=True), start=1):
            now[i, t], old[i, t], mask[i, t] = log(chance), log(chance / ratio), True
    ones = torch.ones(2, dtype=torch.float64)
    columns = {"token_mask": mask, "sample_mask": ones, "advantages": torch.tensor([1.0, -1.0], dtype=torch.float64)}
    return {**columns, "now": now, "prev_logprobs": old, "generation_logprobs": old}


def run_example(name: str, **keys: object) -> float:
    batch = example()
    config = LossConfig.model_validate({"name": name, "reference_policy_kl_penalty": 0, **keys})
    return PolicyLoss(config=config)(batch["now"], batch, scale=SCALE).loss.item()


TOKENS, ROWS = {}, {"token_level_loss": False}
NARROW = {**ROWS, "ratio_clip_min": 3e-4, "ratio_clip_max": 4e-4}
CHECKED: list[tuple[str, dict[str, object], float]] = [
    ("clipped_pg", TOKENS, 0.94),
    ("clipped_pg", {"ratio_clip_max": 0.28}, 0.924),
    ("clipped_pg", ROWS, 0.6083333),
    ("clipped_pg", {**ROWS, "ratio_clip_max": 0.28}, 0.5883333),
    ("clipped_pg", {"constant_length": 8}, 0.29375),
    ("clipped_pg", {"ratio_clip_c": 3.0}, 0.74),
    ("gspo", ROWS, 0.2127530),
    ("gspo", NARROW, 0.2935005),
    ("gspo_token", ROWS, 0.2127530),
    ("gspo_token", NARROW, 0.2935005),
    ("luspo", ROWS, 1.2192066),
    ("gmpo", {**ROWS, "ratio_clip_min": 0.4, "ratio_clip_max": 0.4}, 0.2958111),
    ("cispo", {"ratio_clip_min": 1.0, "ratio_clip_max": 4.0}, -0.2703664),
    ("cispo", TOKENS, -0.2091930),
    ("sapo", ROWS, 0.2176738),
]


@pytest.mark.parametrize(("name", "keys", "expected"), CHECKED, ids=str)
def test_the_example_has_the_numbers_that_were_worked_out_by_hand(name, keys, expected):
    assert run_example(name, **keys) == pytest.approx(expected, abs=5e-8)


def one_token(name: str, *, chance: float, ratio: float, advantage: float, **keys: object) -> tuple[float, float]:
    """Value, and the weight of the gradient of log pi with its sign turned."""
    now = torch.tensor([[0.0, log(chance)]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[0.0, log(chance / ratio)]], dtype=torch.float64)
    batch = {
        "token_mask": torch.tensor([[False, True]]),
        "sample_mask": torch.ones(1),
        "advantages": torch.tensor([advantage], dtype=torch.float64),
        "prev_logprobs": old,
        "generation_logprobs": old,
    }
    config = LossConfig.model_validate({"name": name, "reference_policy_kl_penalty": 0, **keys})
    loss = PolicyLoss(config=config)(now, batch, scale=LossScale(valid_tokens=1.0, valid_sequences=1.0)).loss
    loss.backward()
    return loss.item(), -now.grad[0, 1].item()


def test_sapo_and_dro_pull_as_their_papers_say() -> None:
    _, pull = one_token("sapo", chance=0.3, ratio=1.5, advantage=1.0)
    assert pull == pytest.approx(1.4100223, abs=5e-8)
    value, pull = one_token("dro", chance=0.3, ratio=1.5, advantage=1.0, dro={"beta": 0.5})
    assert (value, pull) == (pytest.approx(1.2450733, abs=5e-8), pytest.approx(0.7972674, abs=5e-8))


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"), [(1.35, 1.0, 0.6377615), (4.0, -1.0, -0.1586401), (1.0, 1.0, 1.0)]
)
def test_vespo_weighs_by_its_kernel(ratio: float, advantage: float, expected: float) -> None:
    _, pull = one_token("vespo", chance=0.2, ratio=ratio, advantage=advantage)
    assert pull == pytest.approx(expected, abs=5e-8)


@pytest.mark.parametrize(
    ("name", "old", "now", "advantage", "bound", "is_kept"),
    [
        ("dppo_tv", 0.2, 0.3, 1.0, 0.0999, False),
        ("dppo_tv", 0.2, 0.3, 1.0, 0.1001, True),
        ("dppo_tv", 0.2, 0.3, -1.0, 0.01, True),
        ("dppo_tv", 0.01, 0.05, 1.0, 0.2, True),
        ("dppo_kl", 0.2, 0.3, 1.0, 0.0257320, False),
        ("dppo_kl", 0.2, 0.3, 1.0, 0.0257322, True),
        ("dppo_kl", 0.2, 0.1, -1.0, 0.0444029, False),
        ("dppo_kl", 0.2, 0.1, -1.0, 0.0444031, True),
        ("dppo_kl", 0.2, 0.1, 1.0, 0.001, True),
    ],
)
def test_dppo_leaves_out_what_moved_too_far_the_way_it_is_pushed(name, old, now, advantage, bound, is_kept):
    value, pull = one_token(
        name, chance=now, ratio=now / old, advantage=advantage, dppo={"delta_low": bound, "delta_high": bound}
    )
    ratio = now / old
    expected = (-ratio * advantage, ratio * advantage) if is_kept else (0.0, 0.0)
    assert (value, pull) == (pytest.approx(expected[0]), pytest.approx(expected[1]))


def test_a_forced_ratio_is_one_and_needs_no_old_policy() -> None:
    batch = loss_batch()
    loss_fn = PolicyLoss(config=loss_config("clipped_pg", force_on_policy_ratio=True))
    assert "prev_logprobs" not in loss_fn.input_fields
    del batch["prev_logprobs"]
    now = batch.tensor("now").clone().requires_grad_()
    output = loss_fn(now, batch, scale=global_scale(batch))
    [forced] = torch.autograd.grad(output.loss, now)
    metrics = values(output.metrics)
    assert metrics["probs_ratio_min"] == metrics["probs_ratio_max"] == 1.0
    assert metrics["gen_kl_error"] > 0
    plain = PolicyLoss(config=loss_config("reinforce"), prev_field="generation_logprobs")
    [expected] = torch.autograd.grad(plain(now, batch, scale=global_scale(batch)).loss, now)
    torch.testing.assert_close(forced, expected)


def test_gspo_and_its_token_form_have_one_gradient_where_a_row_has_one_advantage() -> None:
    batch = loss_batch(per_row=True)
    gradients = []
    for name in ("gspo", "gspo_token"):
        now = batch.tensor("now").clone().requires_grad_()
        PolicyLoss(config=loss_config(name))(now, batch, scale=global_scale(batch)).loss.backward()
        gradients.append(now.grad)
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-15)


def test_entropy_is_subtracted_with_the_mean_of_the_loss() -> None:
    batch = loss_batch()
    plain = PolicyLoss(config=loss_config("clipped_pg", token_level_loss=False))
    loss_fn = PolicyLoss(config=loss_config("clipped_pg", token_level_loss=False, entropy_coefficient=0.5))
    assert "entropy" in loss_fn.input_fields and "entropy" not in plain.input_fields
    entropy = torch.rand(batch.tensor("now").shape, dtype=torch.float64).requires_grad_()
    scale = global_scale(batch)
    output = loss_fn(batch.tensor("now"), {**batch, "entropy": entropy}, scale=scale)
    mask = batch.tensor("token_mask") & (batch.tensor("sample_mask") > 0)[:, None]
    weight = batch.tensor("sample_mask").double()[:, None]
    share = mask * weight / mask.sum(1, keepdim=True).clamp(min=1) / scale.valid_sequences
    bonus = 0.5 * (entropy * share).sum()
    without = plain(batch.tensor("now"), batch, scale=scale).loss
    assert output.loss.item() == pytest.approx((without - bonus).item(), rel=1e-12)
    [gradient] = torch.autograd.grad(output.loss, entropy)
    torch.testing.assert_close(gradient, -0.5 * share)
    found = values(output.metrics)
    expected = (entropy * mask * weight).sum().item() / scale.valid_tokens
    assert found["entropy"] == pytest.approx(expected) and found["entropy_bonus"] == pytest.approx(bonus.item())


def test_the_largest_ratio_is_bounded_and_counted() -> None:
    batch = example()
    batch["prev_logprobs"] = batch["now"].clone()
    batch["prev_logprobs"][0, 1] -= 100.0
    now = batch["now"].float().requires_grad_()
    output = PolicyLoss(config=loss_config("clipped_pg"))(now, batch, scale=SCALE)
    output.loss.backward()
    found = values(output.metrics)
    assert found["ratio_clamped_tokens"] == 1.0 and found["probs_ratio_max"] == pytest.approx(exp(20))
    assert now.grad.isfinite().all()
