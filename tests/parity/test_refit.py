"""After a refit the engine samples from exactly the weights that were just trained."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nemo_rl.algorithms.loss_functions import ClippedPGLoss
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.config.schema import LossConfig
from nemo_rl.distributed.collectives import RankSpec
from nemo_rl.distributed.packing import plan_padded
from nemo_rl.distributed.worker_groups import LocalWorkerGroup
from nemo_rl.errors import WorkerError
from nemo_rl.experience.payload import build_columns
from nemo_rl.models.generation.interfaces import GenerationRequest, SamplingParams
from nemo_rl.models.generation.replicas import GenerationReplicas
from nemo_rl.models.generation.torch_engine.worker import EngineSpec, EngineWorker, build_engine_worker
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.models.policy.workers.launch import WorkerSpec, build_policy_worker
from nemo_rl.models.weight_bundle import WeightBundle
from nemo_rl.models.weight_sync.colocated import ColocatedWeightSync
from tests.helpers.tiny_model import tiny_batch, tiny_policy, write_tiny_folder

PROMPTS = ((9, 30, 31), (12, 40, 41, 42, 43))
SAMPLING = SamplingParams(temperature=1.0, max_new_tokens=8, stop_token_ids=(2,))


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> PolicyConfig:
    return tiny_policy(write_tiny_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def parts(config) -> Iterator[tuple[Policy, GenerationReplicas]]:
    spec = WorkerSpec(policy=config, rank=RankSpec(rank=0, world_size=1), num_steps=4, keep_reference=False, seed=0)
    policy = Policy(LocalWorkerGroup(lambda: build_policy_worker(spec)), timeout_s=60)
    engines = GenerationReplicas(LocalWorkerGroup(lambda: build_engine_worker(EngineSpec(policy=config))), timeout_s=60)
    yield policy, engines
    engines.shutdown()
    policy.shutdown()


def gap(policy: Policy, engines: GenerationReplicas) -> float:
    """Largest difference between the sampler's log-probabilities and the policy's, on the sampled tokens."""
    output = engines.generate(GenerationRequest(prompt_ids=PROMPTS, seeds=tuple(range(8)), sampling=SAMPLING))
    batch = build_columns(PROMPTS, output, group_size=4, pad_token_id=0)
    policy.prepare_for_lp_inference()
    plan = plan_padded(batch.tensor("input_lengths").tolist(), capacity=4096, dp_world=1)
    logprobs = policy.get_logprobs(batch, plan=plan)
    mask = batch.tensor("token_mask").bool()
    return float((logprobs - batch.tensor("generation_logprobs"))[mask].abs().max())


def test_an_engine_follows_the_policy_from_version_to_version(parts):
    policy, engines = parts
    sync = ColocatedWeightSync(policy, engines)
    assert sync.version == -1 and sync.is_stale(0)
    sync.sync(0)
    assert not sync.is_stale(0) and gap(policy, engines) < 1e-5
    batch = tiny_batch(8)
    plan = plan_padded(batch.tensor("input_lengths").tolist(), capacity=200, dp_world=1)
    policy.prepare_for_training()
    for _ in range(3):
        policy.train(batch, ClippedPGLoss(config=LossConfig()), plan=plan)
    assert gap(policy, engines) > 1e-4, "the engine still holds the old weights"
    sync.sync(1)
    assert gap(policy, engines) < 1e-5 and sync.version == 1


class Forgetful(EngineWorker):
    """An engine that says it holds another version than the one it was given."""

    def load_bundle(self, bundle: WeightBundle, *, version: int) -> int:
        return super().load_bundle(bundle, version=version) - 1


def test_an_engine_with_another_version_stops_the_run(parts, config):
    policy, _ = parts
    forgetful = Forgetful.from_config(config)
    other = GenerationReplicas(LocalWorkerGroup(lambda: forgetful), timeout_s=60)
    with pytest.raises(WorkerError, match=r"expected weight version 7 in every engine, got \{0: 6\}"):
        ColocatedWeightSync(policy, other).sync(7)
