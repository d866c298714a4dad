"""`ray start` as a child process: one node of a Ray cluster, until it is told to end.

    echo '["--head", ...]' | python -m nemo_rl.distributed.ray_node

The words after `ray start` come on standard input, when Ray is imported already: a node that waits for the address of
another loses no time. Ends with an error when one of Ray's processes does; a signal ends them all in order.
"""

from __future__ import annotations

import json
import sys

from ray.scripts.scripts import main as ray_command

from nemo_rl.distributed.ray_private import without_what_nobody_asks

__all__: list[str] = []


def main() -> None:
    """Reads the words, and is `ray start` from then on."""
    line = sys.stdin.readline()
    if not line:
        return
    sys.argv = ["ray", "start", *json.loads(line)]
    with without_what_nobody_asks():
        ray_command()


if __name__ == "__main__":
    main()
