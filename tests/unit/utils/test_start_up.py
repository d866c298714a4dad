"""What a person is told while something starts, and the one key that a slow start needs."""

from __future__ import annotations

import ast
import threading
from pathlib import Path

from nemo_rl.config.schema import ClusterConfig
from nemo_rl.utils.deadlines import StartUp

ROOT = Path(__file__).parents[3] / "nemo_rl"
HOME = ROOT / "config" / "base.py"
OTHERS = {ROOT / "environments" / "scorer_pool.py", ROOT / "utils" / "trackers.py"}
"""Not of the cluster: a reward is a user's own code, a tracker goes on without the run."""


def test_a_slow_start_says_what_it_waits_for_and_a_fast_one_is_silent() -> None:
    told: list[str] = []
    second = threading.Event()

    def tell(text: str) -> None:
        told.append(text)
        if len(told) == 2:
            second.set()

    with StartUp(report=tell, every_s=0.02).waiting_for("TransferQueue"):
        assert second.wait(30)
    assert told[0].startswith("waiting for TransferQueue, ") and told[0].endswith(" s")
    told.clear()
    with StartUp(report=tell, every_s=60).waiting_for("TransferQueue"):
        pass
    assert told == []


def test_the_error_past_the_deadline_names_the_key() -> None:
    text = StartUp(timeout_s=90).too_late("TransferQueue did not start")
    assert "within 90 s" in text and "cluster.worker_start_timeout_s" in text
    assert "worker_start_timeout_s" in ClusterConfig.model_fields and StartUp().timeout_s >= 300


def test_no_other_start_has_a_constant_of_its_own() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {target.id}"
        for path in ROOT.rglob("*.py")
        if path != HOME and path not in OTHERS
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
        and ("START" in target.id or "PLACEMENT" in target.id)
        and target.id.endswith("_S")
    ]
    assert found == []
