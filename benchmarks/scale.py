"""How far the driver goes: a step of the real trainer over thousands of stand-ins for workers, in one process.

    python benchmarks/scale.py --json FILE [--quick]

`driver_step` times the stages of a few ranks; here the whole `GRPOTrainer` runs: its source, stages, plans, ledger,
refit and metrics, with policy ranks and engines that answer at once (`scale_actors`). Reported are processor seconds of
the driver by part, without those of the workers, its peak memory, the calls of a step by kind of worker and method, the
microseconds of a real Ray submit beside them, and the seconds of a fixed loop of plain Python, since machines differ.
Exit code 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from io import StringIO
from multiprocessing import get_context
from pathlib import Path
from typing import cast

# A script's own folder is on the path, its package is not.
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common import Hold, check_figures, environment, figures_table, load_average, write_json
from benchmarks.driver_step import GROUP, step_config
from benchmarks.scale_actors import Actors, Engine, PolicyRank, Rollout, rolled_rows
from benchmarks.scale_workers import WorkersSample, measure_workers, worker_rows_per_s
from benchmarks.tiny_model import write_random_model
from nemo_rl.algorithms.batches import BatchSource
from nemo_rl.algorithms.grpo_sync import GRPOTrainer, TrainerParts
from nemo_rl.algorithms.losses.policy_loss import build_loss
from nemo_rl.algorithms.observers import StepObserver, StepObservers
from nemo_rl.algorithms.sources import build_source
from nemo_rl.algorithms.stages.bodies import build_stages
from nemo_rl.algorithms.stages.columns import declare_partition, stage_columns
from nemo_rl.algorithms.stages.stage import StageTools, StepState, begin_step
from nemo_rl.config.data_plane import DataPlaneConfig
from nemo_rl.config.generation import RefitTransport
from nemo_rl.config.schema import MasterConfig
from nemo_rl.data.sampler import SampledPrompt
from nemo_rl.data_plane.client.ledger_client import LedgerClient
from nemo_rl.data_plane.column_io import write_columns
from nemo_rl.data_plane.factory import build_data_plane_client
from nemo_rl.data_plane.interfaces import DataPlaneClient
from nemo_rl.distributed.layout import ParallelLayout
from nemo_rl.experience.rollout_handle import RolloutHandle
from nemo_rl.models.policy.tq_policy import TQPolicy
from nemo_rl.models.weight_sync.base import RefitParties, WeightSync
from nemo_rl.models.weight_sync.factory import build_weight_sync
from nemo_rl.models.weight_sync.receipt import ReceiptSpec, make_probe
from nemo_rl.utils.logger import build_logger
from nemo_rl.utils.memory import frozen_startup_objects
from nemo_rl.utils.panel import Panel

__all__ = ["HOLDS", "LedgerSample", "Scale", "ScaleSample", "figures_of", "main", "measure", "measure_ledger"]

TIMEOUT_S = 600.0
REPEATS = 3
LOOP = 20_000_000
"""Rounds of the fixed loop of plain Python."""
SUBMITS = 2000
PUT_ROWS = 1024
"""Rows that a rollout worker puts at once."""
WORKER_ROWS = 2048
LEDGERS = ((1024, 8), (16_384, 128), (131_072, 1024), (262_144, 2048))
"""Rows that are alive, and leaders that read them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """A size of a run."""

    ranks: int
    engines: int
    rows: int
    mode: str = "sync"
    """`sync` or `async`: where the rows of a step come from."""
    transport: RefitTransport = "broadcast"

    @property
    def name(self) -> str:
        return f"{self.mode}_{self.ranks}"


LARGE = Scale(ranks=1024, engines=256, rows=131_072)
SCALES = (
    Scale(ranks=256, engines=64, rows=131_072),
    LARGE,
    Scale(ranks=1024, engines=256, rows=131_072, mode="async", transport="payload"),
)
QUICK = (Scale(ranks=8, engines=2, rows=256), Scale(ranks=16, engines=4, rows=256, mode="async", transport="payload"))
HOLDS: Mapping[str, Hold] = {
    "own_s_sync_1024": Hold(most=3.0),
    "own_s_async_1024": Hold(most=3.0),
    "with_calls_s_sync_1024": Hold(most=5.0),
    "with_calls_s_async_1024": Hold(most=5.0),
    "growth_256_to_1024": Hold(most=4.0),
    "refit_calls_per_engine_sync_1024": Hold(most=4.0),
    "refit_calls_per_engine_async_1024": Hold(most=4.0),
    "worker_rows_per_s": Hold(least=1000.0),
    "rows_per_s_2_workers_over_1": Hold(least=1.8),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleSample:
    """One step."""

    scale: Scale
    parts: Mapping[str, float]
    """Processor seconds of the driver by part; of an asynchronous run only their sum means anything, since workers are
    played beside the driver."""
    wall_s: float
    """Seconds that passed, without those of the workers."""
    calls: Mapping[str, int]
    """`kind.method` -> requests of the step."""
    results: Mapping[str, int]
    """`kind.method` -> results of streams."""
    sent_bytes: int
    refit_calls: Mapping[str, int]
    """Calls of the refit by kind of worker."""
    num_messages: int
    """Requests that were pickled: one of several ranks counts once."""
    ledger_calls: int
    """Requests of the driver and the rollout worker to the ledger."""

    @property
    def own_s(self) -> float:
        return sum(self.parts.values())

    def as_record(self) -> dict[str, object]:
        return {
            "scale": self.scale.name,
            "rows": self.scale.rows,
            "engines": self.scale.engines,
            "transport": self.scale.transport,
            "own_s": self.own_s,
            "wall_s": self.wall_s,
            "parts": dict(self.parts),
            "calls": dict(self.calls),
            "results": dict(self.results),
            "sent_bytes": self.sent_bytes,
            "refit_calls": dict(self.refit_calls),
            "num_messages": self.num_messages,
            "ledger_calls": self.ledger_calls,
        }


@dataclass(slots=True)
class PartClock(StepObserver):
    """Processor seconds of the driver by part of a step: the parts follow each other without a gap."""

    actors: Actors
    parts: dict[str, float] = field(default_factory=dict)
    _at: float = 0.0

    def now(self) -> float:
        return time.process_time() - self.actors.aside_s

    def begin(self, number: int) -> None:
        self.parts = {}
        self._at = self.now()

    def after_stage(self, stage: str, step: StepState) -> None:
        self.lap(stage)

    def end(self, step: StepState, *, last_checkpoint: int) -> None:
        self.lap("kept")

    def lap(self, part: str) -> None:
        """The time since the last part ended belongs to this one."""
        now = self.now()
        self.parts[part] = self.parts.get(part, 0.0) + now - self._at
        self._at = now


class _Trainer(GRPOTrainer):
    """Tells the clock where the step's own parts end."""

    clock: PartClock
    refit_calls: Mapping[str, int]

    def step(self) -> StepState:
        found = super().step()
        self.clock.lap("clear")
        return found

    def _refit(self) -> None:
        before = dict(self.clock.actors.calls)
        super()._refit()
        self.clock.lap("refit")
        after = self.clock.actors.calls
        self.refit_calls = {
            kind: sum(count - before.get(name, 0) for name, count in after.items() if name[0] == kind)
            for kind in ("policy", "engine", "rollout")
        }

    def close(self) -> None:
        """End the source and the log. Idempotent."""
        self._parts.source.close()
        self._parts.logger.close()

    def one_step(self) -> StepState:
        """Run a step with all that follows it, as `fit` does."""
        step = self.step()
        self._after_step(step)
        self._parts.source.settle(None)
        self.clock.lap("metrics")
        return step


def _open_trainer(scale: Scale, folder: Path, *, actors: Actors, client: DataPlaneClient, steps: int) -> _Trainer:
    """Return a trainer over stand-ins, whose first weights are in the engines.

    Args:
        folder: gets the log.
        steps: that it can run.
    """
    config = _config(scale, folder, steps=steps)
    engines = actors.fleet("engine", Engine, size=scale.engines)
    policy = actors.group("policy", PolicyRank, size=scale.ranks)
    weight_sync = build_weight_sync(scale.transport, _parties(config, policy, engines), address="10.0.0.1")
    num_prompts = (steps + 4) * scale.rows // GROUP

    def rollout_worker(_: int) -> Rollout:
        return Rollout(client, group_size=GROUP, num_prompts=num_prompts, held=lambda: max(0, weight_sync.version))

    rollout = RolloutHandle(
        actors.fleet("rollout", rollout_worker, size=1),
        timeout_s=TIMEOUT_S,
        report=lambda _: None,
        waits=not config.grpo.samples_ahead,
    )
    rollout.setup_data_plane(client.address)
    loss_fn = build_loss(config.loss_fn, config.grpo)
    columns = stage_columns(config, loss_fn)
    tools = StageTools(
        grpo=config.grpo,
        settings=config.policy,
        logger=config.logger,
        client=client,
        policy=TQPolicy(
            policy, address=client.address, timeout_s=TIMEOUT_S, layout=ParallelLayout(dp=scale.ranks), extras=()
        ),
        rollout=rollout,
        loss_fn=loss_fn,
    )
    panel, clock = Panel(Console(file=StringIO()), live=False), PartClock(actors)
    trainer = _Trainer(
        TrainerParts(
            config=config,
            source=_source(config, client, rollout, weight_sync, folder),
            columns=columns,
            stages=build_stages(columns, tools),
            client=client,
            policy=tools.policy,
            weight_sync=weight_sync,
            rollout=rollout,
            checkpoints=None,
            logger=build_logger(config.logger, run_config={}),
            panel=panel,
            observers=StepObservers(clock),
        )
    )
    trainer.clock = clock
    trainer.open_run()
    return trainer


def _source(
    config: MasterConfig, client: DataPlaneClient, rollout: RolloutHandle, weight_sync: WeightSync, folder: Path
) -> BatchSource:
    return build_source(
        config.grpo,
        config.data,
        config.policy,
        rollout.describe(),
        client=client,
        rollout=rollout,
        weight_sync=weight_sync,
        rows_per_conversation=1,
        follows=None,
        log_dir=folder,
        resume_step=0,
        timeout_s=TIMEOUT_S,
        note=lambda _: None,
        durable=config.data_plane.durable,
        saves=False,
    )


def _parties(config: MasterConfig, policy: object, engines: object) -> RefitParties:
    probe = make_probe(vocab_size=64, max_length=48, num_tokens=96)
    receipt = ReceiptSpec(probe=probe, every=1, tolerance=None, precision="bfloat16", has_experts=False)
    return RefitParties(
        policy=policy,  # type: ignore[arg-type]
        engines=engines,  # type: ignore[arg-type]
        timeout_s=TIMEOUT_S,
        one_by_one=config.grpo.samples_ahead,
        receipt=receipt,
    )


def _config(scale: Scale, folder: Path, *, steps: int) -> MasterConfig:
    ahead = (
        ("grpo.async.enabled=true", "loss_fn.use_importance_sampling_correction=true") if scale.mode == "async" else ()
    )
    return step_config(
        scale.rows,
        *ahead,
        "data.validation=null",
        "grpo.use_generation_logprobs_as_prev=false",
        f"grpo.max_num_steps={steps}",
        f"data.train.size={(steps + 4) * scale.rows // GROUP}",
        f"logger.log_dir={folder}",
        "checkpointing.enabled=false",
    )


def measure(scale: Scale, *, repeats: int) -> list[ScaleSample]:
    """Steps of a run of this size, after one that is left out."""
    actors, found = Actors(), list[ScaleSample]()
    client = build_data_plane_client(DataPlaneConfig(impl="noop"), run_id=f"bench-{uuid.uuid4().hex[:8]}")
    try:
        with tempfile.TemporaryDirectory(prefix="scale-") as folder:
            steps = repeats + 1
            trainer = _open_trainer(scale, Path(folder), actors=actors, client=client, steps=steps)
            try:
                with frozen_startup_objects():
                    found = [_sample(trainer, scale, client) for _ in range(steps)]
            finally:
                trainer.close()
    finally:
        client.close()
    return found[1:]


def _sample(trainer: _Trainer, scale: Scale, client: DataPlaneClient) -> ScaleSample:
    actors = trainer.clock.actors
    actors.clear()
    began, aside = time.perf_counter(), actors.aside_wall_s
    asked = _num_requests(client)
    trainer.one_step()
    return ScaleSample(
        scale=scale,
        parts=dict(trainer.clock.parts),
        wall_s=time.perf_counter() - began - (actors.aside_wall_s - aside),
        calls={".".join(name): count for name, count in sorted(actors.calls.items())},
        results={".".join(name): count for name, count in sorted(actors.results.items())},
        sent_bytes=actors.sent_bytes,
        refit_calls=trainer.refit_calls,
        num_messages=actors.num_packed,
        ledger_calls=_num_requests(client) - asked,
    )


def ledger_calls(client: DataPlaneClient) -> dict[str, tuple[int, float]]:
    """Return operation -> requests that the ledger of this process has served, and their seconds."""
    assert isinstance(client, LedgerClient), "a client with a ledger"
    reply = client._link._host.call("watch", {}, timeout_s=TIMEOUT_S)
    operations = cast("dict[str, tuple[int, float]]", reply["operations"])
    return {name: (int(count), float(seconds)) for name, (count, seconds) in operations.items()}


def _num_requests(client: DataPlaneClient) -> int:
    return sum(count for count, _ in ledger_calls(client).values())


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerSample:
    """One ledger with so many rows alive, under the calls of a step."""

    rows: int
    leaders: int
    calls: Mapping[str, int]
    """Operation -> requests of the rollout workers, the leaders and the driver."""
    ms: Mapping[str, float]
    """Operation -> milliseconds of a request."""
    calls_per_leader: float
    row_bytes: float
    """Resident bytes of ledger and store per row, of which the payload takes `payload_bytes`."""
    payload_bytes: float

    def as_record(self) -> dict[str, object]:
        return asdict(self)


def measure_ledger(rows: int, leaders: int) -> LedgerSample:
    """Put so many rows, let each leader read and write its part as in a step with a log-probability pass, and clear."""
    config = step_config(rows)
    client = build_data_plane_client(DataPlaneConfig(impl="noop"), run_id=f"bench-{uuid.uuid4().hex[:8]}")
    try:
        declare_partition(client, stage_columns(config, build_loss(config.loss_fn, config.grpo)), config.grpo)
        before = _resident_bytes()
        step = begin_step(1, [SampledPrompt(at, at) for at in range(rows // GROUP)], group_size=GROUP, version=0)
        puts = [step.keys[at : at + PUT_ROWS] for at in range(0, rows, PUT_ROWS)]
        parts = [rolled_rows(client, keys, partition_id="train", version=0, seed=at) for at, keys in enumerate(puts)]
        meta = parts[0].meta.concat(*(part.meta for part in parts[1:]))
        row_bytes = (_resident_bytes() - before) / rows
        payload_bytes = cast("int", client.stats()["live_bytes"]) / rows
        put = _num_requests(client)
        for leader in range(leaders):
            mine = meta.subset(range(leader, rows, leaders))
            client.kv_batch_get(mine.keys, "train", ["input_ids", "token_mask"])
            mine = write_columns(client, mine, {"advantages": torch.zeros(len(mine))})
            client.kv_batch_get(mine.keys, "train", ["input_ids", "token_mask", "advantages"])
        asked = _num_requests(client) - put
        client.kv_clear(list(step.keys), "train", reason="step end")
        found = ledger_calls(client)
    finally:
        client.close()
    return LedgerSample(
        rows=rows,
        leaders=leaders,
        calls={name: count for name, (count, _) in found.items()},
        ms={name: 1e3 * seconds / count for name, (count, seconds) in found.items()},
        calls_per_leader=asked / leaders,
        row_bytes=row_bytes,
        payload_bytes=payload_bytes,
    )


def _in_new_process(rows: int, leaders: int) -> LedgerSample:
    """Measure where no memory has been freed before."""
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measure_ledger, rows, leaders).result(timeout=TIMEOUT_S)


def _resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * resource.getpagesize()


def _measured_workers(folder: Path, model: Path) -> list[WorkersSample]:
    found = [measure_workers(count, folder, model) for count in (1, 2)]
    if found[0].rewards != found[1].rewards:
        raise RuntimeError(f"the number of rollout workers changes the rewards: {[each.rewards for each in found]}")
    return found


def loop_s() -> float:
    """Return the processor seconds of a fixed loop of plain Python."""
    began, total = time.process_time(), 0
    for number in range(LOOP):
        total += number & 7
    assert total > 0
    return time.process_time() - began


def submit_us() -> float:
    """Return the microseconds of one submit of a small request to a real Ray actor: the median of five hundreds."""
    import ray  # noqa: PLC0415 - only here, and a second to import

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:

        class Echo:
            def call(self, method: str, stage: str, arguments: dict[str, object]) -> str:
                return method

        actor = ray.remote(Echo).remote()
        ray.get(actor.call.remote("start", "", {}))
        found = []
        for _ in range(5):
            began = time.process_time()
            refs = [actor.call.remote("train", "train", {"number": number}) for number in range(SUBMITS)]
            found.append(1e6 * (time.process_time() - began) / SUBMITS)
            ray.get(refs)
    finally:
        ray.shutdown()
    return statistics.median(found)


def figures_of(samples: Sequence[ScaleSample], *, submit: float) -> dict[str, float]:
    """Medians of each size."""
    figures: dict[str, float] = {}
    for scale in dict.fromkeys(each.scale for each in samples):
        chosen, name = [each for each in samples if each.scale == scale], scale.name
        own = statistics.median(each.own_s for each in chosen)
        calls = statistics.median(sum(each.calls.values()) for each in chosen)
        figures |= {
            f"own_s_{name}": own,
            f"wall_s_{name}": statistics.median(each.wall_s for each in chosen),
            f"calls_{name}": calls,
            f"with_calls_s_{name}": own + calls * submit / 1e6,
            f"refit_calls_per_engine_{name}": max(each.refit_calls["engine"] for each in chosen) / scale.engines,
            f"refit_calls_per_rank_{name}": max(each.refit_calls["policy"] for each in chosen) / scale.ranks,
        }
    if "own_s_sync_256" in figures and "own_s_sync_1024" in figures:
        figures["growth_256_to_1024"] = figures["own_s_sync_1024"] / figures["own_s_sync_256"]
    return figures


def _parts_table(samples: Sequence[ScaleSample]) -> Table:
    table, scales = (
        Table(title="processor seconds of the driver, medians"),
        list(dict.fromkeys(s.scale for s in samples)),
    )
    for name in ("part", *(scale.name for scale in scales)):
        table.add_column(name)
    for part in dict.fromkeys(part for each in samples for part in each.parts):
        found = [[each.parts.get(part, 0.0) for each in samples if each.scale == scale] for scale in scales]
        table.add_row(part, *(f"{statistics.median(cells):.3f}" for cells in found))
    return table


def _calls_table(samples: Sequence[ScaleSample]) -> Table:
    table, scales = Table(title="calls of a step"), list(dict.fromkeys(s.scale for s in samples))
    last = {scale: [each for each in samples if each.scale == scale][-1] for scale in scales}
    for name in ("method", *(scale.name for scale in scales)):
        table.add_column(name)
    for method in sorted({name for each in last.values() for name in each.calls}):
        table.add_row(method, *(str(last[scale].calls.get(method, 0)) for scale in scales))
    return table


def _ledger_table(samples: Sequence[LedgerSample]) -> Table:
    table = Table(title="milliseconds of a request to the ledger")
    for name in ("", *(f"{each.rows} rows" for each in samples)):
        table.add_column(name)
    for name in sorted({name for each in samples for name in each.ms}):
        table.add_row(name, *(f"{each.ms.get(name, 0.0):.3f}" for each in samples))
    table.add_row("requests of a leader", *(f"{each.calls_per_leader:.2f}" for each in samples))
    table.add_row("bytes of a row", *(f"{each.row_bytes - each.payload_bytes:.0f}" for each in samples))
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="file for raw samples and figures")
    parser.add_argument("--quick", action="store_true", help="few rows and ranks; the bounds are not measured")
    given = parser.parse_args(arguments)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    torch.set_num_threads(1)
    load_before, loop_before = load_average(), loop_s()
    scales, repeats = (QUICK, 1) if given.quick else (SCALES, REPEATS)
    samples = [each for scale in scales for each in measure(scale, repeats=repeats)]
    ledgers = [_in_new_process(rows, leaders) for rows, leaders in (LEDGERS[:1] if given.quick else LEDGERS)]
    with tempfile.TemporaryDirectory(prefix="scale-") as folder:
        model = write_random_model(Path(folder) / "model")
        workers = [] if given.quick else _measured_workers(Path(folder), model)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        submit = submit_us()
        figures = {**figures_of(samples, submit=submit), "submit_us": submit, "peak_gib": peak, "loop_s": loop_s()}
        figures["worker_rows_per_s"] = worker_rows_per_s(WORKER_ROWS, model)
    if workers:
        figures["rows_per_s_2_workers_over_1"] = workers[1].rows_per_s / workers[0].rows_per_s
    console = Console()
    console.print(_parts_table(samples))
    console.print(_calls_table(samples))
    console.print(_ledger_table(ledgers))
    console.print(figures_table(figures, HOLDS))
    missed = check_figures(figures, HOLDS)
    report = {
        **environment(),
        "load_before": load_before,
        "load_after": load_average(),
        "loop_s": [loop_before, figures["loop_s"]],
        "figures": figures,
        "problems": missed,
        "samples": [each.as_record() for each in samples],
        "ledgers": [each.as_record() for each in ledgers],
        "workers": [each.as_record() for each in workers],
    }
    console.print(f"written to {write_json(given.json, report)}")
    for line in missed:
        console.print(line)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
