"""A program that talks to the model and misbehaves as its argument says; for tests of conversations with programs."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import urllib.error
import urllib.request
from typing import Any

TOOL = {
    "type": "function",
    "function": {"name": "double", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}},
}


class Chat:
    """One history of messages."""

    def __init__(self, **settings: object) -> None:
        self.messages: list[Any] = [{"role": "user", "content": "guess 1 to 9"}]
        self.settings = settings

    def ask(self) -> Any:
        """Return the model's turn, which is put into the history."""
        body = json.dumps({"model": "any", "messages": self.messages, **self.settings}).encode()
        headers = {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "content-type": "application/json"}
        url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
        try:
            with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60) as reply:
                given = json.load(reply)["choices"][0]
        except urllib.error.HTTPError as error:
            sys.exit(error.read().decode())
        self.messages.append(given["message"])
        return given

    def say(self, text: str, **more: object) -> None:
        self.messages.append({"role": "user", "content": text, **more})


def rewrite() -> float:
    """Ask twice, then forget the beginning and ask again."""
    chat = Chat()
    chat.ask()
    chat.say("higher")
    chat.ask()
    chat.messages = [{"role": "user", "content": "once more"}]
    chat.ask()
    return 1.0


def talk(turns: int, **settings: object) -> float:
    """Ask until so many turns are there; a limit ends it."""
    chat = Chat(**settings)
    for number in range(turns):
        given = chat.ask()
        if given["finish_reason"] == "length" and not given["message"]["content"]:
            break
        chat.say(f"higher {number}")
    return 0.25


def use_tool() -> float:
    """Run the calls that the model makes, until it makes none."""
    chat = Chat(tools=[TOOL], temperature=0.0)
    while calls := chat.ask()["message"].get("tool_calls"):
        for call in calls:
            doubled = 2 * json.loads(call["function"]["arguments"])["x"]
            chat.messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(doubled)})
    return float(chat.messages[-1]["content"])


def branch() -> None:
    """Go on in two ways behind one turn, and ask a sub-agent in between."""
    trunk, other, agent = Chat(), Chat(), Chat()
    trunk.ask()
    other.messages = [*trunk.messages]
    agent.messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "4"}]
    trunk.say("higher")
    other.say("lower")
    for chat in (trunk, other, agent):
        chat.ask()
    trunk.say("again")
    trunk.ask()


def stubborn() -> None:
    """Repeat a request that is refused for ever."""
    chat = Chat()
    chat.ask()
    chat.messages = [{"role": "user", "content": "once more"}]
    while True:
        with contextlib.suppress(SystemExit):
            chat.ask()
        time.sleep(0.1)


def insist() -> float:
    """Ask for ever, whatever the answer is."""
    chat = Chat()
    while True:
        chat.ask()
        chat.say("go on")


def main() -> None:
    row, mode = json.loads(sys.stdin.readline()), sys.argv[1]
    reward = 0.5
    if mode == "silent":
        print(json.dumps({"reward": 1.0}))
        return
    if mode == "rewrite":
        reward = rewrite()
    elif mode == "tool":
        reward = use_tool()
    elif mode == "branch":
        branch()
        reward = float(row["seed"] % 2)
    elif mode in ("insist", "stubborn"):
        insist() if mode == "insist" else stubborn()
    elif mode == "short":
        talk(2, max_tokens=3, stop=["zz"])
    else:
        reward = talk(99 if mode == "long" else 2)
    if mode == "crash" or (mode == "flaky" and not os.path.exists(sys.argv[2])):
        if mode == "flaky":
            open(sys.argv[2], "w").close()
        sys.exit(3)
    if mode == "hang":
        time.sleep(1000)
    if mode != "no_reward":
        # Seeds of a run are larger than a part of a reward may be.
        print(json.dumps({"reward": reward, "components": {"seed": row["seed"] % 2**20}}))


if __name__ == "__main__":
    main()
