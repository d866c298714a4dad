"""Deterministic passes: what CUDA would refuse in them, and that nothing of them stays behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import deterministic
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_rl.algorithms.losses.policy_loss import PolicyLoss
from nemo_rl.config.backends import DTensorConfig, MegatronConfig
from nemo_rl.config.generation import GenerationConfig
from nemo_rl.config.loss import LossConfig
from nemo_rl.config.policy import CUBLAS_VARIABLE, PolicyConfig, SequencePackingConfig
from nemo_rl.errors import ConfigError
from nemo_rl.models.head.logprobs import repeatable_cumsum
from nemo_rl.models.policy.workers.base import check_workspace, deterministic_algorithms
from tests.helpers.tiny_model import tiny_batch, tiny_policy, tiny_worker

REFUSED = ("histc", "kthvalue", "median", "nanmedian", "put", "bincount", "cumsum")
"""Operations that raise on CUDA while torch's flag is set: the last two with weights and of floats alone."""


class AsOnCuda(TorchDispatchMode):
    """Raises where CUDA would, and collects the operations that ran with torch's flag and without it."""

    def __init__(self) -> None:
        super().__init__()
        self.strict, self.others = set[str](), set[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function).split(".")[1].rstrip("_")
        is_strict = torch.are_deterministic_algorithms_enabled()
        (self.strict if is_strict else self.others).add(name)
        is_exempt = {"cumsum": not args[0].is_floating_point(), "bincount": len(args) == 1} if name in REFUSED else {}
        assert not is_strict or name not in REFUSED or is_exempt.get(name, False), f"CUDA refuses {name}"
        return function(*args, **(kwargs or {}))


def settings(engine: str, folder: Path, *, is_on: bool) -> PolicyConfig:
    sections = {"dtensor_cfg": DTensorConfig(enabled=False), "megatron_cfg": MegatronConfig(enabled=True)}
    return tiny_policy(
        folder,
        deterministic=is_on,
        sequence_packing=SequencePackingConfig(enabled=True, train_mb_tokens=128, logprob_mb_tokens=128),
        generation=GenerationConfig(top_p=0.8),
        **(sections if engine == "megatron" else {}),
    )


def numbers(config: PolicyConfig) -> tuple[object, ...]:
    worker = tiny_worker(config)
    try:
        result = worker.train(tiny_batch(), PolicyLoss(config=LossConfig()))
        return result.loss, result.grad_norm, worker.get_logprobs(tiny_batch()).tolist()
    finally:
        worker.shutdown()


@pytest.mark.parametrize("engine", ["dtensor", "megatron"])
def test_a_pass_uses_nothing_that_cuda_refuses_and_leaves_no_flag(engine: str, folder: Path) -> None:
    with AsOnCuda() as seen:
        found = numbers(settings(engine, folder, is_on=True))
    assert {"mm", "sort"} <= seen.strict
    assert "cumsum" in seen.others, "top-p was not computed"
    assert not torch.are_deterministic_algorithms_enabled()
    assert deterministic.fill_uninitialized_memory
    # On a CPU the flag changes no number.
    assert found == numbers(settings(engine, folder, is_on=False))


def test_flags_come_back_after_an_error() -> None:
    with pytest.raises(ValueError, match="stop"), deterministic_algorithms():
        assert torch.are_deterministic_algorithms_enabled()
        raise ValueError("stop")
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("rows", [1, 3])
def test_sums_of_floats_are_those_of_torch(rows: int) -> None:
    values = torch.rand(rows, 50, generator=torch.Generator().manual_seed(0))
    with AsOnCuda(), deterministic_algorithms():
        found = repeatable_cumsum(values)
        assert torch.are_deterministic_algorithms_enabled()
    assert torch.equal(found, values.cumsum(-1))


def test_a_worker_on_a_gpu_needs_the_variable_of_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    check_workspace(torch.device("cpu"))
    for value in ("", ":0:0"):
        monkeypatch.setenv(CUBLAS_VARIABLE, value)
        with pytest.raises(ConfigError, match=r"expected CUBLAS_WORKSPACE_CONFIG to be :4096:8 or :16:8"):
            check_workspace(torch.device("cuda"))
    monkeypatch.setenv(CUBLAS_VARIABLE, ":16:8")
    check_workspace(torch.device("cuda"))
