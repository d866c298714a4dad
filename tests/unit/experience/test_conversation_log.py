"""Logs of conversations come back as they were, from a column and from a file, whatever their texts hold."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from nemo_rl.config.env import Ending
from nemo_rl.data.conversation import Message, ToolCall
from nemo_rl.environments.conversation import ToolResult
from nemo_rl.errors import CheckpointError, UnsupportedFormat
from nemo_rl.experience.conversation_attempt import TurnRecord
from nemo_rl.experience.conversation_log import (
    ConversationFile,
    ConversationLog,
    log_column,
    logs_of_column,
    turn_lines,
)

HOSTILE = 'a\x00\x1b[31m\n\u2028\ud7ff "}\u00e9'
TURN = TurnRecord(
    text=HOSTILE,
    num_tokens=3,
    truncated=True,
    calls=(ToolCall(name="add", arguments={"a": [1, 2.5, None, {"b": HOSTILE}]}),),
    results=(ToolResult(text=HOSTILE, error="raised", seconds=0.25),),
    messages=(Message(role="tool", content=HOSTILE, name="add"),),
    stop=("x",),
    reward=0.1,
    components={"part": 1 / 3},
    cached_tokens=0,
    sampled_s=1.23456789,
)
LOG = ConversationLog(
    prompt=4,
    seed=2**62,
    opening=(Message(role="user", content=HOSTILE),),
    turns=(TURN, TurnRecord(text="", num_tokens=1, truncated=False)),
    ending=Ending.ENV_ERROR,
    reward=-0.5,
    error="gone",
    num_attempts=2,
    is_scored=False,
)


def test_a_log_comes_back_from_its_column() -> None:
    other = replace(LOG, turns=(), opening=())
    column = log_column([LOG, None, other, None])
    assert logs_of_column(column) == [LOG, None, other, None]
    assert logs_of_column(log_column([None, None])) == [None, None]


def test_a_file_comes_back_line_by_line(tmp_path: Path) -> None:
    file = ConversationFile(schemas=({"name": "add"},), now=datetime(2025, 3, 4, 5), logs={"a_g0": LOG})
    path = tmp_path / "conversations.jsonl"
    assert file.write(path) == path.stat().st_size
    assert ConversationFile.read(path) == file
    assert len(path.read_text().split("\n")) == 3 and path.read_text().isascii()


@pytest.mark.parametrize("damage", ["", "[]", '{"format": 1, "schemas": [], "now": "x"}', None])
def test_a_damaged_file_is_refused(tmp_path: Path, damage: str | None) -> None:
    path = tmp_path / "conversations.jsonl"
    ConversationFile(now=datetime(2025, 3, 4), logs={"a_g0": LOG}).write(path)
    text = path.read_text().replace("env_error", "bored") if damage is None else damage
    path.write_text(text)
    with pytest.raises(CheckpointError, match=r"conversations.jsonl: expected"):
        ConversationFile.read(path)


def test_a_file_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "conversations.jsonl"
    path.write_text('{"format": 2}\n')
    with pytest.raises(UnsupportedFormat, match=r"conversations.jsonl: expected version 1 of .*, got 2"):
        ConversationFile.read(path)


def test_readable_rollouts_leave_out_what_is_empty() -> None:
    found = turn_lines(LOG)
    assert json.loads(json.dumps(found))["turns"][0]["calls"][0]["name"] == "add"
    assert found["cause"] == "gone" and found["attempts"] == 2 and found["left_out"]
    assert found["turns"][0]["sampled_s"] == 1.2346 and found["turns"][0]["cached_tokens"] == 0
    assert "messages" not in found["turns"][1] and "stop" not in found["turns"][1]
