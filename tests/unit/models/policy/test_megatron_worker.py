"""What the Megatron worker alone has: its exports, its precision, and what it leaves in a process."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from nemo_rl.algorithms.losses.policy_loss import PolicyLoss
from nemo_rl.config.backends import DTensorConfig, MegatronConfig
from nemo_rl.config.loss import LossConfig
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.distributed.layout import ParallelLayout
from nemo_rl.errors import ConfigError, ModelFolderError, NonFiniteError
from nemo_rl.models.megatron.mcore import parallel_state
from nemo_rl.models.policy.workers.megatron_engine import attach_replay
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker
from tests.helpers.megatron_models import hf_model
from tests.helpers.model_families import write_with_tokenizer
from tests.helpers.tiny_model import same, tiny_batch, tiny_policy, tiny_worker, weights_of

LOSS = PolicyLoss(config=LossConfig())
LOGIT_ERROR = 1e-5
"""Of float32 logits of about 10."""


def settings(folder: Path, *, precision: str = "float32", **megatron: object) -> PolicyConfig:
    section = MegatronConfig.model_validate({"enabled": True, "optimizer": {"lr": 1e-3}, **megatron})
    return tiny_policy(folder, precision=precision, dtensor_cfg=DTensorConfig(enabled=False), megatron_cfg=section)


@contextmanager
def running(config: PolicyConfig, *, layout: ParallelLayout | None = None) -> Iterator[PolicyWorker]:
    """A worker of one rank, which is shut down also where the test fails."""
    worker = tiny_worker(config, layout=layout, keep_reference=True)
    try:
        yield worker
    finally:
        worker.shutdown()


@pytest.fixture(scope="module")
def experts(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with experts and the same tokenizer."""
    path = tmp_path_factory.mktemp("experts")
    hf_model("qwen3_moe", vocab_size=320, num_hidden_layers=2).save_pretrained(str(path))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, path / name)
    return path


@pytest.fixture(params=["float32", "bfloat16"])
def worker(request: pytest.FixtureRequest, folder: Path) -> Iterator[PolicyWorker]:
    with running(settings(folder, precision=request.param)) as worker:
        yield worker


@pytest.fixture
def plain(folder: Path) -> Iterator[PolicyWorker]:
    with running(settings(folder)) as worker:
        yield worker


@pytest.mark.parametrize("which", ["folder", "experts"])
def test_what_is_announced_is_exported_under_the_names_of_the_other_engine(which, request):
    path = request.getfixturevalue(which)
    other = tiny_worker(tiny_policy(path))
    expected, weights = other.prepare_refit_info(), dict(other.export_weights())
    other.shutdown()
    with running(settings(path)) as worker:
        announced, exported = worker.prepare_refit_info(), weights_of(worker)
    assert announced == expected
    assert list(announced) == list(exported)
    assert same(exported, weights)


def test_exports_have_the_announced_precision(worker: PolicyWorker) -> None:
    announced = worker.prepare_refit_info()
    exported = weights_of(worker)
    assert list(exported) == list(announced)
    for name, weight in exported.items():
        assert tuple(weight.shape) == announced[name].shape
        assert str(weight.dtype) == f"torch.{announced[name].dtype}"
        assert announced[name].dtype == worker.config.precision


def test_exported_weights_are_copies(plain: PolicyWorker) -> None:
    first = weights_of(plain)
    before = {name: weight.clone() for name, weight in first.items()}
    plain.train(tiny_batch(), LOSS)
    assert same(first, before)
    for weight in first.values():
        weight.zero_()
    assert all(bool(weight.any()) for weight in weights_of(plain).values())


def test_policy_and_its_main_weights_come_back_from_the_reference(worker: PolicyWorker) -> None:
    batch = tiny_batch()
    worker.train(batch, LOSS)
    weights, main = weights_of(worker), dict(worker.engine.optimizer.moments("master"))
    main = {name: tensor.clone() for name, tensor in main.items()}
    assert bool(main) == (worker.config.precision == "bfloat16")
    expected = worker.get_logprobs(batch)
    with pytest.raises(ZeroDivisionError), worker.use_reference_model():
        assert not same(weights_of(worker), weights)
        raise ZeroDivisionError
    assert same(weights_of(worker), weights)
    assert same(dict(worker.engine.optimizer.moments("master")), main)
    assert torch.equal(worker.get_logprobs(batch), expected)


def test_evaluation_leaves_weights_optimizer_and_random_state(worker: PolicyWorker) -> None:
    batch = tiny_batch()
    worker.train(batch, LOSS)
    weights = weights_of(worker)
    state = {name: tensor.clone() for name, tensor in worker.engine.optimizer.state_tensors()}
    schedule, random = worker.engine.optimizer.state_dict(), torch.get_rng_state()
    worker.train(batch, LOSS, eval_mode=True)
    worker.get_logprobs(batch)
    assert same(weights_of(worker), weights)
    assert all(torch.equal(state[name], tensor) for name, tensor in worker.engine.optimizer.state_tensors())
    assert worker.engine.optimizer.state_dict() == schedule
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(weight.main_grad.any() for weight in worker.engine.model.module.parameters())


@pytest.mark.parametrize("which", ["folder", "experts"])
def test_the_largest_logits_are_those_of_hugging_face(which: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(which)
    hf = AutoModelForCausalLM.from_pretrained(path).eval()
    batch = tiny_batch(4)
    with running(settings(path)) as worker:
        values, ids = worker.get_topk_logits(batch, k=5, mbs=3)
    for row, length in enumerate(batch.tensor("input_lengths").tolist()):
        with torch.no_grad():
            logits = hf(batch.tensor("input_ids")[row : row + 1, :length]).logits[0]
        expected = logits.topk(5)
        torch.testing.assert_close(values[row, :length], expected.values, atol=LOGIT_ERROR, rtol=1e-5)
        torch.testing.assert_close(logits.gather(1, ids[row, :length]), expected.values, atol=LOGIT_ERROR, rtol=1e-5)
        assert not values[row, length:].any()


@pytest.mark.parametrize("place", ["weight", "log-probability"])
def test_nan_stops_training_with_the_keys_and_changes_nothing(worker: PolicyWorker, place: str) -> None:
    batch = tiny_batch()
    worker.train(batch, LOSS)
    if place == "weight":
        with torch.no_grad():
            worker.engine.model.module.decoder.final_layernorm.weight[3] = float("nan")
    else:
        batch["prev_logprobs"] = batch.tensor("prev_logprobs").clone()
        batch.tensor("prev_logprobs")[3, 5] = float("nan")
    state = {name: tensor.clone() for name, tensor in worker.engine.optimizer.state_tensors()}
    parts = [weight.detach().clone() for weight in worker.engine.model.module.parameters()]
    with pytest.raises(NonFiniteError, match=r"uid1_g1 \(rank 0\)" if place != "weight" else r"uid0_g0 \(rank 0\)"):
        worker.train(batch, LOSS, mbs=1)
    for weight, part in zip(worker.engine.model.module.parameters(), parts, strict=True):
        assert torch.equal(weight.nan_to_num(nan=9.0), part.nan_to_num(nan=9.0))
        assert not weight.main_grad.any()
    assert all(torch.equal(state[name], tensor) for name, tensor in worker.engine.optimizer.state_tensors())
    assert worker.engine.optimizer.calls_done == 1


def test_a_failed_step_moves_no_bias_of_a_router(tmp_path: Path) -> None:
    model = hf_model("glm4_moe", vocab_size=320)
    write_with_tokenizer(tmp_path, model)
    batch = tiny_batch()
    with running(settings(tmp_path, moe_router_bias_update_rate=0.5)) as biased:
        before = {name: weight for name, weight in weights_of(biased).items() if name.endswith("correction_bias")}
        assert before
        batch.tensor("prev_logprobs")[3, 5] = float("nan")
        with pytest.raises(NonFiniteError):
            biased.train(batch, LOSS)
        after = weights_of(biased)
        assert all(torch.equal(after[name], bias) for name, bias in before.items())
        biased.train(tiny_batch(), LOSS)
        moved = weights_of(biased)
        assert all(not torch.equal(moved[name], bias) for name, bias in before.items())


def test_weights_alone_leave_the_moments_of_the_optimizer(worker: PolicyWorker, tmp_path: Path) -> None:
    batch = tiny_batch()
    worker.save_checkpoint(weights=tmp_path / "first", optimizer=None, tokenizer=tmp_path / "first")
    first = weights_of(worker)
    worker.train(batch, LOSS)
    moments = {name: tensor.clone() for name, tensor in worker.engine.optimizer.moments("exp_avg").items()}
    worker.load_checkpoint(weights=tmp_path / "first", optimizer=None)
    assert same(weights_of(worker), first)
    assert same(dict(worker.engine.optimizer.moments("exp_avg")), moments)
    # The next step goes on from the loaded weights: main weights of half precision were taken anew.
    for name, main in worker.engine.optimizer.moments("master").items():
        assert torch.equal(main, dict(worker.engine.model.module.named_parameters())[name].float())
    worker.train(batch, LOSS)
    moved = max(
        float((weight.float() - first[name].float()).abs().max()) for name, weight in weights_of(worker).items()
    )
    # AdamW moves a weight by about the learning rate, and bfloat16 rounds a weight of 1 to a 128th.
    assert 0 < moved < (3e-3 if worker.config.precision == "float32" else 2e-2)


def test_the_learning_rate_of_a_call_is_in_its_result(folder: Path) -> None:
    schedule = {"lr_warmup_iters": 2, "lr_warmup_init": 0.0, "lr_decay_style": "linear"}
    rates = []
    with running(settings(folder, scheduler=schedule)) as worker:
        before = weights_of(worker)
        for _ in range(3):
            rates.append(worker.train(tiny_batch(), LOSS, gbs=4).learning_rate)
            # Two optimizer steps at a rate of 0 change nothing.
            assert same(weights_of(worker), before) == (len(rates) == 1)
    assert rates == pytest.approx([0.0, 5e-4, 1e-3])


def test_a_process_holds_one_worker_after_the_other(folder: Path, experts: Path) -> None:
    results = []
    for path in (folder, experts, folder):
        with running(settings(path)) as worker:
            results.append(worker.train(tiny_batch(), LOSS).loss)
            worker.shutdown()
        assert not parallel_state.is_initialized() and not dist.is_initialized()
    assert results[0] == results[2] != results[1]


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        ("sizes", ConfigError, "4 attention heads do not divide by 3"),
        ("optimizer", ConfigError, "use_distributed_optimizer"),
        ("weights", ModelFolderError, "model.safetensors"),
    ],
)
def test_a_worker_that_cannot_start_leaves_nothing(folder, tmp_path, fault, kind, message):
    path = Path(shutil.copytree(folder, tmp_path / "model"))
    config, layout = settings(path), ParallelLayout()
    if fault == "sizes":
        config, layout = settings(path, tensor_model_parallel_size=3), ParallelLayout(tp=3)
    elif fault == "optimizer":
        config = settings(path, optimizer={"use_distributed_optimizer": True})
    else:
        content = (path / "model.safetensors").read_bytes()
        (path / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(kind, match=message), running(config, layout=layout):
        pass
    assert not parallel_state.is_initialized() and not dist.is_initialized()
    with running(settings(folder)) as worker:
        assert worker.is_alive()


def test_modules_that_were_imported_on_the_way_are_adapted(experts: Path, tmp_path: Path) -> None:
    paths = {"weights": tmp_path / "weights", "optimizer": tmp_path / "optimizer"}
    with running(settings(experts, activation_checkpointing=True)) as worker:
        worker.train(tiny_batch(), LOSS)
        worker.save_checkpoint(**paths, tokenizer=None)
        worker.load_checkpoint(**paths)
    modules = {name: module for name, module in sys.modules.items() if name.startswith("megatron.core")}
    assert [name for name, module in modules.items() if vars(module).get("torch") is torch] == []


def test_a_layer_with_experts_whose_router_takes_no_routes_is_refused(experts: Path) -> None:
    with running(settings(experts)) as worker:
        assert attach_replay(worker.engine.model, validates=False).layers == (0,)
        worker.engine.model.module.decoder.layers[0].mlp.router = torch.nn.Identity()
        with pytest.raises(
            ConfigError, match=r"router_replay\.enabled: expected a TopKRouter.* layers \[0\] have none"
        ):
            attach_replay(worker.engine.model, validates=False)
