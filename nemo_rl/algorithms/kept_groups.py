"""Finished groups of a run beside its rows: in a checkpoint of an asynchronous run, and in their own files.

`keep_groups` writes those of a checkpoint, `restore_groups` brings them back; `DurableBatches` has all of them kept in
files (`experience.durable_groups`). In a checkpoint, columns lie in a safetensors file, everything else of a
row in `groups.json`; both are in its manifest. A rollout worker reads and writes the columns, so they never pass the
driver.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from nemo_rl.algorithms.async_groups import Frontier
from nemo_rl.algorithms.batches import BatchSource
from nemo_rl.algorithms.stages.columns import PARTITION
from nemo_rl.algorithms.stages.state import StepState
from nemo_rl.config.data import DataConfig
from nemo_rl.config.data_plane import DurableConfig
from nemo_rl.config.grpo import GRPOConfig
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.data_plane.keys import keys_of_groups, new_group_ids
from nemo_rl.errors import CheckpointError
from nemo_rl.experience.durable_groups import check_segments, rollout_identity
from nemo_rl.experience.payload import SampleStats
from nemo_rl.experience.rollout_handle import RolloutHandle
from nemo_rl.experience.rollout_records import RolloutInfo, RolloutResult
from nemo_rl.utils.files import read_plain, write_text

__all__ = ["GROUPS", "DurableBatches", "keep_groups", "restore_groups", "with_durable_groups"]

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
        }
    )
    folder = durable.path.absolute()
    check_segments(folder, identity)
    rollout.open_durable(durable.model_copy(update={"path": folder}), identity)
    return DurableBatches(source, rollout, saves=saves)


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
