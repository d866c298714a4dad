"""`SiteRecording`: which calls of a worker are recorded, and where to: one of its `HookObservers`, made with it.

The driver says which step begins (`begin`, `end`); inside, calls of the chosen phases are seen by a `RecordSink`.
Invariant: without a `RecordSpec` nothing is kept.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from nemo_rl.config.policy import PolicyConfig
from nemo_rl.distributed.worker_pass import WorkerPass
from nemo_rl.errors import UserError
from nemo_rl.models.hf.loading import load_model_config
from nemo_rl.models.policy.hooks import HookPoints
from nemo_rl.models.policy.observer import Capture, HookObserver, PassRows, SiteSink
from nemo_rl.models.policy.steps import RankInfo
from nemo_rl.records.record import RecordManifest, RecordWriter, new_folder
from nemo_rl.records.sites import SITES, Direction, Selector, SiteKind
from nemo_rl.utils.memory import package_versions

__all__ = [
    "RecordSink",
    "RecordSpec",
    "SiteRecording",
    "StepRecords",
    "model_identity",
    "recorded_model",
]


logger = logging.getLogger(__name__)

NAMED = (SiteKind.GRAD, SiteKind.PARAM)
"""Sites that are chosen by the names of parameters."""
STEP_IN_NAME = "{step}"


class RecordSink(SiteSink):
    """Writes the captured tensors of one call, whole, to the records of this rank.

    Args:
        on_refusal: called when the disk refuses, after which nothing is written; None raises instead.
    """

    def __init__(
        self, writer: RecordWriter, selector: Selector, *, on_refusal: Callable[[UserError], None] | None = None
    ) -> None:
        self._writer, self._selector, self._on_refusal = writer, selector, on_refusal
        self._tables: dict[int, str] = {}
        self._has_ended = False

    def takes(self, kind: SiteKind, layer: int | None, direction: Direction) -> bool:
        return self._selector.takes(kind, layer, direction) or (kind in NAMED and kind in self._selector.kinds())

    def see(self, capture: Capture) -> None:
        if self._has_ended:
            return
        try:
            self._write(capture)
        except UserError as error:
            if self._on_refusal is None:
                raise
            self._has_ended = True
            self._on_refusal(error)

    def _write(self, capture: Capture) -> None:
        place = capture.place
        if place.name is not None:
            if capture.is_first and self._selector.takes_parameter(place.name, place.kind):
                self._writer.tensor(place, capture.value, tokens=None)
        elif capture.rows is None:
            self._writer.tensor(place, capture.value, tokens=None)
        else:
            self._writer.tensor(place, capture.tokens(), tokens=self._table(capture.rows), split=capture.split)

    def _table(self, rows: PassRows) -> str:
        if rows.number not in self._tables:
            self._tables[rows.number] = self._writer.tokens(rows.table)
        return self._tables[rows.number]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedModel:
    """The model of a recording, as its manifest names it."""

    identity: Mapping[str, object] = field(default_factory=dict)
    """Facts of the model that must agree between two recordings that are compared."""
    tokenizer: str = ""
    engine: str = ""
    """`megatron` or `dtensor`."""
    precision: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordSpec:
    """Settings of a recording: plain values, the same on every rank."""

    folder: Path
    """Folder of the records of one step, or with `{step}` in its name of every step."""
    sites: str
    """A `Selector`."""
    phases: tuple[str, ...] = tuple(WorkerPass)
    has_backward: bool = True
    """True where training passes run backward, rather than being evaluated."""
    must_succeed: bool = True
    """A disk that refuses is an error; else it ends the recording, and the step goes on."""
    model: RecordedModel = field(default_factory=RecordedModel)
    settings: Mapping[str, object] = field(default_factory=dict)
    """Anything else that readers may want to know."""
    weights: str = ""
    """The name of the weights, for people."""

    def folder_of(self, step: int) -> Path:
        return Path(str(self.folder).replace(STEP_IN_NAME, str(step)))

    def manifest(
        self,
        sites: Iterable[tuple[SiteKind, int | None, Direction]],
        *,
        layout: Mapping[str, int],
        unobserved: Mapping[SiteKind, str],
    ) -> RecordManifest:
        """Return the description of a recording.

        Args:
            sites: places of the model that are observed, asked for or not; so are the keys of `unobserved`.
            layout: sizes of the axes; `world` is the number of files of records.
        """
        selector = Selector.parse(self.sites)
        return RecordManifest(
            run_id=uuid.uuid4().hex,
            model=dict(self.model.identity),
            layout=layout,
            engine=self.model.engine,
            precision=self.model.precision,
            selector=self.sites,
            phases=self.phases,
            sites=tuple(
                {"kind": kind.value, "layer": layer, "direction": way.value}
                for kind, layer, way in sites
                if selector.takes(kind, layer, way)
            ),
            unobserved={kind: why for kind, why in unobserved.items() if kind in selector.kinds()},
            tokenizer=self.model.tokenizer,
            weights=self.weights,
            versions=package_versions(),
            settings=json.loads(json.dumps(dict(self.settings), default=str)),
        )


class StepRecords:
    """The records of one process, step by step.

    Args:
        of: whose recording it is, for the log.

    Raises:
        UserError: an unknown site.
    """

    def __init__(self, spec: RecordSpec, *, rank: int, of: str = "") -> None:
        self._spec, self._rank, self._of = spec, rank, of
        self._selector = Selector.parse(spec.sites)
        self._writer: RecordWriter | None = None

    def end(self, *, is_complete: bool = True) -> None:
        """End the step, whose files are then complete unless it is said otherwise. Idempotent."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        if not is_complete:
            writer.abandon()
            return
        with self._excused():
            writer.close()

    def _open(self, step: int, manifest: Callable[[], RecordManifest]) -> None:
        """Open the files of a step; the first rank makes the folder."""
        folder = self._spec.folder_of(step)
        with self._excused():
            if self._rank == 0:
                new_folder(folder, manifest())
            self._writer = RecordWriter(folder, rank=self._rank)

    def _sink(self) -> RecordSink | None:
        """Return a sink that writes to the files of the step; None where there are none."""
        if self._writer is None:
            return None
        return RecordSink(self._writer, self._selector, on_refusal=None if self._spec.must_succeed else self._stop)

    @contextmanager
    def _excused(self) -> Iterator[None]:
        try:
            yield
        except UserError as error:
            if self._spec.must_succeed:
                raise
            self._stop(error)

    def _stop(self, error: UserError) -> None:
        logger.warning("recording%s stopped, the step continues: %s", self._of, error)
        self.end(is_complete=False)


class SiteRecording(StepRecords, HookObserver):
    """(collective over the job: the constructor) Records of this rank."""

    def __init__(self, spec: RecordSpec, hook_points: HookPoints, here: RankInfo) -> None:
        super().__init__(spec, rank=here.rank)
        self._layout = here.layout
        mine = [(point.kind, point.layer) for point in hook_points.hook_points], dict(hook_points.unobserved)
        everywhere = [mine] * here.layout.world_size
        dist.all_gather_object(everywhere, mine)
        found = {site for sites, _ in everywhere for site in sites}
        self._sites = sorted(found, key=lambda site: (-1 if site[1] is None else site[1], site[0]))
        self._unobserved = {kind: why for _, reasons in everywhere for kind, why in reasons.items()}

    def begin(self, step: int) -> None:
        """Begin a step, to which the passes that follow belong."""
        self.end(is_complete=False)
        self._open(step, self._manifest)

    def begin_call(self, phase: WorkerPass) -> SiteSink | None:
        return self._sink() if phase.value in self._spec.phases else None

    def _manifest(self) -> RecordManifest:
        layout = self._layout
        sizes = {**layout.sizes, "sp": int(layout.sequence_parallel), "world": layout.world_size}
        return self._spec.manifest(self._expected_sites(), layout=sizes, unobserved=self._unobserved)

    def _expected_sites(self) -> Iterator[tuple[SiteKind, int | None, Direction]]:
        """Yield the sites of which a complete recording of this model holds those that were asked for."""
        trains = WorkerPass.TRAIN in self._spec.phases
        of_update = {SiteKind.LOSS, SiteKind.GRAD} if trains and self._spec.has_backward else set()
        of_training = {SiteKind.LOSS, SiteKind.PARAM} if trains else set()
        outside = {SiteKind.TOKENS, SiteKind.LOGPROB, *of_update, *of_training} - self._unobserved.keys()
        for kind, layer in (*self._sites, *((kind, None) for kind in SiteKind if kind in outside)):
            yield kind, layer, Direction.FORWARD
            if of_update and SITES[kind].has_backward:
                yield kind, layer, Direction.BACKWARD


IDENTITY = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "num_experts_per_tok",
)
"""Settings that must agree between two models whose tensors are compared."""


def model_identity(policy: PolicyConfig) -> dict[str, object]:
    """Raises:
    ModelFolderError: the folder cannot be read.
    """
    settings = load_model_config(policy.model_name).get_text_config().to_dict()
    return {name: settings[name] for name in IDENTITY if settings.get(name) is not None}


def recorded_model(policy: PolicyConfig) -> RecordedModel:
    """Raises:
    ModelFolderError: the folder cannot be read.
    """
    return RecordedModel(
        identity=model_identity(policy),
        tokenizer=str(Path(policy.tokenizer.name or policy.model_name).absolute()),
        engine="megatron" if policy.megatron_cfg.enabled else "dtensor",
        precision=policy.precision,
    )
