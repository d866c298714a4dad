"""Saves beside the training of a worker: of their moment, told when they fail, harmless when the process is killed."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nemo_rl.algorithms.losses.nll import NLLLoss
from nemo_rl.algorithms.saver import Saver
from nemo_rl.config.backends import DTensorConfig, MegatronConfig
from nemo_rl.config.run import CheckpointingConfig
from nemo_rl.distributed.worker_groups import LocalWorkerGroup
from nemo_rl.errors import CheckpointError
from nemo_rl.models.policy.tq_policy import Policy
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker
from nemo_rl.utils.checkpoint import CheckpointManager, Upload
from tests.helpers.gloo import run_ranks
from tests.helpers.tiny_model import tiny_batch, tiny_policy, tiny_worker

LOSS = NLLLoss()
FAR_S = 60.0
ENGINES = {
    "dtensor": {"dtensor_cfg": DTensorConfig()},
    "megatron": {"dtensor_cfg": DTensorConfig(enabled=False), "megatron_cfg": MegatronConfig(enabled=True)},
}


@pytest.fixture(params=sorted(ENGINES))
def worker(request: pytest.FixtureRequest, folder: Path) -> Iterator[PolicyWorker]:
    made = tiny_worker(tiny_policy(folder, **ENGINES[request.param]))
    made.train(tiny_batch(), LOSS)
    yield made
    made.shutdown()


def paths_in(folder: Path) -> dict[str, Path]:
    return {"weights": folder / "weights", "optimizer": folder / "optimizer", "tokenizer": folder / "weights"}


def contents(folder: Path) -> dict[str, bytes]:
    """All files but the index of torch's format, in which each save has an id of its own."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".metadata"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_what_is_written_later_is_what_a_save_would_have_written_at_once(worker: PolicyWorker, tmp_path: Path) -> None:
    worker.save_checkpoint(**paths_in(tmp_path / "at once"))
    snapshot = worker.engine.snapshot(with_optimizer=True, copies=True)
    worker.begin_save(**paths_in(tmp_path / "beside"))
    worker.train(tiny_batch(), LOSS)
    torch.rand(5)
    with pytest.raises(RuntimeError, match="finish it before the next"):
        worker.save_checkpoint(**paths_in(tmp_path / "second"))
    assert worker.finish_save(timeout_s=FAR_S) > 0
    assert not worker.is_saving() and worker.finish_save(timeout_s=FAR_S) == 0
    expected = contents(tmp_path / "at once")
    assert "weights/model.safetensors" in expected and len(expected) > 5
    assert contents(tmp_path / "beside") == expected
    # Certainly after the step.
    later = paths_in(tmp_path / "later")
    snapshot.write(weights=later["weights"], optimizer=later["optimizer"], group=torch.distributed.group.WORLD)
    written = contents(tmp_path / "later")
    assert written == {name: content for name, content in expected.items() if name in written} and len(written) > 4
    worker.save_checkpoint(**paths_in(tmp_path / "next"))
    assert contents(tmp_path / "next")["weights/model.safetensors"] != expected["weights/model.safetensors"]


def test_a_copy_that_takes_too_much_of_the_free_memory_is_not_made(
    worker: PolicyWorker, tmp_path: Path, caplog
) -> None:
    caplog.set_level("INFO")
    worker.begin_save(**paths_in(tmp_path / "no room"), most_share=1e-9)
    assert not worker.is_saving() and worker.finish_save(timeout_s=FAR_S) == 0
    assert "checkpointing.async_save=true takes them all the same" in caplog.text
    worker.begin_save(**paths_in(tmp_path / "room"), most_share=0.9)
    assert worker.finish_save(timeout_s=FAR_S) > 0
    assert contents(tmp_path / "room") == contents(tmp_path / "no room")


def test_what_was_written_is_uploaded_beside_the_training_also_without_room_for_a_copy(
    worker: PolicyWorker, tmp_path: Path
) -> None:
    for name, share in (("room", None), ("no room", 1e-9)):
        folder = tmp_path / name
        upload = Upload(url=f"file://{tmp_path}/stored {name}", folder=folder, timeout_s=FAR_S)
        worker.begin_save(**paths_in(folder / "policy"), most_share=share, upload=upload)
        assert worker.finish_save(timeout_s=FAR_S) > 0
        assert contents(tmp_path / f"stored {name}") == contents(folder) and len(contents(folder)) > 5
    blocked = Upload(url=f"file://{folder}/policy/weights/config.json", folder=folder, timeout_s=FAR_S)
    worker.begin_save(**paths_in(folder / "policy"), upload=blocked)
    with pytest.raises(CheckpointError, match=r"rank 0 could not upload it: file://.*earlier checkpoints stay valid"):
        worker.finish_save(timeout_s=FAR_S)


def test_a_disk_that_is_full_is_told_when_the_save_is_finished(worker: PolicyWorker, tmp_path: Path) -> None:
    worker.save_checkpoint(**paths_in(tmp_path))
    before = contents(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        worker.begin_save(**paths_in(tmp_path))
        with pytest.raises(CheckpointError, match=r"rank 0 could not write it: .*free there"):
            worker.finish_save(timeout_s=FAR_S)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert contents(tmp_path) == before and not list(tmp_path.glob("*.part"))
    worker.begin_save(**paths_in(tmp_path))
    worker.finish_save(timeout_s=FAR_S)


def _killed(rank: int, folder: Path, target: Path) -> None:
    worker = tiny_worker(tiny_policy(folder))
    policy = Policy(LocalWorkerGroup(lambda: worker), timeout_s=FAR_S)
    manager = CheckpointManager(target, keep_top_k=1, metric_name="reward")
    saver = Saver(manager, policy, CheckpointingConfig(async_save=True), timeout_s=FAR_S)
    worker.train(tiny_batch(), LOSS)
    saver.save(1, state={"sampler": {}}, waits=True)
    (target / "loss").write_text(repr(worker.train(tiny_batch(), LOSS).loss))
    saver.save(2, state={"sampler": {}}, waits=False)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_kill_in_the_middle_of_a_save_leaves_the_step_before_it(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="-9"):
        run_ranks(1, _killed, folder, tmp_path)
    expected = (tmp_path / "loss").read_text()
    assert {path.name.split(".")[0] for path in tmp_path.glob("*step_*")} == {"step_1", "tmp_step_2"}
    manager = CheckpointManager(tmp_path, keep_top_k=1, metric_name="reward")
    manager.clean()
    assert {path.name for path in tmp_path.iterdir()} == {"latest", "loss", "step_1"}
    checkpoint = manager.choose().checkpoint
    worker = tiny_worker(tiny_policy(folder))
    worker.load_checkpoint(weights=checkpoint.weights, optimizer=checkpoint.optimizer)
    assert repr(worker.train(tiny_batch(), LOSS).loss) == expected
    worker.shutdown()
