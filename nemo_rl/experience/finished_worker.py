"""`FinishedWorker`: gives rows of finished conversations where a rollout worker would have them sampled.

The driver's `RolloutHandle` calls it as it calls a `RolloutWorker`. Invariant: its rows have the columns of a rollout,
so that passes, plans, stages and checkpoints do not tell them apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import numpy as np
import torch

from nemo_rl.data.finished import FinishedRow, finished_encoder, load_finished
from nemo_rl.data.tokenizer import load_tokenizer, stop_token_ids, tokenizer_identity
from nemo_rl.data_plane.column_io import kv_first_write
from nemo_rl.data_plane.keys import keys_of_groups
from nemo_rl.distributed.abort import RootCause
from nemo_rl.errors import WorkerError
from nemo_rl.experience.evaluation.evaluator import EvaluationTask, ValidationResult
from nemo_rl.experience.payload import TURN_REWARDS, TURNS, LineWriter, SampleStats, columns_of_rows
from nemo_rl.experience.rollout_records import WEIGHT_VERSION, GroupRequest, RolloutInfo, RolloutResult
from nemo_rl.experience.rollout_worker import RolloutWorker
from nemo_rl.experience.rollouts import RolloutSpec
from nemo_rl.experience.token_row import TokenRow
from nemo_rl.models.generation.interfaces import GenerationInterface

__all__ = ["FinishedWorker"]


class FinishedWorker(RolloutWorker):
    """Finished conversations to rows.

    Rows are numbered through all sources, those of training first, then those of the held-out sets.

    Args:
        generation: of rollouts; nothing is sampled here.

    Raises:
        DatasetError: a source has rows that cannot be used.
    """

    def __init__(self, spec: RolloutSpec, *, generation: GenerationInterface | None = None) -> None:
        del generation
        self._spec, self._client, self._durable = spec, None, None
        given = spec.policy.tokenizer
        self._tokenizer = load_tokenizer(given.name or spec.policy.model_name, chat_template=given.chat_template)
        self._stop_ids = stop_token_ids(spec.policy.model_name, self._tokenizer)
        chosen = spec.policy.generation.stop_token_ids
        self._finished = load_finished(
            spec.data,
            finished_encoder(
                self._tokenizer, stop_ids=self._stop_ids if chosen is None else tuple(chosen), now=spec.now
            ),
            max_length=spec.policy.max_total_sequence_length,
            min_reward=spec.min_reward,
        )
        self._rows = [row for found in self._finished.values() for row in found.rows]
        ends = accumulate(len(found.rows) for found in self._finished.values())
        self._ranges = {
            where: range(end - len(found.rows), end)
            for (where, found), end in zip(self._finished.items(), ends, strict=True)
        }
        self._lines = LineWriter(self._tokenizer, prompts=[row.prompt for row in self._rows], extras=())

    def describe(self) -> RolloutInfo:
        data, found = self._spec.data, self._finished
        identity = {where: each.digest for where, each in found.items()}
        return RolloutInfo(
            num_train_prompts=tuple(len(found[where].rows) for where in data.sources),
            num_val_prompts=sum(len(found[data.held_out_key(name)].rows) for name in data.held_out),
            num_skipped_prompts=sum(each.num_overlong for each in found.values()),
            skipped=tuple(f"{where}: {line}" for where, each in found.items() for line in each.skipped),
            identity=identity | tokenizer_identity(self._tokenizer, stop_ids=self._stop_ids),
            remarks=(*(line for each in found.values() for line in each.remarks), *self._steps()),
        )

    def _steps(self) -> list[str]:
        """Return a line about the steps that the epochs give, where that many are not what the recipe says."""
        grpo, data = self._spec.grpo, self._spec.data
        if grpo.max_num_epochs is None or data.train.named:
            return []
        num_rows = len(self._finished["data.train"].rows) * grpo.max_num_epochs
        steps, left = divmod(num_rows, grpo.num_prompts_per_step)
        told = [f"{left} rows fill no step"] if left else []
        if steps != grpo.max_num_steps:
            told.append(f"grpo.max_num_steps is {grpo.max_num_steps}, which the learning rate goes by")
        epochs = f"grpo.max_num_epochs={grpo.max_num_epochs}"
        return [f"data.train: {steps} steps with {epochs}: {'; '.join(told)}"] if told else []

    def held_out(self) -> Mapping[str, range]:
        """Return the numbers of the rows of each held-out set, by its name."""
        data = self._spec.data
        return {name: self._ranges[data.held_out_key(name)] for name in data.held_out}

    def rollout(
        self,
        groups: Sequence[GroupRequest],
        *,
        version: int | None,
        partition_id: str,
        engine: int | None = None,
        share: tuple[int, int] = (0, 1),
    ) -> Iterator[tuple[RolloutResult, ...] | RootCause]:
        """Write the row of each group, and yield all of them at once; the arguments are those of `RolloutWorker`."""
        del engine
        mine = groups[share[0] :: share[1]]
        if not mine:
            return
        rows = [self._rows[group.prompt] for group in mine]
        columns = columns_of_rows(list(map(_token_row, rows)), pad_token_id=int(self._tokenizer.pad_token_id))
        for name in (TURNS, TURN_REWARDS):
            columns.pop(name)
        keys = keys_of_groups([group.uid for group in mine], 1)
        tags = [{"reward": 0.0, WEIGHT_VERSION: version or 0} for _ in mine]
        with self.client.stage("rollout"):
            meta = kv_first_write(self.client, columns, keys, partition_id=partition_id, tags=tags)
        stats = SampleStats(
            rewards=np.zeros(len(rows), dtype=np.float32),
            truncated=np.zeros(len(rows), dtype=np.bool_),
            response_lengths=np.asarray([row.num_trained for row in rows], dtype=np.int32),
        )
        written = RolloutResult(meta=meta, sample_stats=stats)
        yield tuple(written.select([place]).counted() for place in range(len(rows)))

    def validate(self, task: EvaluationTask) -> ValidationResult:
        """Refuse: the policy measures the loss of held-out rows, not engines."""
        del task
        raise WorkerError("held-out rows are measured by the policy", stage="validation")

    def shutdown(self) -> None:
        """End the client. Idempotent."""
        client, self._client = self._client, None
        if client is not None:
            client.close()


def _token_row(row: FinishedRow) -> TokenRow:
    """Return the row as a rollout has it, without log-probabilities of a sampler."""
    (first, length), *more = row.turns
    found = TokenRow(row.ids[:first])
    found.add_turn(row.ids[first : first + length], torch.zeros(length), version_spans=((0, 0),))
    end = first + length
    for start, size in more:
        found.insert(row.ids[end:start], num_seam=0)
        found.add_turn(row.ids[start : start + size], torch.zeros(size), version_spans=((0, 0),))
        end = start + size
    if end < len(row.ids):
        found.insert(row.ids[end:], num_seam=0)
    return found
