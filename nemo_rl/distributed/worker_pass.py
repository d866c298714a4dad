"""The names of the work that policy workers do on their rows in a step: model passes, and work without the model."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["RowPass", "WorkerPass"]


class WorkerPass(StrEnum):
    """A pass is its stage's name, as in `FieldSpec.read_by`, errors, data plane counters and traces of routes.

    Example:
        >>> WorkerPass.of_task("prev_lp"), WorkerPass.REFERENCE_LOGPROBS.column
        (<WorkerPass.PREV_LOGPROBS: 'prev_logprobs'>, 'reference_policy_logprobs')
    """

    task: str
    """The task that claims rows for it."""
    column: str
    """The column that the pass writes, one value per token; empty where it writes none, or others."""

    PREV_LOGPROBS = "prev_logprobs", "prev_lp", "prev_logprobs"
    REFERENCE_LOGPROBS = "reference_logprobs", "ref_lp", "reference_policy_logprobs"
    TOPK_LOGITS = "topk_logits", "topk", ""
    TRAIN = "train", "train", ""

    def __new__(cls, stage: str, task: str, column: str) -> WorkerPass:
        made = str.__new__(cls, stage)
        made._value_, made.task, made.column = stage, task, column
        return made

    @classmethod
    def of_task(cls, task: str) -> WorkerPass | None:
        """Return the pass that a consumer task runs; None for a task of something else."""
        return next((each for each in cls if each.task == task), None)


class RowPass(StrEnum):
    """Work without the model (`RowFunction`), by its stage's name."""

    MEASURE = "measure_rows"
    """Sums over the tokens of each row, for the driver."""
    ADVANTAGES = "token_advantages"
    """An advantage of each token, of whole groups."""
