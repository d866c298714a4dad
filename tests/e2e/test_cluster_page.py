"""What docs/cluster.md tells about recipes is done: a recipe of a cluster runs small, one of NeMo-RL is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repo.walk_docs import ROOT, Block, blocks_of

PAGE = "docs/cluster.md"
TIMEOUT_S = 600.0
NEMO_RL = f"{sys.executable} -m nemo_rl.cli.main "


def block_with(words: str) -> Block:
    [found] = [block for block in blocks_of(PAGE) if words in block.body]
    return found


def run(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A script of the page in a folder that has the repository's recipes and examples."""
    for name in ("configs", "examples"):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    script = script.replace("nemo-rl ", NEMO_RL).replace("python examples", f"{sys.executable} examples")
    return subprocess.run(
        ["bash", "-euc", script],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def check_ran(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pass in" in done.stdout and "FAILS" not in done.stdout
    for check in ("every stage", "gradients", "engines", "checkpoint"):
        assert any(line.split("ok")[0].strip() == check for line in done.stdout.splitlines() if "ok" in line), check


@pytest.mark.slow
def test_a_recipe_for_gpus_runs_small(tmp_path: Path) -> None:
    recipe = "configs/recipes/grpo_qwen2.5_1.5b_1gpu.yaml"
    done = run(f"nemo-rl shrink {recipe} cluster.gpus_per_node=2 --out out", tmp_path)
    check_ran(done)
    assert "one process            ok     2 workers give its numbers in 3 steps" in done.stdout


@pytest.mark.full
def test_the_recipe_of_the_page_runs_small(tmp_path: Path) -> None:
    done = run(block_with("shrink configs/recipes/grpo_llama").body, tmp_path)
    check_ran(done)
    assert "one process            ok     4 workers give its numbers in 3 steps" in done.stdout
    assert "16 workers (tp 2, dp 8, sp) -> 4 workers (tp 2, dp 2, sp)" in done.stdout


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["grpo_qwen2.5_1.5b_1gpu", "grpo_math_1b", "grpo_qwen3_30b_a3b_8n8g_r3"])
def test_the_other_recipes_for_gpus_run_small(recipe: str, tmp_path: Path) -> None:
    check_ran(run(f"nemo-rl shrink configs/recipes/{recipe}.yaml --out out", tmp_path))


@pytest.mark.slow
def test_a_recipe_of_nemo_rl_is_imported_and_loads(tmp_path: Path) -> None:
    recipe = next(block for block in blocks_of(PAGE) if block.file_name == "nemo_rl_recipe.yaml")
    (tmp_path / "nemo_rl_recipe.yaml").write_text(recipe.body, encoding="utf-8")
    done = run(block_with("config import").body, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "its values of August 2026 stand in" in done.stdout and "imported.yaml: ok" in done.stdout
