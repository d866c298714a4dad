"""What a policy worker does with a shard of rows: the passes that a step is made of."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["WorkerPass"]


class WorkerPass(StrEnum):
    """Named as the stages of `FieldSpec.read_by`, and in errors, data plane counters and traces of routes."""

    PREV_LOGPROBS = "prev_logprobs"
    REFERENCE_LOGPROBS = "reference_logprobs"
    TRAIN = "train"
