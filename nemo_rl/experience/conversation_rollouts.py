"""`ConversationRollouts`: groups of conversations, scored, as columns, scalars and metrics.

    RolloutWorker.rollout
      `- ConversationRollouts.groups           GroupRequest -> ScoredGroup, as conversations end   (ConversationLoop)
           |- Environment.score                an environment that only scores: the last turns of a group
           |- too few scored conversations     none of the group's rows counts
           `- ScoredGroup.columns, .stats, .metrics

The evaluator has `ConversationSampler` over the same loop. Invariant: a conversation that its policy leaves out has a
row, an ending and no part in any statistic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from nemo_rl.config.env import ConversationConfig, Ending
from nemo_rl.data.datasets import Prompt
from nemo_rl.environments.conversation import ToolResult
from nemo_rl.environments.interfaces import Environment, Response, ending_of
from nemo_rl.environments.process_environment import RewardLog
from nemo_rl.errors import WorkerError, name_some
from nemo_rl.experience.conversation_attempt import ConversationRecord, TurnRecord
from nemo_rl.experience.conversations import ConversationGroup, ConversationLoop, GroupTask
from nemo_rl.experience.payload import ConversationStats, SampleStats
from nemo_rl.experience.rollouts import MeasuredSamples
from nemo_rl.experience.token_row import TokenRow
from nemo_rl.models.generation.interfaces import SamplingParams
from nemo_rl.utils.metrics import Max, Mean, Reduction, Sum

__all__ = ["ConversationRollouts", "ConversationSampler", "ScoredGroup"]

CUT_ENDINGS = (Ending.TOKEN_LIMIT, Ending.CONTEXT_FULL)
"""Endings of conversations that count as truncated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredGroup:
    """The conversations of one group with their rewards."""

    number: int
    records: tuple[ConversationRecord, ...]
    """All have rewards; those that are left out have 0."""
    components: Mapping[str, tuple[float, ...]]
    """Parts of the rewards by name, one per record; NaN where it was not scored."""
    num_timeouts: int = 0
    scoring: Mapping[str, Reduction] = field(default_factory=dict)
    """The environment logs these numbers of its scores."""
    printed: tuple[str, ...] = ()
    drops_void_turns: bool = False

    @property
    def rows(self) -> list[tuple[int, int, TokenRow]]:
        return [
            (sample, place, row) for sample, record in enumerate(self.records) for place, row in enumerate(record.rows)
        ]

    def stats(self) -> SampleStats:
        samples = [sample for sample, _, _ in self.rows]
        of_row = [self.records[sample] for sample in samples]
        endings = list(Ending)
        return SampleStats(
            rewards=np.asarray([record.reward for record in of_row], dtype=np.float32),
            truncated=np.asarray([record.ending in CUT_ENDINGS for record in of_row], dtype=np.bool_),
            response_lengths=np.asarray([row.num_sampled for _, _, row in self.rows], dtype=np.int32),
            components={
                name: np.asarray([part[sample] for sample in samples], dtype=np.float32)
                for name, part in self.components.items()
            },
            conversations=ConversationStats(
                sample=np.asarray(samples, dtype=np.int32),
                is_scored=np.asarray([record.is_scored for record in of_row], dtype=np.bool_),
                endings=np.asarray([endings.index(record.ending) for record in of_row], dtype=np.uint8),
                num_turns=np.asarray([len(record.turns) for record in of_row], dtype=np.int32),
                is_void=np.asarray(
                    [
                        self.drops_void_turns and any(turn.is_void and not turn.is_side for turn in record.turns)
                        for record in of_row
                    ],
                    dtype=np.bool_,
                ),
            ),
        )

    def metrics(self) -> dict[str, Reduction]:
        """Return what a run logs of the group under `rollout/`."""
        turns = [turn for record in self.records for turn in record.turns]
        lengths = [sum(turn.num_tokens for turn in record.turns) for record in self.records]
        logprobs = [value for _, _, row in self.rows for value in row.sampled_logprobs.tolist()]
        num, num_rows = float(len(self.records)), float(len(self.rows))
        with_call = sum(any(turn.num_valid_calls for turn in record.turns) for record in self.records)
        found: dict[str, Reduction] = {
            "response_tokens": Sum(float(sum(lengths))),
            "max_response_tokens": Max(float(max(lengths, default=0))),
            "mean_generation_logprob": Mean(math.fsum(logprobs), float(len(logprobs))),
            "turns": Mean(float(len(turns)), num),
            "rows_per_conversation": Mean(num_rows, num),
            "groups_too_few": Sum(float(not any(record.is_scored for record in self.records))),
            "left_out_rows": Sum(float(sum(not record.is_scored for record in self.records))),
            "retried_conversations": Sum(float(sum(record.num_attempts > 1 for record in self.records))),
            "rewritten_histories": Sum(float(sum(record.num_rewrites for record in self.records))),
            "joined_requests": Sum(float(sum(record.num_joined for record in self.records))),
            "side_requests": Sum(float(sum(turn.is_side for turn in turns))),
            "refilled_conversations": Sum(float(sum(record.is_refill for record in self.records))),
            "valid_call_share": Mean(float(with_call), num),
            "void_turn_share": Mean(float(sum(turn.is_void for turn in turns)), float(len(turns))),
            "turn_sampled_s": Mean(math.fsum(turn.sampled_s for turn in turns), float(len(turns))),
            "turn_waited_s": Mean(math.fsum(turn.waited_s for turn in turns), float(len(turns))),
            "turn_tool_s": Mean(math.fsum(turn.tool_s for turn in turns), float(len(turns))),
            "conversation_s": Mean(math.fsum(record.seconds for record in self.records), num),
        }
        cached = [turn.cached_tokens for turn in turns if turn.cached_tokens is not None]
        if cached:
            found["cached_tokens_per_turn"] = Mean(float(sum(cached)), float(len(cached)))
        return found | self._endings(lengths) | _tool_metrics(turns) | dict(self.scoring)

    def _endings(self, lengths: Sequence[int]) -> dict[str, Reduction]:
        """Return count, reward and sampled tokens of each ending."""
        found: dict[str, Reduction] = {}
        for ending in Ending:
            of_it = [place for place, record in enumerate(self.records) if record.ending is ending]
            if not of_it:
                continue
            count, name = float(len(of_it)), f"ending/{ending.value}"
            found[name] = Sum(count)
            found[f"{name}/tokens"] = Mean(float(sum(lengths[place] for place in of_it)), count)
            scored = [self.records[place].reward or 0.0 for place in of_it if self.records[place].is_scored]
            if scored:
                found[f"{name}/reward"] = Mean(math.fsum(scored), float(len(scored)))
        return found


def _tool_metrics(turns: Sequence[TurnRecord]) -> dict[str, Reduction]:
    """Return calls, failures and seconds of each tool; names that no tool has are counted together."""
    made: dict[str, list[ToolResult]] = {}
    for turn in turns:
        names = [call.name for call in turn.calls] + [""] * (len(turn.results) - len(turn.calls))
        for name, result in zip(names, turn.results, strict=False):
            known = "unreadable" if result.error == "unreadable" else "unknown"
            made.setdefault(known if result.error in ("unreadable", "unknown_tool") else name, []).append(result)
    found: dict[str, Reduction] = {}
    for name, results in made.items():
        count = float(len(results))
        found[f"tool/{name}/calls"] = Sum(count)
        found[f"tool/{name}/failed_share"] = Mean(float(sum(each.error is not None for each in results)), count)
        found[f"tool/{name}/seconds"] = Mean(math.fsum(each.seconds for each in results), count)
    return found


class ConversationRollouts:
    """Runs and scores groups of conversations.

    Args:
        environment: scores last turns; None where the environment has turns.
        log: has what environments and tools print.
    """

    def __init__(
        self, loop: ConversationLoop, config: ConversationConfig, *, environment: Environment | None, log: RewardLog
    ) -> None:
        self._loop, self._config, self._environment, self._log = loop, config, environment, log

    @property
    def num_open(self) -> int:
        return self._loop.num_open

    def abort(self, names: Sequence[str]) -> None:
        """Cancel groups by their names in the schedule; they never come."""
        self._loop.abort(names)

    def waiting(self, names: Sequence[str]) -> list[str]:
        """Return what conversations of these groups wait for; see `ConversationLoop.waiting`."""
        return self._loop.waiting(names)

    def groups(self, tasks: Sequence[GroupTask], *, version: int | None = None) -> Iterator[ScoredGroup]:
        """Yield groups as their conversations end.

        Args:
            version: of the weights that every token must be sampled from; None takes any.

        Raises:
            WorkerError: an engine holds other weights. RewardError: a reward function failed.
        """
        for group in self._loop.run(tasks):
            self._check_versions(group, version)
            yield self._score(tasks[group.number], group)

    def _check_versions(self, group: ConversationGroup, version: int | None) -> None:
        if version is None:
            return
        found = {held for record in group.records for row in record.rows for _, held in row.version_spans}
        if found - {version}:
            raise WorkerError(
                f"expected samples of weight version {version}, the engines hold "
                f"{name_some(sorted(found - {version}))}",
                stage="rollout",
            )

    def _score(self, task: GroupTask, group: ConversationGroup) -> ScoredGroup:
        records, timeouts, printed = list(group.records), 0, tuple[str, ...]()
        metrics: Mapping[str, Reduction] = {}
        asked = [place for place, record in enumerate(records) if record.reward is None and record.is_scored]
        names = list(dict.fromkeys(name for record in records for name in record.components))
        parts = {name: [record.components.get(name, math.nan) for record in records] for name in names}
        if asked and self._environment is not None:
            responses = [records[place].answer or Response(text="", num_tokens=0, truncated=True) for place in asked]
            report = self._environment.score([task.prompt] * len(asked), responses)
            timeouts, printed = report.num_timeouts, report.printed
            metrics = report.metrics
            for at, (place, reward) in enumerate(zip(asked, report.rewards, strict=True)):
                records[place] = records[place].with_outcome(reward)
                if report.unscored and (why := report.unscored[at]):
                    records[place] = replace(records[place], ending=ending_of(why), error=why, is_scored=False)
            for name, values in report.components.items():
                parts[name] = [math.nan] * len(records)
                for place, value in zip(asked, values, strict=True):
                    parts[name][place] = value
        is_whole = sum(record.is_scored for record in records) >= task.min_scored
        records = [
            replace(record, is_scored=record.is_scored and is_whole, reward=record.reward or 0.0) for record in records
        ]
        return ScoredGroup(
            number=group.number,
            records=tuple(records),
            components={
                name: tuple(
                    part if record.is_scored else math.nan for part, record in zip(values, records, strict=True)
                )
                for name, values in parts.items()
            },
            num_timeouts=timeouts,
            scoring=metrics,
            printed=(*printed, *self._log.take()),
            drops_void_turns=self._config.drop_void_turns,
        )


class ConversationSampler:
    """`SamplesPrompts` with conversations: the loop, limits and policies of training."""

    def __init__(self, rollouts: ConversationRollouts) -> None:
        self._rollouts = rollouts

    def sample(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], sampling: SamplingParams, *, version: int | None
    ) -> MeasuredSamples:
        """See `SamplesPrompts`."""
        size = len(seeds) // len(prompts)
        tasks = [
            GroupTask(prompt=prompt, seeds=tuple(seeds[place * size : (place + 1) * size]), sampling=sampling)
            for place, prompt in enumerate(prompts)
        ]
        found = sorted(self._rollouts.groups(tasks, version=version), key=lambda group: group.number)
        records = [record for group in found for record in group.records]
        names = list(dict.fromkeys(name for group in found for name in group.components))
        return MeasuredSamples(
            rewards=tuple(record.reward or 0.0 for record in records),
            is_scored=tuple(record.is_scored for record in records),
            texts=tuple("" if record.answer is None else record.answer.text for record in records),
            responses=tuple(record.rows[-1].ids_behind_prompt for record in records),
            num_tokens=tuple(sum(turn.num_tokens for turn in record.turns) for record in records),
            truncated=tuple(record.ending in CUT_ENDINGS for record in records),
            components={
                name: tuple(
                    part for group in found for part in group.components.get(name, (math.nan,) * len(group.records))
                )
                for name in names
            },
            printed=tuple(line for group in found for line in group.printed),
            endings=tuple(record.ending.value for record in records),
            causes=tuple(record.error for record in records if record.error),
        )
