"""Removes a run's partitions from another program's TransferQueue when the run dies without doing so.

`python -m nemo_rl.data_plane.adapters.transfer_queue_guard RUN_ID RAY_ADDRESS NODE` waits for its standard input: a
word means that the run has closed, its end without one that the owner has died, which the kernel reports however it
dies. Until then it has imported neither torch nor Ray.
"""

from __future__ import annotations

import os
import sys
import threading

from nemo_rl.utils.process_guard import leave_notices_to_driver

__all__ = ["main"]

REMOVE_S = 60.0
"""Seconds in which TransferQueue must answer a guard."""


def main(run_id: str, ray_address: str, node: str) -> None:
    """Wait for the owner's end, and clean up after one that has died."""
    leave_notices_to_driver()
    if sys.stdin.buffer.read():
        return
    # Where the cluster has died as well, Ray waits for it without end.
    last = threading.Timer(2 * REMOVE_S, lambda: os._exit(1))
    last.daemon = True
    last.start()
    import ray  # noqa: PLC0415 - a run that closes needs none of it

    from nemo_rl.config.data_plane import DataPlaneConfig, TransferQueueConfig  # noqa: PLC0415 - see above
    from nemo_rl.data_plane.adapters.transfer_queue import TransferQueueStore  # noqa: PLC0415 - see above

    config = DataPlaneConfig(impl="transfer_queue", transfer_queue=TransferQueueConfig(connect=True))
    ray.init(address=ray_address, _node_ip_address=node, log_to_driver=False)
    TransferQueueStore.take_over(config, run_id=run_id, timeout_s=REMOVE_S).close()
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
