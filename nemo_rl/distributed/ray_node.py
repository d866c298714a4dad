"""`ray start` as a child process: one node of a Ray cluster, until it is told to end.

    echo '["--head", ...]' | python -m nemo_rl.distributed.ray_node

The words after `ray start` come on standard input, when Ray is imported already: a node that waits for the address of
another loses no time. Ends with an error when one of Ray's processes does; a signal ends them all in order. With the
variables of a fork server its workers begin there.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path

from ray.scripts.scripts import main as ray_command

from nemo_rl.distributed import fork_stub
from nemo_rl.distributed.ray_private import apart_from_signals, started_by, without_what_nobody_asks
from nemo_rl.utils.process_guard import leave_notices_to_driver

__all__: list[str] = []


def main() -> None:
    """Read the words, and run as `ray start` from then on."""
    leave_notices_to_driver()
    line = sys.stdin.readline()
    if not line:
        return
    sys.argv = ["ray", "start", *json.loads(line)]
    with ExitStack() as changes:
        changes.enter_context(without_what_nobody_asks())
        changes.enter_context(apart_from_signals())
        if fork_stub.ADDRESS in os.environ:
            changes.enter_context(started_by(Path(fork_stub.__file__)))
        ray_command()


if __name__ == "__main__":
    main()
