"""`DecodeRecording`: the tensors of the embedded engine while it decodes, in the format of the workers' records.

A part of `TorchEngine`. A prompt runs once for all rows of a batch that have it, and the first of them shows it.
Invariant: the same tokens are sampled with and without a recording.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count

from transformers import PreTrainedModel

from nemo_rl.errors import UserError
from nemo_rl.models.generation.interfaces import GenerationOutput, GenerationRequest
from nemo_rl.models.generation.recording import (
    NEVER_IN_DECODING,
    engine_manifest,
    folder_of,
    response_rows,
    write_logprobs,
)
from nemo_rl.models.generation.torch_engine.tracing import NO_SITES, NOT_IN_DECODING, ObservedRequest, RequestSites
from nemo_rl.models.hf_modules import HFSites
from nemo_rl.models.policy.recording import RecordSink, RecordSpec
from nemo_rl.records.selector import Selector
from nemo_rl.records.sites import Direction, SiteKind
from nemo_rl.records.writer import RecordWriter, new_folder
from nemo_rl.tracer.watch import GENERATION

__all__ = ["DecodeRecording"]

logger = logging.getLogger(__name__)


class DecodeRecording:
    """The recording of one embedded engine.

    Args:
        number: of the engine.
        num_engines: of the run.

    Raises:
        UserError: an unknown site.
    """

    def __init__(self, spec: RecordSpec, model: PreTrainedModel, *, number: int, num_engines: int) -> None:
        self._spec, self._number, self._num_engines = spec, number, num_engines
        self._selector = Selector.parse(spec.sites)
        self._sites = HFSites(model)
        self._sites.cannot(NOT_IN_DECODING, *NEVER_IN_DECODING)
        self._writer: RecordWriter | None = None
        self._sink: RecordSink | None = None
        self._numbers = count()

    def begin(self, step: int) -> None:
        """Begin a step, to which the requests that follow belong."""
        self.end()
        folder = folder_of(self._spec, step)
        with self._excused():
            if self._number == 0:
                sites = [(point.kind, point.layer) for point in self._sites.hook_points]
                layout = {"tp": 1, "world": self._num_engines}
                new_folder(
                    folder,
                    engine_manifest(self._spec, layout=layout, sites=sites, unobserved=self._sites.unobserved),
                )
            self._writer = RecordWriter(folder, rank=self._number)
            stop = None if self._spec.must_succeed else self._stop
            self._sink, self._numbers = RecordSink(self._writer, self._selector, on_refusal=stop), count()

    def end(self) -> None:
        """End the step, whose files are then complete. Idempotent."""
        writer, self._writer, self._sink = self._writer, None, None
        if writer is not None:
            with self._excused():
                writer.close()

    @contextmanager
    def request(self, keys: Sequence[str]) -> Iterator[ObservedRequest]:
        """Surround one request, whose rows have these keys; without keys it is not recorded. An error inside it leaves
        the files of the step without their end."""
        if self._sink is None or not keys:
            yield NO_SITES
            return
        sites = RequestSites(
            self._sites.hook_points,
            self._sink,
            phase=GENERATION,
            name_of=lambda row: keys[row],
            numbers=self._numbers,
            between_passes=lambda: None,
        )
        try:
            with sites.attached():
                yield sites
        except BaseException:
            self._abandon()
            raise

    def output(self, request: GenerationRequest, output: GenerationOutput) -> None:
        """Record the log-probabilities of what was sampled."""
        if self._writer is None or not request.keys:
            return
        if self._selector.takes(SiteKind.LOGPROB, None, Direction.FORWARD):
            with self._excused():
                write_logprobs(self._writer, response_rows(request, output), output.logprobs)

    @contextmanager
    def _excused(self) -> Iterator[None]:
        try:
            yield
        except UserError as error:
            if self._spec.must_succeed:
                raise
            self._stop(error)

    def _stop(self, error: UserError) -> None:
        logger.warning("recording of engine %d stopped, the step continues: %s", self._number, error)
        self._abandon()

    def _abandon(self) -> None:
        writer, self._writer, self._sink = self._writer, None, None
        if writer is not None:
            writer.abandon()
