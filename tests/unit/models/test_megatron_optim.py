"""The optimizer of a Megatron rank: torch's updates, clipping, schedules, and nothing from a gradient with NaN."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from nemo_rl.errors import ConfigError
from nemo_rl.models.megatron.convert import export_weights
from nemo_rl.models.megatron.optim import PolicyOptimizer
from nemo_rl.models.megatron.setup import MegatronModel
from nemo_rl.models.policy.workers.base import HostBuffers
from tests.helpers.megatron_models import (
    NUM_STEPS,
    alone,
    build,
    give_gradients,
    gradients,
    hf_model,
    policy_config,
    step,
)

FAMILY = "qwen2"
"""Has biases, and no tied weights."""
SMALL = {"num_hidden_layers": 1}
LR = 0.01
DIFFERENCE = 2e-7
"""Of float32 weights below 1, whose updates are clipped by a norm that is summed in another order."""


@pytest.fixture(scope="module", autouse=True)
def job() -> Iterator[None]:
    with alone():
        yield


def _settings(*, max_grad_norm: float | None = 1.0, precision: str = "float32", **megatron: object):
    megatron["optimizer"] = {"lr": LR, **megatron.get("optimizer", {})}
    return policy_config(precision=precision, **megatron).model_copy(update={"max_grad_norm": max_grad_norm})


def _reference(kind: type[torch.optim.Optimizer], max_grad_norm: float | None, **kwargs: float) -> tuple[dict, list]:
    """Weights after three steps of a torch optimizer, and norms before clipping."""
    weights = {name: weight.detach().clone() for name, weight in hf_model(FAMILY, **SMALL).named_parameters()}
    optimizer = kind(weights.values(), lr=LR, **kwargs)
    norms = []
    for number in range(3):
        for name, grad in gradients(FAMILY, number, **SMALL).items():
            weights[name].grad = grad.clone()
        norms.append(float(torch.nn.utils.clip_grad_norm_(weights.values(), max_grad_norm or math.inf)))
        optimizer.step()
    return weights, norms


def _exported(model: MegatronModel) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in export_weights(model)}


@pytest.mark.parametrize("max_grad_norm", [1.0, None, 1e9])
@pytest.mark.parametrize(
    ("section", "kind", "kwargs"),
    [
        ({"weight_decay": 0.1, "adam_beta2": 0.95}, torch.optim.AdamW, {"weight_decay": 0.1, "betas": (0.9, 0.95)}),
        (
            {"optimizer": "sgd", "weight_decay": 0.1, "sgd_momentum": 0.8},
            torch.optim.SGD,
            {"weight_decay": 0.1, "momentum": 0.8},
        ),
    ],
    ids=["adam", "sgd"],
)
def test_three_steps_are_those_of_torch(section, kind, kwargs, max_grad_norm: float | None) -> None:
    model, optimizer = build(FAMILY, _settings(max_grad_norm=max_grad_norm, optimizer=section), **SMALL)
    norms = [step(model, optimizer, number) for number in range(3)]
    expected, expected_norms = _reference(kind, max_grad_norm, **kwargs)
    assert norms == pytest.approx(expected_norms, rel=1e-6)
    assert min(norms) > 5, "nothing was clipped"
    found = _exported(model)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, atol=DIFFERENCE, rtol=DIFFERENCE, msg=name)


def test_norms_and_biases_are_left_out_of_the_decay_on_request() -> None:
    section = {"weight_decay": 0.5, "decay_norms_and_biases": False}
    model, optimizer = build(FAMILY, _settings(optimizer=section), **SMALL)
    before = {name: weight.detach().clone() for name, weight in model.module.named_parameters()}
    optimizer.apply()
    optimizer.finish()
    for name, weight in model.module.named_parameters():
        factor = 1.0 if weight.dim() == 1 else 1 - LR * 0.5
        torch.testing.assert_close(weight.detach(), before[name] * factor, msg=name)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(value: float, precision: str) -> None:
    model, optimizer = build(FAMILY, _settings(precision=precision), **SMALL)
    step(model, optimizer, 0)
    weights = [weight.detach().clone() for weight in model.module.parameters()]
    state = {name: tensor.clone() for name, tensor in optimizer.state_tensors()}
    give_gradients(model, 1)
    next(model.module.parameters()).main_grad[3, 3] = value
    assert optimizer.finish() is None
    assert optimizer.updates_done == 1
    assert all(torch.equal(a, b) for a, b in zip(weights, model.module.parameters(), strict=True))
    assert all(torch.equal(state[name], tensor) for name, tensor in optimizer.state_tensors())
    assert not any(weight.main_grad.any() for weight in model.module.parameters())
    assert step(model, optimizer, 2) is not None
    assert all(bool(weight.isfinite().all()) for weight in model.module.parameters())


def test_half_precision_steps_float32_weights() -> None:
    # A step of 1e-5 is lost in bfloat16 weights of 0.1, whose neighbours are 5e-4 away.
    section = {"lr": 1e-5, "weight_decay": 0.0}
    model, optimizer = build(FAMILY, _settings(precision="bfloat16", optimizer=section), **SMALL)
    before = {name: tensor.clone() for name, tensor in optimizer.moments("master").items()}
    for number in range(2):
        step(model, optimizer, number)
    for name, weight in model.module.named_parameters():
        main = optimizer.moments("master")[name]
        assert main.dtype == torch.float32
        assert 0 < float((main - before[name]).abs().max()) <= 2.5e-5
        assert torch.equal(weight, main.bfloat16())


def test_main_weights_follow_weights_that_were_loaded() -> None:
    model, optimizer = build(FAMILY, _settings(precision="bfloat16"), **SMALL)
    with torch.no_grad():
        for weight in model.module.parameters():
            weight.fill_(0.5)
    optimizer.take_weights()
    assert all(bool((tensor == 0.5).all()) for tensor in optimizer.moments("master").values())


def test_a_frozen_router_is_no_weight_of_the_optimizer() -> None:
    changes = {"num_hidden_layers": 2}
    model, optimizer = build("qwen3_moe", _settings(freeze_moe_router=True), **changes)
    routers = {name: weight.detach().clone() for name, weight in model.module.named_parameters() if ".router." in name}
    assert routers
    grads = gradients("qwen3_moe", 0, **changes).items()
    expected = math.sqrt(
        sum(float(grad.square().sum()) for name, grad in grads if not name.endswith("mlp.gate.weight"))
    )
    assert step(model, optimizer, 0) == pytest.approx(expected, rel=1e-6)
    assert not routers.keys() & optimizer.moments("exp_avg").keys()
    assert all(torch.equal(weight, model.module.get_parameter(name)) for name, weight in routers.items())


def test_all_state_moves_and_the_weights_of_the_model_stay() -> None:
    model, optimizer = build(FAMILY, _settings(), **SMALL)
    step(model, optimizer, 0)
    assert optimizer.moments("exp_avg").keys() == {name for name, _ in model.module.named_parameters()}
    optimizer.move_state(torch.device("meta"), HostBuffers(is_pinned=False))
    assert {tensor.device.type for _, tensor in optimizer.state_tensors()} == {"meta"}
    assert {weight.device.type for weight in model.module.parameters()} == {"cpu"}


def test_main_weights_are_state_and_weights_of_the_model_are_not() -> None:
    for precision, extra in (("float32", set()), ("bfloat16", {"master"})):
        model, optimizer = build(FAMILY, _settings(precision=precision), **SMALL)
        step(model, optimizer, 0)
        kinds = {name.rpartition(".")[2] for name, _ in optimizer.state_tensors()}
        assert kinds == {"exp_avg", "exp_avg_sq"} | extra


def _linear(ratio: float) -> float:
    return 1 - ratio


def _cosine(ratio: float) -> float:
    return 0.5 * (math.cos(math.pi * ratio) + 1)


@pytest.mark.parametrize(("style", "shape"), [("linear", _linear), ("cosine", _cosine)])
@pytest.mark.parametrize("decay_iters", [6, None])
def test_a_decay_ends_at_the_least_rate(style: str, shape, decay_iters: int | None) -> None:
    warmup, least = 2, 0.001
    schedule = {"lr_decay_style": style, "lr_decay_iters": decay_iters, "lr_warmup_iters": warmup}
    _, optimizer = build(FAMILY, _settings(optimizer={"min_lr": least}, scheduler=schedule), **SMALL)
    end = decay_iters or NUM_STEPS
    expected = [0.0, LR / 2]
    expected += [least + (LR - least) * shape((call - warmup) / (end - warmup)) for call in range(warmup, end + 1)]
    assert _rates(optimizer, end + 3) == pytest.approx([*expected, least, least])


def test_a_root_falls_with_the_steps_and_not_below_the_least_rate() -> None:
    schedule = {"lr_decay_style": "inverse-square-root", "lr_decay_iters": 8, "lr_warmup_iters": 2}
    _, optimizer = build(FAMILY, _settings(optimizer={"min_lr": 0.006}, scheduler=schedule), **SMALL)
    roots = [max(0.006, LR * math.sqrt(2 / call)) for call in range(2, 9)]
    assert _rates(optimizer, 10) == pytest.approx([0.0, LR / 2, *roots, 0.006])


def test_a_constant_rate_is_warmed_up_from_where_it_is_told() -> None:
    schedule = {"lr_warmup_iters": 4, "lr_warmup_init": 0.002}
    _, optimizer = build(FAMILY, _settings(scheduler=schedule), **SMALL)
    assert _rates(optimizer, 6) == pytest.approx([0.002, 0.004, 0.006, 0.008, LR, LR])


@pytest.mark.parametrize(
    ("style", "shape"), [("linear", lambda ratio: ratio), ("cosine", lambda ratio: _cosine(1 - ratio))]
)
def test_weight_decay_rises_over_the_run(style: str, shape) -> None:
    schedule = {"weight_decay_incr_style": style, "start_weight_decay": 0.1, "end_weight_decay": 0.5}
    model, optimizer = build(FAMILY, _settings(scheduler=schedule), **SMALL)
    for call in range(3):
        weight = next(model.module.parameters())
        before = weight.detach().clone()
        optimizer.apply()
        optimizer.finish()
        optimizer.advance()
        decay = 0.1 + 0.4 * shape(call / NUM_STEPS)
        torch.testing.assert_close(weight.detach(), before * (1 - LR * decay))


def test_a_schedule_continues_after_as_many_calls() -> None:
    settings = _settings(scheduler={"lr_decay_style": "cosine", "lr_warmup_iters": 2})
    _, first = build(FAMILY, settings, **SMALL)
    rates = _rates(first, 5)
    state = first.state_dict()
    assert state == {"calls_done": 5.0}
    _, second = build(FAMILY, settings, **SMALL)
    second.load_state_dict(state)
    assert second.calls_done == 5
    assert _rates(second, 3) == _rates(first, 3)
    assert rates[-1] > second.apply()


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"use_distributed_optimizer": True}, "use_distributed_optimizer: only the Adam of Transformer Engine or apex"),
        ({"use_precision_aware_optimizer": True}, "refuses these settings: .*distributed optimizer"),
        ({"min_lr": 1.0}, "refuses these settings"),
    ],
)
def test_what_megatron_core_cannot_do_here_is_refused(section: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=f"policy.megatron_cfg.optimizer.*{message}"):
        build(FAMILY, _settings(optimizer=section), **SMALL)


def _rates(optimizer: PolicyOptimizer, calls: int) -> list[float]:
    rates = []
    for _ in range(calls):
        rates.append(optimizer.apply())
        optimizer.advance()
    return rates
