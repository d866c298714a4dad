"""`Scorer`: the rows of a step under any `ScoreSetting`, by the Hugging Face model in this process.

Rows of one length make a pass: nothing is packed or padded. Invariant: a setting is scored once. Shapes: n rows of a
pass, N all rows, T tokens, M sampled tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from nemo_rl.distributed.local_job import quiet_libraries
from nemo_rl.models.adapters.folder import load_model_at
from nemo_rl.models.head.logits import KeptSets, SupportRecorder, decode_support
from nemo_rl.models.head.logprobs import filter_logits, token_logprobs
from nemo_rl.models.hf.loading import DTYPES
from nemo_rl.models.hf.modules import HFRouters
from nemo_rl.routes.shape import MISSING, RouteShape
from nemo_rl_tools.mismatch.progress import Progress
from nemo_rl_tools.mismatch.setting import Cut, ScoreSetting
from nemo_rl_tools.mismatch.tokens import StepTokens
from nemo_rl_tools.mismatch.versions import Versions

__all__ = ["Scorer", "scaled_rope"]

FREQUENCIES = "inv_freq"
"""End of the name of the buffers: frequency i of n is base ** (-i / n), some scaled for long rows."""


@contextmanager
def scaled_rope(model: torch.nn.Module, factor: float) -> Iterator[None]:
    """The base of all layers is `factor` times what it is."""
    before = [(buffer, buffer.clone()) for buffer in _frequencies(model)]
    try:
        for buffer, _ in before:
            part = torch.arange(len(buffer), device=buffer.device) / len(buffer)
            buffer.mul_(factor**-part)
        yield
    finally:
        for buffer, kept in before:
            buffer.copy_(kept)


def _frequencies(model: torch.nn.Module) -> list[torch.Tensor]:
    found = {id(buffer): buffer for name, buffer in model.named_buffers() if name.endswith(FREQUENCIES)}
    return list(found.values())


PASS_TOKENS = 4096
"""Most tokens of one pass: they bound its logits."""
MODELS_HELD = 2
"""Models held in memory: greedy search goes back and forth between two."""
RoutesOf = Callable[[RouteShape], torch.Tensor | None]
"""Shape of the model's routes -> those of the rollout, `[N, T, L, K]`, -1 where one is missing; None: none kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _ScoredTokens:
    row_m: torch.Tensor
    """Row, out of N, of each sampled token."""
    column_m: torch.Tensor
    target_m: torch.Tensor
    logits_mV: torch.Tensor


class Scorer:
    """Scores the rows of one step.

    Args:
        routes_of: for a model with experts whose rollout has recorded routes; None elsewhere.
        engine: of whose logits a filter made the sets, where these were not recorded.
    """

    def __init__(
        self,
        tokens: StepTokens,
        versions: Versions,
        *,
        engine: ScoreSetting,
        routes_of: RoutesOf | None = None,
        device: torch.device | str = "cpu",
        progress: Progress | None = None,
    ) -> None:
        self.tokens = tokens
        self._folders, self._version, self._device = versions.folders, versions.trainer, device
        self._routes_of, self._engine = routes_of, engine
        self._progress = Progress(lambda _: None) if progress is None else progress
        self._support_NS = tokens.support_NS
        self._routes_NTLK: torch.Tensor | None = None
        self._models: dict[tuple[int, str], tuple[PreTrainedModel, HFRouters | None]] = {}
        self._scored: dict[tuple[tuple[object, ...], Cut], torch.Tensor] = {}
        # One token more: a shift wants the log-probability of the token before the first sampled one.
        sampled = tokens.is_sampled_NT
        self._wanted_NT = sampled | torch.nn.functional.pad(sampled[:, 1:], (0, 1))
        self._wanted_NT[:, 0] = False

    @property
    def is_lagging(self) -> bool:
        """True where the tags name other weights than the trainer's, and they are there."""
        return self._versions(0) != self._versions(None) and self.has_weights(0)

    def has_weights(self, lag: int | None) -> bool:
        """Return whether the weights of every row are there."""
        return all(version in self._folders for version in self._versions(lag))

    def has_rope(self, setting: ScoreSetting) -> bool:
        """Return whether the model has rotary embeddings that can be changed."""
        return bool(_frequencies(self._model(self._versions(setting.lag)[0], setting.precision)[0]))

    def logprobs(self, *settings: ScoreSetting) -> list[torch.Tensor]:
        """Return `[M]` float32 of each; NaN where a shifted token has no counterpart."""
        by_passes: dict[tuple[object, ...], list[ScoreSetting]] = {}
        for setting in settings:
            if (setting.passes, setting.cut) not in self._scored:
                by_passes.setdefault(setting.passes, []).append(setting)
        if by_passes:
            what = "one setting" if len(settings) == 1 else f"{len(settings)} settings"
            self._progress.begin(f"comparing {what}, rows scored", total=len(by_passes) * len(self.tokens.rows))
        for passes, alike in by_passes.items():
            cuts = list(dict.fromkeys(setting.cut for setting in alike))
            for cut, scored_NT in zip(cuts, self._score(alike[0], cuts), strict=True):
                self._scored[passes, cut] = scored_NT
        return [self._placed(self._scored[setting.passes, setting.cut], setting.shift) for setting in settings]

    def one_by_one(self, setting: ScoreSetting, *, num_rows: int) -> torch.Tensor:
        """Score the first rows like `logprobs`, each in its own pass; the others are NaN."""
        rows = range(min(num_rows, len(self.tokens.rows)))
        self._progress.begin("measuring the noise, rows scored", total=len(rows))
        scored = self._score(setting, [setting.cut], groups=[[row] for row in rows])
        return self._placed(scored[0], setting.shift)

    # Private parts.

    def _versions(self, lag: int | None) -> list[int]:
        return [self._version if lag is None else version + lag for version in self.tokens.versions]

    def _placed(self, scored_NT: torch.Tensor, shift: int) -> torch.Tensor:
        moved_NT = scored_NT.roll(shift, dims=1) if shift else scored_NT
        if shift > 0:
            moved_NT[:, :shift] = float("nan")
        elif shift < 0:
            moved_NT[:, shift:] = float("nan")
        return moved_NT[self.tokens.is_sampled_NT]

    @torch.inference_mode()
    def _score(
        self, setting: ScoreSetting, cuts: Sequence[Cut], *, groups: Sequence[Sequence[int]] | None = None
    ) -> list[torch.Tensor]:
        """Return `[N, T]` for each cut, NaN where nothing is wanted."""
        found = [torch.full(self.tokens.ids_NT.shape, float("nan")) for _ in cuts]
        if any(cut.sets == "engine" for cut in cuts):
            self._find_sets()
        for scored in self._passes(setting, self._wanted_NT, groups):
            for cut, scored_NT in zip(cuts, found, strict=True):
                kept = self._kept(scored) if cut.sets == "engine" else None
                logprobs_m = token_logprobs(scored.logits_mV, scored.target_m, sampling=cut.sampling, kept=kept).cpu()
                if kept is not None:
                    # What was not sampled has no set.
                    logprobs_m[~self.tokens.is_sampled_NT[scored.row_m, scored.column_m]] = float("nan")
                scored_NT[scored.row_m, scored.column_m] = logprobs_m
        return found

    def _passes(
        self, setting: ScoreSetting, wanted_NT: torch.Tensor, groups: Sequence[Sequence[int]] | None = None
    ) -> Iterator[_ScoredTokens]:
        """Yield the logits of the wanted tokens, pass by pass; a row is in one pass."""
        ids_NT = self.tokens.ids_NT
        versions = self._versions(setting.lag)
        for version in sorted(set(versions)):
            model, routers = self._model(version, setting.precision)
            with quiet_libraries(), scaled_rope(model, setting.rope):
                for rows in self._groups() if groups is None else groups:
                    of_version = [row for row in rows if versions[row] == version]
                    if not of_version:
                        continue
                    index = torch.tensor(of_version)
                    length = self.tokens.lengths[of_version[0]]
                    with self._routing(routers, setting, index, length):
                        logits_nTV = model(ids_NT[index, :length].to(self._device), use_cache=False).logits
                    self._progress.advance(len(of_version))
                    place_m, column_m = wanted_NT[index, :length].nonzero(as_tuple=True)
                    yield _ScoredTokens(
                        row_m=index[place_m],
                        column_m=column_m,
                        target_m=ids_NT[index[place_m], column_m].to(self._device),
                        logits_mV=logits_nTV[place_m.to(self._device), column_m.to(self._device) - 1],
                    )

    def _find_sets(self) -> None:
        """Find sets that were not recorded: what the filter leaves of the logits, as config and tags have it."""
        if self._support_NS is not None:
            return
        engine, recorder = self._engine, SupportRecorder()
        if not self.has_weights(engine.lag):
            engine = replace(engine, lag=None)
        sampling = engine.sampling
        self._progress.begin("finding the engine's sets, rows scored", total=len(self.tokens.rows))
        for scored in self._passes(engine, self.tokens.is_sampled_NT):
            cut_mV = filter_logits(
                scored.logits_mV.float() / sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                keep_M=scored.target_m,
            )
            recorder.add_turn(~cut_mV.isneginf(), scored.target_m, scored.row_m.to(self._device))
        rows = recorder.rows(len(self.tokens.rows))
        self._support_NS = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)

    def _kept(self, scored: _ScoredTokens) -> KeptSets:
        """Return the sets of what was sampled; other tokens have an empty list."""
        assert self._support_NS is not None, "they are found before a pass"
        rows = scored.row_m.unique()
        number_m = torch.searchsorted(rows, scored.row_m)
        is_sampled_NT = self.tokens.is_sampled_NT
        is_sampled_m = is_sampled_NT[scored.row_m, scored.column_m]
        kept = decode_support(
            self._support_NS[rows],
            self.tokens.ids_NT[rows],
            is_sampled_NT[rows],
            number_m[is_sampled_m],
            scored.column_m[is_sampled_m],
        )
        [numbers] = is_sampled_m.nonzero(as_tuple=True)
        is_dropped_m = torch.zeros_like(is_sampled_m).index_put((numbers,), kept.is_dropped_m)
        return KeptSets(
            place_E=numbers[kept.place_E].to(self._device),
            token_E=kept.token_E.to(self._device),
            is_dropped_m=is_dropped_m.to(self._device),
        )

    def _groups(self) -> Iterator[list[int]]:
        """Yield rows of one length, as many as fit a pass."""
        by_length: dict[int, list[int]] = {}
        for row, length in enumerate(self.tokens.lengths):
            by_length.setdefault(length, []).append(row)
        for length, rows in by_length.items():
            step = max(1, PASS_TOKENS // length)
            yield from (rows[start : start + step] for start in range(0, len(rows), step))

    def _model(self, version: int, precision: str) -> tuple[PreTrainedModel, HFRouters | None]:
        found = self._models.pop((version, precision), None)
        if found is None:
            while len(self._models) >= MODELS_HELD:
                self._models.pop(next(iter(self._models)))
            with quiet_libraries():
                model = load_model_at(self._folders[version], dtype=DTYPES[precision])
            model.to(self._device)  # type: ignore[arg-type]
            found = model, None if self._routes_of is None else HFRouters(model)
        # The last one used is the last to go.
        self._models[version, precision] = found
        return found

    def _routing(
        self, routers: HFRouters | None, setting: ScoreSetting, index: torch.Tensor, length: int
    ) -> AbstractContextManager[None]:
        if routers is None or setting.routes == "own":
            return nullcontext()
        if self._routes_NTLK is None:
            shape = RouteShape(layers=routers.layers, top_k=routers.top_k, num_experts=routers.num_experts)
            assert self._routes_of is not None, "there are routers to replay"
            self._routes_NTLK = self._routes_of(shape)
            assert self._routes_NTLK is not None, "the columns were looked for"
        routes_nTLK = self._routes_NTLK[index, :length]
        columns = {layer: column for column, layer in enumerate(routers.layers)}

        def choose(layer: int, own: torch.Tensor) -> torch.Tensor:
            ids = routes_nTLK[:, :, columns[layer]].flatten(0, 1).to(own.device, own.dtype)
            return torch.where(ids == MISSING, own, ids)

        return routers.choosing(choose)
