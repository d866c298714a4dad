"""Recording looks on: it changes no bit, leaves no hook, and a full disk ends it, not the step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, Phi3Config

from nemo_rl.algorithms.losses.policy_loss import PolicyLoss
from nemo_rl.config.loss import LossConfig
from nemo_rl.errors import NonFiniteError, UserError
from nemo_rl.models.megatron.setup import MegatronModel
from nemo_rl.models.policy.recording import RecordSpec
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker
from nemo_rl.records.reader import read_folder
from nemo_rl.records.sites import SITES, Direction, SiteKind
from tests.helpers.model_families import FAMILY_SIZES, write_family, write_with_tokenizer
from tests.helpers.tiny_model import tiny_batch, tiny_policy, tiny_worker

ENGINES = {
    "dtensor": {"dtensor_cfg": {"activation_checkpointing": "selective"}},
    "megatron": {
        "dtensor_cfg": {"enabled": False},
        "megatron_cfg": {"enabled": True, "activation_checkpointing": True},
    },
}


class Numbers(NamedTuple):
    """What a worker computes."""

    logprobs: torch.Tensor
    reference: torch.Tensor
    loss: tuple[float, ...]
    grad_norm: tuple[float, ...]
    weights: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("moe"), "qwen3_moe")


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def numbers_of(worker: PolicyWorker) -> Numbers:
    batch = tiny_batch(8)
    logprobs, reference = worker.get_logprobs(batch), worker.get_reference_policy_logprobs(batch)
    trained = worker.train(batch, PolicyLoss(config=LossConfig()))
    return Numbers(logprobs, reference, trained.loss, trained.grad_norm, dict(worker.export_weights()))


def hooks_of(worker: PolicyWorker) -> int:
    """Of all modules, and methods that stand in for those of a class."""
    model = worker.engine.model
    parts = list((model.module if isinstance(model, MegatronModel) else model).modules())
    hooks = sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in parts)
    return hooks + sum("gating" in part.__dict__ for part in parts)


def started(engine: str, folder: Path, out: Path | None, **changes: object) -> PolicyWorker:
    record = None if out is None else RecordSpec(folder=out, sites="*", **changes)  # type: ignore[arg-type]
    return tiny_worker(tiny_policy(folder, **ENGINES[engine]), keep_reference=True, record=record)


def test_recording_changes_no_bit_and_sees_every_site(engine: str, folder: Path, tmp_path: Path) -> None:
    worker = started(engine, folder, None)
    without = numbers_of(worker)
    worker.shutdown()
    worker = started(engine, folder, tmp_path / "records")
    hooks = hooks_of(worker)
    worker.begin_recording(1)
    recorded = numbers_of(worker)
    worker.end_recording()
    assert hooks_of(worker) == hooks
    worker.shutdown()
    assert torch.equal(without.logprobs, recorded.logprobs)
    assert torch.equal(without.reference, recorded.reference)
    assert (without.loss, without.grad_norm) == (recorded.loss, recorded.grad_norm)
    assert all(torch.equal(weight, recorded.weights[name]) for name, weight in without.weights.items())
    _assert_complete(tmp_path / "records")


def _assert_complete(path: Path) -> None:
    found = read_folder(path)
    assert not found.problems
    seen = {(record.place.kind, record.place.direction) for record in found.records if record.place.phase == "train"}
    forward = {(kind, Direction.FORWARD) for kind in SiteKind}
    backward = {(kind, Direction.BACKWARD) for kind, meaning in SITES.items() if meaning.has_backward}
    assert seen == forward | backward
    for phase in ("prev_logprobs", "reference_logprobs", "train"):
        places = [record.place for record in found.records if record.place.phase == phase]
        assert {place.kind for place in places} >= {SiteKind.EMBED, SiteKind.LAYER_OUT, SiteKind.LOGPROB}
        # Two rows a microbatch: each has its own records.
        assert {place.microbatch for place in places if place.kind is SiteKind.LAYER_OUT} == {0, 1, 2, 3}
    # Layers that the backward pass ran again are records of their own.
    again = {record.place.kind for record in found.records if record.place.is_recomputed}
    assert SiteKind.ATTN_Q in again and SiteKind.LOGITS not in again
    # Every token of every row, and no padding.
    lengths = tiny_batch(8).tensor("input_lengths")
    outs = [
        record
        for record in found.records
        if record.place.kind is SiteKind.LAYER_OUT and record.place.layer == 0 and record.place.phase == "prev_logprobs"
    ]
    assert sum(record.shape[0] for record in outs) == int(lengths.sum())


def test_hooks_are_gone_after_an_error_and_the_records_say_that_they_are_incomplete(engine, folder, tmp_path):
    worker = started(engine, folder, tmp_path)
    hooks, batch = hooks_of(worker), tiny_batch(8)
    batch["advantages"] = torch.full_like(batch.tensor("advantages"), torch.nan)
    worker.begin_recording(1)
    with pytest.raises(NonFiniteError):
        worker.train(batch, PolicyLoss(config=LossConfig()))
    assert hooks_of(worker) == hooks
    worker.shutdown()
    assert [problem.text for problem in read_folder(tmp_path).problems] == [
        "rank 0 did not end: there is no rank_00000.end"
    ]


def test_nothing_is_written_between_steps_or_in_other_phases(folder: Path, tmp_path: Path) -> None:
    worker = started("dtensor", folder, tmp_path / "of {step} 'x'", phases=("train",))
    numbers_of(worker)
    assert not list(tmp_path.iterdir())
    worker.begin_recording(7)
    numbers_of(worker)
    worker.end_recording()
    numbers_of(worker)
    worker.shutdown()
    found = read_folder(tmp_path / "of 7 'x'")
    assert {record.place.phase for record in found.records} == {"train"} and not found.problems


def test_what_a_model_cannot_give_is_said_with_the_reason(tmp_path: Path) -> None:
    fused = write_with_tokenizer(tmp_path / "phi3", AutoModelForCausalLM.from_config(Phi3Config(**FAMILY_SIZES)))
    worker = tiny_worker(tiny_policy(fused), record=RecordSpec(folder=tmp_path / "records", sites="attn.*"))
    worker.begin_recording(1)
    worker.get_logprobs(tiny_batch(2))
    worker.end_recording()
    worker.shutdown()
    manifest = read_folder(tmp_path / "records").manifest
    assert manifest.unobserved["attn.k"] == "attention has no part named k_proj"
    assert {site["kind"] for site in manifest.sites} == {"attn.context", "attn.out"}


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """/dev/full takes the place of the payload."""
    monkeypatch.setattr("nemo_rl.records.record.payload_path", lambda folder, rank: Path("/dev/full"))
    monkeypatch.setattr("nemo_rl.records.record.PAYLOAD_MODE", "wb")
    yield


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_ends_the_recording_of_a_run_and_not_its_step(folder: Path, tmp_path: Path) -> None:
    worker = started("dtensor", folder, tmp_path / "a", must_succeed=False)
    worker.begin_recording(1)
    numbers_of(worker)
    worker.end_recording()
    worker.shutdown()
    assert not list((tmp_path / "a").glob("*.end"))
    worker = started("dtensor", folder, tmp_path / "b")
    worker.begin_recording(1)
    with pytest.raises(UserError, match="No space left on device"):
        numbers_of(worker)
    worker.shutdown()
