"""Engines that die or stand still in mid-step: a run has the numbers of one in which none does, or tells the cause."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_rl.errors import WorkerError
from tests.helpers.runs import LOCAL, load_recipe, logged_steps, write_recipe
from tests.helpers.warm_runs import WarmRuns

pytestmark = pytest.mark.slow

HALF = {"policy.generation.precision": "bfloat16"}
TWO_ENGINES = {
    **HALF,
    "cluster.cpu_workers_per_node": "1",
    "data_plane.impl": "ray",
    "policy.generation.num_replicas": "2",
    "policy.generation.refit_transport": "broadcast",
    "policy.generation.refit_delta.enabled": "true",
    "policy.generation.engine_timeout_s": "20",
    "policy.generation.backend": "tests.helpers.faulty_engines:build_dying_engine",
}
"""By broadcast, whose group is made anew for the engine that comes, of what has changed."""
SAID = {
    "SIGKILL": r"stage generation: the worker process died \(generation worker",
    "SIGSTOP": r"stage generation: ",
}
OF_ENGINES = ("rollout/engines", "rollout/engines_lost", "rollout/rows_sampled_again")


def whole_refits(steps: list[dict]) -> list[bool]:
    """Of each step, whether all weights were sent after it."""
    return [step["refit/bytes_sent"] >= step["refit/bytes_dense"] for step in steps]


def learned(steps: list[dict]) -> list[dict]:
    names = ("train/reward", "train/loss", "train/grad_norm", "rollout/mean_response_tokens")
    return [{name: step[name] for name in names} for step in steps]


@pytest.mark.parametrize("kind", ["SIGKILL", pytest.param("SIGSTOP", marks=pytest.mark.full)])
def test_another_engine_samples_the_rows_of_one_that_is_lost_and_without_any_the_run_ends(
    kind: str, tmp_path: Path, model: Path, warm_runs: WarmRuns
) -> None:
    config = load_recipe(write_recipe(tmp_path / "alone", model), {**LOCAL, **HALF})
    warm_runs.run(config)
    alone = logged_steps(config.logger.log_dir)
    # Engine 0 has two requests in step 2, and the successor of engine 1 comes for step 3: both end in step 4.
    faults = {"victims": "engine 1 at 2, engine 1 at 2, engine 0 at 5", "signal": kind, "notes": str(tmp_path)}
    options = {f"+policy.generation.options.{name}": json.dumps(value) for name, value in faults.items()}
    config = load_recipe(write_recipe(tmp_path / "two", model), {**TWO_ENGINES, **options, "grpo.max_num_steps": "4"})
    with pytest.raises(WorkerError, match=SAID[kind]) as caught:
        warm_runs.run(config)
    assert caught.value.rank in (0, 1)
    steps = logged_steps(config.logger.log_dir)
    assert learned(steps) == learned(alone)
    assert len({step["train/grad_norm"] for step in steps}) == 3, "weights must change, or a lost row shows nothing"
    # Two of four prompts were the lost engine's, four samples each; at the refit of the second step it was replaced.
    assert [[step[name] for name in OF_ENGINES] for step in steps] == [[2, 0, 0], [1, 1, 8], [2, 0, 0]]
    assert whole_refits(steps) == [False, True, False], "a new engine has nothing that a delta could build on"
