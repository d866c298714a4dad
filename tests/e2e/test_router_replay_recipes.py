"""The shipped recipes with router replay over Ray and TransferQueue: every hop had the routes of the rollout."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_rl.utils.r3_trace import reset_r3_trace
from tests.helpers.model_families import write_family
from tests.helpers.runs import ROOT, SMALL, load_recipe, logged_steps
from tests.helpers.warm_runs import WarmRuns

pytestmark = pytest.mark.slow

PACKED = {"policy.sequence_packing.train_mb_tokens": "128", "policy.sequence_packing.logprob_mb_tokens": "256"}
INSPECT = [sys.executable, "-m", "nemo_rl.cli.main", "inspect"]


@pytest.mark.parametrize("engine", [pytest.param("megatron", marks=pytest.mark.full), "dtensor"])
def test_the_recipe_replays_what_its_rollouts_recorded(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_runs: WarmRuns
) -> None:
    trace = tmp_path / "trace"
    for name, value in (("", "1"), ("_VERIFY_FORWARD", "1"), ("_DIR", str(trace)), ("_STEPS", "2")):
        monkeypatch.setenv(f"NRL_R3_TRACE{name}", value)
    reset_r3_trace()
    model = write_family(tmp_path / "model", "qwen3_moe")
    own = {"policy.model_name": str(model), "logger.log_dir": str(tmp_path / "logs")}
    config = load_recipe(ROOT / "configs" / "recipes" / f"grpo_sort_moe_r3_{engine}_cpu.yaml", SMALL | PACKED | own)
    printed = io.StringIO()
    warm_runs.run(config, shown=printed)
    assert ["route", "trace", str(trace)] in [line.split() for line in printed.getvalue().splitlines()]
    reset_r3_trace()
    flags = ["--require-forward-verify", "--require-cp-identity"]
    checked = subprocess.run([*INSPECT, str(trace), "routes", *flags], capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert len(list(trace.glob("r3_trace_*_pid*.jsonl"))) == 4, "driver, rollout worker and two policy workers"
    steps = logged_steps(config.logger.log_dir)
    for step in steps:
        assert step["data_plane/live_rows"] == 0 and step["r3/train_missing_share"] == 0
        assert step["r3/k3_r3"] < 1e-3 and "r3/k3_free" in step
    # A bfloat16 engine and float32 workers: routes differ here and there.
    assert 0 < sum(step["r3/train_live_routes_differ"] for step in steps) < 0.2
