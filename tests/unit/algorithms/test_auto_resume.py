"""`checkpointing.resume: auto`: continued, started over, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_rl.algorithms.preflight.checks import decide_resume
from nemo_rl.algorithms.run_folder import CONFIG_FILE
from nemo_rl.config.load import load_config
from nemo_rl.config.schema import MasterConfig
from nemo_rl.config.yaml_text import to_yaml
from nemo_rl.errors import RunFolderError

ROOT = Path(__file__).parents[3]


def config(log_dir: Path, *overrides: str) -> MasterConfig:
    own = (f"logger.log_dir={log_dir}", "checkpointing.resume=auto")
    return load_config(ROOT / "configs/grpo_sort_cpu.yaml", [*own, *overrides])


def decided(given: MasterConfig) -> tuple[object, bool]:
    found = decide_resume(given)
    return found.checkpointing.resume, found.logger.overwrite


def write_start(given: MasterConfig, *, step: int | None = None) -> None:
    given.logger.log_dir.mkdir(parents=True, exist_ok=True)
    (given.logger.log_dir / CONFIG_FILE).write_text(to_yaml(given))
    (given.logger.log_dir / "metrics.jsonl").write_text("{}")
    if step is not None:
        (given.checkpoint_dir / f"step_{step}").mkdir(parents=True)


def test_an_empty_folder_is_started_in(tmp_path):
    assert decided(config(tmp_path / "new")) == (False, False)


def test_a_checkpoint_of_the_same_recipe_is_continued_also_for_longer(tmp_path):
    write_start(config(tmp_path), step=20)
    assert decided(config(tmp_path)) == (True, False)
    assert decided(config(tmp_path, "grpo.max_num_steps=500", "logger.live_panel=false")) == (True, False)


def test_a_start_without_a_checkpoint_is_begun_again(tmp_path):
    write_start(config(tmp_path))
    assert decided(config(tmp_path)) == (False, True)
    (tmp_path / "checkpoints" / "tmp_step_1.ab").mkdir(parents=True)
    assert decided(config(tmp_path)) == (False, True)


def test_another_recipe_is_neither_continued_nor_removed(tmp_path):
    write_start(config(tmp_path))
    other = config(tmp_path, "grpo.seed=7", "policy.optimizer.kwargs.lr=1e-3")
    assert decided(other) == (False, False)
    (tmp_path / "checkpoints" / "step_20").mkdir(parents=True)
    with pytest.raises(
        RunFolderError, match=r"others are grpo\.seed, policy\.optimizer\.kwargs\.lr; set checkpointing"
    ):
        decide_resume(other)
    (tmp_path / CONFIG_FILE).write_text("grpo: [")
    with pytest.raises(RunFolderError, match="keys that cannot be read"):
        decide_resume(other)


def test_only_auto_is_decided_here(tmp_path):
    write_start(config(tmp_path), step=1)
    for given in ("true", "false"):
        said = config(tmp_path, f"checkpointing.resume={given}")
        assert decide_resume(said) is said
