"""What a test changes in the process is put back: environment, working directory, logging."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def process_is_restored() -> Iterator[None]:
    environment, folder = dict(os.environ), os.getcwd()
    root, ours = logging.getLogger(), logging.getLogger("nemo_rl")
    handlers, levels = list(root.handlers), (root.level, ours.level)
    yield
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for handler in [*root.handlers]:
        if handler not in handlers:
            root.removeHandler(handler)
    root.setLevel(levels[0])
    ours.setLevel(levels[1])
