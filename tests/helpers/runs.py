"""Small GRPO recipes for tests, on a tiny random model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import yaml

from nemo_rl.config.load import load_config
from nemo_rl.config.schema import MasterConfig
from nemo_rl.utils.trackers import read_metrics

ROOT = Path(__file__).parents[2]
LOCAL = {"cluster.launcher": "local", "cluster.cpu_workers_per_node": "1", "data_plane.impl": "noop"}
"""Everything in one process."""
SMALL = {
    "grpo.num_prompts_per_step": "8",
    "grpo.num_generations_per_prompt": "4",
    "grpo.max_num_steps": "2",
    "grpo.val_at_start": "false",
    "grpo.val_at_end": "false",
    "grpo.val_period": "0",
    "data.validation": "null",
    "data.train.size": "64",
    "policy.train_global_batch_size": "16",
    "policy.generation.num_replicas": "1",
    "env.name": "custom",
    "env.reward_function": "tests.helpers.rewards:odd_share",
    "checkpointing.enabled": "false",
    "logger.tensorboard_enabled": "false",
    "logger.reward_curve": "false",
}
"""Turns a shipped recipe of the sort demo into two steps of seconds."""
OWN_TIME = (
    "timing/",
    "memory/",
    "data_plane/seconds",
    "data_plane/process_seconds",
    "data_plane/share_of_step",
    "/ms_",
    "age_s",
    "_ms",
    "_per_s",
    "rollout/turn_",
    "rollout/conversation_s",
    "async/trainer_idle_share",
    "async/engine_idle_share",
    "async/gain_of_staleness_s",
    "refit/ms",
    "refit/receipt_",
)
"""Metrics that differ from run to run."""


def write_recipe(folder: Path, model: Path, **changes: object) -> Path:
    """Write a recipe of 3 steps with 4 prompts x 4 samples; `changes` are sections that are merged over it."""
    sections: dict[str, dict[str, object]] = {
        "grpo": {
            "num_prompts_per_step": 4,
            "num_generations_per_prompt": 4,
            "max_num_steps": 3,
            "val_period": 0,
            "val_at_start": False,
            "val_at_end": False,
            "seed": 5,
        },
        "loss_fn": {"reference_policy_kl_penalty": 0.01},
        "policy": {
            "model_name": str(model),
            "precision": "float32",
            "train_global_batch_size": 8,
            "max_total_sequence_length": 32,
            "dynamic_batching": {"enabled": True, "train_mb_tokens": 128, "logprob_mb_tokens": 256},
            "optimizer": {"kwargs": {"lr": 1.0e-3, "weight_decay": 0}},
            "generation": {"max_new_tokens": 6},
        },
        "data": {
            "train": {
                "dataset_name": "sort_digits",
                "size": 64,
                "seed": 1,
                "options": {"min_digits": 3, "max_digits": 5},
            },
            "max_input_seq_length": 24,
        },
        "env": {"name": "custom", "reward_function": "tests.helpers.rewards:odd_share"},
        "data_plane": {},
        "cluster": {"cpu_workers_per_node": 2},
        "checkpointing": {"enabled": False},
        "logger": {"log_dir": str(folder / "logs"), "tensorboard_enabled": False, "reward_curve": False},
    }
    for name, section in changes.items():
        assert isinstance(section, Mapping)
        sections[name] = {**sections.get(name, {}), **section}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(sections))
    return path


def load_recipe(path: Path, overrides: Mapping[str, str] | None = None) -> MasterConfig:
    return load_config(path, [f"{name}={value}" for name, value in (overrides or {}).items()])


def logged_steps(log_dir: Path) -> list[dict[str, float]]:
    """Return the metrics of each step, without those that measure time."""
    rows = read_metrics(log_dir / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not any(word in k for word in OWN_TIME)} for row in rows]


def start_cli(recipe: Path, *overrides: str, log: IO[str] | int = subprocess.PIPE) -> subprocess.Popen[str]:
    """Start the command line as a user does, in its own process group; its output goes to `log`."""
    return subprocess.Popen(
        [sys.executable, "examples/run_grpo.py", "--config", str(recipe), *overrides],
        cwd=ROOT,
        # Parts of the tests' own are found from here, and packages that a test has made.
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        },
        stdout=log,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=_hear_signals,  # noqa: PLW1509
    )


def _hear_signals() -> None:
    """What runs the tests in the background may ignore Ctrl-C and hang-ups, which its children inherit."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def run_cli(recipe: Path, *overrides: str, timeout_s: float = 180.0) -> tuple[int, str]:
    """Run the command line and return its exit code and output."""
    process = start_cli(recipe, *overrides)
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        raise AssertionError(f"no end after {timeout_s:.0f} s:\n{output[-4000:]}") from None
    return process.returncode, output


def rollouts_of(log_dir: Path, step: int) -> list[dict[str, object]]:
    """Return the readable rollouts of a step."""
    return _lines_of(log_dir / "rollouts" / f"step_{step}.jsonl")


def validated_rollouts_of(log_dir: Path, step: int) -> list[dict[str, object]]:
    """Return the readable rollouts of the validation after a step."""
    return _lines_of(log_dir / "rollouts" / f"val_step_{step}.jsonl")


def _lines_of(path: Path) -> list[dict[str, object]]:
    # A text may hold other ends of lines than that of the file.
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
