"""Finished groups of an asynchronous run in a checkpoint: `keep_groups` writes them, `restore_groups` brings them back.

Columns lie in a safetensors file, everything else of a row in `groups.json`; both are in the manifest of the
checkpoint. A rollout worker reads and writes the columns, so they never pass the driver.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from nemo_rl.algorithms.stages.columns import PARTITION
from nemo_rl.data_plane.keys import keys_of_groups, new_group_ids
from nemo_rl.errors import CheckpointError
from nemo_rl.experience.payload import SampleStats
from nemo_rl.experience.rollout_handle import RolloutHandle
from nemo_rl.experience.rollout_worker import RolloutResult
from nemo_rl.utils.files import write_text

__all__ = ["GROUPS", "keep_groups", "restore_groups"]

GROUPS = "groups"
"""Folder in a checkpoint."""
COLUMNS_FILE, ROWS_FILE = "columns.safetensors", "groups.json"


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
        record = json.loads((folder / ROWS_FILE).read_text(encoding="utf-8"))
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
