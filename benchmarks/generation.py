"""How fast rollouts are sampled, and what a refit takes: both engines beside Hugging Face's `generate`.

    python benchmarks/generation.py [--quick] --json FILE [--model DIR] [--without-delta]

Speed: 128 rows, 32 decoded together, equal lengths and log-normal ones whose longest is 30 times the median, with a
prompt for each row or one for eight. Refit: models of several sizes, whole and as deltas; and runs of the demo at three
learning rates. Receipts: what they cost a step, and the faults that they find. Figures are medians:
`vllm_vs_hf_unequal` and `embedded_vs_hf_unequal` (tokens per CPU second over those of `generate`, which counts prompts
of every row), `continuous_vs_request_mode_unequal` and so on (the embedded engine's two modes, pair by pair),
`delta_bytes_ratio_1e6` and so on (of the dense bytes), besides tokens per second and milliseconds of everything. Exit
code 1 when a bound is missed. `--without-delta` plants the fault that a figure must find: runs send all weights.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

# A script's own folder is on the path, its package is not; Ray hands the path on to the workers.
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from rich.console import Console

from benchmarks.common import ROOT, Hold, check_figures, environment, figures_table, load_average, write_json
from benchmarks.generation_receipt import ReceiptCase, receipt_figures, receipt_findings, receipt_samples
from benchmarks.generation_refit import QUICK, RefitCase, RefitSample, measure_rates, measure_sizes
from benchmarks.generation_speed import (
    ENGINES,
    MODES,
    SpeedCase,
    SpeedSample,
    measure_modes,
    measure_speed,
    small,
)
from benchmarks.tiny_model import write_random_model
from benchmarks.tracer import Case, write_dense_model

__all__ = ["HOLDS", "figures_of", "main"]

STARTER = ROOT / "checkpoints" / "starter_sort"
HOLDS: Mapping[str, Hold] = {
    "vllm_vs_hf_unequal": Hold(least=1.0),
    "embedded_vs_hf_unequal": Hold(least=1.0),
    # Long rows that are left over decide: more is not to be had where most of a turn is overhead.
    "continuous_vs_request_mode_unequal": Hold(least=0.9),
    "delta_bytes_ratio_1e6": Hold(most=0.10),
    "receipt_pct_of_step": Hold(most=2.0),
    "faults_caught": Hold(least=12),
    "false_alarms": Hold(most=0),
}
SPEED_MODEL = Case(hidden=128, num_layers=4)
PEER = "hf_generate"
QUICK_RECEIPT = ReceiptCase(pairs=1, steps=2, is_small=True)


def figures_of(speeds: Sequence[SpeedSample], refits: Sequence[RefitSample]) -> dict[str, float]:
    """Medians of the samples."""
    figures: dict[str, float] = {}
    for engine in ENGINES:
        for workload in dict.fromkeys(each.workload for each in speeds):
            chosen = [each for each in speeds if (each.engine, each.workload) == (engine, workload)]
            if chosen:
                named = f"{engine}_{workload}"
                figures[f"{named}_tokens_per_s"] = statistics.median(each.tokens / each.wall_s for each in chosen)
                figures[f"{named}_tokens_per_cpu_s"] = statistics.median(each.tokens / each.cpu_s for each in chosen)
    slow, fast = MODES
    for workload in dict.fromkeys(each.workload for each in speeds if each.engine == fast):
        pairs = zip(*(_rates(speeds, mode, workload) for mode in (fast, slow)), strict=True)
        figures[f"{fast}_vs_{slow}_{workload}"] = statistics.median(ours / theirs for ours, theirs in pairs)
    peer = figures.get(f"{PEER}_unequal_tokens_per_cpu_s")
    for engine in ("vllm", "embedded"):
        own = figures.get(f"{engine}_unequal_tokens_per_cpu_s")
        if own is not None and peer is not None:
            figures[f"{engine}_vs_hf_unequal"] = own / peer
    for rate in dict.fromkeys(each.rate for each in refits if each.what == "rate"):
        chosen_refits = [each for each in refits if each.what == "rate" and each.rate == rate]
        figures[f"delta_bytes_ratio_{rate.replace('-', '')}"] = statistics.median(each.ratio for each in chosen_refits)
    sizes = [each for each in refits if each.what == "size"]
    for parameters, transport in dict.fromkeys((each.parameters, each.transport) for each in sizes):
        for is_delta in (False, True):
            same = [each for each in sizes if (each.parameters, each.transport) == (parameters, transport)]
            named = f"refit_{parameters / 1e6:.1f}M_{transport}_{'delta' if is_delta else 'dense'}"
            figures[f"{named}_ms"] = statistics.median(each.ms for each in same if each.is_delta is is_delta)
            figures[f"{named}_mb"] = (
                statistics.median(each.bytes_sent for each in same if each.is_delta is is_delta) / 1e6
            )
    return figures


def _rates(speeds: Sequence[SpeedSample], engine: str, workload: str) -> list[float]:
    """Tokens per CPU second of each request."""
    return [each.tokens / each.cpu_s for each in speeds if (each.engine, each.workload) == (engine, workload)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="file for raw samples and figures")
    parser.add_argument("--model", type=Path, help="trained model of the runs; default the starter, else a random one")
    parser.add_argument("--quick", action="store_true", help="a few tokens and steps; figures mean nothing")
    parser.add_argument("--without-delta", action="store_true", help="plant a fault: runs send all weights")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES), help="whose speed is measured")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.ERROR, format="%(message)s")
    logging.getLogger("benchmarks").setLevel(logging.INFO)
    torch.set_num_threads(1)
    speed_case, refit_case = (small(SpeedCase()), QUICK) if given.quick else (SpeedCase(), RefitCase())
    load_before = load_average()
    with tempfile.TemporaryDirectory(prefix="generation-") as temporary:
        folder = Path(temporary)
        model = given.model or (
            STARTER if STARTER.is_dir() and not given.quick else write_random_model(folder / "tiny")
        )
        speeds = measure_speed(write_dense_model(folder / "dense", SPEED_MODEL), speed_case, engines=given.engines)
        if "embedded" in given.engines:
            speeds += measure_modes(folder / "dense", speed_case)
        refits = measure_sizes(folder, refit_case)
        refits += measure_rates(model, folder / "runs", refit_case, is_delta=not given.without_delta)
        receipts = receipt_samples(model, folder / "receipts", QUICK_RECEIPT if given.quick else ReceiptCase())
    figures = figures_of(speeds, refits) | receipt_figures(receipts)
    if not given.quick:
        figures |= receipt_findings()
    console = Console()
    console.print(figures_table(figures, HOLDS))
    missed = check_figures(figures, HOLDS)
    report = {
        **environment(),
        "load_before": load_before,
        "load_after": load_average(),
        "figures": figures,
        "problems": missed,
        "samples": [
            *(each.as_record() for each in speeds),
            *(each.as_record() for each in refits),
            *(each.as_record() for each in receipts),
        ],
    }
    console.print(f"written to {write_json(given.json, report)}")
    for line in missed:
        console.print(line)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
