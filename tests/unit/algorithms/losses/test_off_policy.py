"""Off-policy weights against numbers worked out by hand, and what the metrics say of them."""

from __future__ import annotations

import pytest
import torch

from nemo_rl.algorithms.losses.off_policy import off_policy_weights
from nemo_rl.algorithms.losses.policy_loss import PolicyLoss
from nemo_rl.config.loss import LossConfig
from nemo_rl.models.head.logprobs import js, k3
from nemo_rl.utils.metrics import values
from tests.helpers.hf_reference import global_scale
from tests.helpers.loss_reference import corrected, loss_batch, loss_config

W = [1.0, 3.0, 0.4]
"""Product 1.2, geometric mean 1.0626586."""


def weights_of(kind: str | None, low: float | None, high: float | None, *, is_row_level: bool = False) -> list[float]:
    keys = {
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": kind,
        "truncated_importance_sampling_ratio_min": low,
        "truncated_importance_sampling_ratio": high,
    }
    log_w = torch.tensor([[0.0, *W]], dtype=torch.float64)
    log_w[0, 1:] = log_w[0, 1:].log()
    mask = torch.tensor([[False, True, True, True]])
    config = LossConfig.model_validate(keys)
    return off_policy_weights(log_w, mask, config, is_row_level=is_row_level).weight_NT[0, 1:].tolist()


@pytest.mark.parametrize(
    ("kind", "low", "high", "expected"),
    [
        (None, None, None, W),
        ("tis", None, 2.0, [1.0, 2.0, 0.4]),
        ("tis", 0.5, 2.0, [1.0, 2.0, 0.5]),
        ("icepop", 0.5, 2.0, [1.0, 0.0, 0.0]),
        ("icepop", 0.39, 3.01, W),
        ("seq-tis", None, 2.0, [1.2] * 3),
        ("seq-tis", None, 1.1, [1.1] * 3),
        ("seq-mis", 0.5, 2.0, [1.2] * 3),
        ("seq-mis", 0.5, 1.1, [0.0] * 3),
        ("seq-mask-tis", 0.9, 1.0627, W),
        ("seq-mask-tis", 0.9, 1.0626, [0.0] * 3),
        ("seq-mask-tis", 1.0627, 2.0, [0.0] * 3),
        ("geo-mask", 0.9, 1.0627, [1.0] * 3),
        ("geo-mask", 0.9, 1.0626, [0.0] * 3),
    ],
)
def test_weights_equal_the_definition(kind, low, high, expected):
    assert weights_of(kind, low, high) == pytest.approx(expected, rel=1e-6)


def test_losses_with_one_ratio_per_row_have_one_weight_per_row() -> None:
    assert weights_of(None, None, None, is_row_level=True) == pytest.approx([1.2] * 3)


def test_the_metrics_say_what_was_masked_and_what_was_truncated() -> None:
    batch = loss_batch()
    mask = batch.tensor("token_mask") & (batch.tensor("sample_mask") > 0)[:, None]
    weight = (mask * batch.tensor("sample_mask")[:, None])[mask]
    w = (batch.tensor("prev_logprobs") - batch.tensor("generation_logprobs")).exp()[mask]

    def metrics(kind: str) -> dict[str, float]:
        loss_fn = PolicyLoss(config=loss_config("clipped_pg", **corrected(kind)))
        return values(loss_fn(batch.tensor("now"), batch, scale=global_scale(batch)).metrics)

    masked, truncated = metrics("icepop"), metrics("tis")
    is_out = (w < 0.8) | (w > 1.25)
    assert (
        masked["masked_share"] == pytest.approx(float(weight[is_out].sum() / weight.sum()), rel=1e-6) and is_out.any()
    )
    assert masked["truncated_share"] == truncated["masked_share"] == 0.0
    assert truncated["truncated_share"] == pytest.approx(float(weight[w > 1.1].sum() / weight.sum()), rel=1e-6)
    mean = float((w.clamp(max=1.1) * weight).sum() / weight.sum())
    assert truncated["sampling_importance_ratio"] == pytest.approx(mean)
    assert truncated["sampling_importance_ratio_max"] == pytest.approx(1.1)
    assert masked["sampling_importance_ratio_min"] == 0.0


def test_what_the_loss_masks_itself_is_in_the_share_as_well() -> None:
    batch = loss_batch()
    found = values(
        PolicyLoss(config=loss_config("dppo_tv"))(batch.tensor("now"), batch, scale=global_scale(batch)).metrics
    )
    assert 0 < found["masked_share"] < 1


def test_divergences_are_unbiased_over_the_sampler() -> None:
    sampler, other = (torch.tensor(p, dtype=torch.float64) for p in ([0.2, 0.5, 0.3], [0.6, 0.3, 0.1]))
    middle, d = (sampler + other) / 2, other.log() - sampler.log()
    kl = (sampler * (sampler / other).log()).sum()
    exact = ((sampler * (sampler / middle).log()).sum() + (other * (other / middle).log()).sum()) / 2
    assert (sampler * k3(d)).sum().item() == pytest.approx(kl.item())
    assert (sampler * js(d)).sum().item() == pytest.approx(exact.item())
    assert js(torch.zeros(1)).item() == 0.0 and (js(d) >= 0).all()


def test_mismatch_metrics_are_those_of_the_gap_between_trainer_and_sampler() -> None:
    batch = loss_batch()
    mask = batch.tensor("token_mask") & (batch.tensor("sample_mask") > 0)[:, None]
    weight = (mask * batch.tensor("sample_mask")[:, None])[mask].double()
    gap = (batch.tensor("prev_logprobs") - batch.tensor("generation_logprobs"))[mask]
    found = values(
        PolicyLoss(config=loss_config("gspo"))(batch.tensor("now"), batch, scale=global_scale(batch)).metrics
    )
    expected = {
        "gen_kl_error": gap.exp() - 1 - gap,
        "js_divergence_error": js(gap),
        "gen_probs_ratio": gap.exp(),
        "token_mult_prob_error": gap.abs().exp(),
    }
    for name, each in expected.items():
        assert found[name] == pytest.approx(float((each * weight).sum() / weight.sum()), rel=1e-6), name
    ratio = (batch.tensor("now") - batch.tensor("prev_logprobs"))[mask].exp()
    assert found["probs_ratio_min"] == pytest.approx(float(ratio.min()))
    assert found["probs_ratio_max"] == pytest.approx(float(ratio.max()))
    assert found["approx_entropy"] == pytest.approx(float((-batch.tensor("now")[mask] * weight).sum() / weight.sum()))
