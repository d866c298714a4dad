"""`TorchEngine`: generation in this process on the Hugging Face model.

Called by rollout actors, validation and the starter. Invariant: weights are replaced as a whole or not at all, and
every output names the version that produced it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import groupby

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nemo_rl.config.policy import PolicyConfig
from nemo_rl.data.tokenizer import load_tokenizer
from nemo_rl.errors import NonFiniteError, name_some
from nemo_rl.models.adapters.folder import served_adapter
from nemo_rl.models.generation.adapter_versions import ServesAdapters
from nemo_rl.models.generation.continuous import ContinuousDecoding
from nemo_rl.models.generation.interfaces import (
    GenerationOutput,
    GenerationRequest,
    GroupSamples,
    RecordedRoutes,
    SleepReport,
)
from nemo_rl.models.generation.requests import RowRequest, check_images, rows_of
from nemo_rl.models.generation.states import EngineStates, ModuleMemory
from nemo_rl.models.generation.torch_engine.adapters import AdapterSlots
from nemo_rl.models.generation.torch_engine.decode import (
    BatchRow,
    DecodeBatch,
    DecodedRows,
    RouteRecorder,
    RowSettings,
    StopStrings,
    decode_rows,
)
from nemo_rl.models.generation.torch_engine.tracing import (
    NO_SITES,
    DecodeRecording,
    DecodeTracing,
    ObservedRequest,
)
from nemo_rl.models.generation.turn_batch import NAMED, ContinuousSpec, TurnBatch, TurnRow
from nemo_rl.models.hf.loading import DTYPES, load_causal_lm, named_weights
from nemo_rl.models.policy.recording import RecordSpec
from nemo_rl.models.policy.tracing import TraceSpec
from nemo_rl.models.vision import family_of
from nemo_rl.routes.shape import RouteShape

__all__ = ["TorchEngine"]

SHUT_DOWN = "this engine was shut down; build a new one"


class TorchEngine(ServesAdapters[AdapterSlots]):
    """One model, one process; rows are decoded together, `max_batch_size` at a time.

    Example:
        >>> engine = TorchEngine.from_config(config, weight_version=0)     # doctest: +SKIP
        >>> output = engine.generate(request)                              # doctest: +SKIP
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        tokenizer: PreTrainedTokenizerBase | None,
        max_total_length: int,
        max_batch_size: int = 1024,
        batch_invariant: bool = False,
        weight_version: int = -1,
        number: int = 0,
        tracing: DecodeTracing | None = None,
        recording: DecodeRecording | None = None,
        adapters: AdapterSlots | None = None,
    ) -> None:
        """Args:
        model: used as it is; it must not be trained while this engine generates.
        tokenizer: only stop strings need one.
        max_total_length: prompt and response together, in tokens.
        batch_invariant: each row is decoded by itself, so that its bits are the same whatever is sampled beside it.
        weight_version: -1 when the weights are to be replaced before use, another number to use them at once.
        number: of this engine among those of a run; named in errors.
        tracing: of this model; None: nothing is shown.
        recording: of this model; None: nothing can be recorded.
        adapters: of this model, whose versions are then those of the engine; None: it serves none.
        """
        self._adapters = adapters
        self._number, self._tracing, self._recording = number, tracing, recording
        self._model: PreTrainedModel | None = model.eval()
        self._tokenizer = tokenizer
        self._max_total_length = max_total_length
        self._max_batch_size = max_batch_size
        self.batch_invariant = batch_invariant
        self._weight_version = weight_version
        self._recorder: RouteRecorder | None = None
        self._stop_strings: dict[tuple[str, ...], StopStrings] = {}
        self._states = EngineStates(ModuleMemory(model), number=number)

    @classmethod
    def from_config(
        cls,
        config: PolicyConfig,
        *,
        device: torch.device | str = "cpu",
        weight_version: int = -1,
        number: int = 0,
        num_engines: int = 1,
        trace: TraceSpec | None = None,
        record: RecordSpec | None = None,
        adapter_slots: int = 2,
    ) -> TorchEngine:
        """The engine of `policy.model_name` in `policy.generation.precision`.

        Args:
            num_engines: of the run.
            trace: the hub that is shown what is watched of the decoding; None: none.
            record: the recording of its tensors; None: none.
            adapter_slots: versions of an adapter that are held at once, with `policy.lora`; an engine that uses the
                weights of the folder begins with `policy.lora.adapter`.

        Raises:
            ModelFolderError: model or tokenizer folder is missing or incomplete.
        """
        model = load_causal_lm(config.model_name, dtype=DTYPES[config.generation.precision or config.precision])
        model.to(device)  # type: ignore[arg-type]
        engine = cls(
            model,
            tokenizer=load_tokenizer(config.tokenizer.name or config.model_name),
            max_total_length=config.max_total_sequence_length,
            max_batch_size=config.generation.max_batch_size,
            batch_invariant=config.generation.batch_invariant,
            weight_version=weight_version,
            number=number,
            tracing=None if trace is None else DecodeTracing(trace, model, number=number, num_engines=num_engines),
            recording=None
            if record is None
            else DecodeRecording(record, model, number=number, num_engines=num_engines),
            adapters=AdapterSlots(model, config.lora, most=adapter_slots) if config.lora.is_native else None,
        )
        if config.lora.is_native and config.lora.adapter is not None and weight_version >= 0:
            known = {name: slot.shape for name, slot in engine.adapter_slots.known.items()}
            engine.update_adapter(served_adapter(config.lora, known).items(), version=weight_version)
        return engine

    def decode_continuously(self, spec: ContinuousSpec, *, with_routes: bool = False) -> None:
        """Switch to continuous mode: rows of several `stream` calls share a batch; `spec.places` holds instead of
        `max_batch_size`."""
        if with_routes:
            # Before the first row: hooks must not be added while another thread decodes.
            self._route_recorder()
        self._decoding = ContinuousDecoding(TurnBatches(self), spec, version=lambda: self._weight_version)

    @property
    def weight_version(self) -> int:
        return self._weight_version

    def generate(self, request: GenerationRequest) -> GenerationOutput:
        """Samples all rows, prompt by prompt.

        Raises:
            ConfigError: routes are asked for, and the model has no experts, or routers of a kind that is not known.
            NonFiniteError: logits are NaN or inf; the text names row, engine and weight version.
            ValueError: seeds do not divide by prompts, or a prompt is empty or leaves no room for a token.
        """
        rows, settings = self.rows_of(request), self.settings_of(request)
        if self._decoding is not None:
            return self._decoding.generate(request)
        # Rows of like prompt length share a batch: less padding. The sort is stable, so groups stay together.
        order = sorted(range(len(rows)), key=lambda i: len(rows[i].prompt))
        size = 1 if self.batch_invariant else self._max_batch_size
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        with self.named_errors(), self._observed(request, len(rows)) as observed:
            parts = [
                decode_rows(
                    self._loaded_model(),
                    [rows[i] for i in batch],
                    settings,
                    observer=observed.batch([rows[i].number for i in batch]),
                    adapters=self._adapters,
                )
                for batch in batches
            ]
        output = _output(parts, order=order, settings=settings, version=self._weight_version)
        if self._recording is not None:
            self._recording.output(request, output)
        return output

    @contextmanager
    def _observed(self, request: GenerationRequest, num_rows: int) -> Iterator[ObservedRequest]:
        """Surround a request with what is shown and what is recorded of it."""
        shown = nullcontext(NO_SITES) if self._tracing is None else self._tracing.request(num_rows)
        recorded = nullcontext(NO_SITES) if self._recording is None else self._recording.request(request.keys)
        with shown as first, recorded as second:
            yield ObservedRequest(first, second)

    def rows_of(self, request: GenerationRequest) -> list[RowRequest]:
        if self._model is not None and not self._states.is_awake:
            raise self._states.not_awake()
        if self._adapters is not None or request.adapters:
            self.adapter_slots.versions.check_request(request.adapters)
        if request.images:
            check_images(request, family_of(self._loaded_model().config))
        return rows_of(request, max_total_length=self._max_total_length)

    def new_batch(self) -> DecodeBatch:
        return DecodeBatch(self._loaded_model(), adapters=self._adapters)

    def output_of(self, parts: Sequence[DecodedRows], settings: RowSettings) -> GenerationOutput:
        order = range(sum(len(rows.lengths) for rows in parts))
        return _output(parts, order=order, settings=settings, version=self._weight_version)

    def stream(self, request: GenerationRequest) -> Iterator[GroupSamples]:
        """Yield groups batch by batch; all at the end where a batch does not hold whole groups.

        Raises:
            ConfigError, NonFiniteError, ValueError: as `generate`, which samples each batch.
        """
        if self._decoding is not None:
            yield from self._decoding.stream(request)
            return
        num_groups, size = len(request.prompt_ids), request.group_size
        groups_of_batch, rest = divmod(self._max_batch_size, max(1, size))
        if rest or num_groups <= groups_of_batch:
            yield from super().stream(request)
            return
        # As `generate` sorts them.
        order = sorted(range(num_groups), key=lambda group: len(request.prompt_ids[group]))
        for start in range(0, num_groups, groups_of_batch):
            groups = tuple(order[start : start + groups_of_batch])
            yield GroupSamples(groups=groups, output=self.generate(request.of_groups(groups)))

    @contextmanager
    def named_errors(self) -> Iterator[None]:
        try:
            yield
        except NonFiniteError as error:
            raise NonFiniteError(
                f"generation engine {self._number}, weight version {self._weight_version}: {error}; nothing was "
                "sampled from it. Training has diverged, or the weights were broken from the start: resume from an "
                "earlier checkpoint with a lower learning rate, or check policy.model_name"
            ) from error

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int) -> int:
        """Replaces every weight; a tied weight may come under either of its names, or both."""
        with nullcontext() if self._decoding is None else self._decoding.at_rest():
            return self._replace_weights(weights, version=version)

    def _replace_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int) -> int:
        model = self._loaded_model()
        self._states.wake_weights()
        own = dict(named_weights(model))
        aliases = {name: weight for name, weight in model.state_dict(keep_vars=True).items() if name not in own}
        canonical = {id(weight): name for name, weight in own.items()}
        staged: dict[str, torch.Tensor] = {}
        problems: list[str] = []
        for name, weight in weights:
            target = aliases.get(name, own.get(name))
            if target is None:
                problems.append(f"{name}: unknown")
            elif target.shape != weight.shape:
                problems.append(f"{name}: expected shape {tuple(target.shape)}, got {tuple(weight.shape)}")
            else:
                staged[canonical[id(target)]] = weight
        problems += [f"{name}: missing" for name in own if name not in staged]
        if problems:
            raise ValueError(
                f"weight update to version {version} refused, version {self._weight_version} stays in use: "
                f"{name_some(problems)}"
            )
        with torch.no_grad():
            for name, weight in staged.items():
                own[name].copy_(weight)
        self._states.has_weights = True
        self._states.wake()
        self._weight_version = version
        return version

    def prepare_for_generation(self) -> None:
        """Wake up; rows that stand still go on."""
        self._loaded_model()
        self._states.wake()
        if self._decoding is not None:
            self._decoding.thaw()

    def finish_generation(self) -> None:
        """Hands unused cache memory back to the device; caches themselves end with each call. In continuous mode rows
        stand still from here on, until `prepare_for_generation`."""
        if self._decoding is not None:
            self._decoding.freeze()
        if self._model is not None and self._model.device.type == "cuda":
            torch.cuda.empty_cache()

    def sleep(self, level: int) -> SleepReport:
        self._loaded_model()
        self.finish_generation()
        if self._decoding is not None:
            self._decoding.check_idle()
        report = self._states.sleep(level)
        if not self._states.has_weights:
            self._weight_version = -1
        return report

    def shutdown(self) -> None:
        if self._decoding is not None:
            self._decoding.end(RuntimeError(SHUT_DOWN))
            self._decoding = None
        if self._tracing is not None:
            self._tracing.close()
        # It holds the model's modules.
        self._tracing = None
        self._model = None
        self._recorder = None
        self._adapters = None

    def _loaded_model(self) -> PreTrainedModel:
        if self._model is None:
            raise RuntimeError(SHUT_DOWN)
        return self._model

    def _route_recorder(self) -> RouteRecorder:
        """Made once: its hooks stay with the model."""
        if self._recorder is None:
            self._recorder = RouteRecorder(self._loaded_model())
        return self._recorder

    def settings_of(self, request: GenerationRequest) -> RowSettings:
        return RowSettings(
            # A row has its own limit: rows that differ in it alone are drawn together.
            sampling=replace(request.sampling, max_new_tokens=1),
            stop_strings=self._finder_of(request.sampling.stop_strings),
            routes=self._route_recorder() if request.with_routes else None,
            with_support=request.with_support,
            is_forced=request.forced is not None,
        )

    def _finder_of(self, texts: tuple[str, ...]) -> StopStrings | None:
        """Made once for these texts, so that rows of several requests have equal settings."""
        if not texts:
            return None
        if self._tokenizer is None:
            raise ValueError("stop strings need a tokenizer; pass one to TorchEngine")
        return self._stop_strings.setdefault(texts, StopStrings(texts, self._tokenizer))


class TurnBatches(TurnBatch):
    """The batches of a continuous engine.

    Rows of groups with names share one batch. Rows without names have a batch for each request or feed, so that they
    are decoded in the bits of request mode, and change no bit of the others. With `batch_invariant` each row has a
    batch of its own.
    """

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine
        self._batches: dict[tuple[int, int], DecodeBatch] = {}
        """Batches by lane, and by row where each has its own."""
        self._batch_of: dict[int, DecodeBatch] = {}
        """The batch of each row, live or ended."""

    def rows_of(self, request: GenerationRequest) -> list[RowRequest]:
        # Also the settings, which may be refused.
        self._engine.settings_of(request)
        return self._engine.rows_of(request)

    def join(self, rows: Sequence[TurnRow]) -> None:
        for place, joining in groupby(rows, key=self._place):
            batch = self._batches.setdefault(place, self._engine.new_batch())
            found = [
                BatchRow(
                    key=each.key,
                    request=each.row,
                    settings=self._engine.settings_of(each.request),
                    adapter=each.adapter,
                )
                for each in joining
            ]
            self._batch_of.update(dict.fromkeys((row.key for row in found), batch))
            batch.join(found)

    def turn(self, *, with_named: bool) -> Collection[int]:
        ended: list[int] = []
        with self._engine.named_errors():
            for (lane, row), batch in [*self._batches.items()]:
                if batch.num_live and (with_named or lane != NAMED):
                    ended += batch.turn()
                elif batch.is_empty:
                    del self._batches[lane, row]
        return ended

    def recompute(self) -> None:
        for (lane, _), batch in self._batches.items():
            if lane == NAMED:
                batch.recompute()

    def lengths(self) -> Mapping[int, int]:
        return {key: length for batch in self._batches.values() for key, length in batch.live_lengths().items()}

    def take(self, request: GenerationRequest, keys: Sequence[int]) -> GenerationOutput:
        parts = [batch.take([*found]) for batch, found in groupby(keys, key=lambda key: self._batch_of[key])]
        for key in keys:
            del self._batch_of[key]
        return self._engine.output_of(parts, self._engine.settings_of(request))

    def drop(self, keys: Collection[int]) -> None:
        gone = set(keys)
        for batch in {self._batch_of.pop(key) for key in gone if key in self._batch_of}:
            batch.drop(gone)

    def _place(self, row: TurnRow) -> tuple[int, int]:
        return row.lane, row.key if self._engine.batch_invariant else -1


def _output(
    parts: Sequence[DecodedRows], *, order: Sequence[int], settings: RowSettings, version: int
) -> GenerationOutput:
    """Return the rows of all parts without padding; `order` has the number of each in the request."""
    if not parts:
        return GenerationOutput.empty(weight_version=version)
    width = max(part.token_ids.shape[1] for part in parts)
    token_ids = [torch.nn.functional.pad(part.token_ids, (0, width - part.token_ids.shape[1])) for part in parts]
    logprobs = [torch.nn.functional.pad(part.logprobs, (0, width - part.logprobs.shape[1])) for part in parts]
    back = torch.empty(len(order), dtype=torch.int64)
    back[torch.tensor(order)] = torch.arange(len(order))
    lengths = torch.cat([part.lengths for part in parts]).cpu()[back]
    used = torch.arange(width) < lengths[:, None]
    supports = [row for part in parts for row in part.support or ()]
    routes = [row for part in parts for row in part.routes or ()]
    return GenerationOutput(
        token_ids=torch.cat(token_ids).cpu()[back][used].to(torch.int32),
        logprobs=torch.cat(logprobs).cpu()[back][used],
        lengths=lengths,
        truncated=torch.cat([part.truncated for part in parts]).cpu()[back],
        weight_version=version,
        routes=_recorded([routes[i] for i in back.tolist()], settings.routes.shape) if settings.routes else None,
        support=tuple(supports[i] for i in back.tolist()) if settings.with_support else None,
    )


def _recorded(rows: Sequence[torch.Tensor], shape: RouteShape) -> RecordedRoutes:
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    return RecordedRoutes(
        ids=torch.cat(list(rows)).cpu(), starts=torch.zeros_like(lengths), lengths=lengths, shape=shape
    )
