"""A Megatron worker with adapters on one rank: what is trained, how it starts, its reference and its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from nemo_rl.algorithms.losses.policy_loss import PolicyLoss
from nemo_rl.config.backends import DTensorConfig, LoraConfig, MegatronConfig
from nemo_rl.config.loss import LossConfig
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.errors import CheckpointError
from nemo_rl.models.hf.loading import load_causal_lm
from nemo_rl.models.policy.workers.megatron_engine import collect_gradients
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker
from tests.helpers.hf_reference import hf_logprobs
from tests.helpers.tiny_model import adapter_of, same, tiny_batch, tiny_policy, tiny_worker, write_tiny_folder

LOSS = PolicyLoss(config=LossConfig())


def settings(folder: Path, *, precision: str = "float32", recompute: bool = False, **lora: object) -> PolicyConfig:
    section = MegatronConfig(enabled=True, activation_checkpointing=recompute, optimizer={"lr": 1e-3})  # type: ignore[arg-type]
    return tiny_policy(
        folder,
        precision=precision,
        dtensor_cfg=DTensorConfig(enabled=False),
        megatron_cfg=section,
        lora=LoraConfig(enabled=True, rank=4, alpha=8, **lora),  # type: ignore[arg-type]
    )


@contextmanager
def running(config: PolicyConfig) -> Iterator[PolicyWorker]:
    worker = tiny_worker(config, keep_reference=True)
    try:
        yield worker
    finally:
        worker.shutdown()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_buffers_optimizer_and_main_weights_hold_adapters_only(folder: Path, precision: str) -> None:
    with running(settings(folder, precision=precision)) as worker:
        engine = worker.engine
        count = sum(weight.numel() for weight in adapter_of(worker).values())
        frozen = {name: weight.clone() for name, weight in engine.weights()}
        worker.train(tiny_batch(), LOSS)
        assert sum(buffer.numel_unpadded for buffer in engine.model.ddp.buffers) == count
        assert sum(weight.numel() for group in engine.param_groups() for weight in group["params"]) == count
        for kind in ("exp_avg", "exp_avg_sq", *(["master"] if precision == "bfloat16" else [])):
            state = engine.optimizer.moments(kind)
            assert sum(value.numel() for value in state.values()) == count
            assert all(value.dtype is torch.float32 for value in state.values())
        assert same(dict(engine.weights()), frozen)
        assert all("low_rank" not in name for name in (*frozen, *worker.prepare_refit_info()))


def test_both_workers_start_with_the_same_adapter_and_step_alike(folder: Path) -> None:
    found = []
    config = settings(folder, init="gaussian")
    for policy in (
        config,
        config.model_copy(update={"megatron_cfg": MegatronConfig(), "dtensor_cfg": DTensorConfig()}),
    ):
        with running(policy) as worker:
            start = adapter_of(worker)
            result = worker.train(tiny_batch(), LOSS)
            found.append((worker.engine.adapter_infos(), start, result))
    (megatron, first, result), (dtensor, second, other) = found
    assert list(megatron.items()) == list(dtensor.items())
    assert list(first) == list(second) and same(first, second)
    assert result.loss == pytest.approx(other.loss, rel=1e-5)
    assert result.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)


def test_the_reference_is_the_model_without_its_adapter(folder: Path) -> None:
    batch = tiny_batch()
    with running(settings(folder)) as worker:
        worker.train(batch, LOSS)
        adapter, policy = adapter_of(worker), worker.get_logprobs(batch)
        reference = worker.get_reference_policy_logprobs(batch)
        assert worker.reference is None
        assert same(adapter_of(worker), adapter) and torch.equal(worker.get_logprobs(batch), policy)
    with torch.no_grad():
        base = hf_logprobs(load_causal_lm(folder), batch) * batch.tensor("token_mask")
    mask = batch.tensor("token_mask")
    assert float((reference - base)[mask].abs().max()) < 1e-4 < float((policy - base)[mask].abs().max())


def test_the_reference_is_the_adapter_of_the_start_where_asked_for(folder: Path, tmp_path: Path) -> None:
    batch = tiny_batch()
    with running(settings(folder)) as worker:
        worker.train(batch, LOSS)
        worker.save_checkpoint(weights=tmp_path / "start", optimizer=None, tokenizer=None)
        saved = adapter_of(worker)
    with running(settings(folder, adapter=str(tmp_path / "start"), reference="start")) as worker:
        assert same(adapter_of(worker), saved)
        start = worker.get_logprobs(batch)
        worker.train(batch, LOSS)
        trained, policy = adapter_of(worker), worker.get_logprobs(batch)
        assert torch.equal(worker.get_reference_policy_logprobs(batch), start)
        assert not torch.equal(policy, start)
        assert same(adapter_of(worker), trained) and torch.equal(worker.get_logprobs(batch), policy)


def test_an_adapter_of_another_base_is_refused(folder: Path, tmp_path: Path) -> None:
    other = write_tiny_folder(tmp_path / "other", seed=1)
    with running(settings(other)) as worker:
        worker.save_checkpoint(weights=tmp_path / "adapter", optimizer=None, tokenizer=None)
    with running(settings(folder)) as worker:
        before = adapter_of(worker)
        with pytest.raises(CheckpointError, match="base with other weights"):
            worker.load_checkpoint(weights=tmp_path / "adapter", optimizer=None)
        assert same(adapter_of(worker), before)
    with pytest.raises(CheckpointError, match="base with other weights"):
        tiny_worker(settings(folder, adapter=str(tmp_path / "adapter")))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_save_beside_the_training_holds_its_moment(folder: Path, tmp_path: Path, precision: str) -> None:
    batch, target = tiny_batch(), tmp_path / "saved"
    with running(settings(folder, precision=precision)) as worker:
        worker.train(batch, LOSS)
        saved = adapter_of(worker)
        worker.begin_save(weights=target / "weights", optimizer=target / "optimizer", tokenizer=None)
        results = [worker.train(batch, LOSS) for _ in range(2)]
        worker.finish_save(timeout_s=60.0)
        last = adapter_of(worker)
    with running(settings(folder, precision=precision)) as worker:
        worker.load_checkpoint(weights=target / "weights", optimizer=target / "optimizer")
        assert same(adapter_of(worker), saved)
        again = [worker.train(batch, LOSS) for _ in range(2)]
        assert [result.loss for result in again] == [result.loss for result in results]
        assert same(adapter_of(worker), last)


def test_recomputation_drops_the_same_inputs_again(folder: Path) -> None:
    norms = {}
    for dropout in (0.0, 0.5):
        for recompute in (False, True):
            with running(settings(folder, dropout=dropout, recompute=recompute)) as worker:
                # B is 0 at first, and what A gives is not seen.
                worker.train(tiny_batch(), LOSS)
                before = worker.get_logprobs(tiny_batch())
                assert torch.equal(worker.get_logprobs(tiny_batch()), before)
                norms[dropout, recompute] = worker.train(tiny_batch(), LOSS).grad_norm[0]
    for dropout in (0.0, 0.5):
        assert norms[dropout, True] == pytest.approx(norms[dropout, False], rel=1e-5)
    assert norms[0.5, False] != pytest.approx(norms[0.0, False], rel=1e-2)


@pytest.mark.parametrize("has_adapter", [False, True])
def test_gradients_are_collected_again_when_weights_have_been_elsewhere(folder: Path, has_adapter: bool) -> None:
    """As between steps on a GPU: torch forgets the hooks of a weight whose data changes its device, or its dtype."""
    config = settings(folder)
    if not has_adapter:
        config = config.model_copy(update={"lora": LoraConfig()})
    with running(config) as worker:
        worker.train(tiny_batch(), LOSS)
        expected = worker.train(tiny_batch(), LOSS).grad_norm[0]
    found = {}
    for collects in (False, True):
        with running(config) as worker:
            worker.train(tiny_batch(), LOSS)
            for weight in worker.engine.model.module.parameters():
                here = weight.data
                weight.data = here.double()
                weight.data = here
            if collects:
                collect_gradients(worker.engine.model.ddp)
            found[collects] = worker.train(tiny_batch(), LOSS).grad_norm[0]
    assert found[False] == 0.0 and found[True] == expected > 0.0
