"""`ScheduledBatches`: the batches of an asynchronous run once more, from its schedule; and the file of a schedule.

Used by `nemo-rl compare RUN replay --to N`. Engines follow their scripts (`EngineSpec.script`), so the batch of each
turn is that of the run; here every group is handed to the engine that had it, before the weights change after which the
run's engine had it too. Invariant: a step has the groups of the run's step, in its order.

Finished groups of a run beside its rows: in a checkpoint of an asynchronous run, and in their own files.

`keep_groups` writes those of a checkpoint, `restore_groups` brings them back; `DurableBatches` has all of them kept in
files (`experience.durable_groups`). In a checkpoint, columns lie in a safetensors file, everything else of a
row in `groups.json`; both are in its manifest. A rollout worker reads and writes the columns, so they never pass the
driver.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from nemo_rl.algorithms.async_selection import Frontier
from nemo_rl.algorithms.batches import BatchSource, RolloutParts, group_request, step_of_groups
from nemo_rl.algorithms.stages.columns import PARTITION
from nemo_rl.algorithms.stages.stage import StepState
from nemo_rl.config.data import SAMPLING_OF_SOURCE, DataConfig
from nemo_rl.config.data_plane import DurableConfig
from nemo_rl.config.grpo import GRPOConfig
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.data.sampler import SampledPrompt
from nemo_rl.data_plane.client.link import CLEAR, stage_context
from nemo_rl.data_plane.keys import group_uid, keys_of_groups, new_group_ids
from nemo_rl.distributed.worker_groups import Pending
from nemo_rl.errors import CheckpointError, name_some
from nemo_rl.experience.durable_groups import check_segments, rollout_identity
from nemo_rl.experience.payload import SampleStats
from nemo_rl.experience.rollout_handle import RolloutHandle
from nemo_rl.experience.rollout_records import RolloutInfo, RolloutResult
from nemo_rl.models.generation.schedule import ScheduleEntry
from nemo_rl.utils.files import read_plain, write_text

__all__ = [
    "GROUPS",
    "SCHEDULE_FILE",
    "DurableBatches",
    "RunSchedule",
    "ScheduleFile",
    "ScheduledBatches",
    "keep_groups",
    "read_schedule",
    "restore_groups",
    "with_durable_groups",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Submitted:
    draw: SampledPrompt
    uid: str
    pending: Pending[RolloutResult]


class ScheduledBatches(BatchSource):
    """Steps as a run had them.

    Args:
        last_step: the last one that is done again.
    """

    def __init__(self, parts: RolloutParts, schedule: RunSchedule, *, last_step: int) -> None:
        self._parts, self._schedule, self._last_step = parts, schedule, last_step
        self._submitted: dict[str, _Submitted] = {}
        self._names = {name for step in range(1, last_step + 1) for name in schedule.steps.get(step, ())}
        """Groups that are trained; the others are sampled alone, since they were in the same batches."""
        self._step = 0
        self.digests: dict[int, str] = {}
        """Version -> digest of the weights, as far as they came."""

    def next(self, number: int) -> StepState:
        started, names = time.perf_counter(), self._schedule.steps.get(number)
        missing = [name for name in names or () if name not in self._submitted]
        if names is None or missing:
            raise CheckpointError(
                f"step {number}: the schedule does not say where its groups were sampled: "
                f"{name_some(missing) or 'none'}; the run had ended before it, or lines of schedule.jsonl are missing"
            )
        chosen = [self._submitted.pop(name) for name in names]
        groups = [each.pending.result() for each in chosen]
        return step_of_groups(number, [each.draw for each in chosen], groups, started=started)

    def trained(self, step: StepState) -> None:
        self._step = step.number

    def updated(self, version: int, *, weights: str | None) -> None:
        if weights is not None:
            self.digests[version] = weights
        if version >= self._last_step:
            return
        for engine in self._schedule.scripts:
            held, found = -1, list[str]()
            for entry in self._schedule.scripts[engine]:
                if entry.kind == "swap" and entry.version is not None:
                    held = entry.version
                elif entry.kind == "join" and held == version:
                    found += entry.groups
            self._submit(engine, found)

    def frontier(self) -> Frontier:
        return Frontier()

    @property
    def is_exhausted(self) -> bool:
        return self._step >= self._last_step

    @property
    def num_waiting_rows(self) -> int:
        # Rows come and go beside the steps; `lost_rows` knows whose they are.
        return -1

    def lost_rows(self, owners: Mapping[str, str]) -> list[str]:
        uids = {each.uid for each in self._submitted.values()}
        return [key for key in owners if group_uid(key) not in uids]

    def save_into(self, folder: Path) -> None:
        raise CheckpointError("a replay saves no checkpoint")

    def state_dict(self) -> dict[str, object]:
        raise CheckpointError("a replay saves no checkpoint")

    def load_state_dict(self, state: Mapping[str, object], *, step: int, folder: Path) -> None:
        raise CheckpointError("a replay resumes from no checkpoint")

    def close(self) -> None:
        left, self._submitted = list(self._submitted.values()), {}
        keys = keys_of_groups([each.uid for each in left], self._parts.rows_per_group)
        if keys:
            with stage_context(CLEAR):
                self._parts.client.kv_clear(list(keys), PARTITION, reason="the replay ended")

    def _submit(self, engine: int, names: Sequence[str]) -> None:
        if not names:
            return
        ordinals = [int(name.split(".")[0]) for name in names]
        draws = [self._schedule.draws.get(ordinal) or self._parts.sampler.draw(ordinal) for ordinal in ordinals]
        uids = new_group_ids(len(names))
        requests = [
            group_request(draw, uid, seed=self._parts.config.seed, name=name)
            for name, draw, uid in zip(names, draws, uids, strict=True)
        ]
        pending = self._parts.rollout.submit_groups(requests, version=None, partition_id=PARTITION, engine=engine)
        for request, draw, each in zip(requests, draws, pending, strict=True):
            self._submitted[request.name] = _Submitted(draw=draw, uid=request.uid, pending=each)


SCHEDULE_FILE = "schedule.jsonl"
"""File in `logger.log_dir`."""


class ScheduleFile:
    """Appends the events of a run; several threads may write.

    Args:
        step: the last one that was trained before this start.
    """

    def __init__(self, log_dir: Path, *, step: int) -> None:
        self._path, self._lock = log_dir / SCHEDULE_FILE, Lock()
        self._write({"event": "start", "step": step})

    def engines(self, entries: Sequence[ScheduleEntry]) -> None:
        self._write(*({"event": "engine", **entry.to_json()} for entry in entries))

    def step(self, number: int, groups: Sequence[str]) -> None:
        """Append the names of the groups that a step has trained, in its order of rows."""
        self._write({"event": "step", "step": number, "groups": list(groups)})

    def draws(self, drawn: Sequence[SampledPrompt]) -> None:
        """Append prompts that depend on what was sampled before."""
        if drawn:
            self._write({"event": "draws", "draws": [[each.ordinal, each.prompt, each.source] for each in drawn]})

    def weights(self, version: int, digest: str) -> None:
        self._write({"event": "weights", "version": version, "digest": digest})

    def _write(self, *lines: Mapping[str, object]) -> None:
        if lines:
            with self._lock, self._path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)


@dataclass(kw_only=True, slots=True)
class RunSchedule:
    """The events of one start of a run."""

    start: int
    """The last step before it."""
    scripts: dict[int, list[ScheduleEntry]] = field(default_factory=dict)
    """Engine -> what its batch did, in order."""
    steps: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Step -> names of its groups."""
    weights: dict[int, str] = field(default_factory=dict)
    """Version -> digest of the weights."""
    draws: dict[int, SampledPrompt] = field(default_factory=dict)
    """Ordinal -> its draw, where that is no function of the ordinal alone."""


def read_schedule(log_dir: Path, *, start: int) -> RunSchedule:
    """Return the last start of the run in `log_dir` after step `start`.

    Raises:
        CheckpointError: the folder has no schedule, none that begins there, or it cannot be followed.
    """
    path = log_dir / SCHEDULE_FILE
    if not path.is_file():
        raise CheckpointError(f"{path}: not there; only asynchronous runs (grpo.async.enabled) have a schedule")
    found: RunSchedule | None = None
    starts: list[int] = []
    for place, text in enumerate(read_plain(path).decode("utf-8").splitlines(), start=1):
        try:
            line = json.loads(text)
            event = line["event"]
            if event == "start":
                starts.append(int(line["step"]))
                found = RunSchedule(start=starts[-1]) if starts[-1] == start else found
                is_wanted = starts[-1] == start
            elif found is not None and is_wanted:
                _add(found, event, line)
        except (ValueError, KeyError, TypeError) as problem:
            raise CheckpointError(f"{path}, line {place}: expected an event of a schedule, got {text!r}") from problem
    if found is None:
        raise CheckpointError(f"{path}: no start after step {start}; expected one of {starts or 'none'}: give --from")
    for engine, entries in found.scripts.items():
        entries.sort(key=lambda entry: entry.number)
        if [entry.number for entry in entries] != list(range(len(entries))):
            raise CheckpointError(
                f"{path}: engine {engine} was replaced in this run, or events of it are missing, so its batches cannot "
                "be formed again; replay the steps one by one with --step N"
            )
    return found


def _add(schedule: RunSchedule, event: str, line: Mapping[str, object]) -> None:
    if event == "engine":
        entry = ScheduleEntry.from_json(line)
        schedule.scripts.setdefault(entry.engine, []).append(entry)
    elif event == "step":
        groups = line["groups"]
        assert isinstance(groups, list), "groups are a list"
        schedule.steps[int(str(line["step"]))] = tuple(map(str, groups))
    elif event == "draws":
        draws = line["draws"]
        assert isinstance(draws, list), "draws are a list"
        schedule.draws |= {
            int(ordinal): SampledPrompt(int(ordinal), int(prompt), str(source)) for ordinal, prompt, source in draws
        }
    elif event == "weights":
        schedule.weights[int(str(line["version"]))] = str(line["digest"])
    else:
        raise ValueError(event)


DURABLE_STATE = "durable"
"""Name in a checkpoint's state of the digests by which finished groups in files are known."""
GROUPS = "groups"
"""Folder in a checkpoint."""
COLUMNS_FILE, ROWS_FILE = "columns.safetensors", "groups.json"
ROWS_DEPEND_ON = ("max_new_tokens", "temperature", "top_p", "top_k", "record_support", "stop_token_ids", "stop_strings")
"""Settings of the engines that decide which tokens a seed gives: groups in files are of a run with the same."""


def with_durable_groups(
    source: BatchSource,
    durable: DurableConfig,
    rollout: RolloutHandle,
    info: RolloutInfo,
    *,
    grpo: GRPOConfig,
    policy: PolicyConfig,
    data: DataConfig,
    saves: bool,
) -> BatchSource:
    """Return the source; where the recipe says so, its finished groups are kept in files, and those there are used.

    Args:
        saves: the run writes checkpoints.

    Raises:
        RunFolderError: the folder has files of another run.
    """
    if durable.path is None:
        return source
    identity = rollout_identity(
        {
            "data": dict(info.identity),
            "seed": grpo.seed,
            "rows": grpo.num_generations_per_prompt,
            "sampling": policy.generation.model_dump(include=set(ROWS_DEPEND_ON)),
            "longest": policy.max_total_sequence_length,
            "routes": policy.router_replay.model_dump(),
            "columns": {name: column.model_dump() for name, column in data.extra_columns.items()},
            **own_sampling(data),
        }
    )
    folder = durable.path.absolute()
    check_segments(folder, identity)
    rollout.open_durable(durable.model_copy(update={"path": folder}), identity)
    return DurableBatches(source, rollout, saves=saves)


def own_sampling(data: DataConfig) -> dict[str, object]:
    """Return how the sources are sampled that say so themselves, by name; an empty mapping where none does."""
    asked = {
        name: source.model_dump(include=set(SAMPLING_OF_SOURCE), exclude_none=True)
        for name, source in data.train.named.items()
    }
    return {"sources": asked} if any(asked.values()) else {}


class DurableBatches(BatchSource):
    """A source whose finished groups are kept in files: which of them a resumed run may ask for, and their weights.

    Args:
        saves: the run writes checkpoints; without them nothing behind the present step is asked for.
    """

    def __init__(self, source: BatchSource, rollout: RolloutHandle, *, saves: bool) -> None:
        self._source, self._rollout, self._saves = source, rollout, saves
        self.samples_ahead = source.samples_ahead
        self._step = 0
        self._frontiers: dict[int, Frontier] = {}
        """Step of each checkpoint that is being written -> the prompts that are settled once it is whole."""

    def next(self, number: int) -> StepState:
        try:
            return self._source.next(number)
        finally:
            self.unfinished = self._source.unfinished

    @property
    def is_exhausted(self) -> bool:
        return self._source.is_exhausted

    @property
    def num_waiting_rows(self) -> int:
        return self._source.num_waiting_rows

    def lost_rows(self, owners: Mapping[str, str]) -> list[str]:
        return self._source.lost_rows(owners)

    def trained(self, step: StepState) -> None:
        self._source.trained(step)

    def updated(self, version: int, *, weights: str | None) -> None:
        self._step = version
        if weights is not None:
            self._rollout.know_weights({version: weights})
        self._source.updated(version, weights=weights)

    def state_dict(self) -> dict[str, object]:
        self._frontiers[self._step] = self._source.frontier()
        weights = {str(version): digest for version, digest in self._rollout.weights.items()}
        return {**self._source.state_dict(), DURABLE_STATE: {"weights": weights}}

    def save_into(self, folder: Path) -> None:
        self._source.save_into(folder)

    def load_state_dict(self, state: Mapping[str, object], *, step: int, folder: Path) -> None:
        durable = state.get(DURABLE_STATE, {})
        weights = durable.get("weights", {}) if isinstance(durable, Mapping) else None
        if not isinstance(weights, Mapping):
            raise CheckpointError(f"{DURABLE_STATE}: expected the digests of weights, got {durable!r}")
        self._rollout.know_weights({int(version): str(digest) for version, digest in weights.items()})
        self._source.load_state_dict(state, step=step, folder=folder)

    def frontier(self) -> Frontier:
        return self._source.frontier()

    def settle(self, saved: int | None) -> None:
        whole = [step for step in self._frontiers if saved is not None and step <= saved]
        if self._saves and not whole:
            return
        found = self._frontiers[max(whole)] if self._saves else self._source.frontier()
        self._frontiers = {step: each for step, each in self._frontiers.items() if step not in whole}
        self._rollout.settle_durable(found.next_ordinal, found.done)

    def run_is_done(self) -> None:
        self._rollout.remove_durable()

    def close(self) -> None:
        self._source.close()


def keep_groups(folder: Path, groups: Mapping[int, RolloutResult], rollout: RolloutHandle) -> None:
    """Write groups whose rows have ended.

    Args:
        groups: by the ordinals of their prompts, at least one.
    """
    first, *others = groups.values()
    rows = first.concat(*others)
    folder.mkdir(parents=True)
    rollout.submit_keep_columns(rows.meta, fields=rows.meta.fields, path=folder / COLUMNS_FILE).result()
    stats = rows.sample_stats
    record = {
        "ordinals": list(groups),
        "tags": [dict(tags) for tags in rows.meta.tags or ()],
        **stats.to_json(),
    }
    write_text(folder / ROWS_FILE, json.dumps(record))


def restore_groups(folder: Path, rollout: RolloutHandle, *, group_size: int) -> dict[int, RolloutResult]:
    """Put the groups of a checkpoint into the data plane; return them by their ordinals.

    Raises:
        CheckpointError: the files are not those that `keep_groups` writes.
    """
    try:
        record = json.loads(read_plain(folder / ROWS_FILE))
        ordinals, tags = [int(ordinal) for ordinal in record["ordinals"]], record["tags"]
        stats = SampleStats.from_json(record)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise CheckpointError(
            f"{folder / ROWS_FILE}: expected the finished groups of an asynchronous run, got {problem!r}; resume with "
            "grpo.async.keep_finished=false, which samples their prompts again"
        ) from problem
    if len(stats) != len(ordinals) * group_size or len(tags) != len(stats):
        raise CheckpointError(
            f"{folder / ROWS_FILE}: expected {group_size} rows for each of {len(ordinals)} groups, got {len(stats)} "
            "rows; resume with the grpo.num_generations_per_prompt of the run, or keep_finished=false"
        )
    keys = keys_of_groups(new_group_ids(len(ordinals)), group_size)
    meta = rollout.restore_columns(keys, partition_id=PARTITION, tags=tags, path=folder / COLUMNS_FILE)
    rows = RolloutResult(meta=meta, sample_stats=stats)
    return {
        ordinal: rows.select(range(place * group_size, (place + 1) * group_size))
        for place, ordinal in enumerate(ordinals)
    }
