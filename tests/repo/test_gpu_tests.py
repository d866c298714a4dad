"""GPU tests run on a machine that has no Ray, TransferQueue or vLLM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENGINES = ("ray", "transfer_queue", "mooncake", "vllm")


def test_collecting_the_gpu_tests_needs_no_engine() -> None:
    script = (
        f"import sys; sys.modules.update(dict.fromkeys({ENGINES!r})); import pytest; "
        "sys.exit(pytest.main(['tests/gpu', '--collect-only', '-q', '-p', 'no:cacheprovider']))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    for module in (ROOT / "tests" / "gpu").glob("test_*.py"):
        assert module.name in done.stdout
