"""What a refit takes and moves, whole and as deltas, for `generation.py`.

Sizes: one worker trains, one bfloat16 engine follows, and the very `sync` of a run is timed. Learning rates: whole runs
of the sort demo, whose metrics say what was sent after each step.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from benchmarks.common import ROOT
from benchmarks.tracer import Case, batch_of, write_dense_model
from nemo_rl.algorithms.losses.nll import NLLLoss
from nemo_rl.algorithms.setup import open_trainer
from nemo_rl.config.backends import OptimizerConfig
from nemo_rl.config.generation import GenerationConfig
from nemo_rl.config.load import load_config
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.distributed.collectives import RankSpec
from nemo_rl.distributed.packing import plan_padded
from nemo_rl.distributed.worker_groups import LocalWorkerGroup, WorkerFleet
from nemo_rl.models.generation.interfaces import EngineSpec
from nemo_rl.models.generation.torch_engine.worker import build_engine_worker
from nemo_rl.models.policy.tq_policy import Policy
from nemo_rl.models.policy.workers.launch import WorkerSpec, build_policy_worker
from nemo_rl.models.weight_sync.base import RefitParties, WeightSync
from nemo_rl.models.weight_sync.factory import build_weight_sync
from nemo_rl.utils.trackers import read_metrics

__all__ = ["RATES", "RefitCase", "RefitSample", "measure_rates", "measure_sizes"]

logger = logging.getLogger(__name__)

RATES = ("1e-6", "1e-5", "1e-4")
RECIPE = ROOT / "configs" / "grpo_sort_cpu.yaml"
TIMEOUT_S = 600.0
FULL_EVERY = 1000
SMALL_RUN = ("grpo.num_prompts_per_step=16", "policy.train_global_batch_size=64")
DEMO = (
    "grpo.val_period=0",
    "grpo.val_at_start=false",
    "grpo.val_at_end=false",
    "data.validation=null",
    "policy.scheduler.name=constant",
    "policy.scheduler.min_factor=0.1",
    "policy.scheduler.warmup_steps=0",
    "policy.generation.precision=bfloat16",
    "policy.generation.num_replicas=1",
    "cluster.cpu_workers_per_node=1",
    "data_plane.impl=ray",
    "checkpointing.enabled=false",
    "logger.tensorboard_enabled=false",
    "logger.reward_curve=false",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RefitCase:
    """How much."""

    hidden: tuple[int, ...] = (128, 512)
    num_layers: int = 4
    refits: int = 5
    """Of each size, after the first one."""
    rates: tuple[str, ...] = RATES
    steps: int = 4
    """Of each run."""
    is_small: bool = False
    """A smoke test: figures mean nothing."""


QUICK = RefitCase(hidden=(64,), num_layers=1, refits=2, rates=RATES[:1], steps=2, is_small=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class RefitSample:
    """One refit after an optimizer step."""

    what: str
    """`size` or `rate`."""
    parameters: int
    transport: str
    is_delta: bool
    rate: str
    ms: float
    bytes_dense: int
    bytes_sent: int

    @property
    def ratio(self) -> float:
        return self.bytes_sent / self.bytes_dense

    def as_record(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__} | {"ratio": self.ratio}


def measure_sizes(folder: Path, case: RefitCase) -> list[RefitSample]:
    """Each size and transport, whole and as deltas; the first refit of each, which is whole, is left out."""
    found: list[RefitSample] = []
    for hidden in case.hidden:
        shape = Case(hidden=hidden, num_layers=case.num_layers, num_rows=2, row_tokens=64)
        model = write_dense_model(folder / f"hidden_{hidden}", shape)
        for transport in ("payload", "broadcast"):
            for is_delta in (False, True):
                with _parties(model, shape, is_delta=is_delta) as (parties, policy):
                    sync = build_weight_sync(transport, parties, address="127.0.0.1")  # type: ignore[arg-type]
                    found += _refits(sync, policy, shape, case, transport=transport, is_delta=is_delta)
        logger.info("refits of hidden size %d are done", hidden)
    return found


def _refits(
    sync: WeightSync, policy: Policy, shape: Case, case: RefitCase, *, transport: str, is_delta: bool
) -> Iterator[RefitSample]:
    batch = batch_of(shape)
    plan = plan_padded([shape.row_tokens] * shape.num_rows, capacity=shape.row_tokens * shape.num_rows, dp_world=1)
    for version in range(case.refits + 1):
        sync.sync(version)
        report = sync.report
        assert report is not None
        if version:
            yield RefitSample(
                what="size",
                # Two bytes each in bfloat16.
                parameters=report.bytes_dense // 2,
                transport=transport,
                is_delta=is_delta,
                rate=RATES[0],
                ms=report.ms,
                bytes_dense=report.bytes_dense,
                bytes_sent=report.bytes_sent,
            )
        policy.prepare_for_training()
        policy.train(batch, NLLLoss(), plan=plan)


@contextmanager
def _parties(model: Path, shape: Case, *, is_delta: bool) -> Iterator[tuple[RefitParties, Policy]]:
    config = PolicyConfig(
        model_name=str(model),
        precision="float32",
        max_total_sequence_length=shape.row_tokens,
        train_global_batch_size=shape.num_rows,
        optimizer=OptimizerConfig(kwargs={"lr": float(RATES[0]), "weight_decay": 0.01}),
        generation=GenerationConfig(precision="bfloat16", max_new_tokens=8),
    )
    spec = WorkerSpec(policy=config, rank=RankSpec(rank=0, world_size=1), num_steps=99, keep_reference=False, seed=0)
    group = LocalWorkerGroup(lambda: build_policy_worker(spec))
    engines = WorkerFleet([LocalWorkerGroup(lambda: build_engine_worker(EngineSpec(policy=config)))])
    parties = RefitParties(
        policy=group, engines=engines, timeout_s=TIMEOUT_S, delta_full_every=FULL_EVERY if is_delta else None
    )
    try:
        yield parties, Policy(group, timeout_s=TIMEOUT_S)
    finally:
        engines.shutdown()
        group.shutdown()


def measure_rates(model: Path, folder: Path, case: RefitCase, *, is_delta: bool) -> list[RefitSample]:
    """Runs of the demo, one for each learning rate."""
    return [sample for rate in case.rates for sample in _run(model, folder / rate, case, rate=rate, is_delta=is_delta)]


def _run(model: Path, folder: Path, case: RefitCase, *, rate: str, is_delta: bool) -> Sequence[RefitSample]:
    overrides = (
        *DEMO,
        *(SMALL_RUN if case.is_small else ()),
        f"policy.model_name={model}",
        f"policy.optimizer.kwargs.lr={rate}",
        f"policy.generation.refit_delta.enabled={str(is_delta).lower()}",
        f"grpo.max_num_steps={case.steps}",
        f"logger.log_dir={folder}",
    )
    config = load_config(RECIPE, list(overrides))
    with open_trainer(config, console=Console(file=io.StringIO())) as trainer:
        trainer.fit()
    logger.info("the run at learning rate %s is done", rate)
    return [
        RefitSample(
            what="rate",
            parameters=int(row["refit/bytes_dense"]) // 2,
            transport=config.refit_transport,
            is_delta=is_delta,
            rate=rate,
            ms=row["refit/ms"],
            bytes_dense=int(row["refit/bytes_dense"]),
            bytes_sent=int(row["refit/bytes_sent"]),
        )
        for row in read_metrics(folder / "metrics.jsonl")
        if "refit/ms" in row
    ]
