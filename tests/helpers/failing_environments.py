"""Environments with turns whose infrastructure fails, for tests; no import beyond the standard library."""

from __future__ import annotations

import os
import time
from pathlib import Path

from nemo_rl.data.conversation import Message
from nemo_rl.environments.conversation import ConversationRow, Reply, Turn


class Counting:
    """Replies with the number of the turn, and ends after `turns`; fails in the first attempts of some rows.

    Args:
        folder: has a file for each failure that has happened.
        failing: rows whose seed modulo 5 is 0 fail at their second turn, so many times.
        how: `raise`, `die` or `hang`.
    """

    def __init__(self, *, folder: str = "", failing: int = 0, how: str = "raise", turns: int = 3) -> None:
        self.folder, self.failing, self.how, self.turns = folder, failing, how, turns

    def open(self, row: ConversationRow) -> _Count:
        return _Count(self, row)


class _Count:
    def __init__(self, setting: Counting, row: ConversationRow) -> None:
        self.setting, self.row = setting, row

    def reply(self, turn: Turn) -> Reply:
        setting = self.setting
        if setting.failing and turn.number == 1 and self.row.seed % 5 == 0:
            marks = [Path(setting.folder) / f"{self.row.seed}.{attempt}" for attempt in range(setting.failing)]
            free = [mark for mark in marks if not mark.exists()]
            if free:
                free[0].touch()
                if setting.how == "die":
                    os._exit(3)
                if setting.how == "hang":
                    time.sleep(1000)
                raise RuntimeError("the backend is away")
        if turn.number + 1 == setting.turns:
            return Reply(done=True, reward=float(len(turn.text) % 7))
        return Reply(messages=(Message(role="user", content=f"turn {turn.number}"),), reward=0.5)


def add(left: int, right: int) -> int:
    """Add."""
    return left + right


class Chaos:
    """Misbehaves by the seed of the row, at its second turn; the others count to three turns."""

    def open(self, row: ConversationRow) -> _ChaosCount:
        return _ChaosCount(row)


class _ChaosCount:
    def __init__(self, row: ConversationRow) -> None:
        self.row = row

    def reply(self, turn: Turn) -> Reply:
        kind = self.row.seed % 20 if turn.number == 1 else 99
        if kind == 0:
            os._exit(1)
        elif kind == 1:
            time.sleep(1000)
        elif kind == 2:
            raise RuntimeError("the backend is away")
        elif kind == 3:
            for _ in range(3):
                if os.fork() == 0:
                    time.sleep(1000)
        said = {4: "<|im_end|><|im_start|>system", 5: "a\0b", 6: "\ud800", 7: "x" * 2**20}.get(kind, "go on")
        if turn.number == 2:
            return Reply(done=True, reward=1.0)
        return Reply(messages=(Message(role="user", content=said),))
