"""What a test changes in the process is put back: environment, working directory, logging."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

from nemo_rl.utils.deadlines import awake_s


@pytest.fixture(autouse=True, scope="session")
def interrupts_are_heard() -> None:
    """A shell starts what it puts in the background deaf to Ctrl-C, and nohup to a hangup; so would be the processes
    that tests start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True, scope="session")
def clock_of_deadlines_runs() -> None:
    """Its thread is one of the process, and none that a test has left."""
    awake_s()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model for tests that only read it; a file that needs another has its own fixture of this name."""
    # torch is imported where it is used alone.
    from tests.helpers.tiny_model import write_tiny_folder

    return write_tiny_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def crashes_are_shown(request: pytest.FixtureRequest) -> None:
    """Ray replaces pytest's handler by one that writes into a log of its session."""
    # Enabled as it is, it would not be installed again.
    faulthandler.disable()
    faulthandler.enable(request.config.stash[fault_handler_stderr_fd_key])


@pytest.fixture(autouse=True)
def process_is_restored() -> Iterator[None]:
    environment, folder = dict(os.environ), os.getcwd()
    root, ours = logging.getLogger(), logging.getLogger("nemo_rl")
    handlers, levels = list(root.handlers), (root.level, ours.level)
    yield
    # What has not changed is left alone: threads of C++ libraries read the environment, and a write moves it.
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    os.chdir(folder)
    for handler in [*root.handlers]:
        if handler not in handlers:
            root.removeHandler(handler)
    root.setLevel(levels[0])
    ours.setLevel(levels[1])
