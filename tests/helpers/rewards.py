"""Custom rewards of every kind, good and bad; tests and recipes name them `tests.helpers.rewards:NAME`."""

from __future__ import annotations

import contextlib
import math
import os
import re
import threading
import time


def length(prompt: str, response: str, answer: object) -> float:
    print("a reward function may print")
    return len(response) + (0.5 if answer == {"gold": prompt} else 0.0)


def hang_on_request(prompt: str, response: str, answer: object) -> float:
    if response == "hang":
        time.sleep(3600)
    if response == "hang in C":
        # Exponential backtracking that never releases the interpreter lock.
        re.match(r"(a+)+$", "a" * 60 + "b")
    return 1.0


def misbehave(prompt: str, response: str, answer: object) -> object:
    if response == "raise":
        raise KeyError("gold")
    if response == "exit":
        os._exit(3)
    return {"nan": math.nan, "inf": math.inf, "text": "1.0", "none": None, "true": True}.get(response, 0.25)


def chatty(prompt: str, response: str, answer: object) -> float:
    for number in range(int(response)):
        print(f"line {number} \x1b[2J\u202e of {response}")
    return float(response)


def floods(prompt: str, response: str, answer: object) -> float:
    """Writes `answer` without end to the descriptor of the name: while it is asked, or in a thread after its answer."""
    target, _, when = response.partition(" ")
    descriptors = {"stdout": [1], "stderr": [2], "everywhere": list(map(int, os.listdir("/proc/self/fd")))}

    def write() -> None:
        while True:
            for descriptor in descriptors[target]:
                with contextlib.suppress(OSError):
                    os.write(descriptor, str(answer).encode("latin-1") * 4096)

    if when == "later":
        threading.Thread(target=write, daemon=True).start()
    elif target in descriptors:
        write()
    return 1.0


def says_one_long_line(prompt: str, response: str, answer: object) -> float:
    os.write(1, b"\xff\xfe" + b"y" * int(response) + b"\nshort\nno end")
    return 1.0


def parts(prompt: str, response: str, answer: object) -> dict[str, float]:
    """Return the components that `answer` names."""
    if response == "hang":
        time.sleep(3600)
    return {str(name): len(response) / 10 + number for number, name in enumerate(answer or ())}


def with_context(
    prompt: str, response: str, answer: object, *, row: dict, response_tokens: int, truncated: bool
) -> float:
    return row["difficulty"] * 100 + response_tokens * 10 + truncated


def with_everything(prompt: str, response: str, answer: object, **context: object) -> float:
    assert set(context) == {"row", "prompt_tokens", "response_tokens", "truncated"}, context
    return float(context["prompt_tokens"])


def with_the_unnamed(prompt: str, response: str, answer: object, judge: object, /) -> float:
    return 0.0


def batch(prompts: list[str], responses: list[str], answers: list[object], *, truncated: list[bool]) -> list[float]:
    assert len(prompts) == len(responses) == len(answers) == len(truncated)
    if "hang" in responses:
        time.sleep(3600)
    return [len(responses) + len(response) / 100 for response in responses]


def short_batch(prompts: list[str], responses: list[str], answers: list[object]) -> list[float]:
    return [1.0]


def writes_everywhere(prompt: str, response: str, answer: object) -> float:
    """Like a library that takes every descriptor for its own: what it writes looks like a reply."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with contextlib.suppress(OSError):
                os.write(int(name), b'garbage\n{"id": 1, "scores": [9.0]}\n{"id": "1", "scores": [9.0]}\nhalf a line')
    return float(response)


def leaves_a_session(prompt: str, response: str, answer: object) -> float:
    """Starts a process in its own session, whose parent ends at once; `response` is a file for its number."""
    first = os.fork()
    if first == 0:
        os.setsid()
        second = os.fork()
        if second:
            with open(response, "w") as file:
                file.write(str(second))
            os._exit(0)
        time.sleep(3600)
    os.waitpid(first, 0)
    if answer == "exit":
        os._exit(3)
    return 1.0


def odd_share(prompt: str, response: str, answer: object) -> float:
    """Share of characters with an odd code: varies between the samples of any untrained model."""
    return sum(ord(character) % 2 for character in response) / max(len(response), 1)


def odd_share_or_none(prompt: str, response: str, answer: object) -> float | None:
    """None for a third of the responses."""
    return None if sum(map(ord, response)) % 3 == 0 else odd_share(prompt, response, answer)


def parts_or_none(prompt: str, response: str, answer: object) -> dict[str, float | None] | None:
    """Return the components of `answer`, which may be None as they may be; None for another answer."""
    return {str(name): part for name, part in answer.items()} if isinstance(answer, dict) else None


def judged(prompt: str, response: str, answer: object, *, response_tokens: int) -> dict[str, float]:
    """Print a line, and return components."""
    print(f"judging {response_tokens} tokens")
    return {"odd": odd_share(prompt, response, answer), "length": float(response_tokens)}


def right_and_short(prompt: str, response: str, answer: object) -> dict[str, float]:
    """Components that often cancel in their sum."""
    is_odd = float(odd_share(prompt, response, answer) > 0.6)
    return {"odd": is_odd, "even": 1.0 - is_odd}


def indifferent(prompt: str, response: str, answer: object) -> float:
    """Return the same reward for every response, so that no group learns from it."""
    return 0.5


def explode(prompt: str, response: str, answer: object) -> float:
    raise ValueError("this reward always fails")


def returns_none(prompt: str, response: str, answer: object) -> None:
    """Return what a function without a return statement does."""


def hang(prompt: str, response: str, answer: object) -> float:
    time.sleep(600)
    return 1.0


def of_columns(prompt: str, response: str, answer: object, level: int, *, bonus: float = 0.5) -> float:
    """Takes columns of the row by their names, as reward functions of TRL do."""
    return level + bonus
