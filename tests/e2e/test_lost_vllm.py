"""vLLM engines that die or stand still while they decode: the same rows and rewards, or the cause and nothing left."""

from __future__ import annotations

import io
import time
import uuid
from pathlib import Path

import pytest
from rich.console import Console

from nemo_rl.algorithms.run import run
from tests.helpers.engine_process import NO_VLLM, has_vllm
from tests.helpers.faulty_engines import ENDED_SUFFIX
from tests.helpers.model_families import write_dense
from tests.helpers.processes import MARK, wait_for_none
from tests.helpers.runs import load_recipe, logged_steps, rollouts_of, run_cli, write_recipe

pytestmark = [
    pytest.mark.slow,
    pytest.mark.full,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not has_vllm(), reason=NO_VLLM),
]

SETTINGS = {
    "cluster.cpu_workers_per_node": "1",
    "data_plane.impl": "ray",
    "policy.generation.num_replicas": "2",
    "policy.generation.backend": "tests.helpers.faulty_engines:build_dying_vllm",
    "policy.generation.max_new_tokens": "20",
    "policy.max_total_sequence_length": "64",
    "policy.generation.engine_timeout_s": "25",
    "policy.generation.refit_delta.enabled": "true",
}
OF_A_ROW = ("prompt", "token_ids", "reward", "advantage", "weight_version")
LOST = ("rollout/engines", "rollout/engines_lost")
END_S = 150.0
"""From the death of the last engine to the end of a run: seconds, and more where much else runs."""


def settings_of(folder: Path, *, victims: str, kind: str) -> dict[str, str]:
    options = {"victims": victims, "signal": kind, "notes": str(folder)}
    return SETTINGS | {f"+policy.generation.options.{name}": repr(value) for name, value in options.items()}


def trained(folder: Path, model: Path, *, victims: str, kind: str = "SIGKILL") -> tuple[list[dict], list[list[dict]]]:
    """Metrics and rollouts of each step."""
    config = load_recipe(write_recipe(folder, model), settings_of(folder, victims=victims, kind=kind))
    run(config, console=Console(file=io.StringIO()))
    steps = logged_steps(config.logger.log_dir)
    return steps, [
        [{name: row[name] for name in OF_A_ROW} for row in rollouts_of(config.logger.log_dir, number)]
        for number in (1, 2, 3)
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dense(tmp_path_factory.mktemp("vllm") / "model")


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[list[dict], list[list[dict]]]:
    return trained(tmp_path_factory.mktemp("unharmed"), model, victims="none")


@pytest.mark.parametrize("kind", ["SIGKILL", "SIGSTOP"])
def test_the_other_engine_samples_the_same_rows(
    kind: str, tmp_path: Path, model: Path, unharmed: tuple[list[dict], list[list[dict]]]
) -> None:
    steps, rollouts = trained(tmp_path, model, victims="engine 1 at 2", kind=kind)
    assert (tmp_path / f"engine_1_0{ENDED_SUFFIX}").exists()
    assert rollouts == unharmed[1] and len(rollouts[1]) == 16
    assert [step["train/reward"] for step in steps] == [step["train/reward"] for step in unharmed[0]]
    assert [step["train/grad_norm"] for step in steps] == [step["train/grad_norm"] for step in unharmed[0]]
    assert [[step[name] for name in LOST] for step in steps] == [[2, 0], [1, 1], [2, 0]]


def test_without_any_engine_the_run_ends_with_the_cause_and_leaves_nothing(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    settings = settings_of(tmp_path, victims="engine 0 at 2, engine 1 at 2", kind="SIGKILL")
    code, output = run_cli(
        write_recipe(tmp_path, model), *(f"{name}={value}" for name, value in settings.items()), timeout_s=600
    )
    ended = time.time()
    assert code == 1, output[-3000:]
    assert "stage generation: the worker process died (generation worker" in output
    assert wait_for_none(mark, timeout_s=30.0) == []
    died = max(path.stat().st_mtime for path in tmp_path.glob(f"*{ENDED_SUFFIX}"))
    print(f"ended {ended - died:.1f} s after the last engine")
    assert ended - died < END_S
