"""A tool, an environment, rewards and a program that do what `hostile_acts` names."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.helpers.hostile_acts import VALUES, perform

NEIGHBOUR = "neighbour"
"""Name of what does no harm."""


def act(name: str) -> Any:
    """Do what is named."""
    return "fine" if name == NEIGHBOUR else perform(name)


class Hostile:
    """Does what the prompt names, where the answer says: at `open`, `reply` or `close`, or as a field of a reply."""

    def open(self, row: Any) -> HostileConversation:
        if row.answer == "open" and row.prompt != NEIGHBOUR:
            perform(row.prompt)
        return HostileConversation(row.prompt, row.answer)


class HostileConversation:
    def __init__(self, name: str, place: str) -> None:
        self.name, self.place = name, place

    def reply(self, turn: Any) -> Any:
        plain = {"done": True, "reward": 0.25}
        if self.name == NEIGHBOUR or self.place in ("open", "close"):
            return plain
        made = perform(self.name)
        match self.place:
            case "reply":
                return plain
            case "whole":
                return made
            case "content" | "name":
                return {"messages": [{"role": "user", "content": "x", self.place: made}]}
            case "component":
                return {**plain, "components": {"part": made}}
        return {**plain, self.place: made}

    def close(self) -> None:
        if self.place == "close" and self.name != NEIGHBOUR:
            perform(self.name)


def reward_one(prompt: str, response: str, answer: object) -> Any:
    """Return what is named as the reward."""
    made = perform(response) if response != NEIGHBOUR else None
    return made if response in VALUES else 0.25


def reward_parts(prompt: str, response: str, answer: object) -> Any:
    """Return what is named as a part of the reward."""
    return {"part": reward_one(prompt, response, answer)}


def reward_batch(prompts: Sequence[str], responses: Sequence[str], answers: Sequence[object]) -> Any:
    """Return what is named in place of the list."""
    made = [reward_one("", response, None) for response in responses]
    return made[0] if responses[0] in VALUES else made


def main() -> None:
    """Be a program: do what the row's prompt names, then state a reward."""
    name = json.loads(sys.stdin.readline())["prompt"]
    if name in LAST_LINES:
        sys.stdout.buffer.write(LAST_LINES[name] + b"\n")
        return
    if name != NEIGHBOUR:
        perform(name)
    print('{"reward": 0.25}', flush=True)


LAST_LINES = {
    "digits": b'{"reward": 1' + b"0" * 400 + b"}",
    "more digits": b'{"reward": 1' + b"0" * 5000 + b"}",
    "nan": b'{"reward": NaN}',
    "1e999": b'{"reward": 1e999}',
    "1e308": b'{"reward": 1e308}',
    "true": b'{"reward": true}',
    "text": b'{"reward": "1"}',
    "nested": b'{"reward": ' + b"[" * 20_000,
    "nested in a part": b'{"reward": 1, "components": ' + b'{"a":' * 900 + b"1" + b"}" * 901,
    "digits in a part": b'{"reward": 1, "components": {"a": -1' + b"0" * 400 + b"}}",
    "odd names": b'{"reward": 1, "components": {"\\ud800\\n": 1, "": 2}}',
    "a list of parts": b'{"reward": 1, "components": [1]}',
    "no parts": b'{"reward": 1, "components": null}',
    "many parts": b'{"reward": 1, "components": {' + b",".join(b'"%d": 1' % n for n in range(5000)) + b"}}",
    "twice": b'{"reward": 1, "reward": "x"}',
    "bytes": bytes(range(256)),
    "long": b'{"reward": 1, "x": "' + b"x" * 100_000 + b'"}',
    "null": b'{"reward": null}',
}
"""Last lines of programs, by name."""

if __name__ == "__main__":
    main()
