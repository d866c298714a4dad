"""What the live tracer costs: interleaved pairs of training steps of one worker, with and without it, in CPU time.

    python benchmarks/tracer.py [--quick] --json FILE [--without-tracing]

A worker trains on 4,096 tokens with hidden size 512, both engines; a real hub takes what it shows. Figures, medians
over pairs, of the engine that pays more: `stats_pct` (`stats` of all layers: residual stream, attention and MLP with
their gradients, log-probabilities and loss), `tiles_pct` (besides them eight tiles of each token of the first row after
each layer), `all_sites_pct` (`stats` of every site there is), `off_pct` (a worker that could be traced, and is not,
against one that could not), `frames_per_s` and `bytes_per_s` (of `stats`, while the step runs). Exit code 1 when a
bound is missed. `--without-tracing` plants the fault that the figures must find: nothing is watched.
"""

from __future__ import annotations

import argparse
import gc
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

# A script's own folder is on the path, its package is not.
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from rich.console import Console
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.common import Hold, check_figures, environment, figures_table, load_average, write_json
from benchmarks.router_replay_models import ENGINES, Engine, policy_of
from nemo_rl.algorithms.losses.nll import NLLLoss
from nemo_rl.data.generated import problems
from nemo_rl.data.tokenizer import build_tokenizer
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.policy.observer import NO_HOOK_OBSERVERS
from nemo_rl.models.policy.tracing import SiteTracing, TraceSpec
from nemo_rl.models.policy.workers.compose import compose_worker
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker
from nemo_rl.tracer.link import HubAddress
from nemo_rl.tracer.process import HubProcess, HubSpec

__all__ = ["HOLDS", "WATCHES", "Case", "main"]

logger = logging.getLogger(__name__)

HOLDS: Mapping[str, Hold] = {
    "stats_pct": Hold(most=5.0),
    "off_pct": Hold(most=1.0),
    "frames_per_s": Hold(least=1.0),
    "bytes_per_s": Hold(least=1.0),
}
LAYERS = "layer.out, attn.out, mlp.out, logprob, loss"
SITES = "embed, layer.*, attn.*, mlp.*, logits, logprob, token_loss, loss"
WATCHES: Mapping[str, tuple[str, ...]] = {
    "stats": (f"{LAYERS} | stats",),
    "tiles": (f"{LAYERS} | stats", "layer.out | tiles(8, rms)"),
    "all_sites": (f"{SITES} | stats",),
}
WARMUP_PAIRS = 2
SEED, TIMEOUT_S = 0, 600.0
KEYS = ("row 0",)
"""Rows whose tokens are shown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What one training step computes."""

    hidden: int = 512
    num_layers: int = 2
    num_rows: int = 4
    row_tokens: int = 1024
    num_pairs: int = 30


QUICK = Case(hidden=64, num_layers=2, num_rows=2, row_tokens=32, num_pairs=2)
"""A smoke test: figures mean nothing."""


@dataclass(kw_only=True, slots=True)
class Samples:
    """CPU seconds of each step of the pairs of one engine and question."""

    engine: Engine
    what: str
    without_s: list[float] = field(default_factory=list)
    with_s: list[float] = field(default_factory=list)
    frames_per_s: float = 0.0
    bytes_per_s: float = 0.0

    @property
    def percent(self) -> float:
        """Median of what the pairs say."""
        ratios = [traced / plain for plain, traced in zip(self.without_s, self.with_s, strict=True)]
        return 100.0 * (statistics.median(ratios) - 1.0)

    def as_record(self) -> dict[str, object]:
        return {
            "engine": self.engine,
            "what": self.what,
            "without_s": self.without_s,
            "with_s": self.with_s,
            "percent": self.percent,
            "frames_per_s": self.frames_per_s,
            "bytes_per_s": self.bytes_per_s,
        }


def measure(case: Case, folder: Path, *, is_off: bool) -> list[Samples]:
    """All engines and questions."""
    model = write_dense_model(folder / "model", case)
    found = []
    for engine in ENGINES:
        place = HubSpec(folder=folder / f"hub_{engine}", run="benchmark", start_timeout_s=TIMEOUT_S)
        with HubProcess(place) as hub:
            address = HubAddress(host=hub.spec.host, port=hub.port, token=hub.tokens.job)
            spec = TraceSpec(address=address, run="benchmark", memory_bytes=64 << 20)
            found += measure_engine(model, engine, case, spec, is_off=is_off)
    return found


def measure_engine(model: Path, engine: Engine, case: Case, spec: TraceSpec, *, is_off: bool) -> list[Samples]:
    """Pairs of steps of one worker."""
    batch = batch_of(case)
    with worker_of(model, engine, case, trace=spec) as worker:
        found = [pairs(Samples(engine=engine, what="off"), case, batch, worker, watches=None)]
        for what, watches in WATCHES.items():
            watched = () if is_off else watches
            found.append(pairs(Samples(engine=engine, what=what), case, batch, worker, watches=watched))
    return found


def pairs(
    samples: Samples,
    case: Case,
    batch: BatchedDataDict,
    worker: PolicyWorker,
    *,
    watches: Sequence[str] | None,
) -> Samples:
    """Steps in turn, the order of which changes from pair to pair.

    Args:
        watches: of the step with the tracer; None: nothing, compared with a worker that was made without a tracer.
    """
    tracing, with_tracer = worker.tracing, worker._hook_observers
    assert isinstance(tracing, SiteTracing), "a worker that can be traced"
    link = tracing.link
    traced_s, sent, sent_bytes = 0.0, 0, 0
    for pair in range(-WARMUP_PAIRS, case.num_pairs):
        if pair == 0:
            traced_s, sent, sent_bytes = 0.0, link.sent, link.sent_bytes
        for is_traced in (False, True) if pair % 2 else (True, False):
            if is_traced and watches is not None:
                worker.begin_tracing(pair + WARMUP_PAIRS + 1, watches, KEYS)
            # Megatron-core has room for one model in a process: this is what a worker without a tracer holds.
            worker._hook_observers = with_tracer if is_traced or watches is not None else NO_HOOK_OBSERVERS
            began = time.perf_counter()
            seconds = step_s(worker, batch)
            wall_s = time.perf_counter() - began
            worker.end_tracing()
            if pair >= 0:
                (samples.with_s if is_traced else samples.without_s).append(seconds)
                traced_s += wall_s if is_traced else 0.0
    worker._hook_observers = with_tracer
    samples.frames_per_s = (link.sent - sent) / traced_s
    samples.bytes_per_s = (link.sent_bytes - sent_bytes) / traced_s
    logger.info("%s, %s: %+.2f %% over %d pairs", samples.engine, samples.what, samples.percent, case.num_pairs)
    return samples


def step_s(worker: PolicyWorker, batch: BatchedDataDict) -> float:
    """CPU seconds of all threads of this process in one training call."""
    gc.collect()
    started = time.process_time()
    worker.train(batch, NLLLoss())
    return time.process_time() - started


@contextmanager
def worker_of(model: Path, engine: Engine, case: Case, *, trace: TraceSpec | None) -> Iterator[PolicyWorker]:
    config = policy_of(model, engine, is_replayed=False, max_length=case.row_tokens)
    config = config.model_copy(
        update={"train_global_batch_size": case.num_rows, "train_micro_batch_size": case.num_rows}
    )
    worker = compose_worker(
        config, rank=0, world_size=1, num_steps=1000, collective_timeout_s=TIMEOUT_S, seed=SEED, trace=trace
    )
    try:
        yield worker
    finally:
        worker.shutdown()


def batch_of(case: Case) -> BatchedDataDict:
    """Full rows of random tokens."""
    shape = (case.num_rows, case.row_tokens)
    ids = torch.randint(0, 500, shape, generator=torch.Generator().manual_seed(SEED), dtype=torch.int32)
    mask = torch.ones(shape, dtype=torch.bool)
    mask[:, 0] = False
    columns: dict[str, torch.Tensor | list[object]] = {
        "input_ids": ids,
        "input_lengths": torch.full(shape[:1], case.row_tokens, dtype=torch.int32),
        "token_mask": mask,
        "sample_mask": torch.ones(case.num_rows),
        "keys": [f"row {number}" for number in range(case.num_rows)],
    }
    return BatchedDataDict(columns)


def write_dense_model(folder: Path, case: Case) -> Path:
    """A random model without experts."""
    tokenizer = build_tokenizer(f"user\n{p.prompt}\nassistant\n{p.answer}" for p in problems(200, seed=1))
    torch.manual_seed(SEED)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=case.hidden,
        num_hidden_layers=case.num_layers,
        num_attention_heads=max(2, case.hidden // 64),
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=3 * case.hidden,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    return folder


def figures_of(found: Sequence[Samples]) -> dict[str, float]:
    """Of the engine that pays more."""
    figures = {f"{what}_pct": max(each.percent for each in found if each.what == what) for what in (*WATCHES, "off")}
    stats = [each for each in found if each.what == "stats"]
    figures["frames_per_s"] = min(each.frames_per_s for each in stats)
    figures["bytes_per_s"] = min(each.bytes_per_s for each in stats)
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="file for raw samples and figures")
    parser.add_argument("--quick", action="store_true", help="a tiny model and two pairs; figures mean nothing")
    parser.add_argument("--without-tracing", action="store_true", help="plant a fault: nothing is watched")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("megatron").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    load_before = load_average()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(QUICK if given.quick else Case(), Path(folder), is_off=given.without_tracing)
    figures = figures_of(found)
    console = Console()
    console.print(figures_table(figures, HOLDS))
    problems_found = check_figures(figures, HOLDS)
    report = {
        **environment(),
        "load_before": load_before,
        "load_after": load_average(),
        "figures": figures,
        "problems": problems_found,
        "samples": [each.as_record() for each in found],
    }
    console.print(f"written to {write_json(given.json, report)}")
    for line in problems_found:
        console.print(line)
    return 1 if problems_found else 0


if __name__ == "__main__":
    sys.exit(main())
