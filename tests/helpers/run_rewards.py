"""Reward functions of whole test runs; named in recipes as `tests.helpers.run_rewards:NAME`."""

from __future__ import annotations

import time


def digit_share(prompt: str, response: str, answer: object) -> float:
    """Share of digits in the response: varies between samples of an untrained model."""
    return sum(character.isdigit() for character in response) / max(len(response), 1)


def explode(prompt: str, response: str, answer: object) -> float:
    raise ValueError("this reward always fails")


def hang(prompt: str, response: str, answer: object) -> float:
    time.sleep(600)
    return 1.0
