"""`Recording`: which calls of a worker are recorded, and where to: one of its `Onlookers`, made with it.

The driver says which step begins (`begin`, `end`); inside, calls of the chosen phases are seen by a `RecordSink`.
Invariant: without a `RecordSpec` nothing is kept.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch.distributed as dist

from nemo_rl.distributed.worker_pass import WorkerPass
from nemo_rl.errors import UserError
from nemo_rl.models.policy.recording.record_sink import RecordSink
from nemo_rl.models.policy.recording.sight import SiteSink
from nemo_rl.models.policy.recording.taps import Taps
from nemo_rl.models.policy.steps import ThisRank
from nemo_rl.records.record import Manifest
from nemo_rl.records.selector import Selector
from nemo_rl.records.sites import SITES, Direction, SiteKind
from nemo_rl.records.writer import RecordWriter, new_folder
from nemo_rl.utils.memory import package_versions

__all__ = ["NO_RECORDING", "RecordSpec", "Recording", "SiteRecording"]

logger = logging.getLogger(__name__)

STEP_IN_NAME = "{step}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordSpec:
    """What is recorded; plain values, the same on every rank."""

    folder: Path
    """Of the records of one step, or with `{step}` in its name of every step."""
    sites: str
    """A `Selector`."""
    phases: tuple[str, ...] = tuple(WorkerPass)
    has_backward: bool = True
    """Whether training passes run backward, rather than being evaluated."""
    must_succeed: bool = True
    """A disk that refuses is an error; else it ends the recording, and the step goes on."""
    model: Mapping[str, object] = field(default_factory=dict)
    """What must agree between two recordings that are compared."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Anything else that readers may want to know."""
    tokenizer: str = ""
    weights: str = ""
    engine: str = ""
    precision: str = ""


class Recording(Protocol):
    """Which passes are looked at."""

    def begin(self, step: int) -> None:
        """The passes that follow belong to this step."""

    def end(self, *, is_complete: bool = True) -> None:
        """No pass of the step follows. Idempotent."""

    def begin_call(self, phase: WorkerPass) -> SiteSink | None:
        """As in `Onlooker`."""

    def end_call(self, phase: WorkerPass) -> None:
        """As in `Onlooker`."""


class _NoRecording:
    def begin(self, step: int) -> None:
        raise UserError(f"step {step}: this worker was started without anything to record; see diagnostics.record")

    def end(self, *, is_complete: bool = True) -> None:
        pass

    def begin_call(self, phase: WorkerPass) -> SiteSink | None:
        return None

    def end_call(self, phase: WorkerPass) -> None:
        pass


NO_RECORDING: Recording = _NoRecording()


class SiteRecording:
    """(collective over the job: the constructor) Records of this rank.

    Raises:
        UserError: an unknown site.
    """

    def __init__(self, spec: RecordSpec, taps: Taps, here: ThisRank) -> None:
        self._spec, self._taps, self._here = spec, taps, here
        self._selector = Selector.parse(spec.sites)
        self._writer: RecordWriter | None = None
        mine = [(tap.kind, tap.layer) for tap in taps.taps], dict(taps.unobserved)
        everywhere: list[tuple[list[tuple[SiteKind, int | None]], dict[SiteKind, str]]] = [
            ([], {})
        ] * here.layout.world_size
        dist.all_gather_object(everywhere, mine)
        self._sites = sorted({site for sites, _ in everywhere for site in sites}, key=_by_layer)
        self._unobserved = {kind: why for _, reasons in everywhere for kind, why in reasons.items()}

    def begin(self, step: int) -> None:
        """As in `Recording`."""
        self.end(is_complete=False)
        folder = Path(str(self._spec.folder).replace(STEP_IN_NAME, str(step)))
        with self._excused():
            if self._here.rank == 0:
                new_folder(folder, self._manifest())
            self._writer = RecordWriter(folder, rank=self._here.rank)

    def end(self, *, is_complete: bool = True) -> None:
        """As in `Recording`."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        if not is_complete:
            writer.abandon()
            return
        with self._excused():
            writer.close()

    def begin_call(self, phase: WorkerPass) -> SiteSink | None:
        """As in `Onlooker`."""
        if self._writer is None or phase.value not in self._spec.phases:
            return None
        return RecordSink(self._writer, self._selector, on_refusal=None if self._spec.must_succeed else self._stop)

    def end_call(self, phase: WorkerPass) -> None:
        """As in `Onlooker`."""

    @contextmanager
    def _excused(self) -> Iterator[None]:
        try:
            yield
        except UserError as error:
            if self._spec.must_succeed:
                raise
            self._stop(error)

    def _stop(self, error: UserError) -> None:
        logger.warning("recording ends here, the step goes on: %s", error)
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.abandon()

    def _manifest(self) -> Manifest:
        spec, layout = self._spec, self._here.layout
        kinds = set(self._selector.kinds())
        return Manifest(
            run_id=uuid.uuid4().hex,
            model=dict(spec.model),
            layout={
                "dp": layout.dp,
                "cp": layout.cp,
                "tp": layout.tp,
                "pp": layout.pp,
                "sp": int(layout.sequence_parallel),
                "world": layout.world_size,
            },
            engine=spec.engine,
            precision=spec.precision,
            selector=spec.sites,
            phases=spec.phases,
            sites=tuple(self._expected_sites()),
            unobserved={kind: why for kind, why in self._unobserved.items() if kind in kinds},
            tokenizer=spec.tokenizer,
            weights=spec.weights,
            versions=package_versions(),
            settings=json.loads(json.dumps(dict(spec.settings), default=str)),
        )

    def _expected_sites(self) -> Iterator[dict[str, object]]:
        """What a complete recording of this model holds."""
        trains = WorkerPass.TRAIN in self._spec.phases
        of_update = {SiteKind.LOSS, SiteKind.GRAD} if trains and self._spec.has_backward else set()
        of_training = {SiteKind.LOSS, SiteKind.PARAM} if trains else set()
        outside = {SiteKind.TOKENS, SiteKind.LOGPROB, *of_update, *of_training} - self._unobserved.keys()
        for kind, layer in (*self._sites, *((kind, None) for kind in SiteKind if kind in outside)):
            ways = [Direction.FORWARD]
            if of_update and SITES[kind].has_backward:
                ways.append(Direction.BACKWARD)
            for way in ways:
                if self._selector.takes(kind, layer, way):
                    yield {"kind": kind.value, "layer": layer, "direction": way.value}


def _by_layer(site: tuple[SiteKind, int | None]) -> tuple[int, str]:
    kind, layer = site
    return (-1 if layer is None else layer, kind)
