"""What the receipt of a refit costs a step, and what it finds, for `generation.py`.

Cost: runs of the sort demo with receipts and without, in turns, whose metrics say how long refits and steps took. What
it finds: the tests that plant the faults and those of refits in which there is none, counted by their outcome.
"""

from __future__ import annotations

import io
import logging
import os
import re
import statistics
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from benchmarks.common import ROOT
from nemo_rl.algorithms.setup import open_trainer
from nemo_rl.config.load import load_config
from nemo_rl.models.weight_sync.receipt import FIRST_TURNS
from nemo_rl.utils.trackers import read_metrics

__all__ = ["ReceiptCase", "ReceiptSample", "receipt_figures", "receipt_findings", "receipt_samples"]

logger = logging.getLogger(__name__)

RECIPE = ROOT / "configs" / "grpo_sort_cpu.yaml"
OVERRIDES = (
    "grpo.val_period=0",
    "grpo.val_at_start=false",
    "grpo.val_at_end=false",
    "data.validation=null",
    "checkpointing.enabled=false",
    "logger.tensorboard_enabled=false",
    "logger.reward_curve=false",
)
SMALL = (
    "grpo.num_prompts_per_step=16",
    "policy.train_global_batch_size=64",
    "policy.generation.num_replicas=1",
    "cluster.launcher=local",
    "cluster.cpu_workers_per_node=1",
    "data_plane.impl=noop",
)
"""Of a smoke test: in this process."""
FAULTS_FILE = "tests/unit/models/test_refit_receipt.py"
ALARMS_FILE = "tests/unit/models/test_refit_receipt_long.py"
TESTS_TIMEOUT_S = 3600.0
PLANTED = re.compile(r"test_a_fault_in_(?:the_embedded_engine_is_named|vllm_is_found)\[(.+)\]")
REPLICAS = ("test_one_replica_that_was_not_updated", "test_a_vllm_replica_that_was_not_updated")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceiptCase:
    """How much."""

    pairs: int = 3
    steps: int = 24
    """Of each run; those at its start, which have receipts whatever they cost, are left out."""
    is_small: bool = False
    """A smoke test: figures mean nothing, and no fault is planted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceiptSample:
    """One step of a run."""

    has_receipt: bool
    step_s: float
    refit_s: float
    receipt_ms: float
    is_scored: bool
    """Whether rows were scored."""

    def as_record(self) -> dict[str, object]:
        return {"what": "receipt", **asdict(self)}


def receipt_samples(model: Path, folder: Path, case: ReceiptCase) -> list[ReceiptSample]:
    """Steps of runs with receipts and without, in turns."""
    found: list[ReceiptSample] = []
    for pair in range(case.pairs):
        for has_receipt in (True, False) if pair % 2 else (False, True):
            found += _run(model, folder / f"{pair}_{has_receipt}", case, has_receipt=has_receipt)
    return found


def receipt_figures(samples: Sequence[ReceiptSample]) -> dict[str, float]:
    """`receipt_pct_of_step`: how much longer refits are, of a step and its refit without receipts.

    Not every receipt scores rows: `receipt_ms` and `receipt_scored_ms` are medians of all and of those that do, and
    the refits of a run are taken by their mean, of whose values a tenth at either end is left out.
    """
    with_it, without = ([each for each in samples if each.has_receipt == on] for on in (True, False))
    longer = _mean([each.refit_s for each in with_it]) - _mean([each.refit_s for each in without])
    whole = statistics.median(each.step_s + each.refit_s for each in without)
    return {
        "receipt_pct_of_step": 100 * longer / whole,
        "receipt_ms": statistics.median(each.receipt_ms for each in with_it),
        "receipt_scored_ms": statistics.median(each.receipt_ms for each in with_it if each.is_scored),
        "receipt_scored_share": sum(each.is_scored for each in with_it) / len(with_it),
    }


def receipt_findings() -> dict[str, float]:
    """`faults_caught`: kinds of planted faults that every engine's receipt found; `false_alarms`: series of 200 refits
    without a fault in which one was reported."""
    faults: dict[str, bool] = {}
    for name, is_passed in _outcomes(FAULTS_FILE):
        planted = PLANTED.search(name)
        kind = planted[1] if planted else "replica" if name.startswith(REPLICAS) else None
        if kind is not None:
            faults[kind] = faults.get(kind, True) and is_passed
    alarms = [is_passed for _, is_passed in _outcomes(ALARMS_FILE)]
    return {
        "faults_caught": float(sum(faults.values())),
        "faults_planted": float(len(faults)),
        "false_alarms": float(alarms.count(False)),
        "refits_without_fault": 200.0 * len(alarms),
    }


def _run(model: Path, folder: Path, case: ReceiptCase, *, has_receipt: bool) -> list[ReceiptSample]:
    overrides = [
        *OVERRIDES,
        *(SMALL if case.is_small else ()),
        f"policy.model_name={model}",
        f"policy.generation.receipt.enabled={str(has_receipt).lower()}",
        f"grpo.max_num_steps={case.steps}",
        f"logger.log_dir={folder}",
    ]
    with open_trainer(load_config(RECIPE, overrides), console=Console(file=io.StringIO())) as trainer:
        trainer.fit()
    first = 1 if case.is_small else FIRST_TURNS
    logger.info("a run %s receipts is done", "with" if has_receipt else "without")
    return [
        ReceiptSample(
            has_receipt=has_receipt,
            step_s=row["timing/step_s"],
            refit_s=row["timing/refit_s"],
            receipt_ms=row.get("refit/receipt_ms", 0.0),
            is_scored="refit/receipt_gap" in row,
        )
        for row in read_metrics(folder / "metrics.jsonl")
        if row["step"] > first and "timing/refit_s" in row
    ]


def _mean(values: Sequence[float]) -> float:
    """Without the tenth at either end."""
    cut = len(values) // 10
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


def _outcomes(file: str) -> list[tuple[str, bool]]:
    """Name and success of every test of a file that was not skipped."""
    with tempfile.TemporaryDirectory(prefix="receipt-") as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", file, f"--junitxml={report}", "-p", "no:cacheprovider"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        ran = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TESTS_TIMEOUT_S, check=False
        )
        if not report.is_file():
            raise RuntimeError(f"{file}: pytest wrote no report: {ran.stdout[-300:]}{ran.stderr[-300:]}")
        cases = list(ET.parse(report).getroot().iter("testcase"))
    return [
        (case.get("name") or "", case.find("failure") is None and case.find("error") is None)
        for case in cases
        if case.find("skipped") is None
    ]
