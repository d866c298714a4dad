"""Layout mistakes show in `nemo-rl shrink`: those of recipes before anything starts, those of code in a shrunk run.

Rules and the real model's sizes refuse the mistakes in recipes. The mistakes in code are planted into a copy of the
library, as the faults of `tests/mutants` are, and show in a check of the shrunk run or end it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nemo_rl.cli.main import app
from nemo_rl.errors import UserError
from tests.mutants.faults import ROOT, Fault

LLAMA, QWEN = "grpo_llama3.1_8b_2n8g", "grpo_qwen3_30b_a3b_8n8g_r3"
TIMEOUT_S = 900.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeMistake:
    """Overrides that make a shipped recipe wrong."""

    name: str
    recipe: str
    overrides: tuple[str, ...]
    message: str
    """Part of what is said."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeMistake:
    """A line of the library that is wrong, and a recipe whose layout goes through it."""

    name: str
    recipe: str
    fault: Fault
    overrides: tuple[str, ...] = ()
    cpus: int = 1
    """One core: at most four workers."""


IN_RECIPES = (
    RecipeMistake(
        name="tensor ranks do not divide the real key-value heads",
        recipe=LLAMA,
        overrides=("policy.dtensor_cfg.tensor_parallel_size=16",),
        message="8",
    ),
    RecipeMistake(
        name="pipeline stages do not divide the real layers",
        recipe=QWEN,
        overrides=(
            *("cluster.num_nodes=5", "policy.generation.num_replicas=1"),
            "policy.megatron_cfg.pipeline_model_parallel_size=5",
        ),
        message="48 layers do not divide over 5 stages",
    ),
    RecipeMistake(
        name="expert ranks do not divide the real experts",
        recipe=QWEN,
        overrides=(
            *("cluster.num_nodes=6", "policy.generation.num_replicas=1"),
            *("policy.megatron_cfg.pipeline_model_parallel_size=4", "policy.megatron_cfg.context_parallel_size=1"),
            "policy.megatron_cfg.expert_model_parallel_size=6",
        ),
        message="128 experts do not divide by 6",
    ),
    RecipeMistake(
        name="sequence parallel without tensor parallel",
        recipe=LLAMA,
        overrides=("policy.dtensor_cfg.tensor_parallel_size=1", "policy.dtensor_cfg.sequence_parallel=true"),
        message="policy.dtensor_cfg.sequence_parallel: True would be ignored",
    ),
    RecipeMistake(
        name="experts under tensor parallel without sequence parallel",
        recipe=QWEN,
        overrides=("policy.megatron_cfg.sequence_parallel=false",),
        message="sequence_parallel: experts under tensor parallelism need it",
    ),
    RecipeMistake(
        name="a packing cap below the longest sequence",
        recipe=LLAMA,
        overrides=("policy.sequence_packing.train_mb_tokens=4000",),
        message="4000 tokens do not hold one sequence",
    ),
    RecipeMistake(
        name="a global batch that the step does not divide into",
        recipe=LLAMA,
        overrides=("grpo.num_generations_per_prompt=12",),
        message="policy.train_global_batch_size: expected a divisor",
    ),
)


def _fault(file: str, old: str, new: str, why: str) -> Fault:
    return Fault(file=f"nemo_rl/{file}", old=old, new=new, tests=("tests/e2e/test_shrink_mistakes.py",), why=why)


IN_CODE = (
    CodeMistake(
        name="ranks count through the context axis before the tensor axis",
        recipe=QWEN,
        fault=_fault(
            "distributed/layout.py",
            "cp, tp = divmod(rest, self.tp)",
            "tp, cp = divmod(rest, self.cp)",
            "megatron-core's groups and ours hold other ranks",
        ),
    ),
    CodeMistake(
        name="gradients of keys and values are not reduced over the context ranks",
        recipe=LLAMA,
        overrides=(
            *("policy.dtensor_cfg.tensor_parallel_size=1", "policy.dtensor_cfg.sequence_parallel=false"),
            "policy.dtensor_cfg.context_parallel_size=2",
        ),
        fault=_fault(
            "distributed/differentiable.py",
            "return _scatter(grad, ctx.group, ctx.dim), None, None",
            "return grad.chunk(dist.get_world_size(ctx.group), ctx.dim)[dist.get_rank(ctx.group)], None, None",
            "each context rank trains on its own queries alone",
        ),
    ),
    CodeMistake(
        name="gradients are not summed over the tensor ranks",
        recipe=LLAMA,
        overrides=("policy.dtensor_cfg.sequence_parallel=false",),
        fault=_fault(
            "distributed/differentiable.py",
            "return _sum(grad, ctx.group), None",
            "return grad, None",
            "tensor parallel ranks train on a part of the gradient",
        ),
    ),
    CodeMistake(
        name="gradients are averaged over the data shards, where they must be summed",
        recipe=LLAMA,
        fault=_fault(
            "models/dtensor/train_step.py",
            "averaged_over = self._optimizer_step.groups.fsdp_mesh.size()",
            "averaged_over = self._here.layout.cp",
            "the learning rate falls with every node",
        ),
    ),
    CodeMistake(
        name="gradients of norms are not summed over the sequence-parallel ranks",
        recipe=QWEN,
        fault=_fault(
            "models/megatron/train_step.py",
            "finalize_model_grads(modules, None, **kwargs)",
            "[module.finish_grad_sync() for module in modules]",
            "norms of the tensor ranks drift apart",
        ),
    ),
    CodeMistake(
        name="tensor ranks take halves of gate and up together",
        recipe=QWEN,
        overrides=(
            *("policy.model_name=models/Qwen3-8B", "policy.router_replay.enabled=false"),
            *("policy.megatron_cfg.expert_model_parallel_size=1", "policy.megatron_cfg.freeze_moe_router=false"),
            *("policy.megatron_cfg.moe_router_dtype=fp32", "policy.megatron_cfg.pipeline_model_parallel_size=4"),
            "~policy.megatron_cfg.expert_tensor_parallel_size",
        ),
        fault=_fault(
            "models/megatron/convert_table.py",
            "divided = whole.unflatten(self.dim, (self.runs, size, -1))",
            "divided = whole.unflatten(self.dim, (1, size, -1))",
            "the model is another one than in the folder",
        ),
    ),
)


def shrink_a_copy(mistake: CodeMistake, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs the command on a copy of the library with the mistake in it."""
    library = folder / "library"
    shutil.copytree(ROOT / "nemo_rl", library / "nemo_rl", ignore=shutil.ignore_patterns("__pycache__"))
    path = library / mistake.fault.file
    path.write_text(mistake.fault.apply(path.read_text(encoding="utf-8")), encoding="utf-8")
    return subprocess.run(
        [
            *(sys.executable, "-m", "nemo_rl.cli.main", "shrink", str(ROOT / f"configs/recipes/{mistake.recipe}.yaml")),
            *(*mistake.overrides, "--cpus", str(mistake.cpus), "--steps", "2", "--out", str(folder / "out")),
        ],
        cwd=library,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(library)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


NAMES = [mistake.name for mistake in (*IN_RECIPES, *IN_CODE)]


def test_at_least_ten_different_mistakes_are_planted() -> None:
    assert len(set(NAMES)) == len(NAMES) >= 10


@pytest.mark.parametrize("mistake", IN_RECIPES, ids=lambda mistake: mistake.name)
def test_a_mistake_in_a_recipe_is_refused_before_anything_starts(mistake: RecipeMistake, tmp_path: Path) -> None:
    recipe = ROOT / "configs" / "recipes" / f"{mistake.recipe}.yaml"
    out = tmp_path / "out"
    result = CliRunner().invoke(app, ["shrink", str(recipe), *mistake.overrides, "--out", str(out)])
    assert isinstance(result.exception, UserError), result.output
    assert result.exception.exit_code == 2 and mistake.message in str(result.exception)
    assert not out.exists()


@pytest.mark.full
@pytest.mark.parametrize("mistake", IN_CODE, ids=lambda mistake: mistake.name)
def test_a_mistake_in_a_worker_shows_in_the_shrunk_run(mistake: CodeMistake, tmp_path: Path) -> None:
    done = shrink_a_copy(mistake, tmp_path)
    assert done.returncode != 0, done.stdout
    # Either the run ended with an error, or a check of its numbers fails.
    assert "FAILS" in done.stdout or "error:" in done.stderr, done.stdout + done.stderr


@pytest.mark.full
def test_without_a_mistake_nothing_shows(tmp_path: Path) -> None:
    planted = IN_CODE[0]
    sound = replace(planted, name="none", fault=replace(planted.fault, new=planted.fault.old))
    done = shrink_a_copy(sound, tmp_path)
    assert done.returncode == 0 and "FAILS" not in done.stdout, done.stdout + done.stderr
