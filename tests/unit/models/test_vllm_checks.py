"""Settings of vLLM that are refused before anything starts, and what is said where vLLM is not installed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from nemo_rl.models.generation.interfaces import EngineSpec
from nemo_rl.models.generation.vllm.start import (
    BUNDLES,
    IN_PROCESS,
    KEYS,
    OWN,
    check_vllm,
    engine_arguments,
    known_arguments,
    prepare_process,
)
from nemo_rl.models.generation.vllm.turns import join_routes
from nemo_rl.routes.shape import MISSING, RouteShape, place_routes
from tests.helpers.engine_process import NO_VLLM, has_vllm, vllm_policy

needs_vllm = pytest.mark.skipif(not has_vllm(), reason=NO_VLLM)


def test_without_vllm_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert check_vllm(vllm_policy(Path("m"))) == ["policy.generation.backend=vllm needs vLLM: make vllm"]


@needs_vllm
@pytest.mark.parametrize(
    ("generation", "said"),
    [
        ({"vllm_kwargs": {"cpu_offload": 4}}, "no such argument; did you mean 'cpu_offload_gb'"),
        ({"vllm_kwargs": {"block_sise": 64}}, "did you mean 'policy.generation.vllm_cfg.block_size'"),
        ({"vllm_kwargs": {"zzzzzz": 4}}, "no such argument; see vLLM's EngineArgs"),
        ({"vllm_kwargs": {"block_size": 64}}, "has a key of its own; set policy.generation.vllm_cfg.block_size"),
        ({"vllm_kwargs": {"trust_remote_code": True}}, "cannot be set, because code in a model folder is never run"),
        ({"temperature": 0.001}, "policy.generation.temperature: vLLM samples at 0.01 or more, got 0.001"),
        ({"val_temperature": 0.001}, "policy.generation.val_temperature: vLLM samples at 0.01"),
        ({"vllm_cfg": {"max_model_len": 32}}, "max_model_len: 32 does not hold policy.max_total_sequence_length 64"),
        ({"vllm_cfg": {"max_num_batched_tokens": 8}}, "max_num_batched_tokens: 8 is less than a token of each of 64"),
    ],
)
def test_settings_that_vllm_would_refuse_or_change_are_refused(generation: dict[str, object], said: str) -> None:
    (line,) = check_vllm(vllm_policy(Path("m"), generation=generation))
    assert said in line


@needs_vllm
def test_routes_do_not_go_through_a_pipeline() -> None:
    sizes = {"vllm_cfg": {"pipeline_parallel_size": 2}}
    (line,) = check_vllm(vllm_policy(Path("m"), generation=sizes, router_replay={"enabled": True}))
    assert "pipeline_parallel_size: 2 cannot be combined with policy.router_replay.enabled" in line


@needs_vllm
def test_what_we_set_and_what_we_keep_are_arguments_of_this_vllm() -> None:
    import importlib.util

    found = importlib.util.find_spec("vllm")
    assert found is not None and found.origin is not None
    known = known_arguments(Path(found.origin).parent)
    assert known >= {
        *KEYS,
        *OWN,
        *engine_arguments(EngineSpec(policy=vllm_policy(Path("m")), use_gpu=True, weight_version=0)),
    }


def test_every_key_reaches_the_engine() -> None:
    keys = {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 3,
        "gpu_memory_utilization": 0.7,
        "max_model_len": 100,
        "enforce_eager": True,
        "block_size": 96,
        "enable_prefix_caching": False,
        "max_num_batched_tokens": 128,
        "max_num_seqs": 5,
        "enable_expert_parallel": True,
    }
    policy = vllm_policy(
        Path("m"),
        generation={"vllm_cfg": {**keys, "kv_cache_gib": 0.5}, "vllm_kwargs": {"cpu_offload_gb": 1}},
        router_replay={"enabled": True},
    )
    on_gpu = engine_arguments(EngineSpec(policy=policy, use_gpu=True, bundles=(0, 1), sleep_level=1))
    assert {name: on_gpu[name] for name in keys} == keys and "kv_cache_memory_bytes" not in on_gpu
    assert on_gpu["distributed_executor_backend"] == "ray" and on_gpu["enable_sleep_mode"] is True
    assert on_gpu["cpu_offload_gb"] == 1 and on_gpu["enable_return_routed_experts"] and on_gpu["load_format"] == "dummy"
    on_cpu = engine_arguments(EngineSpec(policy=policy, weight_version=0, sleep_level=1))
    assert on_cpu["kv_cache_memory_bytes"] == 2**29 and "gpu_memory_utilization" not in on_cpu
    assert "distributed_executor_backend" not in on_cpu and "enable_sleep_mode" not in on_cpu
    assert on_cpu["load_format"] == "auto" and on_cpu["dtype"] == "float32"


def test_variables_of_another_vllm_give_way_and_given_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = vllm_policy(Path("m"))
    monkeypatch.setattr(os, "environ", {IN_PROCESS: "1", BUNDLES: "7", "VLLM_LOGGING_LEVEL": "DEBUG"})
    prepare_process(EngineSpec(policy=policy, use_gpu=True, bundles=(0, 1)))
    assert os.environ[IN_PROCESS] == "0" and os.environ[BUNDLES] == "0,1"
    assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG", "nothing depends on it"
    given = policy.generation.model_copy(update={"env_vars": {IN_PROCESS: "1"}})
    os.environ[IN_PROCESS] = "1"
    prepare_process(EngineSpec(policy=policy.model_copy(update={"generation": given}), use_gpu=True))
    assert os.environ[IN_PROCESS] == "1"


def test_what_is_left_out_follows_the_policy_and_the_machine() -> None:
    policy = vllm_policy(Path("m"))
    on_cpu, on_gpu = (engine_arguments(EngineSpec(policy=policy, use_gpu=use_gpu)) for use_gpu in (False, True))
    assert on_cpu["enforce_eager"] is True and on_gpu["enforce_eager"] is False
    assert on_cpu["block_size"] == 32 and "block_size" not in on_gpu
    assert on_cpu["max_model_len"] == 64 and on_cpu["max_num_seqs"] == 64


def test_rows_that_no_router_can_have_chosen_are_missing_and_no_expert_0() -> None:
    shape = RouteShape(layers=(1, 2), top_k=2, num_experts=8)
    whole = np.array([[[0, 0], [3, 1], [0, 7]], [[0, 0], [1, 0], [2, 5]]], dtype=np.uint8)
    never_written = np.zeros((2, 3, 2), dtype=np.uint8)
    routes = join_routes([whole, never_written, whole[:1]], shape)
    assert routes.lengths.tolist() == [2, 2, 1] and routes.ids.dtype == torch.int16
    assert routes.ids[:2].tolist() == [[[3, 1], [0, 7]], [[1, 0], [2, 5]]]
    assert (routes.ids[2:4] == MISSING).all()
    placed = place_routes([routes], lengths=torch.tensor([3, 3, 3]), keys=["a", "b", "c"]).values()
    assert (placed[:, 0, 0] == MISSING).tolist() == [False, False, False, True, True, False, False, True, False]


def test_whole_routes_keep_the_dtype_of_the_wire_and_none_are_none() -> None:
    shape = RouteShape(layers=(0,), top_k=2, num_experts=300)
    many = np.array([[[299, 4]]], dtype=np.uint16)
    assert join_routes([many], shape).ids.dtype == torch.int16
    assert join_routes([many], RouteShape(layers=(0,), top_k=2, num_experts=100)).ids.tolist() == [[[-1, -1]]]
    empty = join_routes([], shape)
    assert tuple(empty.ids.shape) == (0, 1, 2) and empty.lengths.tolist() == []
