"""A time limit ends Python code, and leaves other timers as they were."""

from __future__ import annotations

import signal
import threading

import pytest

from nemo_rl.utils.deadlines import time_limit


def spin() -> None:
    while True:
        pass


def test_what_has_no_end_is_ended_and_what_ends_is_left_alone():
    handler = signal.getsignal(signal.SIGALRM)
    with pytest.raises(TimeoutError, match=r"not finished within 0\.1 s"), time_limit(0.1):
        spin()
    with time_limit(60):
        pass
    assert signal.getsignal(signal.SIGALRM) is handler


def test_a_timer_of_somebody_else_goes_on():
    before = signal.setitimer(signal.ITIMER_REAL, 500)
    try:
        with time_limit(60):
            assert signal.getitimer(signal.ITIMER_REAL)[0] <= 60
        assert 60 < signal.getitimer(signal.ITIMER_REAL)[0] <= 500
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)


def test_another_thread_runs_without_a_limit():
    done = []

    def work() -> None:
        with time_limit(0.01):
            done.append(signal.getitimer(signal.ITIMER_REAL)[0])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(timeout=60)
    assert len(done) == 1
