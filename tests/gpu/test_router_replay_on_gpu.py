"""Router replay on a CUDA device: the CPU's numbers with the same routes, also where layers are recomputed on the
threads of the autograd engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from nemo_rl.config.backends import DTensorConfig, MegatronConfig, MegatronOptimizerConfig
from nemo_rl.config.policy import PolicyConfig, RouterReplayConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.errors import WorkerError
from nemo_rl.models.hf.loading import load_model_config
from nemo_rl.models.policy.routes.replay import MicrobatchRoutes, RouteReplayer
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker
from nemo_rl.routes.digest import route_digests
from tests.helpers.megatron_models import shape_of, write_experts
from tests.helpers.parallel_layouts import LOSS, Case, forced_routes, layout_batch, plan_of
from tests.helpers.tiny_model import tiny_policy, tiny_worker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda"
BOUND = 1e-4
"""Of float32 log-probabilities of about -6 between the two devices."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_experts(tmp_path_factory.mktemp("model"))


def policy_of(engine: str, folder: Path) -> PolicyConfig:
    replay = RouterReplayConfig(enabled=True)
    if engine == "dtensor":
        return tiny_policy(folder, dtensor_cfg=DTensorConfig(activation_checkpointing=True), router_replay=replay)
    section = MegatronConfig(
        enabled=True,
        activation_checkpointing=True,
        optimizer=MegatronOptimizerConfig(lr=1e-3, min_lr=0.0, use_distributed_optimizer=False),
    )
    return tiny_policy(folder, dtensor_cfg=DTensorConfig(enabled=False), megatron_cfg=section, router_replay=replay)


def batch_of(folder: Path) -> BatchedDataDict:
    batch = layout_batch()
    batch["routed_experts"] = forced_routes(load_model_config(str(folder)))
    return batch


@dataclass(kw_only=True)
class Seen:
    """Observes passes: which layers were run how, and whether their ids were the forced ones."""

    layers: tuple[int, ...]
    expected: torch.Tensor
    """`[N, T, L]` digests of the forced routes."""
    actions: Counter[tuple[int, str]] = field(default_factory=Counter)

    def used(
        self,
        routes: MicrobatchRoutes,
        *,
        layer: int,
        action: str,
        ids_TK: torch.Tensor,
        matches: bool | None,
        pending: tuple[int, int],
    ) -> None:
        self.actions[layer, action] += 1
        is_known = routes.is_token_T if routes.is_missing_T is None else routes.is_token_T & ~routes.is_missing_T
        rows = torch.tensor(routes.rows)[routes.row_T[is_known].cpu()]
        wanted = self.expected[rows, routes.column_T[is_known].cpu(), self.layers.index(layer)]
        assert torch.equal(route_digests(ids_TK[is_known].cpu()[:, None], [layer])[:, 0], wanted)

    def cleared(self, routes: MicrobatchRoutes, *, layer: int, pending: int) -> None:
        self.actions[layer, "clear"] += 1


def outcome(worker: PolicyWorker, batch: BatchedDataDict) -> tuple[torch.Tensor, float, float]:
    plan = plan_of(Case(family="qwen3_moe"), worker.layout).for_rank(0)
    logprobs = worker.get_logprobs(batch, plan=plan)
    result = worker.train(batch, LOSS, plan=plan)
    return logprobs, result.loss[0], result.grad_norm[0]


@pytest.mark.parametrize("engine", ["megatron", "dtensor"])
def test_replay_gives_the_numbers_of_the_cpu(engine: str, folder: Path) -> None:
    found = []
    # The DTensor worker on the CPU stands for both: megatron-core allocates on a GPU where it sees one.
    for kind, device in (("dtensor", "cpu"), (engine, DEVICE)):
        worker = tiny_worker(policy_of(kind, folder), device=device)
        found.append(outcome(worker, batch_of(folder)))
        assert worker.replay.routers.replayer.is_idle
        worker.shutdown()
    (cpu, cpu_loss, cpu_norm), (gpu, gpu_loss, gpu_norm) = found
    torch.testing.assert_close(gpu, cpu, rtol=0, atol=BOUND)
    assert gpu_loss == pytest.approx(cpu_loss, rel=1e-3) and gpu_norm == pytest.approx(cpu_norm, rel=1e-3)


@pytest.mark.parametrize("engine", ["megatron", "dtensor"])
def test_recomputed_layers_use_the_same_routes_on_whatever_thread_they_run(
    engine: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, batch = shape_of(str(folder)), batch_of(folder)
    digests = route_digests(batch.tensor("routed_experts").long(), shape.layers)
    seen = Seen(layers=shape.layers, expected=digests)
    honest = RouteReplayer.stage
    monkeypatch.setattr(RouteReplayer, "stage", lambda self, name, _=None: honest(self, name, seen))
    worker = tiny_worker(policy_of(engine, folder), device=DEVICE)
    plan = plan_of(Case(family="qwen3_moe"), worker.layout).for_rank(0)
    worker.train(batch, LOSS, plan=plan)
    worker.shutdown()
    passes = len(plan.microbatches[0])
    for layer in shape.layers:
        assert seen.actions[layer, "replay_forward"] == seen.actions[layer, "replay_backward"] == passes


def test_wrong_ids_end_the_pass(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NRL_ROUTER_REPLAY_VALIDATE", "1")
    worker = tiny_worker(policy_of("megatron", folder), device=DEVICE)
    batch = batch_of(folder)
    batch.tensor("routed_experts")[1, 3] = 1
    with pytest.raises(WorkerError, match="different ids"):
        outcome(worker, batch)
    assert worker.replay.routers.replayer.is_idle
    worker.shutdown()
