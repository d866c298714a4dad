"""What a run does after the loss of a node: the config by which it goes on, or why it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_rl.algorithms.run import config_after_loss
from nemo_rl.algorithms.saver import build_checkpoints
from nemo_rl.config.schema import MasterConfig
from nemo_rl.errors import NodeLost
from tests.helpers.runs import load_recipe, write_recipe

NODES = {"cluster.num_nodes": "2", "cluster.address": "auto"}


def recipe(folder: Path, *, spare: int = 2, steps: tuple[int, ...] = (2, 4)) -> MasterConfig:
    """Return a recipe of two nodes and spare ones, with checkpoints of these steps in its folder."""
    path = write_recipe(folder, folder / "model", checkpointing={"enabled": True, "metric_name": "train:reward"})
    config = load_recipe(path, {**NODES, "cluster.spare_nodes": str(spare), "logger.overwrite": "true"})
    saved = build_checkpoints(
        config.checkpointing, log_dir=config.logger.log_dir, metric_name="train:reward", timeout_s=60
    )
    assert saved is not None
    for step in steps:
        saved.save(step, write=_write_policy, state={"sampler": {}})
    return config


def _write_policy(folder: Path) -> None:
    for part in ("weights", "optimizer"):
        (folder / "policy" / part).mkdir(parents=True)
        (folder / "policy" / part / "shard.bin").write_bytes(b"y")


def test_a_run_resumes_its_last_checkpoint_and_has_fewer_spare_nodes(tmp_path: Path) -> None:
    said: list[str] = []
    config = config_after_loss(recipe(tmp_path), NodeLost("n2 died", num_lost=1, num_spare=2), report=said.append)
    assert config.checkpointing.resume is True and config.logger.overwrite is False
    assert (config.cluster.num_nodes, config.cluster.spare_nodes) == (2, 1)
    assert said == ["warning: n2 died; going on after step 4 on the nodes that are alive"]
    # Another spare node had died unseen.
    config = config_after_loss(config, NodeLost("n1 died", num_lost=1, num_spare=0), report=said.append)
    assert config.cluster.spare_nodes == 0


@pytest.mark.parametrize(
    ("given", "num_spare", "why"),
    [
        ({"spare": 0}, 1, "no node is spare"),
        ({"steps": ()}, 1, "no checkpoint is complete"),
        ({}, -1, "too few are alive"),
    ],
)
def test_a_run_that_cannot_go_on_ends_with_the_node_and_the_reason(
    tmp_path: Path, given: dict[str, int | tuple[int, ...]], num_spare: int, why: str
) -> None:
    lost, said = NodeLost("n2 died", num_lost=1, num_spare=num_spare), list[str]()
    with pytest.raises(NodeLost, match="n2 died") as raised:
        config_after_loss(recipe(tmp_path, **given), lost, report=said.append)  # type: ignore[arg-type]
    assert raised.value.__notes__ == [f"cluster.spare_nodes: the run does not go on by itself, {why}"] and not said
