"""After a refit the engine samples from exactly the weights that were just trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from nemo_rl.algorithms.losses.policy_loss import PolicyLoss
from nemo_rl.config.loss import LossConfig
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.distributed.collectives import RankSpec
from nemo_rl.distributed.packing import plan_padded
from nemo_rl.distributed.worker_groups import Call, LocalWorkerGroup, WorkerFleet, ask
from nemo_rl.errors import WorkerError, WorkerLost
from nemo_rl.experience.payload import build_columns
from nemo_rl.experience.scheduler import EngineScheduler
from nemo_rl.models.generation.interfaces import EngineSpec, GenerationRequest, SamplingParams
from nemo_rl.models.generation.torch_engine.worker import EngineWorker, build_engine_worker
from nemo_rl.models.hf.loading import load_causal_lm
from nemo_rl.models.policy.tq_policy import Policy
from nemo_rl.models.policy.workers.launch import WorkerSpec, build_policy_worker
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker
from nemo_rl.models.weight_sync.base import RefitParties, WeightSync
from nemo_rl.models.weight_sync.factory import BroadcastWeightSync, PayloadWeightSync
from tests.helpers.tiny_model import tiny_batch, tiny_model, tiny_policy, write_tiny_folder

PROMPTS = ((9, 30, 31), (12, 40, 41, 42, 43))
SAMPLING = SamplingParams(temperature=1.0, max_new_tokens=8, stop_token_ids=(2,))


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> PolicyConfig:
    return tiny_policy(write_tiny_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def parties(config) -> Iterator[RefitParties]:
    spec = WorkerSpec(policy=config, rank=RankSpec(rank=0, world_size=1), num_steps=4, keep_reference=False, seed=0)
    policy = LocalWorkerGroup(lambda: build_policy_worker(spec))
    engines = fleet_of(build_engine_worker(EngineSpec(policy=config)))
    yield RefitParties(policy=policy, engines=engines, timeout_s=60, max_bucket_bytes=10_000)
    engines.shutdown()
    policy.shutdown()


@pytest.fixture(scope="module")
def parts(parties) -> Iterator[tuple[Policy, EngineScheduler]]:
    yield Policy(parties.policy, timeout_s=60), replicas_of(parties.engines)


def fleet_of(engine: EngineWorker) -> WorkerFleet:
    return WorkerFleet([LocalWorkerGroup(lambda: engine)])


def replicas_of(engines: WorkerFleet) -> EngineScheduler:
    return EngineScheduler(engines, batch_rows=64, timeout_s=60)


def gap(policy: Policy, engines: EngineScheduler) -> float:
    """Largest difference between the sampler's log-probabilities and the policy's, on the sampled tokens."""
    output = engines.generate(GenerationRequest(prompt_ids=PROMPTS, seeds=tuple(range(8)), sampling=SAMPLING))
    batch = build_columns(PROMPTS, output, group_size=4, pad_token_id=0)
    policy.prepare_for_lp_inference()
    plan = plan_padded(batch.tensor("input_lengths").tolist(), capacity=4096, dp_world=1)
    logprobs = policy.get_logprobs(batch, plan=plan)
    mask = batch.tensor("token_mask").bool()
    return float((logprobs - batch.tensor("generation_logprobs"))[mask].abs().max())


@pytest.fixture(scope="module", params=["payload", "broadcast"])
def sync(request, parties) -> WeightSync:
    """Both transports, in so small buckets that weights are cut."""
    if request.param == "payload":
        return PayloadWeightSync(parties)
    return BroadcastWeightSync(parties, address="127.0.0.1")


def test_an_engine_follows_the_policy_from_version_to_version(parts, sync):
    policy, engines = parts
    assert sync.version == -1
    sync.sync(0)
    assert sync.version == 0 and gap(policy, engines) < 1e-5
    batch = tiny_batch(8)
    plan = plan_padded(batch.tensor("input_lengths").tolist(), capacity=200, dp_world=1)
    policy.prepare_for_training()
    for _ in range(3):
        policy.train(batch, PolicyLoss(config=LossConfig()), plan=plan)
    assert gap(policy, engines) > 1e-4, "the engine still holds the old weights"
    sync.sync(1)
    assert gap(policy, engines) < 1e-5 and sync.version == 1


def test_engines_may_be_of_lower_precision_than_the_policy(parties, parts, config):
    generation = config.generation.model_copy(update={"precision": "bfloat16"})
    half = EngineWorker.from_config(config.model_copy(update={"generation": generation}))
    whole = EngineWorker.from_config(config)
    for engine in (half, whole):
        # What is left of the folder's weights would be seen.
        for weight in engine._loaded_model().parameters():
            torch.nn.init.zeros_(weight)
        PayloadWeightSync(replace(parties, engines=fleet_of(engine))).sync(3)
    expected = dict(whole._loaded_model().named_parameters())
    for name, weight in half._loaded_model().named_parameters():
        assert weight.dtype == torch.bfloat16 and torch.equal(weight, expected[name].to(torch.bfloat16))
    # Eight bits of mantissa in two layers, on log-probabilities of up to 12.
    assert 1e-4 < gap(parts[0], replicas_of(fleet_of(half))) < 0.5


class Forgetful(EngineWorker):
    """An engine that says it holds another version than the one it was given."""

    def finish_refit(self, *, version: int) -> int:
        return super().finish_refit(version=version) - 1


def test_an_engine_with_another_version_stops_the_run(parties, config):
    forgetful = Forgetful.from_config(config)
    sync = PayloadWeightSync(replace(parties, engines=fleet_of(forgetful)))
    with pytest.raises(WorkerError, match=r"expected weight version 7 in every engine, got \{0: 6\}"):
        sync.sync(7)
    assert sync.version == -1


class Stored(LocalWorkerGroup):
    """A worker whose buckets are read as those of its own process are."""

    @property
    def is_local(self) -> bool:
        return False


class Counted(LocalWorkerGroup):
    """A worker whose calls are counted, as if it had its own process."""

    num_calls = 0

    @property
    def is_local(self) -> bool:
        return False

    def submit(self, call):
        self.num_calls += 1
        return super().submit(call)


@pytest.mark.parametrize("kind", ["payload", "rolling", "broadcast"])
def test_the_calls_of_a_refit_do_not_grow_with_its_buckets(parties, parts, config, kind):
    engine, counts = EngineWorker.from_config(config), []
    policy, member = Counted(lambda: parties.policy._worker), Counted(lambda: engine)
    for most in (None, 1_000):
        given = replace(
            parties, policy=policy, engines=WorkerFleet([member]), max_bucket_bytes=most, one_by_one=kind == "rolling"
        )
        sync = PayloadWeightSync(given) if kind != "broadcast" else BroadcastWeightSync(given, address="127.0.0.1")
        sync.sync(1)
        # The second one joins no group.
        policy.num_calls = member.num_calls = 0
        sync.sync(2)
        counts.append((policy.num_calls, member.num_calls))
        assert gap(parts[0], replicas_of(given.engines)) < 1e-5
    assert counts[0] == counts[1], "300 buckets, and two"
    assert sum(counts[0]) <= 12, f"calls to a rank of the policy and to an engine: {counts[0]}"
    engine.leave_refit()


class Telling(EngineWorker):
    """An engine that says when it stops, gets weights and goes on; it may be lost meanwhile."""

    heard: list[str]
    name = "?"
    is_lost = False

    def finish_generation(self) -> None:
        self.heard.append(f"{self.name} stops")
        super().finish_generation()

    def finish_refit(self, *, version: int) -> int:
        if self.is_lost:
            raise WorkerLost("the engine is gone", stage="refit")
        self.heard.append(f"{self.name} has {version}")
        return super().finish_refit(version=version)

    def prepare_for_generation(self) -> None:
        self.heard.append(f"{self.name} goes on")
        super().prepare_for_generation()


@pytest.mark.parametrize("is_lost", [False, True])
def test_engines_get_their_weights_one_after_the_other(parties, parts, config, is_lost):
    heard: list[str] = []
    members = [Telling.from_config(config), Telling.from_config(config)]
    for engine, name in zip(members, "ab", strict=True):
        engine.heard, engine.name = heard, name
    members[0].is_lost = is_lost
    engines = WorkerFleet([LocalWorkerGroup(partial(lambda engine: engine, each)) for each in members])
    policy = Stored(lambda: parties.policy._worker)
    sync = PayloadWeightSync(replace(parties, policy=policy, engines=engines, one_by_one=True))
    sync.sync(5)
    expected = ["a stops"] if is_lost else ["a stops", "a has 5", "a goes on"]
    expected += ["b stops", "b has 5", "b goes on"]
    assert heard[: len(expected)] == expected
    assert sync.version == 5 and engines.numbers == ((1,) if is_lost else (0, 1))
    assert gap(parts[0], replicas_of(engines)) < 1e-5


class Deaf(EngineWorker):
    """An engine that fails at the second bucket."""

    num_heard = 0

    def load_bucket(self, bucket: np.ndarray | None = None) -> None:
        self.num_heard += 1
        if self.num_heard == 2:
            raise OSError("no memory for the second bucket")
        super().load_bucket(bucket)


def test_an_engine_that_fails_half_way_holds_no_version(parties, config):
    deaf = Deaf.from_config(config, weight_version=3)
    sync = PayloadWeightSync(replace(parties, engines=fleet_of(deaf)))
    with pytest.raises(OSError, match="second bucket"):
        sync.sync(4)
    assert deaf.weight_version == -1 and sync.version == -1
    parties.policy.run(Call(request=ask(PolicyWorker.end_refit), stage="refit", timeout_s=5))


def test_an_engine_of_another_model_is_refused_before_anything_is_written(parties, config, tmp_path):
    tiny_model(num_layers=1).save_pretrained(str(tmp_path))
    other = EngineWorker(load_causal_lm(tmp_path), tokenizer=None, max_total_length=64, weight_version=3)
    sync = PayloadWeightSync(replace(parties, engines=fleet_of(other)))
    with pytest.raises(ValueError, match=r"do not fit this engine: model.layers.1.*unknown"):
        sync.sync(4)
    assert other.weight_version == 3, "the engine goes on with what it has"


@pytest.fixture(params=["payload", "broadcast"])
def delta_sync(request, parties, config) -> Iterator[tuple[WeightSync, EngineWorker]]:
    """To a bfloat16 engine, in so small buckets that weights are cut."""
    generation = config.generation.model_copy(update={"precision": "bfloat16"})
    engine = EngineWorker.from_config(config.model_copy(update={"generation": generation}))
    given = replace(parties, engines=fleet_of(engine), max_bucket_bytes=10_001, delta_full_every=4)
    yield (
        (PayloadWeightSync(given) if request.param == "payload" else BroadcastWeightSync(given, address="127.0.0.1")),
        engine,
    )
    given.engines.shutdown()


def holds(engine: EngineWorker, policy: Policy, parties: RefitParties) -> bool:
    """Whether the engine has the policy's weights to the last bit."""
    policy.prepare_for_lp_inference()
    exported = parties.policy.run(Call(request=ask(PolicyWorker.export_weights), stage="refit", timeout_s=60))[0]
    own = dict(engine._loaded_model().named_parameters())
    return all(
        torch.equal(own[name].view(torch.int16), weight.bfloat16().view(torch.int16))
        for name, weight in exported
        if name in own
    )


def train(policy: Policy, *, seed: int) -> None:
    batch = tiny_batch(8, seed=seed)
    policy.prepare_for_training()
    policy.train(
        batch,
        PolicyLoss(config=LossConfig()),
        plan=plan_padded(batch.tensor("input_lengths").tolist(), capacity=200, dp_world=1),
    )


def test_what_has_changed_makes_the_same_bits_of_less(delta_sync, parts, parties) -> None:
    sync, engine = delta_sync
    policy, shares = parts[0], []
    for version in range(6):
        sync.sync(version)
        assert holds(engine, policy, parties) and engine.weight_version == version
        assert sync.report.version == version
        shares.append(sync.report.bytes_sent / sync.report.bytes_dense)
        train(policy, seed=version)
        assert not holds(engine, policy, parties), "weights must change, or a refit shows nothing"
    is_whole = [share >= 1 for share in shares]
    assert is_whole == [True, False, False, False, True, False], "one of four is whole"


def test_after_weights_from_elsewhere_or_a_failure_the_next_refit_is_whole(delta_sync, parts, parties, monkeypatch):
    sync, engine = delta_sync
    policy = parts[0]
    for version in (0, 1):
        sync.sync(version)
    assert sync.report.bytes_sent < sync.report.bytes_dense
    engine.update_weights(engine._loaded_model().state_dict().items(), version=1)
    sync.sync(2)
    assert sync.report.bytes_sent > sync.report.bytes_dense, "nobody knows what the engine has got"
    train(policy, seed=7)
    with monkeypatch.context() as patched:
        patched.setattr(engine, "finish_refit", _fails)
        with pytest.raises(OSError, match="at the end"):
            sync.sync(3)
    sync.sync(3)
    assert sync.report.bytes_sent > sync.report.bytes_dense and holds(engine, policy, parties)


def _fails(*, version: int) -> int:
    raise OSError(f"no memory at the end of {version}")
