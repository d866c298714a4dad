"""A generation engine takes settings and requests with their rows, and returns outputs and reports.

The records of `GenerationInterface`. Invariants: rows of an output come in the order of the rows of its request, which
is prompt by prompt; each row has room for at least one token.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from nemo_rl.config.policy import PolicyConfig
from nemo_rl.models.generation.schedule import ScheduleEntry
from nemo_rl.models.policy.recording import RecordSpec
from nemo_rl.models.policy.tracing import TraceSpec
from nemo_rl.models.vision import PromptImages, VisionFamily
from nemo_rl.routes.shape import RecordedRoutes
from nemo_rl.utils.metrics import Reduction, merge_metrics

__all__ = [
    "BASE",
    "EngineLoad",
    "EngineSpec",
    "GenerationOutput",
    "GenerationRequest",
    "GroupSamples",
    "RankMemoryChange",
    "RowRequest",
    "SamplingParams",
    "SleepReport",
    "check_images",
    "rows_of",
]


BASE = -1
"""Version of no adapter: the frozen model alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpec:
    """The settings that one replica needs to start."""

    policy: PolicyConfig
    use_gpu: bool = False
    threads: int = 1
    number: int = 0
    """Number of the replica."""
    num_engines: int = 1
    """Replicas of the run."""
    trace: TraceSpec | None = None
    """The tracer's hub; None: none."""
    record: RecordSpec | None = None
    """The recording of the engine's tensors; None: none."""
    weight_version: int = -1
    """Version of the weights of `policy.model_name`; -1: a refit brings others before anything is sampled."""
    continuous: bool = False
    """True: several `stream` calls may be active at once, whose rows join and leave one batch between tokens."""
    script: tuple[ScheduleEntry, ...] = ()
    """Schedule of a continuous engine that is to be followed, event by event; empty: groups join as there is room."""
    adapter_slots: int = 2
    """Versions of an adapter that are held at once, with `policy.lora`: those of rows that may still be sampled, and
    the one that a refit brings."""
    bundles: tuple[int, ...] = ()
    """Bundles of Ray's placement group in which the ranks of an engine over several GPUs run; empty: the engine's own
    process, and children of it, are all."""
    gpu_share: float = 1.0
    """Share of a GPU that Ray gives to each rank in these bundles."""
    sleep_level: int = 0
    """Level at which the engine sleeps while the policy trains; above 0 it starts asleep, unless it has weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Sampling settings, the same for every row of a request."""

    temperature: float
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int | None = None
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    stop_strings: tuple[str, ...] = ()

    @property
    def is_plain(self) -> bool:
        """True when tokens are drawn from the model's own distribution."""
        return self.temperature == 1.0 and self.top_p == 1.0 and self.top_k is None


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """P prompts, G samples of each. Rows come back prompt by prompt: row = p * G + g.

    Example:
        Two prompts, two samples each: `prompt_ids=[[1, 2], [3]]`, `seeds=[7, 8, 9, 10]`.
    """

    prompt_ids: tuple[tuple[int, ...], ...]
    seeds: tuple[int, ...]
    """P * G seeds. What a row samples depends on its seed, its prompt and the weights alone."""
    sampling: SamplingParams
    with_routes: bool = False
    """True when the output has the routes of experts; the model must have such."""
    with_support: bool = False
    """True when the output has the sets that top-k and top-p kept; of the embedded engine alone."""
    forced: tuple[tuple[int, ...], ...] | None = None
    """The response of each row, decoded token by token as if it had been drawn, so that the output has its
    log-probabilities; stops and limits hold as for drawn ones. None: rows are drawn."""
    limits: tuple[int, ...] = ()
    """Most tokens of each prompt's rows, where that is less than `sampling.max_new_tokens`; empty: it is not."""
    names: tuple[str, ...] = ()
    """Name of each prompt's group, `ordinal.attempt`, for the schedule of a continuous engine. Empty: the rows are in
    no schedule, have places of their own, and one version each, such as those of validation and receipts."""

    adapters: tuple[int, ...] = ()
    """Version of the adapter of each prompt's rows, or `BASE`; empty: the one in use. For engines that serve them."""
    images: tuple[PromptImages | None, ...] = ()
    """Images of each prompt, whose placeholders stand in its ids; empty: no prompt has any."""
    keys: tuple[str, ...] = ()
    """Key of each row, for a recording of the engine's tensors; empty: the request is not recorded."""

    @property
    def group_size(self) -> int:
        return len(self.seeds) // len(self.prompt_ids) if self.prompt_ids else 0

    def of_groups(self, groups: Sequence[int]) -> GenerationRequest:
        """Return the request for the prompts with these numbers, in that order."""
        rows = [group * self.group_size + row for group in groups for row in range(self.group_size)]
        return replace(
            self,
            prompt_ids=tuple(self.prompt_ids[group] for group in groups),
            seeds=tuple(self.seeds[row] for row in rows),
            forced=None if self.forced is None else tuple(self.forced[row] for row in rows),
            limits=tuple(self.limits[group] for group in groups) if self.limits else (),
            names=tuple(self.names[group] for group in groups) if self.names else (),
            adapters=tuple(self.adapters[group] for group in groups) if self.adapters else (),
            images=tuple(self.images[group] for group in groups) if self.images else (),
            keys=tuple(self.keys[row] for row in rows) if self.keys else (),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationOutput:
    """N responses laid end to end."""

    token_ids: torch.Tensor
    """`[sum(lengths)]` int32, response tokens, the stop token included."""
    logprobs: torch.Tensor
    """`[sum(lengths)]` float32, log-probability under the distribution sampled from (temperature, top-p, top-k)."""
    lengths: torch.Tensor
    """`[N]` int64, at least 1."""
    truncated: torch.Tensor
    """`[N]` bool, True when `max_new_tokens` ended the row."""
    weight_version: int | tuple[int, ...]
    """Version of the weights that produced a row: one number for all rows, or one per row; of a row of several versions
    the oldest."""
    version_spans: tuple[tuple[tuple[int, int], ...], ...] | None = None
    """Spans (first token of the response, version) of each row, from token 0 on; None where each row has one
    version."""
    routes: RecordedRoutes | None = None
    """Routes of prompts and responses; None unless the request asks for them."""
    support: tuple[torch.Tensor, ...] | None = None
    """Sampling masks of each row's tokens, uint8, laid out by `nemo_rl.models.head.logits`; None unless the request
    asks."""
    cached_tokens: torch.Tensor | None = None
    """`[N]` int64, tokens of the prompt that a prefix cache had; None where there is no such cache."""
    metrics: Mapping[str, Reduction] = field(default_factory=dict)
    """Metrics of the engine's work; a run logs it under `rollout/`."""

    @property
    def row_versions(self) -> tuple[int, ...]:
        """The weight version of each row."""
        version = self.weight_version
        return (version,) * len(self.lengths) if isinstance(version, int) else version

    @property
    def row_spans(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """The version spans of each row."""
        if self.version_spans is not None:
            return self.version_spans
        return tuple(((0, version),) for version in self.row_versions)

    def with_spans(self, spans: tuple[tuple[tuple[int, int], ...], ...]) -> GenerationOutput:
        """Return the output with the version spans of each row, in the shortest form that says them."""
        versions = tuple(min(version for _, version in row) for row in spans)
        is_mixed = any(len(row) > 1 for row in spans)
        is_one = not is_mixed and len(set(versions)) == 1
        return replace(
            self, weight_version=versions[0] if is_one else versions, version_spans=spans if is_mixed else None
        )

    @classmethod
    def empty(cls, *, weight_version: int) -> GenerationOutput:
        """Return an output without rows."""
        return cls(
            token_ids=torch.zeros(0, dtype=torch.int32),
            logprobs=torch.zeros(0),
            lengths=torch.zeros(0, dtype=torch.int64),
            truncated=torch.zeros(0, dtype=torch.bool),
            weight_version=weight_version,
        )

    @classmethod
    def joined(cls, outputs: Sequence[GenerationOutput]) -> GenerationOutput:
        """Return the rows of all outputs, of which there is at least one, in order; weight versions may differ."""
        versions = tuple(version for output in outputs for version in output.row_versions)
        supports = [output.support for output in outputs if output.support is not None]
        cached = [output.cached_tokens for output in outputs if output.cached_tokens is not None]
        return cls(
            token_ids=torch.cat([output.token_ids for output in outputs]),
            logprobs=torch.cat([output.logprobs for output in outputs]),
            lengths=torch.cat([output.lengths for output in outputs]),
            truncated=torch.cat([output.truncated for output in outputs]),
            weight_version=versions or outputs[0].weight_version,
            version_spans=tuple(spans for output in outputs for spans in output.row_spans)
            if any(output.version_spans is not None for output in outputs)
            else None,
            routes=_joined_routes([output.routes for output in outputs if output.routes is not None]),
            support=tuple(row for support in supports for row in support) if supports else None,
            cached_tokens=torch.cat(cached) if len(cached) == len(outputs) else None,
            metrics=merge_metrics(output.metrics for output in outputs),
        )

    def select(self, rows: Sequence[int]) -> GenerationOutput:
        """Return the rows at `rows`, in that order; the metrics stay those of all."""
        index = torch.tensor(rows, dtype=torch.int64)
        lengths = self.lengths[index]
        tokens = _spans(self.lengths.cumsum(0)[index] - lengths, lengths)
        routes = self.routes
        if routes is not None:
            spans = _spans(routes.lengths.cumsum(0)[index] - routes.lengths[index], routes.lengths[index])
            routes = replace(routes, ids=routes.ids[spans], starts=routes.starts[index], lengths=routes.lengths[index])
        versions, all_spans = self.weight_version, self.version_spans
        return replace(
            self,
            token_ids=self.token_ids[tokens],
            logprobs=self.logprobs[tokens],
            lengths=lengths,
            truncated=self.truncated[index],
            weight_version=versions if isinstance(versions, int) else tuple(versions[row] for row in rows),
            version_spans=None if all_spans is None else tuple(all_spans[row] for row in rows),
            routes=routes,
            support=None if self.support is None else tuple(self.support[row] for row in rows),
            cached_tokens=None if self.cached_tokens is None else self.cached_tokens[index],
        )


def _joined_routes(routes: Sequence[RecordedRoutes]) -> RecordedRoutes | None:
    if not routes:
        return None
    return RecordedRoutes(
        ids=torch.cat([part.ids for part in routes]),
        starts=torch.cat([part.starts for part in routes]),
        lengths=torch.cat([part.lengths for part in routes]),
        shape=routes[0].shape,
    )


def _spans(starts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Indices of several spans, one span after the other."""
    first = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum())) + (starts - first).repeat_interleave(lengths)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSamples:
    """Groups of a request whose rows have all ended."""

    groups: tuple[int, ...]
    """Numbers of the prompts in the request, or in the feed."""
    output: GenerationOutput
    """Rows of these groups, in their order."""
    schedule: tuple[ScheduleEntry, ...] = ()
    """Events of a continuous engine's batch since it last handed any out."""
    seconds: tuple[float, ...] = ()
    """Time of each group in the batch of a continuous engine; empty from others."""

    def without(self, groups: Collection[int]) -> GroupSamples | None:
        """Return the samples of the other groups; None where there is none."""
        kept = [place for place, group in enumerate(self.groups) if group not in groups]
        if len(kept) == len(self.groups):
            return self
        size = len(self.output.lengths) // len(self.groups)
        rows = [place * size + row for place in kept for row in range(size)]
        found = tuple(self.groups[place] for place in kept)
        seconds = tuple(self.seconds[place] for place in kept) if self.seconds else ()
        return replace(self, groups=found, output=self.output.select(rows), seconds=seconds) if kept else None


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLoad:
    """The work of a continuous engine in some time."""

    busy_s: float = 0.0
    """Seconds in which it decoded."""
    thrown_tokens: int = 0
    """Tokens of rows that were taken out before they ended."""
    group_seconds: tuple[float, ...] = ()
    """Time of each named group that ended: from the join of its rows to the end of the last one."""


MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemoryChange:
    """The memory of one rank of an engine before and after it fell asleep or woke up, in bytes."""

    device: str
    before: int
    after: int
    note: str = ""
    """Remark on memory that has stayed where it was; empty where there is none."""

    def __str__(self) -> str:
        moved = f"{self.before / MIB:.1f} MiB -> {self.after / MIB:.1f} MiB on {self.device}"
        return f"{moved} ({self.note})" if self.note else moved


@dataclass(frozen=True, kw_only=True, slots=True)
class SleepReport:
    """The memory that an engine has freed."""

    level: int
    ranks: tuple[RankMemoryChange, ...]
    """Changes of each rank; empty where the engine slept already."""

    @property
    def freed_bytes(self) -> int:
        """Return the bytes of all ranks."""
        return sum(change.before - change.after for change in self.ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowRequest:
    """One response to sample."""

    prompt: tuple[int, ...]
    seed: int
    max_new_tokens: int
    """Most tokens to sample, at least 1; already cut to what the total length leaves."""
    number: int = 0
    """Number of the row in its request; named in errors."""
    group: str = ""
    adapter: int | None = None
    """Version of its adapter, or `BASE`; None: the one in use."""
    images: PromptImages | None = None
    forced: tuple[int, ...] | None = None
    """The response, as long as `max_new_tokens`; None: it is drawn."""


def rows_of(request: GenerationRequest, *, max_total_length: int) -> list[RowRequest]:
    """Return all rows, prompt by prompt.

    Args:
        max_total_length: prompt and response together, in tokens.

    Raises:
        ValueError: seeds do not divide by prompts, or a prompt is empty or leaves no room for a token, or for what is
            forced.
    """
    num_prompts, num_rows = len(request.prompt_ids), len(request.seeds)
    if (num_prompts == 0) != (num_rows == 0) or (num_prompts and num_rows % num_prompts):
        raise ValueError(f"expected as many seeds for every prompt, got {num_prompts} prompts and {num_rows} seeds")
    if request.names and len(request.names) != num_prompts:
        raise ValueError(f"expected a name for each of {num_prompts} prompts, got {len(request.names)}")
    if request.limits and len(request.limits) != num_prompts:
        raise ValueError(f"expected a limit for each of {num_prompts} prompts, got {len(request.limits)}")
    if request.adapters and len(request.adapters) != num_prompts:
        raise ValueError(f"expected an adapter for each of {num_prompts} prompts, got {len(request.adapters)}")
    if request.images and len(request.images) != num_prompts:
        raise ValueError(f"expected images or None for each of {num_prompts} prompts, got {len(request.images)}")
    rows: list[RowRequest] = []
    for p, prompt in enumerate(request.prompt_ids):
        limit = min((request.sampling.max_new_tokens, *request.limits[p : p + 1]))
        room = min(limit, max_total_length - len(prompt))
        if not prompt or room < 1:
            raise ValueError(
                f"prompt {p}: expected 1 to {max_total_length - 1} tokens (max_total_length "
                f"{max_total_length} less one response token), got {len(prompt)}"
            )
        name = request.names[p] if request.names else ""
        adapter = request.adapters[p] if request.adapters else None
        seeds = request.seeds[p * request.group_size : (p + 1) * request.group_size]
        rows += [
            RowRequest(
                prompt=tuple(prompt),
                seed=seed,
                max_new_tokens=room,
                number=number,
                group=name,
                adapter=adapter,
                images=request.images[p] if request.images else None,
            )
            for number, seed in enumerate(seeds, start=len(rows))
        ]
    return rows if request.forced is None else _forced(rows, request.forced)


def check_images(request: GenerationRequest, family: VisionFamily | None) -> None:
    """Compare placeholders and images of each prompt.

    Args:
        family: of the model; None: it takes no images.

    Raises:
        ValueError: they do not fit, or the model takes no images.
    """
    for number, (prompt, images) in enumerate(zip(request.prompt_ids, request.images, strict=False)):
        if images is None:
            continue
        if family is None:
            raise ValueError(f"prompt {number} has images, and the model of this engine takes none")
        problem = family.row_problem(torch.tensor(prompt), images.tensors)
        if problem is not None:
            raise ValueError(f"prompt {number}: {problem}")


def _forced(rows: Sequence[RowRequest], responses: Sequence[tuple[int, ...]]) -> list[RowRequest]:
    if len(responses) != len(rows):
        raise ValueError(f"expected a forced response for each of {len(rows)} rows, got {len(responses)}")
    for row, response in zip(rows, responses, strict=True):
        if not 1 <= len(response) <= row.max_new_tokens:
            raise ValueError(
                f"row {row.number}: expected 1 to {row.max_new_tokens} forced tokens, got {len(response)}; give fewer, "
                "or raise max_new_tokens"
            )
    return [
        replace(row, forced=response, max_new_tokens=len(response))
        for row, response in zip(rows, responses, strict=True)
    ]
