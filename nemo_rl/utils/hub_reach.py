"""`why_unreachable`: whether the Hugging Face hub answers, asked with a deadline. Called before a download."""

from __future__ import annotations

import threading

from huggingface_hub import constants
from huggingface_hub.utils import get_session

from nemo_rl.errors import shorten

__all__ = ["ETAG_TIMEOUT_S", "why_unreachable"]

REACH_TIMEOUT_S = 8.0
"""Seconds for the hub to answer at all, looking up its address included."""
ETAG_TIMEOUT_S = 15.0
"""Seconds for one question about a file."""


def why_unreachable() -> str | None:
    """Return why the hub cannot be asked, or None when it answers, with any code."""
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    failed: list[str] = []

    def ask() -> None:
        try:
            get_session().head(constants.ENDPOINT, timeout=REACH_TIMEOUT_S)
        except Exception as error:  # noqa: BLE001  (whatever a network raises: the hub does not answer)
            failed.append(shorten(f"{type(error).__name__}: {error}"))

    # A thread that nobody waits for: looking up an address has no deadline of its own.
    thread = threading.Thread(target=ask, daemon=True, name="hub-probe")
    thread.start()
    thread.join(REACH_TIMEOUT_S + 1)
    if thread.is_alive():
        return f"{constants.ENDPOINT} does not answer within {REACH_TIMEOUT_S:.0f} s"
    return f"{constants.ENDPOINT} cannot be reached ({failed[0]})" if failed else None
