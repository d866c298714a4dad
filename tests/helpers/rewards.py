"""Custom rewards of every kind, good and bad, named in tests as `tests.helpers.rewards:NAME`."""

from __future__ import annotations

import math
import os
import re
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
