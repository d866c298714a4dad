"""Engines that die or stand still in mid-step: a run has the numbers of one in which none does, or tells the cause."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest
from rich.console import Console

from nemo_rl.algorithms.run import run
from nemo_rl.errors import WorkerError
from tests.helpers.runs import load_recipe, logged_steps, write_recipe
from tests.helpers.tiny_model import write_tiny_folder

pytestmark = pytest.mark.slow

TWO_ENGINES = {
    "cluster.cpu_workers_per_node": "1",
    "data_plane.impl": "ray",
    "policy.generation.num_replicas": "2",
    "policy.generation.refit_transport": "broadcast",
    "policy.generation.precision": "bfloat16",
    "policy.generation.refit_delta.enabled": "true",
    "policy.generation.backend": "tests.helpers.faulty_engines:build_dying_engine",
}
"""By broadcast, whose group is made anew for the engine that comes, of what has changed."""
OF_ENGINES = ("rollout/engines", "rollout/engines_lost", "rollout/rows_sampled_again")


def steps_of(folder: Path, model: Path, *, victims: str, kind: str = "SIGKILL", **settings: str) -> list[dict]:
    config = load_recipe(
        write_recipe(folder, model),
        {
            **TWO_ENGINES,
            "+policy.generation.options.victims": victims,
            "+policy.generation.options.signal": kind,
            "+policy.generation.options.at": "2",
            "+policy.generation.options.notes": str(folder),
            **settings,
        },
    )
    run(config, console=Console(file=io.StringIO()))
    return logged_steps(config.logger.log_dir)


def whole_refits(steps: list[dict]) -> list[bool]:
    """Of each step, whether all weights were sent after it."""
    return [step["refit/bytes_sent"] >= step["refit/bytes_dense"] for step in steps]


def learned(steps: list[dict]) -> list[dict]:
    names = ("train/reward", "train/loss", "train/grad_norm", "rollout/mean_response_tokens")
    return [{name: step[name] for name in names} for step in steps]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory: pytest.TempPathFactory, model: Path) -> list[dict]:
    return steps_of(tmp_path_factory.mktemp("unharmed"), model, victims="none")


@pytest.mark.parametrize("kind", ["SIGKILL", pytest.param("SIGSTOP", marks=pytest.mark.full)])
def test_another_engine_samples_the_rows_of_one_that_is_lost(
    kind: str, tmp_path: Path, model: Path, unharmed: list[dict]
) -> None:
    steps = steps_of(tmp_path, model, victims="engine 1", kind=kind, **{"policy.generation.engine_timeout_s": "20"})
    assert learned(steps) == learned(unharmed)
    assert len({step["train/grad_norm"] for step in steps}) == 3, "weights must change, or a lost row shows nothing"
    # Two of four prompts were the lost engine's, four samples each; at the refit of the second step it was replaced.
    assert [[step[name] for name in OF_ENGINES] for step in steps] == [[2, 0, 0], [1, 1, 8], [2, 0, 0]]
    assert whole_refits(unharmed) == [False, False, False]
    assert whole_refits(steps) == [False, True, False], "a new engine has nothing that a delta could build on"


def test_a_run_without_engines_ends_with_the_first_cause(tmp_path: Path, model: Path) -> None:
    began = time.monotonic()
    with pytest.raises(WorkerError, match=r"stage generation: the worker process died \(generation worker") as caught:
        steps_of(tmp_path, model, victims="engine 0 engine 1")
    assert caught.value.rank in (0, 1)
    assert time.monotonic() - began < 300
