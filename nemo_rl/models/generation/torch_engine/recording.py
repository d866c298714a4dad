"""`DecodeRecording`: the tensors of the embedded engine while it decodes, in the format of the workers' records.

A part of `TorchEngine`. A prompt runs once for all rows of a batch that have it, and the first of them shows it.
Invariant: the same tokens are sampled with and without a recording.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count

from transformers import PreTrainedModel

from nemo_rl.models.generation.interfaces import GenerationOutput, GenerationRequest
from nemo_rl.models.generation.recording import NEVER_IN_DECODING, engine_manifest, response_rows, write_logprobs
from nemo_rl.models.generation.torch_engine.tracing import NO_SITES, NOT_IN_DECODING, ObservedRequest, RequestSites
from nemo_rl.models.hf_modules import HFSites
from nemo_rl.models.policy.recording import RecordSpec, StepRecords
from nemo_rl.records.record import RecordManifest
from nemo_rl.records.sites import Direction, SiteKind
from nemo_rl.tracer.watch import GENERATION

__all__ = ["DecodeRecording"]


class DecodeRecording(StepRecords):
    """The recording of one embedded engine.

    Args:
        number: of the engine.
        num_engines: of the run.
    """

    def __init__(self, spec: RecordSpec, model: PreTrainedModel, *, number: int, num_engines: int) -> None:
        super().__init__(spec, rank=number, of=f" of engine {number}")
        self._num_engines, self._sites = num_engines, HFSites(model)
        self._sites.cannot(NOT_IN_DECODING, *NEVER_IN_DECODING)

    def begin(self, step: int) -> None:
        """Begin a step, to which the requests that follow belong."""
        self.end()
        self._open(step, self._manifest)

    @contextmanager
    def request(self, keys: Sequence[str]) -> Iterator[ObservedRequest]:
        """Surround one request, whose rows have these keys; without keys it is not recorded. An error inside it leaves
        the files of the step without their end."""
        sink = self._sink()
        if sink is None or not keys:
            yield NO_SITES
            return
        sites = RequestSites(
            self._sites.hook_points,
            sink,
            phase=GENERATION,
            name_of=lambda row: keys[row],
            numbers=count(),
            between_passes=lambda: None,
        )
        try:
            with sites.attached():
                yield sites
        except BaseException:
            self.end(is_complete=False)
            raise

    def output(self, request: GenerationRequest, output: GenerationOutput) -> None:
        """Record the log-probabilities of what was sampled."""
        if self._writer is None or not request.keys:
            return
        if self._selector.takes(SiteKind.LOGPROB, None, Direction.FORWARD):
            with self._excused():
                write_logprobs(self._writer, response_rows(request, output), output.logprobs)

    def _manifest(self) -> RecordManifest:
        sites = [(point.kind, point.layer) for point in self._sites.hook_points]
        layout = {"tp": 1, "world": self._num_engines}
        return engine_manifest(self._spec, layout=layout, sites=sites, unobserved=self._sites.unobserved)
