"""One rank of the DTensor worker equals a plain Hugging Face model, in every layout of its microbatches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nemo_rl.algorithms.losses.policy_loss import PolicyLoss
from nemo_rl.config.backends import DTensorConfig
from nemo_rl.config.generation import GenerationConfig
from nemo_rl.config.loss import LossConfig
from nemo_rl.config.policy import PolicyConfig, SequencePackingConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.packing import PackPlan
from nemo_rl.errors import ConfigError
from nemo_rl.models.hf.loading import load_causal_lm
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker
from tests.helpers.hf_reference import hf_logprobs, hf_train_step
from tests.helpers.model_families import LONG_ROPE, write_with_tokenizer
from tests.helpers.tiny_model import tiny_batch, tiny_model, tiny_policy, tiny_worker

LOSS = PolicyLoss(config=LossConfig())
ADAM = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.0}
# The longest rows stand apart, and one microbatch is a single row.
UNEVEN = PackPlan(microbatches=(((6, 1, 3), (0,), (7, 2, 5, 4)),), steps=(3,), pad_to=24)


@pytest.fixture
def make(folder: Path) -> Iterator[object]:
    started: list[PolicyWorker] = []

    def start(config: PolicyConfig | None = None, **kwargs: object) -> PolicyWorker:
        started.append(tiny_worker(config or tiny_policy(folder), **kwargs))
        return started[-1]

    yield start
    for worker in started:
        worker.shutdown()


@pytest.mark.parametrize("layout", ["one by one", "two by two", "uneven", "packed", "packed and rounded up"])
def test_logprobs_equal_hf_in_every_layout(layout: str, folder: Path, make) -> None:
    batch = tiny_batch(8)
    expected = hf_logprobs(load_causal_lm(folder), batch).detach()
    plan = {"uneven": UNEVEN, "packed": replace(UNEVEN, packed=True)}.get(layout)
    config = tiny_policy(folder)
    if layout == "packed and rounded up":
        config = tiny_policy(
            folder, make_sequence_length_divisible_by=16, sequence_packing=SequencePackingConfig(enabled=True)
        )
    mbs = {"one by one": 1, "two by two": 2}.get(layout)
    everything = batch.select_indices(range(8))
    del everything["token_mask"]
    torch.testing.assert_close(
        make(config).get_logprobs(everything, mbs=mbs, plan=plan), expected, rtol=1e-5, atol=1e-5
    )


def test_with_a_token_mask_only_its_tokens_are_computed(folder: Path, make) -> None:
    batch = tiny_batch(8)
    expected = torch.where(batch.tensor("token_mask"), hf_logprobs(load_causal_lm(folder), batch).detach(), 0.0)
    torch.testing.assert_close(make().get_logprobs(batch), expected, rtol=1e-5, atol=1e-5)


def test_logprobs_follow_the_sampling_temperature(folder: Path, make) -> None:
    config = tiny_policy(folder, generation=GenerationConfig(temperature=0.6))
    batch = tiny_batch(8)
    expected = hf_logprobs(load_causal_lm(folder), batch, temperature=0.6).detach()
    result = make(config).get_logprobs(batch)
    mask = batch.tensor("token_mask")
    torch.testing.assert_close(result[mask], expected[mask], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["one by one", "uneven", "packed", "recomputed"])
def test_loss_gradient_norm_and_weights_equal_hf(layout: str, folder: Path, make) -> None:
    batch = tiny_batch(8)
    loss, norm, weights = hf_train_step(folder, batch, LOSS, ADAM, max_norm=1.0)
    config = tiny_policy(folder)
    if layout == "recomputed":
        config = tiny_policy(folder, dtensor_cfg=DTensorConfig(activation_checkpointing=True))
    plan = {"uneven": UNEVEN, "packed": replace(UNEVEN, packed=True)}.get(layout)
    worker = make(config)
    result = worker.train(batch, LOSS, gbs=8, mbs=1, plan=plan)
    assert result.loss[0] == pytest.approx(loss, rel=1e-5)
    assert result.grad_norm[0] == pytest.approx(norm, rel=1e-5)
    for name, weight in worker.export_weights():
        # Adam's first step is lr * sign(gradient) where gradients are clear: an error in one shows as 2e-3.
        torch.testing.assert_close(weight, weights[name], rtol=0, atol=2e-5)


def test_topk_logits_are_those_of_the_next_token(folder: Path, make) -> None:
    batch = tiny_batch(8)
    values, ids = make().get_topk_logits(batch, k=4, mbs=3)
    model, length = load_causal_lm(folder), int(batch.tensor("input_lengths")[5])
    with torch.no_grad():
        logits = model(batch.tensor("input_ids")[5:6, :length].long(), use_cache=False).logits[0]
    expected = logits.topk(4, dim=-1)
    torch.testing.assert_close(values[5, :length], expected.values, rtol=1e-5, atol=1e-5)
    assert torch.equal(ids[5, :length], expected.indices)
    assert not values[5, length:].any()


YARN = {"factor": 8.0, "original_max_position_embeddings": 16}
LLAMA3 = {**YARN, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES = {"linear": {"factor": 4.0}, "yarn": YARN, "llama3": LLAMA3, "longrope": LONG_ROPE, "proportional": {}}


@pytest.mark.parametrize("kind", sorted(ROPE_INIT_FUNCTIONS))
def test_positions_of_a_row_do_not_follow_the_rows_beside_it(kind: str, tmp_path: Path, make) -> None:
    batch, model = tiny_batch(8), tiny_model()
    # `proportional` is scaled as `default` is.
    model.config.rope_parameters = {"rope_theta": 1e4, **ROPES.get(kind, {"factor": 4.0}), "rope_type": kind}
    if kind == "dynamic":
        model.config.max_position_embeddings = 16
    write_with_tokenizer(tmp_path, model)
    if kind not in ROPES:
        with pytest.raises(ConfigError, match=f"rope_type {kind!r}, whose frequencies grow with the longest row"):
            make(tiny_policy(tmp_path))
        return
    lengths = batch.tensor("input_lengths")
    assert lengths.min() < LONG_ROPE["original_max_position_embeddings"] < lengths.max()
    expected = hf_logprobs(load_causal_lm(tmp_path), batch).detach()
    everything = BatchedDataDict({name: column for name, column in batch.items() if name != "token_mask"})
    worker = make(tiny_policy(tmp_path))
    for plan in (UNEVEN, replace(UNEVEN, packed=True)):
        found = worker.get_logprobs(everything, plan=plan)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    worker.shutdown()


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_stays_near_float32(precision: str, folder: Path, make) -> None:
    batch = tiny_batch(8)
    loss, norm, _ = hf_train_step(folder, batch, LOSS, ADAM, max_norm=1.0)
    result = make(tiny_policy(folder, precision=precision)).train(batch, LOSS, gbs=8, mbs=4)
    # bfloat16 keeps 8 bits, float16 11: losses of order 1 built from ratios of log-probabilities.
    tolerance = {"bfloat16": 0.1, "float16": 0.02}[precision]
    assert result.loss[0] == pytest.approx(loss, rel=tolerance)
    assert result.grad_norm[0] == pytest.approx(norm, rel=tolerance)
