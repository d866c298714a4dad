"""A loss that does something else when it meets a certain row: `tests.helpers.faulty_loss:PlantedLoss` in a recipe."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from nemo_rl.algorithms.losses.policy_loss import PolicyLoss
from nemo_rl.models.policy.interfaces import LossOutput, LossScale

WAIT_S = 60.0


def row_sums(ids_NT: torch.Tensor, lengths_N: torch.Tensor) -> list[int]:
    """Return a weighted sum of each row's tokens, which names the row: keys differ from run to run."""
    is_token_NT = torch.arange(ids_NT.shape[1]) < lengths_N[:, None]
    weights_T = torch.arange(1, ids_NT.shape[1] + 1)
    return torch.where(is_token_NT, ids_NT.long() * weights_T, 0).sum(1).tolist()


@dataclass(frozen=True, kw_only=True)
class PlantedLoss(PolicyLoss):
    """Options: `row`, one of `row_sums`; `folder`, which is copied to `copy` once the file `after` is there, as a kill
    would leave it. The loss is no number then."""

    @property
    def input_fields(self) -> tuple[str, ...]:
        return (*PolicyLoss.input_fields.fget(self), "input_ids", "input_lengths")

    def __call__(
        self, token_logprobs: torch.Tensor, batch: Mapping[str, torch.Tensor], *, scale: LossScale
    ) -> LossOutput:
        out = PolicyLoss.__call__(self, token_logprobs, batch, scale=scale)
        options = self.config.options
        if options["row"] not in row_sums(batch["input_ids"], batch["input_lengths"]):
            return out
        if "copy" in options:
            give_up = time.monotonic() + WAIT_S
            while not Path(options["after"]).is_file() and time.monotonic() < give_up:
                time.sleep(0.01)
            shutil.copytree(options["folder"], options["copy"])
        return replace(out, loss=out.loss * float("nan"))
