"""Adapters of one DTensor worker: reference, checkpoints, memory, dropout, and what is refused."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, GptOssConfig

from nemo_rl.algorithms.losses.policy_loss import PolicyLoss
from nemo_rl.config.backends import DTensorConfig, LoraConfig
from nemo_rl.config.loss import LossConfig
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.errors import CheckpointError, ConfigError
from nemo_rl.models.adapters.folder import lora_of
from nemo_rl.models.adapters.lora import adapted_layers, attach_adapters, experts_problem, named_adapters
from nemo_rl.models.hf.files import local_shard
from nemo_rl.models.hf.loading import build_meta_model, load_causal_lm, load_model_config, named_weights
from nemo_rl.models.policy.fit import check_model_fits
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker
from tests.helpers.hf_reference import hf_logprobs
from tests.helpers.model_families import write_family
from tests.helpers.tiny_model import (
    adapter_of,
    same,
    tiny_batch,
    tiny_model,
    tiny_policy,
    tiny_worker,
    write_tiny_folder,
)

LOSS = PolicyLoss(config=LossConfig())
LORA = LoraConfig(enabled=True, rank=4, alpha=8.0)


@pytest.fixture
def policy(folder: Path) -> PolicyConfig:
    return tiny_policy(folder, lora=LORA)


@pytest.fixture
def worker(policy: PolicyConfig) -> Iterator[PolicyWorker]:
    made = tiny_worker(policy, keep_reference=True)
    yield made
    made.shutdown()


def changed(policy: PolicyConfig, **changes: object) -> PolicyConfig:
    return policy.model_copy(update={"lora": policy.lora.model_copy(update=changes)})


def trained(policy: PolicyConfig, target: Path, *, steps: int = 2) -> dict[str, torch.Tensor]:
    """Train a worker, save its adapter and optimizer, and return the adapter."""
    made = tiny_worker(policy)
    for _ in range(steps):
        made.train(tiny_batch(), LOSS)
    made.save_checkpoint(weights=target / "weights", optimizer=target / "optimizer", tokenizer=None)
    found = adapter_of(made)
    made.shutdown()
    return found


def bytes_of(tensors: Iterator[torch.Tensor]) -> int:
    return sum(local_shard(tensor).nbytes for tensor in tensors)


def train_bytes(worker: PolicyWorker) -> int:
    """Return the bytes of weights, gradients and optimizer state at the moment of an optimizer step."""
    model, optimizer, found = worker.engine.model, worker.engine.optimizer, list[int]()

    def measure(*_: object) -> None:
        states = [value for state in optimizer.state.values() for value in state.values()]
        gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
        found.append(bytes_of(iter([*model.parameters(), *gradients, *states])))

    optimizer.register_step_post_hook(measure)
    worker.train(tiny_batch(), LOSS)
    return found[0]


# ---- reference


def test_the_reference_is_the_model_without_adapters_and_costs_no_memory(worker: PolicyWorker) -> None:
    batch = tiny_batch()
    before = worker.get_logprobs(batch)
    for _ in range(3):
        worker.train(batch, LOSS)
    after, reference = worker.get_logprobs(batch), worker.get_reference_policy_logprobs(batch)
    assert torch.equal(reference, before) and not torch.equal(after, before)
    assert torch.equal(worker.get_logprobs(batch), after), "the adapters are on again"
    assert worker.reference is None


def test_the_reference_can_be_the_adapter_of_the_start(policy: PolicyConfig, tmp_path: Path) -> None:
    start = trained(policy, tmp_path)
    given = changed(policy, adapter=str(tmp_path / "weights"), reference="start")
    worker, batch = tiny_worker(given, keep_reference=True), tiny_batch()
    assert same(adapter_of(worker), start)
    before = worker.get_logprobs(batch)
    worker.train(batch, LOSS)
    after = worker.get_logprobs(batch)
    assert torch.equal(worker.get_reference_policy_logprobs(batch), before) and not torch.equal(after, before)
    assert torch.equal(worker.get_logprobs(batch), after)
    kept = worker.reference
    assert kept is not None and bytes_of(iter(kept)) == bytes_of(iter(start.values())), "of the adapter alone"
    worker.shutdown()


def test_nothing_but_log_probabilities_runs_while_adapters_are_off(worker: PolicyWorker) -> None:
    with worker.use_reference_model():
        with pytest.raises(RuntimeError, match="does not nest"), worker.use_reference_model():
            pass
        with pytest.raises(RuntimeError, match="while the reference weights are in place"):
            worker.prepare_for_lp_inference()
        with pytest.raises(RuntimeError, match="leave use_reference_model first"):
            worker.train(tiny_batch(), LOSS)
    worker.train(tiny_batch(), LOSS)


def test_adapters_are_on_again_after_an_error(worker: PolicyWorker) -> None:
    worker.train(tiny_batch(), LOSS)
    before = worker.get_logprobs(tiny_batch())
    with pytest.raises(ZeroDivisionError), worker.use_reference_model():
        raise ZeroDivisionError
    assert torch.equal(worker.get_logprobs(tiny_batch()), before)


# ---- checkpoints


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("qwen3", "all-linear"),
        # Its first layer is dense.
        ("qwen3_moe", "all-linear"),
        ("qwen3_moe", ["experts.gate_up_proj", "experts.down_proj", "o_proj"]),
    ],
)
def test_a_checkpoint_is_an_adapter_that_peft_loads(family: str, targets: object, tmp_path: Path) -> None:
    folder, batch = write_family(tmp_path / "model", family), tiny_batch()
    worker = tiny_worker(tiny_policy(folder, lora=LORA.model_copy(update={"targets": targets})))
    for _ in range(2):
        worker.train(batch, LOSS)
    worker.save_checkpoint(weights=tmp_path / "weights", optimizer=tmp_path / "optimizer", tokenizer=None)
    names = {path.name for path in (tmp_path / "weights").iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors", "nemo_rl_base.json"}
    assert json.loads((tmp_path / "weights" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        folder
    )
    found = worker.get_logprobs(batch)
    worker.shutdown()
    with warnings.catch_warnings():
        # Of a mixture it always has a rank for fused weights.
        warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys")
        model = peft.PeftModel.from_pretrained(load_causal_lm(folder), str(tmp_path / "weights"))
    with torch.no_grad():
        expected = hf_logprobs(model, batch) * batch.tensor("token_mask")
    assert float((found - expected).abs().max()) < 2e-5
    meta = build_meta_model(folder)
    assert adapted_layers(meta, lora_of(tmp_path / "weights")) == adapted_layers(meta, worker.config.lora)


def test_training_goes_on_to_the_bit(policy: PolicyConfig, tmp_path: Path) -> None:
    long, batch = tiny_worker(policy), tiny_batch()
    start = long.weights_digest()
    long.train(batch, LOSS)
    assert long.weights_digest() != start, "it follows the adapter"
    long.save_checkpoint(weights=tmp_path / "weights", optimizer=tmp_path / "optimizer", tokenizer=None)
    long.train(batch, LOSS)
    expected = adapter_of(long), long.weights_digest()
    long.shutdown()
    resumed = tiny_worker(policy)
    resumed.load_checkpoint(weights=tmp_path / "weights", optimizer=tmp_path / "optimizer")
    resumed.train(batch, LOSS)
    assert same(adapter_of(resumed), expected[0]) and resumed.weights_digest() == expected[1]
    resumed.shutdown()


def test_a_save_beside_the_training_holds_its_moment(worker: PolicyWorker, tmp_path: Path) -> None:
    worker.train(tiny_batch(), LOSS)
    expected = adapter_of(worker)
    snapshot = worker.engine.snapshot(with_optimizer=True, copies=True)
    worker.train(tiny_batch(), LOSS)
    weights = tmp_path / "weights"
    snapshot.write(weights=weights, optimizer=tmp_path / "optimizer", group=worker._save_group)
    assert not same(adapter_of(worker), expected)
    worker.load_checkpoint(weights=weights, optimizer=None)
    assert same(adapter_of(worker), expected)


def test_an_adapter_of_another_base_is_refused(policy: PolicyConfig, tmp_path: Path) -> None:
    trained(policy, tmp_path, steps=1)
    other = policy.model_copy(update={"model_name": str(write_tiny_folder(tmp_path / "other", seed=1))})
    worker = tiny_worker(other)
    with pytest.raises(CheckpointError, match="trained on a base with other weights"):
        worker.load_checkpoint(weights=tmp_path / "weights", optimizer=None)
    worker.shutdown()
    with pytest.raises(CheckpointError, match="trained on a base with other weights"):
        tiny_worker(changed(other, adapter=str(tmp_path / "weights")))


def test_a_run_without_adapters_refuses_one_and_the_other_way_round(policy, folder, tmp_path):
    trained(policy, tmp_path, steps=1)
    whole = tiny_worker(tiny_policy(folder))
    with pytest.raises(CheckpointError, match="expected a whole model, got an adapter"):
        whole.load_checkpoint(weights=tmp_path / "weights", optimizer=None)
    whole.shutdown()
    worker = tiny_worker(policy)
    with pytest.raises(CheckpointError, match="expected adapter_config.json, which is missing"):
        worker.load_checkpoint(weights=folder, optimizer=None)
    worker.shutdown()


# ---- memory and numbers


def test_adapters_train_in_about_a_quarter_of_the_memory(tmp_path: Path) -> None:
    folder, found = write_tiny_folder(tmp_path), {}
    config = load_model_config(folder)
    config.update({"hidden_size": 256, "intermediate_size": 1024})
    AutoModelForCausalLM.from_config(config).save_pretrained(str(folder))
    for name, lora in (("full", LoraConfig()), ("lora", LoraConfig(enabled=True, rank=1))):
        worker = tiny_worker(tiny_policy(folder, lora=lora))
        found[name] = train_bytes(worker)
        worker.shutdown()
    share = found["lora"] / found["full"]
    # One of four float32 numbers for each weight, and four for each of the 1 % more that are trained.
    assert 0.25 < share < 0.265, share


def test_frozen_weights_stored_in_half_precision_are_held_so_with_the_same_numbers(tmp_path: Path) -> None:
    model, batch, found = tiny_model().bfloat16(), tiny_batch(), {}
    for name, dtype in (("half", torch.bfloat16), ("single", torch.float32)):
        folder = write_tiny_folder(tmp_path / name)
        model.to(dtype).save_pretrained(str(folder))
        worker = tiny_worker(tiny_policy(folder, lora=LORA, precision="bfloat16"))
        norms = [worker.train(batch, LOSS).grad_norm for _ in range(3)]
        dtypes = {weight.dtype for _, weight in worker.engine.weights()}
        trained = {weight.dtype for _, weight in worker.engine.adapters()}
        found[name] = (adapter_of(worker), worker.get_logprobs(batch), norms)
        assert trained == {torch.float32} and dtypes == {torch.bfloat16 if name == "half" else torch.float32}
        worker.shutdown()
    assert same(found["half"][0], found["single"][0])
    assert torch.equal(found["half"][1], found["single"][1]) and found["half"][2] == found["single"][2]


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_dropout_acts_in_training_alone(recompute: str, policy: PolicyConfig) -> None:
    sizes = DTensorConfig(activation_checkpointing=recompute)
    given = changed(policy, dropout=0.5).model_copy(update={"dtensor_cfg": sizes})
    found = []
    for config in (changed(policy, dropout=0.0), given, given):
        worker = tiny_worker(config)
        worker.train(tiny_batch(), LOSS)
        found.append((worker.get_logprobs(tiny_batch()), worker.train(tiny_batch(), LOSS).grad_norm))
        assert torch.equal(worker.get_logprobs(tiny_batch()), worker.get_logprobs(tiny_batch()))
        worker.shutdown()
    assert torch.equal(found[1][0], found[2][0]) and found[1][1] == found[2][1], "drawn from the seed"
    assert not torch.equal(found[0][0], found[1][0])


# ---- refusals


@pytest.mark.parametrize(
    ("lora", "sizes", "text"),
    [
        ({"dropout": 0.1}, {"tensor_parallel_size": 2}, "policy.lora.dropout: 0.1 with .*tensor_parallel_size=2"),
        ({"dropout": 0.1}, {"context_parallel_size": 2}, "policy.lora.dropout: 0.1 with .*context_parallel_size=2"),
        ({"targets": ["lm_head"], "serve": "merged"}, {}, "lm_head of 'qwen3' shares its weight with the embedding"),
        ({"targets": ["q_proj", "w1"]}, {}, "w1"),
        ({"targets": ["experts.down_proj"]}, {}, "experts.down_proj"),
    ],
)
def test_what_cannot_run_is_refused_before_a_worker_starts(lora, sizes, text, folder):
    config = tiny_policy(folder, lora=LORA.model_copy(update=lora), dtensor_cfg=DTensorConfig(**sizes))
    with pytest.raises(ConfigError, match=text):
        check_model_fits(tiny_model(), config)


def test_transposed_experts_are_refused_with_their_reason() -> None:
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "vocab_size": 64}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(GptOssConfig(**sizes, **heads))
    assert experts_problem(model.model.layers[0].mlp.experts, "down_proj") is not None
    with pytest.raises(ConfigError, match="stored transposed"):
        adapted_layers(model, LORA.model_copy(update={"targets": ["experts.down_proj"]}))


def test_attaching_freezes_the_model_and_renames_nothing() -> None:
    model = tiny_model()
    before = dict(named_weights(model))
    attach_adapters(model, adapted_layers(model, LORA), LORA)
    assert {name: id(weight) for name, weight in named_weights(model)} == {
        name: id(weight) for name, weight in before.items()
    }
    assert not any(weight.requires_grad for weight in before.values())
    assert all(weight.requires_grad for _, weight in named_adapters(model))
