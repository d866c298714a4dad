"""The collector is off inside and as before outside, also over threads and nested."""

from __future__ import annotations

import gc
import threading

from nemo_rl.utils.collector import paused_collector


def test_it_is_off_inside_and_on_after_the_last_has_left():
    assert gc.isenabled()
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with paused_collector():
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(60)
    with paused_collector():
        assert not gc.isenabled()
    assert not gc.isenabled(), "the other thread is still inside"
    leave.set()
    thread.join(60)
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off():
    gc.disable()
    try:
        with paused_collector():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
