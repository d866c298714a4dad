"""The rollout worker: holds prompts, environment and tokenizer, has groups sampled, writes their first columns.

    RolloutHandle.submit_groups          the driver's side (`rollout_handle.py`): a pending result for each group
      |- WorkerGroup.stream              beside the worker's other calls, so that none waits for a rollout
      `- RolloutWorker.rollout
           |- EngineScheduler.stream     groups come as their rows end
           `- RolloutWorker._write       rewards, columns, routes -> data plane           (ResponseScorer, RouteWriter)

What crosses between the two sides: numbers of prompts, metas and per-row scalars, never a token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate, chain, repeat
from pathlib import Path

import numpy as np

from nemo_rl.config.data_plane import DurableConfig
from nemo_rl.data.datasets import Prompt, build_prompt_sets
from nemo_rl.data.tokenizer import load_tokenizer, stop_token_ids, tokenizer_identity
from nemo_rl.data_plane.address import DataPlaneAddress
from nemo_rl.data_plane.client.operation_counts import Totals
from nemo_rl.data_plane.column_io import (
    cut_columns,
    extra_specs,
    kv_first_write,
)
from nemo_rl.data_plane.factory import attach_data_plane
from nemo_rl.data_plane.interfaces import DataPlaneClient, KVBatchMeta, Tags
from nemo_rl.data_plane.keys import key_of, keys_of_groups
from nemo_rl.distributed.abort import RootCause
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.worker_groups import WorkerFleet
from nemo_rl.environments.answers import AnswerCheck, drop_unreadable
from nemo_rl.environments.interfaces import NO_REWARD
from nemo_rl.errors import DataPlaneClosed, RewardError, WorkerError
from nemo_rl.experience import routes
from nemo_rl.experience.conversation_log import (
    CONVERSATION,
    ConversationLog,
    log_column,
)
from nemo_rl.experience.conversation_rollouts import ScoredGroup
from nemo_rl.experience.conversation_setup import RolloutSampling
from nemo_rl.experience.conversations import GroupTask
from nemo_rl.experience.durable_groups import DurableGroups
from nemo_rl.experience.evaluation.evaluator import EvaluationTask, Evaluator, ValidationResult
from nemo_rl.experience.payload import (
    VERSION_SPANS,
    LineWriter,
    SampleStats,
    add_extras,
    add_images,
    build_columns,
    columns_of_conversations,
    columns_of_rows,
    component_columns,
    group_metrics,
    image_specs,
    left_out_metrics,
    single_turns,
    version_span_column,
)
from nemo_rl.experience.rollout_records import WEIGHT_VERSION, GroupRequest, RolloutInfo, RolloutResult
from nemo_rl.experience.rollouts import (
    EnvReport,
    ResponseScorer,
    RolloutSpec,
    SourceSampling,
    check_versions,
    sampling_of_sources,
    sampling_params,
)
from nemo_rl.experience.routes import RouteWriter
from nemo_rl.experience.scheduler import EngineScheduler, at_once
from nemo_rl.models.generation.interfaces import (
    GenerationInterface,
    GenerationOutput,
    GenerationRequest,
    GroupSamples,
)
from nemo_rl.utils.metrics import Max, Reduction, Sum

__all__ = ["REWARD_LOG", "RolloutSpec", "RolloutWorker"]

REWARD_LOG = "reward.log"
"""File in `logger.log_dir` with what the reward has printed; there once it has."""
UNSCORED_ROWS = "EnvReport.unscored: expected none from an environment without `overlaps` (WaitsForOthers)"
GROUPS_BESIDE = 64
"""Batches of groups that are scored at one time, beside sampling; each holds a thread that waits."""
MOST_WAITING = 3
"""Conversations that a message about a step that waits names."""


_Report = EnvReport | None


class RolloutWorker:
    """Prompts to scored rows.

    Args:
        generation: engines, shared with the weight sync.
    """

    def __init__(self, spec: RolloutSpec, *, generation: GenerationInterface) -> None:
        self._spec = spec
        self._generation = generation
        self._tokenizer = load_tokenizer(
            spec.policy.tokenizer.name or spec.policy.model_name,
            chat_template=spec.policy.tokenizer.chat_template,
        )
        self._stop_ids = stop_token_ids(spec.policy.model_name, self._tokenizer)
        self._parts = RolloutSampling(
            spec,
            tokenizer=self._tokenizer,
            stop_ids=self._stop_ids,
            generation=generation,
            log_file=spec.logger.log_dir / REWARD_LOG,
        )
        self._pictures, self._image_specs = self._parts.pictures, image_specs(spec.data, spec.policy)
        try:
            sets = build_prompt_sets(
                spec.data,
                self._tokenizer,
                now=spec.now,
                tools=self._parts.environment.schemas,
                pictures=self._pictures.encoder,
            )
            self._sets = drop_unreadable(spec.data, self._parts.environment.scorer, sets)
            self._train = tuple(prompt for where in spec.data.sources for prompt in self._sets[where].prompts)
            ends = accumulate(len(self._sets[where]) for where in spec.data.sources)
            self._numbers = {
                where: range(end - len(self._sets[where]), end)
                for where, end in zip(spec.data.sources, ends, strict=True)
            }
            self._answers = AnswerCheck(self._parts.environment.scorer, self._sets)
            if not self._answers.look():
                self._answers.go_on()
        except BaseException:
            self._parts.shutdown()
            raise
        self._lines = LineWriter(self._tokenizer, prompts=self._train, extras=extra_specs(spec.data.extra_columns))
        self._sampling = sampling_params(spec.policy.generation, self._stop_ids, is_validation=False)
        self._sources, limits = sampling_of_sources(
            spec.data, self._sampling, group_size=spec.grpo.num_generations_per_prompt
        )
        self._is_alike = self._parts.conversations is not None or len(set(self._sources.values())) == 1
        """True where one request holds groups of all sources."""
        has_limits = any(limit != self._sampling.max_new_tokens for limit in limits.values())
        self._limits = tuple(limits[prompt.section] for prompt in self._train) if has_limits else ()
        """Most tokens of a response to each prompt; empty where they are those of `sampling`."""
        self._scorer = None
        if self._parts.environment.scorer is not None:
            self._scorer = ResponseScorer(self._parts.environment.scorer, self._tokenizer, sampling=self._sampling)
        self._evaluator = Evaluator(
            spec.evaluation,
            sampling=sampling_params(spec.policy.generation, self._stop_ids, is_validation=True),
            seed=spec.grpo.seed,
            is_accuracy=spec.is_accuracy,
            sampler=self._parts.sampler_of(self._sampling),
            tokenizer=self._tokenizer,
            sets={name: self._sets[spec.data.held_out_key(name)] for name in spec.data.held_out},
        )
        self._leaves_none = any(env.on_none == "leave_out" for env in spec.envs.values())
        self._beside: ThreadPoolExecutor | None = None
        if self._scorer is not None and self._scorer.overlaps:
            self._beside = ThreadPoolExecutor(GROUPS_BESIDE, thread_name_prefix="scoring")
        self._may_lack = self._beside is not None or self._leaves_none
        """True where rows may have no reward."""
        self._client: DataPlaneClient | None = None
        self._routes = RouteWriter(spec.policy.router_replay)
        self._durable: DurableGroups | None = None
        self._weights: dict[int, str] = {}
        """Version -> digest, of the weights that this run has had; kept with finished groups."""

    def describe(self) -> RolloutInfo:
        data, sets = self._spec.data, self._sets
        identity = {where: found.digest for where, found in sets.items()}
        identity |= tokenizer_identity(self._tokenizer, stop_ids=self._stop_ids)
        return RolloutInfo(
            num_train_prompts=tuple(len(sets[where]) for where in data.sources),
            num_val_prompts=sum(len(sets[data.held_out_key(name)]) for name in data.held_out),
            num_skipped_prompts=sum(each.num_skipped_overlong for each in sets.values()),
            skipped=tuple(f"{where}: {line}" for where, found in sets.items() for line in found.skipped),
            identity=identity | {"reward": self._parts.environment.identity},
            prints_the_date=any(found.prints_the_date for found in sets.values()),
            remarks=tuple(line for found in sets.values() for line in found.remarks),
        )

    def setup_data_plane(self, address: DataPlaneAddress) -> None:
        """Attaches this process's client."""
        self._client = attach_data_plane(address)

    def open_durable(self, config: DurableConfig, identity: str) -> None:
        """Keep finished groups in files from here on; see `DurableGroups`."""
        self._durable = DurableGroups(config, identity=identity)

    def know_weights(self, weights: Mapping[int, str]) -> None:
        """Learn the digests of weights that the engines have, or had before the run was resumed, by version."""
        self._weights.update(weights)

    def settle_durable(self, below: int, done: Sequence[int]) -> None:
        """Forget stored groups that nobody asks for any more; see `DurableGroups.settle`."""
        if self._durable is not None:
            self._durable.settle(below, done)

    def remove_durable(self) -> None:
        """Remove the files of finished groups: the run is done."""
        durable, self._durable = self._durable, None
        if durable is not None:
            durable.remove()

    def durable_ordinals(self) -> dict[int, int]:
        """Return the ordinals of stored groups with the oldest version of their weights."""
        return {} if self._durable is None else self._durable.ordinals

    def restore_groups(
        self, groups: Sequence[GroupRequest], *, partition_id: str
    ) -> tuple[list[RolloutResult], list[GroupRequest]]:
        """Put stored groups into the data plane in place of sampling them.

        Returns:
            The rows of those that there are, and the others.
        """
        if self._durable is None:
            return [], list(groups)
        with self.client.stage("rollout"):
            return self._durable.restore(groups, self.client, weights=self._weights, partition_id=partition_id)

    def use_engines(self, engines: WorkerFleet) -> None:
        assert isinstance(self._generation, EngineScheduler), "one engine alone is never replaced"
        self._generation.use(engines)
        if self._parts.turn_sampler is not None:
            self._parts.turn_sampler.use(engines)

    @property
    def client(self) -> DataPlaneClient:
        if self._client is None:
            raise DataPlaneClosed("the rollout worker has no data plane client; call setup_data_plane first")
        return self._client

    def rollout(
        self,
        groups: Sequence[GroupRequest],
        *,
        version: int | None,
        partition_id: str,
        engine: int | None = None,
        share: tuple[int, int] = (0, 1),
    ) -> Iterator[tuple[RolloutResult, ...] | RootCause]:
        """Sample, score and write groups, as `_rollout` does. In an asynchronous run an error is the last thing that is
        yielded: it is that of these groups alone, and an error that leaves a worker ends its process."""
        try:
            restored, groups = self.restore_groups(groups, partition_id=partition_id)
            for result in restored:
                yield (result.counted(),)
            if groups:
                run = self._rollout if self._is_alike else self._rollout_of_kinds
                yield from run(groups, version=version, partition_id=partition_id, engine=engine, share=share)
        except Exception as error:
            if not self._spec.grpo.samples_ahead:
                raise
            yield RootCause.of(error, rank=0, stage="rollout")

    def _rollout(
        self,
        groups: Sequence[GroupRequest],
        *,
        version: int | None,
        partition_id: str,
        engine: int | None,
        share: tuple[int, int],
    ) -> Iterator[tuple[RolloutResult, ...]]:
        """Sample, score and write groups; yield them, each as a result of its own, as their rows end.

        Args:
            version: of the weights, as in `check_versions`.
            engine: number of the only engine that may sample them; None: any.
            share: (i, n): this is worker i of n that are given the same groups, each of which does its own part.

        Raises:
            WorkerError: an engine failed, or holds other weights. RewardError: a reward function failed.
        """
        for where, numbers in self._numbers.items():
            self._answers.require(where, [each.prompt - numbers.start for each in groups if each.prompt in numbers])
        if self._parts.conversations is not None:
            first, step = share
            mine = groups[first::step]
            yield from self._converse(mine, version=version, partition_id=partition_id, engine=engine)
            return
        own, replay = self._sources[self._train[groups[0].prompt].section], self._spec.policy.router_replay
        request = GenerationRequest(
            prompt_ids=tuple(self._train[group.prompt].ids for group in groups),
            seeds=tuple(group.seed + row for group in groups for row in range(own.group_size)),
            sampling=own.sampling,
            limits=tuple(self._limits[group.prompt] for group in groups) if self._limits else (),
            with_routes=replay.records_at_rollout,
            with_support=self._spec.policy.generation.record_support,
            names=tuple(group.name for group in groups) if self._spec.grpo.samples_ahead else (),
            keys=tuple(keys_of_groups([each.uid for each in groups], own.group_size)) if self._spec.names_rows else (),
            images=self._pictures.of([self._train[group.prompt] for group in groups]),
        )
        stream = self._stream(request, engine, share)
        scored = self._scored(groups, stream) if self._beside else zip(stream, repeat(None))
        for at, (samples, report) in enumerate(scored):
            check_versions(samples.output, version)
            ended = [groups[number] for number in samples.groups]
            results = self._write(ended, samples.output, report, partition_id=partition_id, first=at == 0)
            yield tuple(each.counted() for each in (replace(results[0], schedule=samples.schedule), *results[1:]))

    def _rollout_of_kinds(
        self,
        groups: Sequence[GroupRequest],
        *,
        version: int | None,
        partition_id: str,
        engine: int | None,
        share: tuple[int, int],
    ) -> Iterator[tuple[RolloutResult, ...]]:
        """Do as `_rollout` does, with a request for the groups of each size and way of sampling: at the same time where
        rows join and leave the engines' batches one by one, else one after the other."""
        kinds: dict[SourceSampling, list[GroupRequest]] = {}
        for group in groups:
            kinds.setdefault(self._sources[self._train[group.prompt].section], []).append(group)
        streams = [
            self._rollout(kind, version=version, partition_id=partition_id, engine=engine, share=share)
            for kind in kinds.values()
        ]
        yield from at_once(streams) if self._spec.grpo.samples_ahead else chain.from_iterable(streams)

    def _scored(
        self, groups: Sequence[GroupRequest], stream: Iterator[GroupSamples]
    ) -> Iterator[tuple[GroupSamples, EnvReport]]:
        """Yield samples with their rewards, in the order of the samples; they are scored beside the sampling of further
        groups."""
        assert self._scorer is not None and self._beside is not None, "scoring waits for others"
        waiting: deque[tuple[GroupSamples, Future[tuple[tuple[str, ...], EnvReport]]]] = deque()
        for samples in stream:
            prompts = [self._train[groups[number].prompt] for number in samples.groups]
            waiting.append((samples, self._beside.submit(self._scorer.score, prompts, samples.output)))
            while waiting and waiting[0][1].done():
                first, done = waiting.popleft()
                yield first, done.result()[1]
        for samples, scored in waiting:
            yield samples, scored.result()[1]

    def _stream(self, request: GenerationRequest, engine: int | None, share: tuple[int, int]) -> Iterator[GroupSamples]:
        scheduler = self._generation
        if not isinstance(scheduler, EngineScheduler):
            assert engine is None and share == (0, 1), "an engine is chosen by number among several"
            return scheduler.stream(request)
        return scheduler.stream(request, share=share) if engine is None else scheduler.samples_of(engine, request)

    def abort(self, names: Sequence[str]) -> None:
        """Take running groups out of the engines, by their names in the schedule; their results never come."""
        if self._parts.conversations is not None:
            self._parts.conversations.abort(names)
        else:
            self._generation.abort(names)

    def waiting(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return what the conversations of running groups wait for that have waited longest; none of single turns."""
        conversations = self._parts.conversations
        return () if conversations is None else tuple(conversations.waiting(names)[:MOST_WAITING])

    def _converse(
        self, groups: Sequence[GroupRequest], *, version: int | None, partition_id: str, engine: int | None
    ) -> Iterator[tuple[RolloutResult, ...]]:
        """Let groups of conversations run, and write each as it ends; the arguments are those of `_rollout`."""
        conversations = self._parts.conversations
        assert conversations is not None, "the recipe has conversations"
        sources = [self._sources[self._train[group.prompt].section] for group in groups]
        most = self._sampling.max_new_tokens
        tasks = [
            GroupTask(
                prompt=self._train[group.prompt],
                seeds=tuple(range(group.seed, group.seed + own.group_size)),
                sampling=replace(own.sampling, max_new_tokens=self._limits[group.prompt] if self._limits else most),
                name=group.name if self._spec.grpo.samples_ahead else "",
                only_engine=engine,
                min_scored=self._spec.experience.conversation.min_scored,
            )
            for group, own in zip(groups, sources, strict=True)
        ]
        for part, scored in enumerate(conversations.groups(tasks, version=version), start=1):
            result = self._write_conversations(
                groups[scored.number], scored, version=version, partition_id=partition_id, is_first=part == 1
            )
            if part == len(tasks) and not self._spec.grpo.samples_ahead:
                # All have been closed; beside groups of later steps others are open.
                still_open: dict[str, Reduction] = {"open_conversations": Max(float(conversations.num_open))}
                result = replace(result, metrics={**result.metrics, **still_open})
            if self._parts.turn_sampler is not None:
                result = replace(result, schedule=self._parts.turn_sampler.take_schedule())
            yield (result.counted(),)

    def _write_conversations(
        self, group: GroupRequest, scored: ScoredGroup, *, version: int | None, partition_id: str, is_first: bool
    ) -> RolloutResult:
        """Write the columns of a group whose conversations have ended; raise WorkerError where none has a turn."""
        size = len(scored.records)
        rows = [row for _, _, row in scored.rows]
        # The first row of each conversation has the key of a single turn.
        keys = [key_of(group.uid, sample + place * size) for sample, place, _ in scored.rows]
        columns = columns_of_rows(
            rows,
            pad_token_id=int(self._tokenizer.pad_token_id),
            with_versions=self._spec.grpo.samples_ahead,
        )
        prompt = self._train[group.prompt]
        specs = extra_specs(self._spec.data.extra_columns)
        records = [scored.records[sample] for sample, _, _ in scored.rows]
        self._add_extras(columns, [prompt] * len(rows), columns_of_conversations(records, specs))
        opening = prompt.messages
        columns[CONVERSATION] = log_column(
            [
                ConversationLog.of(scored.records[sample], prompt=group.prompt, opening=() if sample else opening)
                if place == 0
                else None
                for sample, place, _ in scored.rows
            ]
        )
        route_metrics = self._routes.add(
            self.client,
            columns,
            self._routes.of_rows(rows),
            keys=keys,
            partition_id=partition_id,
            is_first=is_first,
        )
        stats = replace(scored.stats(), leaves_none=self._leaves_none)
        versions = [held for row in rows for _, held in row.version_spans]
        if not versions and version is None:
            raise WorkerError(
                f"no conversation of the group has a turn: {scored.records[0].error or scored.records[0].ending}",
                stage="rollout",
            )
        newest = max(versions, default=version or 0)
        spans = [row.version_spans or ((0, newest),) for row in rows]
        tags = [
            {"reward": float(reward), **of_row}
            for reward, of_row in zip(stats.rewards, self._version_tags(spans), strict=True)
        ]
        columns = self._kept(columns, partition_id)
        with self.client.stage("rollout"):
            meta = kv_first_write(self.client, columns, keys, partition_id=partition_id, tags=tags)
        metrics = {**scored.metrics(), "reward_timeouts": Sum(float(scored.num_timeouts)), **route_metrics}
        result = RolloutResult(meta=meta, sample_stats=stats, metrics=metrics, printed=scored.printed)
        if (durable := self._durable) is not None:
            sampled = {version for row in spans for _, version in row}
            durable.keep([group], [result], [sampled], columns, weights=self._weights)
        return result

    def _write(
        self, groups: list[GroupRequest], output: GenerationOutput, report: _Report, *, partition_id: str, first: bool
    ) -> tuple[RolloutResult, ...]:
        """Score groups that have ended, if nobody has, and write their columns; `first` of one call of `rollout`."""
        assert self._scorer is not None, "single turns are scored"
        prompts = [self._train[group.prompt] for group in groups]
        report = report or self._scorer.score(prompts, output)[1]
        size = len(output.lengths) // len(groups)
        keys = keys_of_groups([group.uid for group in groups], size)
        columns = build_columns(
            [prompt.ids for prompt in prompts],
            output,
            group_size=size,
            pad_token_id=int(self._tokenizer.pad_token_id),
        )
        self._add_extras(columns, [prompt for prompt in prompts for _ in range(size)], report.columns)
        add_images(columns, self._image_specs, self._pictures.of(prompts), group_size=size)
        recorded = () if output.routes is None else (output.routes,)
        route_metrics: dict[str, Reduction] = {}
        if self._spec.policy.router_replay.records_at_rollout:
            route_metrics = self._routes.add(
                self.client, columns, recorded, keys=keys, partition_id=partition_id, is_first=first
            )
        rewards = np.asarray(report.rewards, dtype=np.float32)
        tags = [
            {"reward": float(reward), **versions}
            for reward, versions in zip(rewards, self._version_tags(output.row_spans), strict=True)
        ]
        if self._spec.grpo.samples_ahead:
            columns[VERSION_SPANS] = version_span_column(output)
        columns = self._kept(columns, partition_id)
        with self.client.stage("rollout"):
            meta = kv_first_write(self.client, columns, keys, partition_id=partition_id, tags=tags)
        sample_stats = SampleStats(
            rewards=rewards,
            truncated=output.truncated.numpy(),
            response_lengths=output.lengths.numpy().astype(np.int32),
            components=component_columns(report.components),
        )
        written = RolloutResult(meta=meta, sample_stats=sample_stats)
        shared = {"reward_timeouts": Sum(float(report.num_timeouts)), **output.metrics, **route_metrics}
        results = [
            replace(written.select(range(first, first + size)), metrics=metrics)
            for first, metrics in zip(range(0, len(keys), size), group_metrics(output, size), strict=True)
        ]
        results = self._with_unscored(results, report, size) if self._may_lack or any(report.unscored) else results
        # What was measured of all these groups together goes with the first one.
        shared = {**results[0].metrics, **report.metrics, **shared}
        results[0] = replace(results[0], metrics=shared, printed=report.printed)
        if (durable := self._durable) is not None:
            of_row = [{version for _, version in spans} for spans in output.row_spans]
            versions = [set().union(*of_row[at : at + size]) for at in range(0, len(keys), size)]
            durable.keep(groups, results, versions, columns, weights=self._weights)
        return tuple(results)

    def _with_unscored(self, groups: Sequence[RolloutResult], report: EnvReport, size: int) -> list[RolloutResult]:
        """Return groups with what is known of their rows without a reward."""
        others = [why for why in report.unscored if why and not (self._leaves_none and why == NO_REWARD)]
        if self._beside is None and others:
            raise RewardError(f"{UNSCORED_ROWS}, got {others[0]!r}")
        found = []
        for first, group in zip(range(0, size * len(groups), size), groups, strict=True):
            rows = single_turns(report.unscored[first : first + size], group.sample_stats.truncated, group_size=size)
            stats = replace(group.sample_stats, conversations=rows, leaves_none=self._leaves_none)
            metrics = {**group.metrics, **left_out_metrics(stats)}
            found.append(replace(group, sample_stats=stats, metrics=metrics))
        return found

    def _kept(self, columns: BatchedDataDict, partition_id: str) -> BatchedDataDict:
        """Return the columns as they are kept in files, without padding; as they are where none are kept."""
        if self._durable is None:
            return columns
        return BatchedDataDict(cut_columns(self.client, columns, partition_id=partition_id))

    def _version_tags(self, spans: Sequence[Sequence[tuple[int, int]]]) -> list[dict[str, int]]:
        of_row = [[version for _, version in row] for row in spans]
        if not self._spec.grpo.samples_ahead:
            return [{WEIGHT_VERSION: min(versions)} for versions in of_row]
        return [
            {WEIGHT_VERSION: min(versions), "first_version": versions[0], "last_version": versions[-1]}
            for versions in of_row
        ]

    def _add_extras(
        self, columns: BatchedDataDict, prompts: Sequence[Prompt], given: Mapping[str, Sequence[object]]
    ) -> None:
        """Add the columns of `data.extra_columns`; `prompts` has one entry per row."""
        declared = self._spec.data.extra_columns
        if declared:
            add_extras(columns, extra_specs(declared), prompts, declared=declared, given=given)

    def validate(self, task: EvaluationTask) -> ValidationResult:
        """Measures the held-out prompts; see `Evaluator.evaluate`."""
        for where in map(self._spec.data.held_out_key, self._spec.data.held_out):
            self._answers.require(where, range(len(self._sets[where].prompts[: task.max_prompts])))
        return self._evaluator.evaluate(task)

    def validate_apart(self, task: EvaluationTask) -> Iterator[ValidationResult]:
        """Yield what `validate` returns: as a stream it runs beside the worker's other calls."""
        yield self.validate(task)

    def log_rollouts(
        self, meta: KVBatchMeta, *, scored: KVBatchMeta | None, path: Path, records: Sequence[Mapping[str, object]]
    ) -> None:
        """Write the rows as readable JSON lines; see `LineWriter`."""
        self._lines.write(self.client, meta, scored=scored, path=path, records=records)

    def keep_columns(self, meta: KVBatchMeta, *, fields: Sequence[str], path: Path) -> int:
        """Write columns of the rows to a file, as they are stored; return its bytes."""
        return routes.keep_columns(self.client, meta, fields=fields, path=path)

    def keep_conversations(self, meta: KVBatchMeta, *, path: Path) -> int:
        """Write the conversations of the rows to a file of `ConversationFile`; return its bytes."""
        schemas, now = self._parts.environment.schemas, self._parts.now
        return routes.keep_conversations(self.client, meta, schemas=schemas, now=now, path=path)

    def restore_columns(
        self, keys: Sequence[str], *, partition_id: str, tags: Sequence[Tags], path: Path
    ) -> KVBatchMeta:
        """Write rows of a file of `keep_columns` under new keys; see `read_column_file` for its errors."""
        return routes.restore_columns(self.client, keys, partition_id=partition_id, tags=tags, path=path)

    def data_plane_snapshot(self) -> Totals:
        """Counters of this process's client since the last call."""
        return self.client.snapshot(reset=True)

    def shutdown(self) -> None:
        """Ends scoring processes and the client. Idempotent."""
        self._answers.close()
        self._parts.shutdown()
        if self._beside is not None:
            self._beside.shutdown(wait=False, cancel_futures=True)
        durable, self._durable = self._durable, None
        if durable is not None:
            durable.close()
        client, self._client = self._client, None
        if client is not None:
            client.close()
