"""What is not a number, empty or alone: every loss stays finite, with a finite gradient."""

from __future__ import annotations

import math

import pytest
import torch

from nemo_rl.algorithms.losses.policy_loss import PolicyLoss
from nemo_rl.config.loss import LOSS_PROPERTIES, LossConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.policy.interfaces import LossScale
from nemo_rl.utils.metrics import values
from tests.helpers.hf_reference import global_scale
from tests.helpers.loss_reference import corrected, corrections_of, kl_configs, loss_batch, loss_config

INFINITY = float("inf")


def configs() -> list[LossConfig]:
    found = []
    for name in LOSS_PROPERTIES:
        found += [loss_config(name, reference_policy_kl_penalty=0.1)]
        found += [loss_config(name, **corrected(kind)) for kind in corrections_of(name)]
    return found + kl_configs()[::4]


def finite_run(config: LossConfig, batch: BatchedDataDict, now: torch.Tensor, scale: LossScale) -> dict[str, float]:
    now = now.clone().requires_grad_()
    output = PolicyLoss(config=config)(now, batch, scale=scale)
    output.loss.backward()
    found = values(output.metrics)
    assert math.isfinite(output.loss.item()) and now.grad.isfinite().all()
    assert all(math.isfinite(value) for value in found.values()), found
    assert output.token_losses.isfinite().all()
    return {**found, "pull": float(now.grad.abs().sum())}


@pytest.mark.parametrize("config", configs(), ids=lambda config: config.name)
def test_empty_single_and_infinite_tokens_make_no_nan(config: LossConfig) -> None:
    # No token in the microbatch, while others have some; and none in the whole batch.
    for scale in (LossScale(valid_tokens=9.0, valid_sequences=3.0), LossScale(valid_tokens=0.0, valid_sequences=0.0)):
        empty = loss_batch()
        empty["sample_mask"] = torch.zeros(6)
        assert finite_run(config, empty, empty.tensor("now"), scale)["pull"] == 0.0
    # A row with one token.
    single = loss_batch(rows=1, width=3)
    single["token_mask"] = torch.tensor([[False, True, False]])
    finite_run(config, single, single.tensor("now"), global_scale(single))
    # What is infinite, or not known to the sampler, counts as equal.
    for name in ("now", "prev_logprobs", "generation_logprobs", "reference_policy_logprobs"):
        for odd in (-INFINITY, INFINITY, *([float("nan")] if name == "generation_logprobs" else [])):
            batch = loss_batch()
            batch.tensor(name)[0, 2] = odd
            batch.tensor(name)[1, 1] = odd
            found = finite_run(config, batch, batch.tensor("now"), global_scale(batch))
            assert found["nonfinite_tokens"] == (0 if name == "reference_policy_logprobs" else 2), name
    far = loss_batch()
    far["prev_logprobs"] = far.tensor("prev_logprobs") - 200.0
    finite_run(config, far, far.tensor("now").float(), global_scale(far))


@pytest.mark.parametrize("name", ["now", "prev_logprobs"])
def test_what_is_no_number_in_the_trainer_reaches_the_loss_so_that_workers_stop(name: str) -> None:
    batch = loss_batch()
    batch.tensor(name)[0, 2] = float("nan")
    loss_fn = PolicyLoss(config=loss_config("clipped_pg"))
    assert math.isnan(loss_fn(batch.tensor("now"), batch, scale=global_scale(batch)).loss.item())


def test_a_token_that_is_not_finite_leaves_the_others_alone() -> None:
    clean, odd = loss_batch(), loss_batch()
    odd.tensor("prev_logprobs")[0, 2] = -INFINITY
    clean.tensor("prev_logprobs")[0, 2] = clean.tensor("now")[0, 2]
    gradients = []
    for batch in (clean, odd):
        now = batch.tensor("now").clone().requires_grad_()
        PolicyLoss(config=loss_config("clipped_pg"))(now, batch, scale=global_scale(batch)).loss.backward()
        gradients.append(now.grad)
    changed = (gradients[0] != gradients[1]).nonzero().tolist()
    assert changed == [[0, 2]] and gradients[1][0, 2] == 0.0
