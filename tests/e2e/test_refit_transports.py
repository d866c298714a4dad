"""A whole run over Ray and TransferQueue whose weights reach two engines by broadcast: the numbers of one process."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from nemo_rl.algorithms.run import run
from tests.helpers.runs import LOCAL, load_recipe, logged_steps, write_recipe
from tests.helpers.tiny_model import write_tiny_folder

pytestmark = [pytest.mark.slow, pytest.mark.full]

BROADCAST = {
    "cluster.cpu_workers_per_node": "1",
    "data_plane.impl": "transfer_queue",
    "policy.generation.num_replicas": "2",
    "policy.generation.refit_transport": "broadcast",
}


def train(folder: Path, model: Path, overrides: dict[str, str]) -> list[dict[str, float]]:
    config = load_recipe(write_recipe(folder, model), overrides)
    run(config, console=Console(file=io.StringIO()))
    return logged_steps(config.logger.log_dir)


def learned(steps: list[dict[str, float]]) -> list[dict[str, float]]:
    names = ("train/reward", "train/loss", "train/grad_norm", "rollout/mean_response_tokens")
    return [{name: step[name] for name in names} for step in steps]


def test_two_engines_by_broadcast_sample_what_one_engine_samples(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    model = write_tiny_folder(tmp_path_factory.mktemp("model"))
    alone = train(tmp_path_factory.mktemp("one"), model, LOCAL)
    together = train(tmp_path_factory.mktemp("two"), model, BROADCAST)
    assert learned(together) == learned(alone)
    assert len({step["train/grad_norm"] for step in alone}) == 3, "weights must change, or a refit shows nothing"
