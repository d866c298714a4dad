"""One rank of the runner: makes a worker or an engine, runs the passes that were asked for, ends.

Every rank calls `probe_rank` with the same `RankWork`. Invariant: what it returns is the same on every rank.

`probe_engine` is called in its own process, since vLLM changes the process that it is in. The engine reads the
first tokens of each row and decodes the others; these are forced, so that it computes what it would have computed had
it drawn them. Invariant: all tokens of a row but the last one are fed, each once.

Routes of a model on given rows are one file: recorded in any layout, replayed in any other. It is safetensors with a
manifest in its header: `ids` `[S, L, K]`, `tokens` `[S]`, `lengths` `[N]`, rows end to end in global order, -1 where a
route is missing. Invariant: a file that does not belong to the model, or to the rows, is refused by name before any
pass.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from nemo_rl.algorithms.grpo import plan_train
from nemo_rl.algorithms.losses.nll import NLLLoss
from nemo_rl.config.parts import ENGINE_CAPABILITIES, ENGINES
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.collectives import RankSpec
from nemo_rl.distributed.layout import ParallelLayout
from nemo_rl.distributed.packing import PackPlan
from nemo_rl.errors import UserError, WorkerError, boundary
from nemo_rl.models.generation.interfaces import (
    EngineSpec,
    GenerationInterface,
    GenerationRequest,
    RecordedEngine,
    SamplingParams,
)
from nemo_rl.models.policy.recording import RecordSpec
from nemo_rl.models.policy.routes.worker_replay import ROUTES
from nemo_rl.models.policy.tracing import TraceSpec
from nemo_rl.models.policy.workers.compose import worker_of_job
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker
from nemo_rl.routes.columns import validate_routes
from nemo_rl.routes.digest import route_digests
from nemo_rl.routes.shape import RouteShape
from nemo_rl.utils.files import FileFormat, check_format, give_usual_mode, replace_file
from nemo_rl_tools.runner.layout_text import LayoutText
from nemo_rl_tools.runner.prompts import RunnerRows, batch_of

__all__ = [
    "STEP",
    "RankResult",
    "RankWork",
    "engine_policy",
    "probe_engine",
    "probe_rank",
    "read_routes",
    "write_routes",
]

FORMAT = "nemo_rl.routes"


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutesFile:
    """The content of a routes file."""

    shape: RouteShape
    model: Mapping[str, object]
    rows: RunnerRows
    routes: torch.Tensor
    """`[S, L, K]` int16, decoded, row after row."""

    def for_rows(
        self, rows: RunnerRows, *, shape: RouteShape, model: Mapping[str, object], where: Path
    ) -> torch.Tensor:
        """Return `[N, T, L, K]` int16 for these rows, found by their tokens; -1 in the padding.

        Raises:
            UserError: of another model, or a row is not in the file.
        """
        if self.shape != shape or dict(self.model) != dict(model):
            theirs, ours = {**self.model, **asdict(self.shape)}, {**model, **asdict(shape)}
            differ = [
                f"{name} {theirs.get(name)!r} instead of {ours[name]!r}"
                for name in ours
                if theirs.get(name) != ours[name]
            ]
            raise UserError(f"{where}: routes of another model: {', '.join(differ)}; record them with this one")
        start_of: dict[tuple[int, ...], int] = {}
        start = 0
        for row in self.rows.ids:
            start_of.setdefault(row, start)
            start += len(row)
        width = max(len(row) for row in rows.ids)
        found = torch.full((len(rows.ids), width, *self.routes.shape[1:]), -1, dtype=torch.int16)
        for number, row in enumerate(rows.ids):
            if row not in start_of:
                raise UserError(f"{where}: {_why_not(rows.keys[number], row, self.rows)}; record its routes first")
            found[number, : len(row)] = self.routes[start_of[row] : start_of[row] + len(row)]
        return found


def write_routes(
    path: Path, routes_NTLK: torch.Tensor, rows: RunnerRows, *, shape: RouteShape, model: Mapping[str, object]
) -> Path:
    """Write the file, or leave what was there.

    Raises:
        UserError: the disk refuses, or a route is none.
    """
    routes = torch.cat([routes_NTLK[number, : len(row)] for number, row in enumerate(rows.ids)]).contiguous()
    lengths = torch.tensor([len(row) for row in rows.ids])
    tokens = torch.tensor([token for row in rows.ids for token in row])
    manifest = {
        "format": FORMAT,
        "version": FileFormat.ROUTES.version,
        "model": dict(model),
        "layers": list(shape.layers),
        "top_k": shape.top_k,
        "num_experts": shape.num_experts,
        "keys": list(rows.keys),
        "digests": _row_digests(routes, rows.ids, shape),
    }
    tensors = {"ids": routes, "tokens": tokens, "lengths": lengths}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, lambda temporary: save_file(tensors, temporary, metadata={FORMAT: json.dumps(manifest)}))
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: routes cannot be written: {error}") from error
    give_usual_mode(path)
    return path


def read_routes(path: Path) -> RoutesFile:
    """Raises:
    UserError: no file of routes, of another version, or damaged.
    """
    try:
        with safe_open(str(path), framework="pt") as file:
            manifest = json.loads((file.metadata() or {})[FORMAT])
            tensors = {name: file.get_tensor(name) for name in ("ids", "tokens", "lengths")}
        check_format(FileFormat.ROUTES, manifest["version"], where=path)
        shape = RouteShape(
            layers=tuple(manifest["layers"]), top_k=manifest["top_k"], num_experts=manifest["num_experts"]
        )
        lengths = [int(n) for n in tensors["lengths"].tolist()]
        ids = tuple(tuple(part.tolist()) for part in tensors["tokens"].split(lengths))
        rows = RunnerRows(keys=tuple(manifest["keys"]), ids=ids)
        is_whole = manifest["digests"] == _row_digests(tensors["ids"], ids, shape)
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such routes file") from error
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, RuntimeError) as error:
        raise UserError(f"{path}: not a routes file, or a damaged one: {error}") from error
    if not is_whole:
        raise UserError(f"{path}: damaged: its routes are not those that were recorded")
    routes = torch.nested.nested_tensor_from_jagged(tensors["ids"], torch.tensor([0, *lengths]).cumsum(0))
    validate_routes(routes, shape, keys=rows.keys)
    return RoutesFile(shape=shape, model=manifest["model"], rows=rows, routes=tensors["ids"])


def _row_digests(routes: torch.Tensor, rows: Sequence[Sequence[int]], shape: RouteShape) -> list[str]:
    digests_SL = route_digests(routes.long(), shape.layers)
    parts = digests_SL.split([len(row) for row in rows])
    return [
        blake2b(json.dumps([list(row), part.tolist()]).encode(), digest_size=8).hexdigest()
        for row, part in zip(rows, parts, strict=True)
    ]


def _why_not(key: str, row: Sequence[int], held: RunnerRows) -> str:
    same_key = dict(zip(held.keys, held.ids, strict=True)).get(key)
    if same_key is None:
        return f"it has no routes of {key}"
    if len(same_key) != len(row):
        return f"its {key} has {len(same_key)} tokens, this one {len(row)}"
    at = next(i for i, (a, b) in enumerate(zip(same_key, row, strict=True)) if a != b)
    return f"its {key} has token {same_key[at]} at position {at}, this one {row[at]}"


STEP = 0
"""Step number of the records."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankWork:
    """Plain values, the same for every rank."""

    policy: PolicyConfig
    rows: RunnerRows
    layout: ParallelLayout
    seed: int = 0
    has_backward: bool = False
    top_k: int = 0
    """Likeliest next tokens per position; 0: none."""
    model: Mapping[str, object] = field(default_factory=dict)
    """The model's description, which a file of routes keeps."""
    record: RecordSpec | None = None
    trace: TraceSpec | None = None
    watches: tuple[str, ...] = ()
    """Sites that the hub of `trace` is shown."""
    routes_from: Path | None = None
    routes_to: Path | None = None
    use_gpu: bool = False
    timeout_s: float = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RankResult:
    """The numbers that the job computed."""

    logprobs: tuple[tuple[float, ...], ...]
    """Log-probabilities of each row, position by position; 0.0 at the first, which nothing predicts."""
    loss: float | None = None
    grad_norm: float | None = None
    top_k: tuple[tuple[tuple[tuple[int, float], ...], ...], ...] = ()
    """Tokens and logits of each row and position, the largest first."""


def probe_rank(spec: RankSpec, work: RankWork) -> RankResult:
    """(collective) Return all passes on this rank.

    Raises:
        UserError: model, layout, routes or disk do not allow it.
    """
    with worker_of_job(
        spec,
        work.policy,
        uses_gpu=work.use_gpu,
        num_threads=1,
        timeout_s=work.timeout_s,
        num_steps=1,
        seed=work.seed,
        layout=work.layout,
        record=work.record,
        trace=work.trace,
    ) as worker:
        lengths = [len(row) for row in work.rows.ids]
        plan = plan_train(lengths, [len(lengths)], work.policy, layout=work.layout)
        dp = work.layout.coordinates(spec.rank).dp
        mine, own = list(plan.rows_of_rank(dp)), plan.for_rank(dp)
        batch = batch_of(work.rows)
        if work.routes_from is not None:
            held = read_routes(work.routes_from)
            batch[ROUTES] = held.for_rows(work.rows, shape=_shape_of(worker), model=work.model, where=work.routes_from)
        part = batch.select_indices(mine)
        if work.record is not None:
            worker.begin_recording(STEP)
        worker.begin_tracing(STEP, work.watches, work.rows.keys)
        logprobs_NT = _logprobs(work, worker, part, own, mine)
        top_k = _top_k(work, worker, part, mine)
        loss = grad_norm = None
        if work.has_backward:
            trained = worker.train(part, NLLLoss(), plan=own)
            [loss], [grad_norm] = trained.loss, trained.grad_norm
        worker.end_recording()
        worker.end_tracing()
    return RankResult(
        logprobs=tuple(tuple(logprobs_NT[number, : len(row)].tolist()) for number, row in enumerate(work.rows.ids)),
        loss=loss,
        grad_norm=grad_norm,
        top_k=top_k,
    )


def _logprobs(
    work: RankWork, worker: PolicyWorker, part: BatchedDataDict, plan: PackPlan, mine: list[int]
) -> torch.Tensor:
    """Return `[N, T]` of all rows, on every rank."""
    if work.routes_to is None:
        found_nT = worker.get_logprobs(part, plan=plan)
    else:
        [found_nT], routes_nTLK = worker.record_routes(part, plan=plan)
        routes_NTLK = _of_all_ranks(routes_nTLK.to(torch.int32), work, mine, worker, is_of_layers=True).to(torch.int16)
        # A backward pass that follows uses them, too.
        part[ROUTES] = routes_NTLK[mine]
        if worker.rank == 0:
            write_routes(work.routes_to, routes_NTLK, work.rows, shape=_shape_of(worker), model=work.model)
    return _of_all_ranks(found_nT, work, mine, worker)


def _of_all_ranks(
    part: torch.Tensor, work: RankWork, mine: list[int], worker: PolicyWorker, *, is_of_layers: bool = False
) -> torch.Tensor:
    """(collective) Return `[N, T, ...]` from what the ranks that speak for their shards have.

    Args:
        is_of_layers: `part` are routes, of which every rank has those of its layers and -1 elsewhere.
    """
    size = (len(work.rows.ids), max(map(len, work.rows.ids)), *part.shape[2:])
    whole = torch.full(size, -1 if is_of_layers else 0, dtype=part.dtype)
    if is_of_layers or work.layout.is_writer(worker.rank):
        whole[mine, : part.shape[1]] = part[:, : size[1]]
    on_device = whole.to(worker.device)
    dist.all_reduce(on_device, op=dist.ReduceOp.MAX if is_of_layers else dist.ReduceOp.SUM)
    return on_device.cpu()


def _shape_of(worker: PolicyWorker) -> RouteShape:
    if worker.replay is None:
        raise WorkerError("router replay is off", rank=worker.rank, stage="routes")
    return worker.replay.shape


def _top_k(
    work: RankWork, worker: PolicyWorker, part: BatchedDataDict, mine: list[int]
) -> tuple[tuple[tuple[tuple[int, float], ...], ...], ...]:
    if not work.top_k:
        return ()
    values_nTk, ids_nTk = worker.get_topk_logits(part, k=work.top_k, mbs=len(mine))
    values = _of_all_ranks(values_nTk, work, mine, worker).tolist()
    ids = _of_all_ranks(ids_nTk, work, mine, worker).tolist()
    return tuple(
        tuple(tuple(zip(ids[n][t], values[n][t], strict=True)) for t in range(len(row)))
        for n, row in enumerate(work.rows.ids)
    )


def engine_policy(policy: PolicyConfig, layout: LayoutText, *, longest: int) -> PolicyConfig:
    """Return the policy with the engine that the layout names.

    Args:
        longest: tokens of the longest row.

    Raises:
        UserError: the layout has an axis that an engine has not, or the engine cannot be recorded.
    """
    name, generation = layout.engine or "", policy.generation
    capabilities = ENGINE_CAPABILITIES.get(name)
    if capabilities is None or not capabilities.records_decoding:
        known = ", ".join(each for each, found in ENGINE_CAPABILITIES.items() if found.records_decoding)
        raise UserError(f"engine={name}: expected an engine that can be recorded: {known}")
    words = asdict(layout)
    given = [axis for axis in ("cp", "pp", "ep") if words[axis] != 1]
    given += [axis for axis in ("dp", "etp", "mbs", "worker") if words[axis] is not None]
    given += [axis for axis in ("sp", "packed", "recompute") if words[axis]]
    if name == "torch" and layout.tp > 1:
        given.append("tp")
    if given:
        raise UserError(f"engine={name}: an engine has no {', '.join(given)}; leave that out")
    sizes = generation.vllm_cfg.model_dump() | {
        "tensor_parallel_size": layout.tp,
        "pipeline_parallel_size": 1,
        "enforce_eager": True,
        # Rows with the same beginning are each read from it on.
        "enable_prefix_caching": False,
    }
    changes = {
        "backend": name,
        "precision": layout.precision or generation.precision or policy.precision,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": None,
        "vllm_cfg": sizes,
    }
    record = policy.model_dump()
    record["generation"] |= changes
    record["lora"] |= {"enabled": False}
    record["router_replay"] = {}
    # What the workers need is of no matter here.
    record["dtensor_cfg"], record["megatron_cfg"], record["sequence_packing"] = {}, {}, {}
    record["max_total_sequence_length"] = max(policy.max_total_sequence_length, longest + 1)
    return PolicyConfig(**json.loads(json.dumps(record, default=str)))


def probe_engine(spec: RankSpec, work: RankWork, prompt: int | None) -> RankResult:
    """Run the rows through one engine.

    Args:
        prompt: tokens of a row that are read at once; None: half of each row.

    Raises:
        UserError: the engine cannot be started with this model, or the disk does not take the records.
    """
    del spec
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    name = work.policy.generation.backend
    build: Callable[..., GenerationInterface] = ENGINES.load(name, key="engine")
    with boundary(UserError, f"engine={name}"):
        engine = build(spec=EngineSpec(policy=work.policy, use_gpu=work.use_gpu, weight_version=0, record=work.record))
    try:
        cuts = [min(len(ids) - 1, prompt or max(1, len(ids) // 2)) for ids in work.rows.ids]
        responses = tuple(ids[cut:] for ids, cut in zip(work.rows.ids, cuts, strict=True))
        request = GenerationRequest(
            prompt_ids=tuple(ids[:cut] for ids, cut in zip(work.rows.ids, cuts, strict=True)),
            seeds=(0,) * len(responses),
            sampling=SamplingParams(
                temperature=1.0, max_new_tokens=max(map(len, responses)), stop_token_ids=(), stop_strings=()
            ),
            forced=responses,
            keys=work.rows.keys,
        )
        if work.record is not None and isinstance(engine, RecordedEngine):
            engine.begin_recording(STEP)
        output = engine.generate(request)
        if work.record is not None and isinstance(engine, RecordedEngine):
            engine.end_recording()
    finally:
        engine.shutdown()
    found = output.logprobs.split(output.lengths.tolist())
    nothing = float("nan")
    return RankResult(
        logprobs=tuple((nothing,) * cut + tuple(row.tolist()) for cut, row in zip(cuts, found, strict=True))
    )
