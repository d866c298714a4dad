"""`run_probe`: one worker on given rows, in one layout, from a recipe to the numbers; `ProbeSpec` says what.

Called by the command line and by `run_ab`, which runs the same rows in two layouts, on two workers or with two sets of
weights, and says where they first differ. Ranks are processes of this machine, or those that torchrun has started.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import torch

from nemo_rl.algorithms.run_folder import TRACER
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.config.run import ClusterConfig
from nemo_rl.data.tokenizer import load_tokenizer
from nemo_rl.distributed.collectives import RankSpec
from nemo_rl.distributed.layout import ParallelLayout
from nemo_rl.distributed.local_job import quiet_libraries, run_job
from nemo_rl.distributed.worker_pass import WorkerPass
from nemo_rl.errors import UserError
from nemo_rl.models.hf.loading import load_model_config, local_folders, model_class
from nemo_rl.models.policy.fit import check_policy_fits
from nemo_rl.models.policy.recording import RecordSpec, model_identity, recorded_model
from nemo_rl.models.policy.tracing import TraceSpec
from nemo_rl.records.reader import read_folder
from nemo_rl.records.sites import Selector
from nemo_rl.tracer.process import HubSpec, open_job
from nemo_rl.tracer.watch import GENERATION, WatchPlan
from nemo_rl.utils.files import write_text
from nemo_rl_tools.runner.layout_text import LayoutText, smallest_world
from nemo_rl_tools.runner.prompts import PromptSpec, RunnerRows, make_rows
from nemo_rl_tools.runner.rank import STEP, RankResult, RankWork, engine_policy, probe_engine, probe_rank

__all__ = ["RECORDS", "ProbeResult", "ProbeSpec", "run_ab", "run_probe"]

RECORDS, RESULT = "records", "result.json"
"""Names in the folder of a probe."""
RANDOM = "random:"
PROBE = "probe"
"""Name of the run for the tracer."""
TRACE_BYTES = 256 << 20
"""Bytes of frames that may wait in each rank: a probe is short, and may show much."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeSpec:
    """One probe."""

    policy: PolicyConfig
    cluster: ClusterConfig
    seed: int
    """Seed of the recipe."""
    layout: LayoutText | None = None
    """The layout, or None for that of the recipe."""
    prompt: PromptSpec = field(default_factory=PromptSpec)
    has_backward: bool = False
    top_k: int = 0
    dump: str | None = None
    """Sites to record, under `out`."""
    watches: tuple[str, ...] = ()
    """Sites that are shown to a tracer's hub, which writes them to `tracer/` under `out`."""
    out: Path | None = None
    """Folder of the result and the records."""
    routes_to: Path | None = None
    routes_from: Path | None = None
    timeout_s: float = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeResult:
    """The result of a probe."""

    rows: RunnerRows
    texts: tuple[tuple[str, ...], ...]
    found: RankResult
    layout: str
    world_size: int
    unobserved: Mapping[str, str] = field(default_factory=dict)
    """Sites that were to be recorded and that this model does not give -> why."""
    is_first_rank: bool = True
    """True where this process speaks for the job."""

    def as_record(self) -> dict[str, object]:
        rows = [
            {
                "key": key,
                "token_ids": list(ids),
                "logprobs": [None if math.isnan(logprob) else logprob for logprob in logprobs],
                **(
                    {"top_k": [[list(pair) for pair in at] for at in self.found.top_k[number]]}
                    if self.found.top_k
                    else {}
                ),
            }
            for number, (key, ids, logprobs) in enumerate(
                zip(self.rows.keys, self.rows.ids, self.found.logprobs, strict=True)
            )
        ]
        return {
            "layout": self.layout,
            "world_size": self.world_size,
            "loss": self.found.loss,
            "grad_norm": self.found.grad_norm,
            "unobserved": dict(self.unobserved),
            "rows": rows,
        }

    def lines(self) -> list[str]:
        lines = [f"{self.layout}: {self.world_size} process{'' if self.world_size == 1 else 'es'}"]
        for number, (key, ids, logprobs) in enumerate(
            zip(self.rows.keys, self.rows.ids, self.found.logprobs, strict=True)
        ):
            scored = [logprob for logprob in logprobs[1:] if not math.isnan(logprob)]
            total = sum(scored)
            lines.append(
                f"{key}: {len(ids)} tokens, log-probabilities of {len(scored)}: mean {total / len(scored):.6f}, "
                f"lowest {min(scored):.6f}"
            )
            if self.found.top_k:
                lines += self._top_k_lines(number)
        if self.found.loss is not None and self.found.grad_norm is not None:
            lines.append(f"loss {self.found.loss:.9g}, gradient norm {self.found.grad_norm:.9g}")
        return lines + [f"not observed: {site}: {why}" for site, why in self.unobserved.items()]

    def _top_k_lines(self, number: int) -> list[str]:
        lines = []
        for position, pairs in enumerate(self.found.top_k[number]):
            likely = ", ".join(f"{token} {logit:.4f}" for token, logit in pairs)
            lines.append(f"  position {position} {self.texts[number][position]!r}: next {likely}")
        return lines


def run_probe(spec: ProbeSpec) -> ProbeResult:
    """Run the ranks and return what they computed; under torchrun, as one of its ranks.

    Raises:
        UserError: what is asked for cannot be done with this model, on these rows, or on this disk.
        ChildFailed: a rank ended with an error that nobody foresaw.
    """
    if spec.dump is not None:
        Selector.parse(spec.dump)
        if spec.out is None:
            raise UserError("a dump needs a folder for its records: give --out DIR")
    plan = WatchPlan.parse(spec.watches)
    if spec.watches and (spec.out is None or "RANK" in os.environ):
        raise UserError("the trace server of this process writes what is watched: give --out DIR, without torchrun")
    if spec.routes_from is not None and spec.routes_to is not None:
        raise UserError("routes are recorded or replayed, not both: give one file")
    with _weights(local_folders(spec.policy), spec) as (weighted, weights):
        rows, texts = _rows(weighted, spec)
        if spec.layout is not None and spec.layout.engine is not None:
            work, found, words = _engine_result(weighted, spec, rows, weights=weights)
            world_size, rank = spec.layout.tp, RankSpec(rank=0, world_size=1)
        else:
            policy, world_size = _placed(weighted, spec, rows)
            check_policy_fits(policy)
            work = _work(policy, spec, rows, world_size, weights=weights)
            words = _layout_words(work)
            rank, found = _worker_result(work, spec, plan, world_size)
    result = ProbeResult(
        rows=rows,
        texts=texts,
        found=found,
        layout=words,
        world_size=world_size,
        unobserved={} if work.record is None or rank.rank > 0 else read_folder(work.record.folder).manifest.unobserved,
        is_first_rank=rank.rank == 0,
    )
    if spec.out is not None and rank.rank == 0:
        _write(spec.out / RESULT, result)
    return result


def _worker_result(work: RankWork, spec: ProbeSpec, plan: WatchPlan, world_size: int) -> tuple[RankSpec, RankResult]:
    """Run the rows through the ranks of a worker, or through the rank that torchrun has started here."""
    if "RANK" in os.environ:
        rank = RankSpec.of_torchrun(os.environ)
        if rank.world_size != world_size:
            raise UserError(f"torchrun started {rank.world_size} ranks, the layout needs {world_size}")
        with quiet_libraries():
            return rank, probe_rank(rank, work)
    with _traced(work, spec, plan) as traced:
        [found, *_] = run_job(world_size, probe_rank, traced, timeout_s=spec.timeout_s)
    return RankSpec(rank=0, world_size=1), cast("RankResult", found)


def _engine_result(
    policy: PolicyConfig, spec: ProbeSpec, rows: RunnerRows, *, weights: str
) -> tuple[RankWork, RankResult, str]:
    """Run the rows through a generation engine; return the work, the numbers and the layout in words.

    Raises:
        UserError: something is asked for that an engine does not do.
    """
    assert spec.layout is not None and spec.layout.engine is not None, "the layout names an engine"
    asked = {"--backward": spec.has_backward, "--top-k": spec.top_k, "--watch": spec.watches}
    asked |= {"routes": spec.routes_from or spec.routes_to}
    if given := [name for name, value in asked.items() if value]:
        raise UserError(f"engine={spec.layout.engine}: an engine has no {', '.join(given)}; leave that out")
    placed = engine_policy(policy, spec.layout, longest=max(map(len, rows.ids)))
    work = _work(placed, spec, rows, 1, weights=weights)
    if work.record is not None:
        model = replace(work.record.model, engine=spec.layout.engine, precision=placed.generation.precision or "")
        work = replace(work, record=replace(work.record, phases=(GENERATION,), model=model))
    [found] = run_job(1, probe_engine, work, spec.layout.prompt, timeout_s=spec.timeout_s, is_apart=True)
    words = [spec.layout.engine, f"tp={spec.layout.tp}", str(placed.generation.precision)]
    return work, cast("RankResult", found), " ".join(words)


def _rows(policy: PolicyConfig, spec: ProbeSpec) -> tuple[RunnerRows, tuple[tuple[str, ...], ...]]:
    tokenizer = load_tokenizer(policy.tokenizer.name or policy.model_name, chat_template=policy.tokenizer.chat_template)
    settings = load_model_config(policy.model_name).get_text_config().to_dict()
    rows = make_rows(
        spec.prompt,
        tokenizer,
        vocab_size=int(settings["vocab_size"]),
        max_length=int(settings.get("max_position_embeddings") or 1 << 20),
    )
    return rows, tuple(tuple(tokenizer.decode([token]) for token in ids) for ids in rows.ids)


def _placed(policy: PolicyConfig, spec: ProbeSpec, rows: RunnerRows) -> tuple[PolicyConfig, int]:
    has_routes = spec.routes_from is not None or spec.routes_to is not None
    if spec.layout is None:
        world_size = smallest_world(policy.parallel_sizes)
        changes = {"train_global_batch_size": len(rows.ids), "logprob_batch_size": None}
        placed = policy.model_copy(update=changes)
        if has_routes and not policy.router_replay.enabled:
            raise UserError("routes: the recipe has policy.router_replay.enabled=false; set it, or give --layout")
        return placed, world_size
    placed = spec.layout.put_into(policy, num_rows=len(rows.ids), replays_routes=has_routes)
    return placed, spec.layout.world_size


def _work(policy: PolicyConfig, spec: ProbeSpec, rows: RunnerRows, world_size: int, *, weights: str) -> RankWork:
    record = None
    if spec.dump is not None and spec.out is not None:
        record = RecordSpec(
            folder=spec.out / RECORDS,
            sites=spec.dump,
            phases=(WorkerPass.PREV_LOGPROBS, *([WorkerPass.TRAIN] if spec.has_backward else [])),
            model=recorded_model(policy),
            weights=weights,
            settings={"layout": str(spec.layout), "routes_from": str(spec.routes_from), "prompt": str(spec.prompt)},
        )
    return RankWork(
        policy=policy,
        rows=rows,
        layout=ParallelLayout.of_policy(policy, world_size=world_size),
        seed=spec.seed,
        has_backward=spec.has_backward,
        top_k=spec.top_k,
        model=model_identity(policy),
        record=record,
        routes_from=spec.routes_from,
        routes_to=spec.routes_to,
        use_gpu=spec.cluster.gpus_per_node > 0,
        timeout_s=min(spec.cluster.collective_timeout_s, spec.timeout_s),
    )


@contextmanager
def _traced(work: RankWork, spec: ProbeSpec, plan: WatchPlan) -> Iterator[RankWork]:
    if not plan.watches or spec.out is None:
        yield work
        return
    policy, layout = work.policy, work.layout
    tokenizer = Path(policy.tokenizer.name or policy.model_name)
    hub = HubSpec(
        folder=spec.out / TRACER,
        run=PROBE,
        start_timeout_s=spec.timeout_s,
        watches=plan.texts,
        record=True,
        tokenizer=tokenizer,
    )
    facts = {
        "name": spec.out.name,
        "model": dict(work.model),
        "layout": layout.sizes,
        "tokenizer": str(tokenizer),
    }
    with open_job(hub, facts) as job:
        job.link.say({"type": "step", "step": STEP, "keys": list(work.rows.keys)})
        trace = TraceSpec(address=job.address, run=PROBE, memory_bytes=TRACE_BYTES)
        yield replace(work, trace=trace, watches=plan.texts)


@contextmanager
def _weights(policy: PolicyConfig, spec: ProbeSpec) -> Iterator[tuple[PolicyConfig, str]]:
    named = spec.layout.weights if spec.layout is not None else None
    if named is None:
        yield policy, policy.model_name
        return
    tokenizer = policy.tokenizer.model_copy(update={"name": policy.tokenizer.name or policy.model_name})
    policy = policy.model_copy(update={"tokenizer": tokenizer})
    if not named.startswith(RANDOM):
        folder = Path(named)
        of_checkpoint = folder / "policy" / "weights"
        chosen = of_checkpoint if of_checkpoint.is_dir() else folder
        yield policy.model_copy(update={"model_name": str(chosen)}), named
        return
    seed = named.removeprefix(RANDOM)
    if not seed.isdecimal():
        raise UserError(f"weights: expected {RANDOM}SEED, got {named!r}")
    with tempfile.TemporaryDirectory(prefix="nemo_rl_probe_") as folder_name:
        torch.manual_seed(int(seed))
        config = load_model_config(policy.model_name)
        model = model_class(config).from_config(config, trust_remote_code=False)
        model.save_pretrained(folder_name)
        yield policy.model_copy(update={"model_name": folder_name}), named


def _layout_words(work: RankWork) -> str:
    policy, sizes = work.policy, work.policy.parallel_sizes
    axes = {
        "dp": work.layout.dp,
        "tp": sizes.tensor,
        "cp": sizes.context,
        "pp": sizes.pipeline,
        "ep": sizes.expert,
    }
    words = [f"{name}={size}" for name, size in axes.items() if size > 1 or name == "tp"]
    words += ["sp"] if sizes.sequence_parallel else []
    words += ["packed"] if policy.sequence_packing.is_on else []
    return " ".join(["megatron" if policy.megatron_cfg.enabled else "dtensor", *words, policy.precision])


def _write(path: Path, result: ProbeResult) -> None:
    try:
        write_text(path, json.dumps(result.as_record()) + "\n")
    except OSError as error:
        raise UserError(f"{path}: the result cannot be written: {error.strerror or error}") from error


SIDES = ("a", "b")
ROUTES = "routes.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class ABRuns:
    """Folders of two probes of the same rows."""

    records: tuple[Path, Path]
    noise: tuple[Path, ...] = ()
    """Records of further runs of side a."""


def run_ab(
    spec: ProbeSpec, a: LayoutText, b: LayoutText, *, pins_routes: bool = False, num_noise_runs: int = 0
) -> ABRuns:
    """Run both sides, one after the other, each in its own folder under `spec.out`.

    Args:
        spec: with sites to record and a folder; its layout is replaced.
        pins_routes: side b, and repeated runs of side a, use the experts that side a chose.
        num_noise_runs: how often side a is run again, to measure what differs without a cause.

    Raises:
        UserError: as `run_probe`, or the folder holds an earlier comparison.
    """
    if spec.out is None or spec.dump is None:
        raise UserError("a comparison needs sites and a folder for its records: give --dump SELECTOR and --out DIR")
    routes = spec.out / ROUTES if pins_routes else None
    folders = [spec.out / side for side in SIDES]
    run_probe(replace(spec, layout=a, out=folders[0], routes_to=routes))
    run_probe(replace(spec, layout=b, out=folders[1], routes_from=routes))
    noise = [spec.out / f"a_again_{number}" for number in range(num_noise_runs)]
    for folder in noise:
        run_probe(replace(spec, layout=a, out=folder, routes_from=routes))
    return ABRuns(
        records=(folders[0] / RECORDS, folders[1] / RECORDS),
        noise=tuple(folder / RECORDS for folder in noise),
    )
