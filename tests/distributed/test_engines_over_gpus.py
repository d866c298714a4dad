"""Engines over several GPUs on Ray's logical ones: bundles and nodes, refit of every rank, a rank that dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import ray
import torch
from ray.cluster_utils import Cluster

from nemo_rl.algorithms import engines as engines_module
from nemo_rl.algorithms.engines import EngineStarts, gpu_share
from nemo_rl.config.load import load_config
from nemo_rl.config.schema import MasterConfig
from nemo_rl.distributed.ray_worker_groups import RayPlacement, RayWorkerGroup
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.worker_groups import Call, WorkerFleet, WorkerGroup, ask
from nemo_rl.models.generation.interfaces import (
    EngineSpec,
    GenerationInterface,
    GenerationOutput,
    GenerationRequest,
    SamplingParams,
)
from nemo_rl.models.hf.loading import load_model_config
from nemo_rl.models.weight_sync.base import RefitParties
from nemo_rl.models.weight_sync.factory import BroadcastWeightSync, PayloadWeightSync, receipt_spec
from tests.helpers.engine_process import NO_VLLM, has_vllm, names_left, policy_of, train
from tests.helpers.logical_gpus import NOTES, build_on_logical_gpus, rank_notes
from tests.helpers.model_families import write_moe
from tests.helpers.runs import write_recipe

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.skipif(not has_vllm(), reason=NO_VLLM)]

NODES, GPUS = 2, 2
START_S = 240.0
CALL_S = 60.0


class Place:
    """A worker that says where it is, as a policy worker would be."""

    def where(self) -> tuple[str, int]:
        context = ray.get_runtime_context()
        return context.get_node_id(), int(context.get_accelerator_ids()["GPU"][0])

    def shutdown(self) -> None:
        pass


@dataclass
class Opened:
    config: MasterConfig
    cluster: RayVirtualCluster
    notes: Path
    policy_places: list[tuple[str, int]]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    folder = tmp_path_factory.mktemp("gpus")
    (folder / "notes").mkdir()
    model = write_moe(folder / "moe")
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 8, "num_gpus": GPUS, "include_dashboard": False})
    nodes.add_node(num_cpus=8, num_gpus=GPUS, node_ip_address="127.0.0.2")
    settings = {
        "cluster.address": nodes.address,
        "cluster.num_nodes": str(NODES),
        "cluster.gpus_per_node": str(GPUS),
        "policy.generation.backend": "vllm",
        "policy.generation.vllm_cfg.kv_cache_gib": "0.05",
        "policy.generation.vllm_cfg.tensor_parallel_size": "2",
        "policy.generation.num_replicas": "2",
        "policy.router_replay.enabled": "true",
        f"+policy.generation.env_vars.{NOTES}": str(folder / "notes"),
    }
    given = ["~cluster.cpu_workers_per_node", *(f"{name}={value}" for name, value in settings.items())]
    config = load_config(write_recipe(folder, model), given)
    try:
        with RayVirtualCluster(config.cluster, other_cpus=1, cpus_per_bundle=2) as cluster:
            placement = RayPlacement(
                num_gpus=gpu_share(config), placement_group=cluster.placement_group, bundles=cluster.policy_bundles
            )
            policy = RayWorkerGroup("policy", world_size=NODES * GPUS, placement=placement)
            policy.begin_start(Place, [{}] * (NODES * GPUS))
            policy.finish_start(timeout_s=START_S)
            places = policy.run(Call(request=ask(Place.where), stage="place", timeout_s=CALL_S))
            yield Opened(config, cluster, folder / "notes", places)
            policy.shutdown()
    finally:
        ray.shutdown()
        nodes.shutdown()


@pytest.fixture(scope="module")
def fleet(opened: Opened) -> Iterator[WorkerFleet]:
    builder = engines_module._builder
    # The engine of the recipe, on CPUs.
    engines_module._builder = lambda config: build_on_logical_gpus
    starts = EngineStarts(
        opened.config, lambda number: EngineSpec(policy=opened.config.policy, number=number), opened.cluster
    )
    found = starts.fleet(timeout_s=START_S)
    starts.begin_all()
    for group in found.members:
        assert isinstance(group, RayWorkerGroup)
        group.finish_start(timeout_s=START_S)
    yield found
    found.shutdown()
    engines_module._builder = builder


@pytest.fixture(scope="module")
def policy(opened: Opened) -> Iterator[WorkerGroup]:
    # It trains on rows without routes.
    without = opened.config.policy.router_replay.model_copy(update={"enabled": False})
    with policy_of(opened.config.policy.model_copy(update={"router_replay": without})) as group:
        yield group


def _parties(opened: Opened, fleet: WorkerFleet, policy: WorkerGroup) -> RefitParties:
    spec = receipt_spec(opened.config.policy, load_model_config(opened.config.policy.model_name).to_dict())
    return RefitParties(policy=policy, engines=fleet, timeout_s=CALL_S, max_bucket_bytes=50_000, receipt=spec)


def _sampled(fleet: WorkerFleet) -> dict[int, GenerationOutput]:
    sampling = SamplingParams(temperature=1.0, max_new_tokens=12, stop_token_ids=())
    asked = GenerationRequest(prompt_ids=((9, 8, 7), (4, 5, 6, 7)), seeds=(1, 2), sampling=sampling, with_routes=True)
    return fleet.run(ask(GenerationInterface.generate, request=asked), stage="generation", timeout_s=CALL_S)


def test_the_ranks_of_an_engine_stand_beside_neighbouring_policy_workers_of_one_node(opened, fleet):
    notes = rank_notes(opened.notes)
    assert len(notes) == 4 and len(fleet) == 2
    for note in notes:
        bundles = note["bundles"]
        assert bundles in ([0, 1], [2, 3])
        assert (note["node"], note["gpu"]) == opened.policy_places[bundles[int(str(note["rank"]))]]
    assert names_left(*(int(str(note["pid"])) for note in notes)) == []
    assert len({node for node, _ in opened.policy_places}) == NODES


def test_every_rank_joins_the_group_of_the_refit_and_all_engines_sample_the_same(opened, fleet, policy):
    by_broadcast = BroadcastWeightSync(_parties(opened, fleet, policy), address="127.0.0.1")
    by_broadcast.sync(0)
    first = _sampled(fleet)
    assert by_broadcast.report is not None and by_broadcast.report.receipt is not None
    train(policy)
    PayloadWeightSync(_parties(opened, fleet, policy)).sync(1)
    second = _sampled(fleet)
    for found in (first, second):
        assert torch.equal(found[0].token_ids, found[1].token_ids)
        assert torch.equal(found[0].routes.ids, found[1].routes.ids)
    assert {output.weight_version for output in second.values()} == {1}


def test_an_engine_whose_rank_dies_is_lost_alone_and_comes_back_in_its_bundles(opened, fleet, policy):
    sync = BroadcastWeightSync(_parties(opened, fleet, policy), address="127.0.0.1")
    sync.sync(2)
    before = _sampled(fleet)
    notes = rank_notes(opened.notes)
    victim = next(note for note in notes if note["bundles"] == [2, 3] and note["rank"] == 1)
    os.kill(int(str(victim["pid"])), signal.SIGKILL)
    left = _sampled(fleet)
    assert list(left) == [0] and fleet.numbers == (0,)
    sync.sync(3)
    assert fleet.numbers == (0, 1)
    after = _sampled(fleet)
    assert all(torch.equal(after[number].token_ids, before[0].token_ids) for number in (0, 1))
    assert sum(note["bundles"] == [2, 3] for note in rank_notes(opened.notes)) == 4
