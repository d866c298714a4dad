"""`WorkersRecording`: the tensors of an engine while it decodes, in the format of the policy workers' records.

    logger.log_dir/steps/step_N/records/generation/    one rank per engine, or per rank of a vLLM engine

The driver says which step begins and when it has ended. A request is recorded where it names the keys of its rows, as
those of training rollouts do. The last token of a row is never fed. The embedded engine has `DecodeRecording`.
Invariant: the same tokens are sampled with and without a recording.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from nemo_rl.errors import UserError
from nemo_rl.models.generation.interfaces import GenerationOutput, GenerationRequest
from nemo_rl.models.policy.recording import RecordSpec
from nemo_rl.records.record import RecordManifest, RecordPlace, RecordWriter, TokenTable, new_folder
from nemo_rl.records.sites import Direction, Selector, SiteKind
from nemo_rl.tracer.watch import GENERATION

__all__ = [
    "NEVER_IN_DECODING",
    "ROW_KEY",
    "WorkersRecording",
    "engine_manifest",
    "response_rows",
    "write_logprobs",
]

logger = logging.getLogger(__name__)

ROW_KEY = "nemo_rl_row"
"""Extra argument of a request to vLLM with the key of its row; a request without it is not recorded."""
NEVER_IN_DECODING = (SiteKind.TOKEN_LOSS, SiteKind.LOSS, SiteKind.GRAD, SiteKind.PARAM)
"""Sites of training alone."""


def engine_manifest(
    spec: RecordSpec,
    *,
    layout: Mapping[str, int],
    sites: Iterable[tuple[SiteKind, int | None]],
    unobserved: Mapping[SiteKind, str],
) -> RecordManifest:
    """Return the description of a recording of engines; arguments as `RecordSpec.manifest`."""
    everything = [(SiteKind.TOKENS, None), *sites, (SiteKind.LOGPROB, None)]
    forward = [(kind, layer, Direction.FORWARD) for kind, layer in everything]
    return spec.manifest(forward, layout=layout, unobserved=unobserved)


def response_rows(request: GenerationRequest, output: GenerationOutput) -> TokenTable:
    """Return the rows and positions of all sampled tokens, in the order of the output."""
    lengths = output.lengths
    prompts = torch.tensor([len(ids) for ids in request.prompt_ids]).repeat_interleave(request.group_size)
    row_R = torch.arange(len(lengths)).repeat_interleave(lengths)
    first_R = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    position_R = prompts[row_R] + torch.arange(int(lengths.sum())) - first_R
    return TokenTable(keys=request.keys, row_R=row_R, position_R=position_R, token_R=output.token_ids.long())


def write_logprobs(writer: RecordWriter, table: TokenTable, logprobs: torch.Tensor) -> None:
    place = RecordPlace(kind=SiteKind.LOGPROB, phase=GENERATION)
    writer.tensor(place, logprobs, tokens=writer.tokens(table))


class WorkersRecording:
    """The recording of an engine whose model is in workers that it calls, such as those of vLLM.

    Args:
        rpc: calls a method of `RefitExtension` in every worker and returns what each gives.
        number: of the engine.
        num_engines: of the run.
        num_ranks: workers of an engine, all of its tensor axis.
    """

    def __init__(
        self, spec: RecordSpec, rpc: Callable[..., Sequence[object]], *, number: int, num_engines: int, num_ranks: int
    ) -> None:
        self._spec, self._rpc, self._number = spec, rpc, number
        self._num_engines, self._num_ranks = num_engines, num_ranks
        Selector.parse(spec.sites)
        self.is_on = False
        """True between `begin` and `end`."""

    def begin(self, step: int) -> None:
        """Begin a step, to which the requests that follow belong.

        Raises:
            UserError: the folder cannot be written, and the recording must succeed.
        """
        self.end()
        folder = self._spec.folder_of(step)
        try:
            if self._number == 0:
                new_folder(folder, self._manifest())
            self._rpc("begin_recording", str(folder), self._number * self._num_ranks, self._spec.sites)
        except UserError as error:
            self._refused(str(error))
            return
        self.is_on = True

    def end(self) -> None:
        """End the step, whose files are then complete. Idempotent."""
        if self.is_on:
            self.is_on = False
            problems = [str(found) for found in self._rpc("end_recording") if found is not None]
            if problems:
                self._refused(problems[0])

    def output(self, request: GenerationRequest, output: GenerationOutput) -> None:
        if self.is_on and request.keys:
            table = response_rows(request, output)
            tokens = torch.stack((table.row_R, table.position_R, table.token_R), dim=1).tolist()
            self._rpc("record_logprobs", list(request.keys), tokens, output.logprobs.tolist())

    def _manifest(self) -> RecordManifest:
        found = self._rpc("recorded_sites")[0]
        assert isinstance(found, Mapping), "the workers answer with their sites"
        return engine_manifest(
            self._spec,
            layout={"tp": self._num_ranks, "world": self._num_ranks * self._num_engines},
            sites=[(SiteKind(kind), layer) for kind, layer in found["sites"]],
            unobserved={SiteKind(kind): why for kind, why in found["unobserved"].items()},
        )

    def _refused(self, text: str) -> None:
        if self._spec.must_succeed:
            raise UserError(text)
        logger.warning("recording of engine %d stopped, the step continues: %s", self._number, text)
