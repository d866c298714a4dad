"""Ten steps whose judge is SmolLM2, served by vLLM on this machine."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from nemo_rl.algorithms.run import run
from tests.helpers.engine_process import NO_VLLM, has_vllm
from tests.helpers.runs import LOCAL, ROOT, load_recipe, logged_steps, write_recipe

SMOLLM2 = ROOT / "checkpoints" / "smollm2"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.full,
    pytest.mark.skipif(not has_vllm(), reason=NO_VLLM),
    pytest.mark.skipif(not SMOLLM2.is_dir(), reason="checkpoints/smollm2 is not there; `make demo-llm` makes it"),
]
START_LIMIT_S, END_LIMIT_S = 600.0, 60.0


@contextmanager
def _served(log: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(SMOLLM2), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--max-model-len", "1024", "--dtype", "float32", "--enforce-eager"]
    variables = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
    variables |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1", "OMP_NUM_THREADS": "1"}
    with log.open("w") as file:
        server = subprocess.Popen(
            command, env={**os.environ, **variables}, stdout=file, stderr=file, start_new_session=True
        )
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_LIMIT_S
        while not _is_up(url):
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(1.0)
        yield f"{url}/v1"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait(END_LIMIT_S)


def _is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5.0).status_code == 200
    except httpx.HTTPError:
        return False


def test_ten_steps_have_verdicts_of_smollm2(tmp_path: Path, model: Path) -> None:
    with _served(tmp_path / "vllm.log") as url:
        judge = {"base_url": url, "model": str(SMOLLM2), "rubric": "The response should be sorted digits."}
        judge |= {"max_tokens": 32, "max_concurrent": 4, "timeout_s": 300.0, "request_timeout_s": 150.0}
        recipe = write_recipe(
            tmp_path,
            model,
            env={"name": "judge", "reward_function": None, "judges": {"order": judge}},
            grpo={"num_prompts_per_step": 2, "max_num_steps": 10},
        )
        run(load_recipe(recipe, LOCAL), console=Console(file=io.StringIO()))
    steps = [row for row in logged_steps(tmp_path / "logs") if "rollout/left_out_rows" in row]
    assert len(steps) == 10
    lines = [json.loads(line) for line in (tmp_path / "logs" / "verdicts.jsonl").read_text().splitlines()]
    failed = [line for line in lines if line["scores"] is None]
    assert sum(row["rollout/judge/order/rows_without_verdict"] for row in steps) == len(failed)
    assert len(lines) - len(failed) > len(lines) / 2, "the schema makes verdicts of a small model readable"
    assert all(json.loads(line["text"])["score"] / 10 == line["scores"][0] for line in lines if line["scores"])
