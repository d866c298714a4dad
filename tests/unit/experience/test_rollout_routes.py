"""The rollout worker writes the routes that its engine recorded, in the columns that the run has declared."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nemo_rl.algorithms.losses.policy_loss import PolicyLoss
from nemo_rl.algorithms.stages.columns import stage_columns, written_fields
from nemo_rl.config.load import load_config
from nemo_rl.config.schema import MasterConfig
from nemo_rl.data_plane.schema import ROUTE_FIELDS
from nemo_rl.errors import WorkerError
from nemo_rl.experience.evaluation.evaluator import EvaluationTask
from nemo_rl.experience.rollout_records import GroupRequest, RolloutResult
from nemo_rl.experience.rollout_worker import RolloutWorker
from nemo_rl.experience.rollouts import RolloutSpec
from nemo_rl.jagged import lengths_of, values_of
from nemo_rl.models.generation.interfaces import GenerationOutput, GenerationRequest
from nemo_rl.models.generation.torch_engine import TorchEngine
from nemo_rl.models.hf.loading import load_causal_lm
from nemo_rl.models.hf.modules import HFRouters
from nemo_rl.routes.columns import decode_routes
from nemo_rl.routes.digest import route_digests
from nemo_rl.routes.shape import RouteShape
from nemo_rl.utils.metrics import values as reduced
from nemo_rl.utils.r3_trace import reset_r3_trace
from tests.helpers.data_planes import Plane, open_plane
from tests.helpers.model_families import write_family
from tests.helpers.runs import LOCAL, write_recipe

SHAPE = RouteShape(layers=(1,), top_k=2, num_experts=4)


class Listening(TorchEngine):
    """Remembers what it was asked for."""

    asked: bool = False

    def generate(self, request: GenerationRequest) -> GenerationOutput:
        self.asked = request.with_routes
        return super().generate(request)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("moe"), "qwen3_moe")


@pytest.fixture
def plane() -> Iterator[Plane]:
    with open_plane("noop") as plane:
        yield plane
        plane.settle()


def config_of(model: Path, folder: Path, *keys: str) -> MasterConfig:
    recipe = write_recipe(folder, model)
    validation = ("+data.validation={dataset_name: sort_digits, size: 4}", "grpo.val_at_end=true")
    return load_config(recipe, [*(f"{key}={value}" for key, value in LOCAL.items()), *validation, *keys])


def rollout(plane: Plane, config: MasterConfig) -> tuple[RolloutWorker, RolloutResult, Listening]:
    """One rollout of two prompts."""
    engine = Listening.from_config(config.policy, weight_version=0)
    assert isinstance(engine, Listening)
    worker = RolloutWorker(RolloutSpec.of(config), generation=engine)
    stages = stage_columns(config, PolicyLoss(config=config.loss_fn, prev_field="prev_logprobs"))
    partition = plane.partition(list(written_fields(stages)))
    worker.setup_data_plane(plane.owner.address)
    groups = [GroupRequest(uid="a", prompt=3, seed=5), GroupRequest(uid="b", prompt=8, seed=9)]
    [results] = worker.rollout(groups, version=0, partition_id=partition)
    return worker, results[0].concat(*results[1:]), engine


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("bit_packed", ["false", "true"])
def test_the_columns_hold_the_routes_of_a_recomputation(
    plane: Plane,
    model: Path,
    tmp_path: Path,
    bit_packed: str,
    verify: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("NRL_R3_TRACE", "NRL_R3_TRACE_VERIFY_FORWARD"):
        monkeypatch.setenv(name, "on" if verify else "off")
    reset_r3_trace()
    on = ("policy.router_replay.enabled=true", f"policy.router_replay.bit_packed={bit_packed}")
    worker, result, engine = rollout(plane, config_of(model, tmp_path, *on))
    names = [name for name in ROUTE_FIELDS if name in result.meta.fields]
    form = "routed_experts_bits" if bit_packed == "true" else "routed_experts"
    digests = ["routed_experts_digests"] if verify else []
    assert names == [form, "routed_experts_missing", *digests] and engine.asked

    rows = plane.owner.get_data(result.meta, ["input_ids", *names])
    columns = {name: rows.get(name) for name in names}
    routes = decode_routes(columns, SHAPE)
    assert lengths_of(routes).tolist() == list(result.meta.sequence_lengths or ())
    reference = load_causal_lm(model)
    routers = HFRouters(reference)
    for ids, found in zip(rows.get("input_ids").unbind(), routes.unbind(), strict=True):
        own: dict[int, torch.Tensor] = {}
        with torch.no_grad(), routers.choosing(own.__setitem__):
            reference(ids[None, :-1].long(), use_cache=False)
        assert found[:-1, 0].tolist() == own[1].tolist()
        assert found[-1].tolist() == [[0, 1]]
    if verify:
        expected = route_digests(values_of(routes).long(), SHAPE.layers)
        assert torch.equal(values_of(columns["routed_experts_digests"]), expected)

        reset_r3_trace()
        (file,) = (tmp_path / "logs" / "r3_trace").glob("*.jsonl")
        records = [json.loads(line) for line in file.read_text().splitlines()]
        traced = [record["key"] for record in records if record["event"] == "rollout_payload_sample"]
        assert traced and set(traced) <= set(result.meta.keys)

    metrics = reduced(result.metrics)
    assert metrics["routes_missing_share"] == metrics["routes_missing_trained_tokens"] == 0
    assert metrics["routes_bytes_vs_bound"] == pytest.approx(metrics["routes_bytes_per_token"] * 8 / 4)
    worker.validate(EvaluationTask(step=1, version=0))
    assert not engine.asked, "a validation needs no routes"
    worker.shutdown()


@pytest.mark.parametrize(
    "keys", [(), ("policy.router_replay.enabled=true", "policy.router_replay.source=prev_logprobs")]
)
def test_engines_record_only_when_training_replays_their_routes(
    plane: Plane, model: Path, tmp_path: Path, keys: tuple[str, ...]
) -> None:
    worker, result, engine = rollout(plane, config_of(model, tmp_path, *keys))
    assert not engine.asked and not set(ROUTE_FIELDS) & set(result.meta.fields)
    assert not any(name.startswith("routes_") for name in result.metrics)
    worker.shutdown()


class Deaf(Listening):
    """Does not record."""

    def generate(self, request: GenerationRequest) -> GenerationOutput:
        silent = GenerationRequest(prompt_ids=request.prompt_ids, seeds=request.seeds, sampling=request.sampling)
        return super().generate(silent)


def test_an_engine_without_routes_ends_the_step(plane: Plane, model: Path, tmp_path: Path) -> None:
    config = config_of(model, tmp_path, "policy.router_replay.enabled=true")
    worker = RolloutWorker(RolloutSpec.of(config), generation=Deaf.from_config(config.policy, weight_version=0))
    worker.setup_data_plane(plane.owner.address)
    with pytest.raises(WorkerError, match="expected routes with the samples, the engines gave none"):
        list(worker.rollout([GroupRequest(uid="a", prompt=3, seed=5)], version=0, partition_id=plane.partition()))
    worker.shutdown()
