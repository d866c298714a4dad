"""Calls of a native library end for their caller by the deadline, and close knows what is still inside."""

from __future__ import annotations

import threading
import time

import pytest

from nemo_rl.data_plane.adapters.mooncake_link import DeadlineCalls
from nemo_rl.errors import DataPlaneClosed, DataPlaneTimeout


def names() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("lib")]


def test_results_and_errors_reach_the_caller_and_threads_are_reused() -> None:
    calls = DeadlineCalls("lib")
    assert [calls.run(lambda value=value: value * 2, timeout_s=5) for value in range(20)] == list(range(0, 40, 2))
    with pytest.raises(ZeroDivisionError):
        calls.run(lambda: 1 // 0, timeout_s=5)
    with pytest.raises(TimeoutError, match="its own"):
        calls.run(lambda: (_ for _ in ()).throw(TimeoutError("its own")), timeout_s=5)
    assert len(names()) == 1
    assert calls.close(grace_s=1)
    assert not names()


def test_past_the_deadline_the_caller_goes_on_and_close_waits_for_the_call() -> None:
    calls, release = DeadlineCalls("lib"), threading.Event()
    started = time.monotonic()
    with pytest.raises(DataPlaneTimeout, match="lib did not answer within 0.1 s"):
        calls.run(release.wait, timeout_s=0.1)
    assert time.monotonic() - started < 3
    assert calls.run(lambda: 7, timeout_s=5) == 7  # others are not behind it
    assert not calls.close(grace_s=0.1)
    with pytest.raises(DataPlaneClosed):
        calls.run(lambda: 8, timeout_s=5)
    threading.Timer(0.1, release.set).start()
    assert calls.close(grace_s=5)
    time.sleep(0.1)
    assert not names()
