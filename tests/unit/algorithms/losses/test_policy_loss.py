"""Losses against a slow float64 reference written row by row."""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from nemo_rl.algorithms.losses.nll import NLLLoss
from nemo_rl.algorithms.losses.policy_loss import PolicyLoss
from nemo_rl.config.loss import LossConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.collectives import destroy_process_group
from nemo_rl.models.policy.interfaces import LossFunction, LossScale
from nemo_rl.models.policy.steps import loss_scales
from nemo_rl.models.policy.workers.compose import ensure_process_group
from nemo_rl.models.policy.workers.stored_routes import logprob_mismatch
from nemo_rl.utils.metrics import merge_metrics, values
from tests.helpers.tiny_model import tiny_batch


def _scale(batch: Mapping[str, torch.Tensor]) -> LossScale:
    counts = [n for _, n in _valid(batch)]
    return LossScale(valid_tokens=float(sum(counts)), valid_sequences=float(sum(n > 0 for n in counts)))


def _valid(batch: Mapping[str, torch.Tensor]) -> list[tuple[list[int], int]]:
    rows = []
    for mask, weight in zip(batch["token_mask"].tolist(), batch["sample_mask"].tolist(), strict=True):
        places = [t for t, m in enumerate(mask) if m and weight > 0 and t > 0]
        rows.append((places, len(places)))
    return rows


def _slow(logprobs: torch.Tensor, batch: Mapping[str, torch.Tensor], config: LossConfig) -> tuple[torch.Tensor, int]:
    """The loss by its definition, and the number of clamped tokens."""
    totals, clamped = [], 0
    for i, (places, count) in enumerate(_valid(batch)):
        row = torch.zeros((), dtype=torch.float64)
        for t in places:
            advantage = float(batch["advantages"][i, t])
            ratio = (logprobs[i, t] - float(batch["prev_logprobs"][i, t])).exp()
            clipped = ratio.clamp(1 - config.ratio_clip_min, 1 + config.ratio_clip_max)
            token = -torch.minimum(ratio * advantage, clipped * advantage)
            if config.reference_policy_kl_penalty > 0:
                raw = float(batch["reference_policy_logprobs"][i, t]) - logprobs[i, t]
                x = raw.clamp(-config.kl_input_clamp_value, config.kl_input_clamp_value)
                kl = x.exp() - 1 - x if config.reference_policy_kl_type == "k3" else x * x / 2
                clamped += int(
                    abs(raw.item()) > config.kl_input_clamp_value or kl.item() > config.kl_output_clamp_value
                )
                token = token + config.reference_policy_kl_penalty * kl.clamp(max=config.kl_output_clamp_value)
            row = row + token
        totals.append((row, count))
    if config.token_level_loss:
        return sum(row for row, _ in totals) / sum(count for _, count in totals), clamped
    used = [(row, count) for row, count in totals if count]
    return sum(row / count for row, count in used) / len(used), clamped


CONFIGS = [
    LossConfig(reference_policy_kl_penalty=0.0),
    LossConfig(reference_policy_kl_penalty=0.0, ratio_clip_max=0.28, token_level_loss=False),
    LossConfig(reference_policy_kl_penalty=0.1),
    LossConfig(reference_policy_kl_penalty=0.1, reference_policy_kl_type="k2", token_level_loss=False),
    LossConfig(reference_policy_kl_penalty=0.5, kl_input_clamp_value=0.4, kl_output_clamp_value=0.05),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_loss_and_gradient_equal_the_definition(config: LossConfig) -> None:
    batch = tiny_batch(6)
    noise = torch.randn(6, 24, generator=torch.Generator().manual_seed(5)) * 0.4
    logprobs = (torch.full((6, 24), -3.0) + noise).requires_grad_()
    reference = logprobs.detach().double().requires_grad_()
    output = PolicyLoss(config=config)(logprobs, batch, scale=_scale(batch))
    expected, clamped = _slow(reference, batch, config)
    output.loss.backward()
    expected.backward()
    assert output.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(logprobs.grad.double(), reference.grad, rtol=1e-4, atol=1e-7)
    if config.reference_policy_kl_penalty > 0:
        assert values(output.metrics)["kl_clamped_tokens"] == clamped


@pytest.mark.parametrize("token_level", [True, False])
def test_microbatches_add_up_to_the_whole_batch(token_level: bool) -> None:
    batch = tiny_batch(8)
    logprobs = torch.full((8, 24), -3.1)
    loss_fn = PolicyLoss(config=LossConfig(token_level_loss=token_level))
    whole = loss_fn(logprobs, batch, scale=_scale(batch))
    parts = [
        loss_fn(logprobs[rows], batch.select_indices(rows), scale=_scale(batch))
        for rows in ([0, 5, 3], [1], [2, 4, 6, 7])
    ]
    assert sum(part.loss.item() for part in parts) == pytest.approx(whole.loss.item(), rel=1e-5)
    merged, expected = values(merge_metrics(p.metrics for p in parts)), values(whole.metrics)
    assert merged.keys() == expected.keys()
    for name, value in expected.items():
        assert merged[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def test_masked_positions_may_hold_anything_without_reaching_loss_or_gradient() -> None:
    batch = tiny_batch(6)
    loss_fn = PolicyLoss(config=LossConfig())
    clean = torch.full((6, 24), -3.0, requires_grad=True)
    before = loss_fn(clean, batch, scale=_scale(batch))
    before.loss.backward()
    masked = ~batch.tensor("token_mask")
    for name in ("prev_logprobs", "generation_logprobs", "reference_policy_logprobs"):
        batch[name] = batch.tensor(name).masked_fill(masked, -1e4)
    dirty = torch.full((6, 24), -3.0, requires_grad=True)
    after = loss_fn(dirty, batch, scale=_scale(batch))
    after.loss.backward()
    assert torch.equal(after.loss, before.loss)
    assert torch.equal(dirty.grad, clean.grad)
    assert values(after.metrics) == values(before.metrics)


def test_equal_policies_have_ratio_one_no_divergence_and_no_clipping() -> None:
    batch = tiny_batch(6)
    metrics = values(PolicyLoss(config=LossConfig())(batch.tensor("prev_logprobs"), batch, scale=_scale(batch)).metrics)
    assert metrics["probs_ratio"] == metrics["probs_ratio_min"] == metrics["probs_ratio_max"] == 1.0
    assert metrics["policy_kl"] == metrics["clip_fraction"] == 0.0
    assert metrics["gen_kl_error"] > 0
    assert metrics["valid_tokens"] == _scale(batch).valid_tokens


def test_clipping_stops_the_gradient_only_in_the_direction_of_the_advantage() -> None:
    ratios = torch.tensor([[1.0, 1.5, 1.5, 0.5, 0.5]])
    batch = {
        "token_mask": torch.ones(1, 5, dtype=torch.bool),
        "sample_mask": torch.ones(1),
        "advantages": torch.tensor([[0.0, 1.0, -1.0, 1.0, -1.0]]),
        "prev_logprobs": torch.zeros(1, 5),
        "generation_logprobs": torch.zeros(1, 5),
    }
    logprobs = ratios.log().requires_grad_()
    config = LossConfig(reference_policy_kl_penalty=0.0)
    PolicyLoss(config=config)(logprobs, batch, scale=_scale(batch)).loss.backward()
    assert [bool(g) for g in logprobs.grad[0]] == [False, False, True, True, False]


def test_old_policy_comes_from_the_named_column() -> None:
    batch = tiny_batch(6)
    config = LossConfig(reference_policy_kl_penalty=0.0)
    loss_fn = PolicyLoss(config=config, prev_field="generation_logprobs")
    assert loss_fn.input_fields == ("token_mask", "sample_mask", "advantages", "generation_logprobs")
    metrics = values(loss_fn(batch.tensor("generation_logprobs"), batch, scale=_scale(batch)).metrics)
    assert metrics["probs_ratio_max"] == 1.0
    assert metrics["gen_kl_error"] == 0.0


@pytest.mark.parametrize(
    ("prev_field", "is_first", "tells"),
    [
        ("prev_logprobs", True, True),
        ("prev_logprobs", False, True),
        ("generation_logprobs", True, True),
        ("generation_logprobs", False, False),
    ],
)
def test_the_mismatch_is_that_of_the_weights_that_have_sampled(prev_field: str, is_first: bool, tells: bool) -> None:
    batch = tiny_batch(6)
    loss_fn = PolicyLoss(config=LossConfig(), prev_field=prev_field)
    scale = replace(_scale(batch), is_first_update=is_first)
    metrics = values(loss_fn(batch.tensor("prev_logprobs"), batch, scale=scale).metrics)
    mismatch = {"gen_kl_error", "js_divergence_error", "gen_probs_ratio", "token_mult_prob_error"}
    assert mismatch & metrics.keys() == (mismatch if tells else set())
    assert metrics["policy_kl"] >= 0


def test_the_reference_is_read_only_with_a_penalty() -> None:
    assert "reference_policy_logprobs" in PolicyLoss(config=LossConfig()).input_fields
    assert "reference_policy_logprobs" not in PolicyLoss(config=CONFIGS[0]).input_fields


def test_a_microbatch_without_valid_tokens_has_no_loss_and_harmless_metrics() -> None:
    batch = tiny_batch(4)
    batch["sample_mask"] = torch.zeros(4)
    output = PolicyLoss(config=LossConfig())(
        torch.zeros(4, 24), batch, scale=LossScale(valid_tokens=10.0, valid_sequences=2.0)
    )
    assert output.loss.item() == 0.0
    assert all(math.isfinite(value) for value in values(output.metrics).values())


def test_losses_survive_pickling() -> None:
    loss_fn = PolicyLoss(config=LossConfig(ratio_clip_max=0.28))
    assert pickle.loads(pickle.dumps(loss_fn)) == loss_fn


def test_nll_is_the_mean_over_valid_tokens() -> None:
    batch = tiny_batch(6)
    logprobs = -torch.rand(6, 24)
    picked = [-float(logprobs[i, t]) for i, (places, _) in enumerate(_valid(batch)) for t in places]
    loss = NLLLoss()(logprobs, batch, scale=_scale(batch)).loss.item()
    assert loss == pytest.approx(sum(picked) / len(picked), rel=1e-5)


def repeated(batch: BatchedDataDict, times: torch.Tensor) -> BatchedDataDict:
    """Each row so many times, with weight 1."""
    rows = torch.arange(batch.size).repeat_interleave(times.long())
    found = batch.select_indices(rows.tolist())
    return BatchedDataDict({**found, "sample_mask": torch.ones(len(rows))})


def scale_of(batch: BatchedDataDict) -> LossScale:
    """As a job of one rank counts."""
    device = torch.device("cpu")
    ensure_process_group(0, 1, 60.0, device)
    try:
        [scale] = loss_scales(batch, [[range(batch.size)]], is_writer=True)
    finally:
        destroy_process_group()
    return scale


@pytest.mark.parametrize("loss_fn", [*(PolicyLoss(config=config) for config in CONFIGS), NLLLoss()], ids=str)
def test_a_row_of_weight_one_half_is_half_a_row(loss_fn: LossFunction) -> None:
    """Loss, gradient, counts and every metric are those of rows that are there once or twice, and count half."""
    batch = tiny_batch(6)
    batch["sample_mask"] = torch.tensor([0.5, 1.0, 0.0, 0.5, 1.0, 0.5])
    twice = repeated(batch, 2 * batch.tensor("sample_mask"))
    logprobs = (batch.tensor("prev_logprobs") + 0.2).requires_grad_()
    rows = torch.arange(6).repeat_interleave((2 * batch.tensor("sample_mask")).long())
    half_scale, scale = (scale_of(part) for part in (batch, twice))
    assert (half_scale.valid_tokens, half_scale.valid_sequences) == (scale.valid_tokens / 2, 7 / 2)
    found = loss_fn(logprobs, batch, scale=half_scale)
    [gradient] = torch.autograd.grad(found.loss, logprobs)
    expected = loss_fn(logprobs[rows], twice, scale=scale)
    [wanted] = torch.autograd.grad(expected.loss, logprobs)
    torch.testing.assert_close(found.loss, expected.loss)
    torch.testing.assert_close(gradient, wanted)
    counts = {"valid_tokens", "valid_sequences", "kl_clamped_tokens"}
    for name, metric in expected.metrics.items():
        assert found.metrics[name].value == pytest.approx(metric.value / (2 if name in counts else 1), rel=1e-5), name


def test_the_mismatch_of_a_row_of_weight_one_half_counts_half() -> None:
    batch = tiny_batch(4)
    batch["sample_mask"] = torch.tensor([0.5, 1.0, 0.0, 0.5])
    twice = repeated(batch, 2 * batch.tensor("sample_mask"))
    found, expected = (values(logprob_mismatch(part, part.tensor("prev_logprobs"), "prev")) for part in (batch, twice))
    assert found == pytest.approx(expected, rel=1e-9)


def test_weights_below_one_still_make_a_mean() -> None:
    batch = tiny_batch(2)
    logprobs = batch.tensor("prev_logprobs")
    whole, small = (
        NLLLoss()(
            logprobs,
            {**batch, "sample_mask": batch.tensor("sample_mask") * part},
            scale=LossScale(valid_tokens=part * int(batch.tensor("token_mask")[0].sum()), valid_sequences=part),
        ).loss
        for part in (1.0, 1e-3)
    )
    torch.testing.assert_close(small, whole)
