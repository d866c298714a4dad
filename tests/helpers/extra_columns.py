"""An environment that returns extra columns, a loss that reads them, and a dataset whose rows have them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from nemo_rl.algorithms.losses.policy_loss import token_weights
from nemo_rl.config.env import EnvConfig
from nemo_rl.config.loss import LossConfig
from nemo_rl.data.conversation import Message
from nemo_rl.data.datasets import Prompt
from nemo_rl.environments.conversation import ConversationRow, Reply, Turn
from nemo_rl.environments.interfaces import EnvReport, Response
from nemo_rl.environments.process_environment import EnvironmentStart
from nemo_rl.models.policy.interfaces import LossOutput, LossScale
from nemo_rl.utils.metrics import Sum

DECLARED: dict[str, dict[str, object]] = {
    "image": {"dtype": "float32", "dims": ["patches", 3], "read_by": ["prev_logprobs", "train"]},
    "grid": {"dtype": "int16", "dims": [2, 2], "read_by": ["train"]},
    "weight": {"dtype": "float32", "read_by": ["train", "log"]},
    "note": {"dtype": "object", "read_by": ["log"]},
    "spots": {"dtype": "int32", "dims": ["spots"], "source": "environment", "read_by": ["train"]},
    "verdict": {"dtype": "object", "source": "environment"},
}
"""Columns that rows differ in, of fixed size, of one number, and of objects; from prompts and from the environment."""


def write_rows(path: Path, *, count: int = 24) -> Path:
    """Write prompts with the columns of `DECLARED` whose source is the prompt."""
    rows = [
        {
            "input": f"sort {number:03d}",
            "output": "".join(sorted(f"{number:03d}")),
            "image": [[number + patch / 8, 1.0, -patch] for patch in range(number % 4)],
            "grid": [[number, 1], [2, 3]],
            "weight": 0.5 + number % 3,
            "note": {"number": number, "words": ["a", None, number / 4]},
        }
        for number in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class SpottedEnvironment:
    """Rewards odd digits, and says where they are."""

    def __init__(self, cfg: EnvConfig, start: EnvironmentStart) -> None:
        del cfg, start

    def score(self, prompts: Sequence[Prompt], responses: Sequence[Response]) -> EnvReport:
        """Return rewards, the places of odd digits, and an object per row."""
        spots = [[at for at, character in enumerate(each.text) if character in "13579"] for each in responses]
        return EnvReport(
            rewards=tuple(float(len(each)) for each in spots),
            columns={
                "spots": spots,
                "verdict": [
                    {"answer": prompt.answer, "length": each.num_tokens}
                    for prompt, each in zip(prompts, responses, strict=True)
                ],
            },
        )

    def shutdown(self) -> None:
        """Nothing to end."""


class ExtraLoss:
    """The policy gradient, weighted by every tensor of `DECLARED`, so that a wrong or padded value changes it."""

    input_fields = (
        "token_mask",
        "sample_mask",
        "advantages",
        "generation_logprobs",
        "weight",
        "image",
        "grid",
        "spots",
    )

    def __init__(self, *, config: LossConfig, prev_field: str) -> None:
        del config, prev_field

    def __call__(
        self, token_logprobs: torch.Tensor, batch: Mapping[str, torch.Tensor], *, scale: LossScale
    ) -> LossOutput:
        rows = batch["weight"] + batch["grid"].sum((1, 2)) / 64 + batch["spots"].sum(1) / 8
        rows = rows + batch["image"].sum((1, 2)) / 16
        weight_NT = rows[:, None] * token_weights(batch) / (scale.valid_tokens or 1.0)
        loss = -(weight_NT * token_logprobs * batch["advantages"][:, None]).sum()
        return LossOutput(loss=loss, metrics={"loss": Sum(loss.item()), "rows": Sum(float(rows.sum()))})


class CountingWords:
    """An environment with turns that ends after some of them, and tells facts of the row with its replies."""

    def __init__(self, *, turns: int = 2) -> None:
        self._turns = turns

    def open(self, row: ConversationRow) -> CountedWords:
        """Begin a conversation."""
        return CountedWords(self._turns)


class CountedWords:
    """One row."""

    def __init__(self, turns: int) -> None:
        self._left, self._lengths = turns, list[int]()

    def reply(self, turn: Turn) -> Reply:
        """Say `more`, and count the characters of every turn."""
        self._left -= 1
        self._lengths.append(len(turn.text))
        facts = {"spots": np.asarray(self._lengths), "verdict": {"turns": len(self._lengths)}}
        if self._left:
            return Reply(messages=(Message(role="user", content="more"),), columns=facts)
        return Reply(done=True, reward=float(self._lengths[-1] % 2), columns=facts)
