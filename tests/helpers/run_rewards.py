"""Reward functions of whole test runs; named in recipes as `tests.helpers.run_rewards:NAME`."""

from __future__ import annotations

import time


def odd_share(prompt: str, response: str, answer: object) -> float:
    """Share of characters with an odd code: varies between the samples of any untrained model."""
    return sum(ord(character) % 2 for character in response) / max(len(response), 1)


def judged(prompt: str, response: str, answer: object, *, response_tokens: int) -> dict[str, float]:
    """Prints, and gives components."""
    print(f"judging {response_tokens} tokens")
    return {"odd": odd_share(prompt, response, answer), "length": float(response_tokens)}


def right_and_short(prompt: str, response: str, answer: object) -> dict[str, float]:
    """Components that often cancel in their sum."""
    is_odd = float(odd_share(prompt, response, answer) > 0.6)
    return {"odd": is_odd, "even": 1.0 - is_odd}


def indifferent(prompt: str, response: str, answer: object) -> float:
    """No group learns from it."""
    return 0.5


def explode(prompt: str, response: str, answer: object) -> float:
    raise ValueError("this reward always fails")


def hang(prompt: str, response: str, answer: object) -> float:
    time.sleep(600)
    return 1.0
