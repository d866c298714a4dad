"""Rows of readable rollouts made by hand, as a run writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from nemo_rl.utils.rollout_file import rollout_path

HOSTILE = "\x1b[2J\x1b]0;owned\x07<img src=x onerror=\"document.title='owned'\">\u202e\r"
"""A response that clears terminals, renames windows and runs scripts, where it may."""


def token_row(
    key: str,
    texts: Sequence[str],
    *,
    prompt: Sequence[str] = ("Sort: ", "3 1 2"),
    apart: Mapping[int, float] = {},
    masked: Sequence[int] = (),
    **fields: object,
) -> dict[str, object]:
    """Return a line of the file.

    Args:
        texts: of the tokens of the response.
        apart: place in the response -> log-probability of the rollout less that of the trainer; 0 elsewhere.
        masked: places in the response that are not trained.
    """
    mask = [0] * len(prompt) + [int(at not in masked) for at in range(len(texts))]
    ours = [-0.25 if kept else None for kept in mask]
    theirs = [None if value is None else value - apart.get(at - len(prompt), 0.0) for at, value in enumerate(ours)]
    return {
        "key": key,
        "group": key.rpartition("_g")[0],
        "prompt": "".join(prompt),
        "response": "".join(texts),
        "reward": 1.0,
        "components": {"correct": 1.0, "format": None},
        "response_tokens": len(texts),
        "truncated": False,
        "finish_reason": "stop",
        "advantage": 0.5,
        "sample_mask": 1.0,
        "weight_version": 4,
        "no_prev_logprobs": None,
        "token_ids": list(range(len(mask))),
        "token_texts": [*prompt, *texts],
        "token_mask": mask,
        "generation_logprobs": ours,
        "prev_logprobs": theirs,
        **fields,
    }


def unscored_row(key: str, texts: Sequence[str], *, why: str) -> dict[str, object]:
    """Return a row whose run has no log-probabilities of the trainer."""
    return token_row(key, texts, prev_logprobs=None, no_prev_logprobs=why)


def earlier_row(key: str, response: str) -> dict[str, object]:
    """Return a line of a version that wrote no tokens."""
    return {
        "key": key,
        "prompt": "Sort: 3 1 2",
        "response": response,
        "reward": 0.25,
        "response_tokens": 3,
        "truncated": True,
        "advantage": -0.5,
    }


def write_rows(log_dir: Path, step: int, rows: Sequence[Mapping[str, object]]) -> Path:
    """Write the rows as a step of a run, and return the run's folder."""
    path = rollout_path(log_dir, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return log_dir


def usual_rows() -> list[dict[str, object]]:
    """Return two groups with all that a page has to show."""
    return [
        token_row("aa11_g0", ["1", " 2", " 3", "<|im_end|>"], apart={1: 0.12, 2: -0.9}),
        token_row("aa11_g1", ["3", "\n", " tool: ok", " 2"], masked=[2], reward=0.0, finish_reason="length"),
        token_row("bb22_g0", ["\u4e2d", "\u6587", "", "", "\U0001f600", "e\u0301"] * 12, apart={3: 0.7}),
        token_row("bb22_g1", [HOSTILE], sample_mask=0.0, advantage=0.0),
    ]
