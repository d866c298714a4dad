"""`TorchEngine`: generation in this process on the Hugging Face model.

Called by rollout actors, validation and the starter. Invariant: weights are replaced as a whole or not at all, and
every output names the version that produced it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nemo_rl.config.policy import PolicyConfig
from nemo_rl.data.tokenizer import load_tokenizer
from nemo_rl.errors import NonFiniteError, name_some
from nemo_rl.models.generation.interfaces import (
    GenerationInterface,
    GenerationOutput,
    GenerationRequest,
    GroupSamples,
    RecordedRoutes,
    SamplingParams,
)
from nemo_rl.models.generation.rows import rows_of
from nemo_rl.models.generation.torch_engine.decode import (
    DecodedRows,
    DecodeRecorders,
    RouteRecorder,
    RowRoutes,
    StopStrings,
    decode_rows,
)
from nemo_rl.models.generation.torch_engine.tracing import NO_TRACING, DecodeTracing, EngineTracing
from nemo_rl.models.loading import DTYPES, load_causal_lm, named_weights
from nemo_rl.models.policy.tracing import TraceSpec
from nemo_rl.models.support import SupportRecorder
from nemo_rl.routes.shape import RouteShape

__all__ = ["TorchEngine"]


class TorchEngine(GenerationInterface):
    """One model, one process; rows are decoded together, `max_batch_size` at a time.

    Example:
        >>> engine = TorchEngine.from_config(config, weight_version=0)     # doctest: +SKIP
        >>> output = engine.generate(request)                              # doctest: +SKIP
    """

    def __init__(  # noqa: PLR0913 - the parts of the object
        self,
        model: PreTrainedModel,
        *,
        tokenizer: PreTrainedTokenizerBase | None,
        max_total_length: int,
        max_batch_size: int = 1024,
        weight_version: int = -1,
        number: int = 0,
        tracing: EngineTracing = NO_TRACING,
    ) -> None:
        """Args:
        model: used as it is; it must not be trained while this engine generates.
        tokenizer: only stop strings need one.
        max_total_length: prompt and response together, in tokens.
        weight_version: -1 when the weights are to be replaced before use, another number to use them at once.
        number: of this engine among those of a run; named in errors.
        tracing: of this model.
        """
        self._number, self._tracing = number, tracing
        self._model: PreTrainedModel | None = model.eval()
        self._tokenizer = tokenizer
        self._max_total_length = max_total_length
        self._max_batch_size = max_batch_size
        self._weight_version = weight_version
        self._recorder: RouteRecorder | None = None

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
    ) -> TorchEngine:
        """The engine of `policy.model_name` in `policy.generation.precision`.

        Args:
            num_engines: of the run.
            trace: the hub that is shown what is watched of the decoding; None: none.

        Raises:
            ModelFolderError: model or tokenizer folder is missing or incomplete.
        """
        model = load_causal_lm(config.model_name, dtype=DTYPES[config.generation.precision or config.precision])
        model.to(device)  # type: ignore[arg-type]
        return cls(
            model,
            tokenizer=load_tokenizer(config.tokenizer.name or config.model_name),
            max_total_length=config.max_total_sequence_length,
            max_batch_size=config.generation.max_batch_size,
            weight_version=weight_version,
            number=number,
            tracing=NO_TRACING
            if trace is None
            else DecodeTracing(trace, model, number=number, num_engines=num_engines),
        )

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
        rows = rows_of(request, max_total_length=self._max_total_length)
        if not rows:
            return _join([], order=[], version=self._weight_version)
        recorder = self._route_recorder() if request.with_routes else None
        stop_strings = self._stop_strings(request.sampling)
        # Rows of like prompt length share a batch: less padding. The sort is stable, so groups stay together.
        order = sorted(range(len(rows)), key=lambda i: len(rows[i].prompt))
        batches = [order[start : start + self._max_batch_size] for start in range(0, len(order), self._max_batch_size)]
        routes = [RowRoutes(recorder) if recorder is not None else None for _ in batches]
        supports = [SupportRecorder() if request.with_support else None for _ in batches]
        listening = recorder.listening() if recorder is not None else nullcontext()
        with listening, self._named_errors(), self._tracing.request(len(rows)) as observed:
            parts = [
                decode_rows(
                    self._loaded_model(),
                    [rows[i] for i in batch],
                    request.sampling,
                    stop_strings=stop_strings,
                    recorders=DecodeRecorders(
                        routes=recorded,
                        support=support,
                        observer=observed.batch([rows[i].number for i in batch]),
                    ),
                )
                for batch, recorded, support in zip(batches, routes, supports, strict=True)
            ]
        output = _join(parts, order=order, version=self._weight_version)
        if request.with_support:
            output = replace(output, support=_support_rows(supports, batches))
        if recorder is None:
            return output
        taken = [recorded.end_to_end() for recorded in routes if recorded is not None]
        return replace(output, routes=_join_routes(taken, order=order, shape=recorder.shape))

    def stream(self, request: GenerationRequest) -> Iterator[GroupSamples]:
        """Yield groups batch by batch; all at the end where a batch does not hold whole groups.

        Raises:
            ConfigError, NonFiniteError, ValueError: as `generate`, which samples each batch.
        """
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
    def _named_errors(self) -> Iterator[None]:
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
        model = self._loaded_model()
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
        self._weight_version = version
        return version

    def prepare_for_generation(self) -> None:
        """Check that the engine is there; its weights stay where they are."""
        self._loaded_model()

    def finish_generation(self) -> None:
        """Hands unused cache memory back to the device; caches themselves end with each call."""
        if self._model is not None and self._model.device.type == "cuda":
            torch.cuda.empty_cache()

    def shutdown(self) -> None:
        self._tracing.close()
        # It holds the model's modules.
        self._tracing = NO_TRACING
        self._model = None
        self._recorder = None

    def _loaded_model(self) -> PreTrainedModel:
        if self._model is None:
            raise RuntimeError("this engine was shut down; build a new one")
        return self._model

    def _route_recorder(self) -> RouteRecorder:
        """Made once: its hooks stay with the model."""
        if self._recorder is None:
            self._recorder = RouteRecorder(self._loaded_model())
        return self._recorder

    def _stop_strings(self, sampling: SamplingParams) -> StopStrings | None:
        if not sampling.stop_strings:
            return None
        if self._tokenizer is None:
            raise ValueError("stop strings need a tokenizer; pass one to TorchEngine")
        return StopStrings(sampling.stop_strings, self._tokenizer)


def _join(parts: Sequence[DecodedRows], *, order: Sequence[int], version: int) -> GenerationOutput:
    """Rows of all batches in the order of the request, without padding."""
    if not parts:
        return GenerationOutput(
            token_ids=torch.zeros(0, dtype=torch.int32),
            logprobs=torch.zeros(0),
            lengths=torch.zeros(0, dtype=torch.int64),
            truncated=torch.zeros(0, dtype=torch.bool),
            weight_version=version,
        )
    width = max(part.token_ids.shape[1] for part in parts)
    wide = [
        replace(
            part,
            token_ids=torch.nn.functional.pad(part.token_ids, (0, width - part.token_ids.shape[1])),
            logprobs=torch.nn.functional.pad(part.logprobs, (0, width - part.logprobs.shape[1])),
        )
        for part in parts
    ]
    back = torch.empty(len(order), dtype=torch.int64)
    back[torch.tensor(order)] = torch.arange(len(order))
    lengths = torch.cat([part.lengths for part in wide]).cpu()[back]
    used = torch.arange(width) < lengths[:, None]
    return GenerationOutput(
        token_ids=torch.cat([part.token_ids for part in wide]).cpu()[back][used].to(torch.int32),
        logprobs=torch.cat([part.logprobs for part in wide]).cpu()[back][used],
        lengths=lengths,
        truncated=torch.cat([part.truncated for part in wide]).cpu()[back],
        weight_version=version,
    )


def _support_rows(
    supports: Sequence[SupportRecorder | None], batches: Sequence[Sequence[int]]
) -> tuple[torch.Tensor, ...]:
    """Sampling masks of all batches in the order of the request."""
    rows: dict[int, torch.Tensor] = {}
    for support, batch in zip(supports, batches, strict=True):
        if support is not None:
            rows.update(zip(batch, support.rows(len(batch)), strict=True))
    return tuple(rows[row] for row in range(len(rows)))


def _join_routes(
    parts: Sequence[tuple[torch.Tensor, torch.Tensor]], *, order: Sequence[int], shape: RouteShape
) -> RecordedRoutes:
    """Routes of all batches in the order of the request."""
    ids, lengths = torch.cat([ids for ids, _ in parts]).cpu(), torch.cat([lengths for _, lengths in parts]).cpu()
    back = torch.argsort(torch.tensor(order))
    starts = (lengths.cumsum(0) - lengths)[back]
    lengths = lengths[back]
    shift = (starts - (lengths.cumsum(0) - lengths)).repeat_interleave(lengths)
    return RecordedRoutes(
        ids=ids[torch.arange(len(ids)) + shift], starts=torch.zeros_like(lengths), lengths=lengths, shape=shape
    )
