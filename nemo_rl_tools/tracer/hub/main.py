"""The hub's process: `python -m nemo_rl_tools.tracer.hub.main`, started by `nemo_rl.tracer.process`.

One line of JSON on standard input says what to do, one on standard output which port it listens on. Standard input then
stays open: its end means that the job is gone.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from contextlib import suppress

from nemo_rl.errors import UserError
from nemo_rl.tracer.process import HubSpec
from nemo_rl.tracer.protocol import HubTokens
from nemo_rl.tracer.watch import WatchPlan
from nemo_rl.utils.process_guard import leave_notices_to_driver
from nemo_rl_tools.tracer.hub.hub import Hub, SinkThread
from nemo_rl_tools.tracer.hub.server import HubEndpoint, HubServer

__all__ = ["main"]

logger = logging.getLogger(__name__)

LINGER_S = 3.0
"""After the job has ended viewers get what waits for them for so long."""
PARENT_S = 1.0
"""Seconds between checks that the parent is alive: another of its children may hold its end of the pipe."""


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    given = json.loads(sys.stdin.readline())
    spec, tokens = HubSpec.of_record(given["spec"]), HubTokens(**given["tokens"])
    try:
        asyncio.run(_run(spec, tokens))
    except (OSError, UserError) as error:
        _say({"error": str(error)})
        return 1
    return 0


async def _run(spec: HubSpec, tokens: HubTokens) -> None:
    parent = os.getppid()
    hub = Hub(limits=spec.limits, plan=WatchPlan.parse(spec.watches), artifacts=spec.artifacts)
    server = HubServer(
        hub,
        tokens=tokens,
        endpoint=HubEndpoint(host=spec.host, port=spec.port, origins=spec.origins, has_legacy=spec.compat),
        tokenizer=spec.tokenizer,
    )
    async with server:
        _say({"port": server.port})
        if spec.record:
            _record(hub, spec)
        logger.info("listening on port %d", server.port)
        await _job_ends(parent)
        logger.info("the job has ended")
        await server.sessions.end_is_known()
        await server.sessions.driver_gone()
        await server.ranks.flush()
        # In a thread, so that viewers get the last pictures meanwhile.
        await asyncio.to_thread(hub.close_sinks)
        await _linger(server)


def _record(hub: Hub, spec: HubSpec) -> None:
    # Imported here: only recordings need it.
    from nemo_rl_tools.tracer.store import StreamWriter  # noqa: PLC0415

    try:
        writer = StreamWriter(spec.folder, spec.record_bytes)
    except UserError as error:
        hub.problem(f"recording is off: {error}")
        return
    hub.add_sink(SinkThread(writer, max_bytes=spec.limits.sink_bytes, problem=hub.problem))


async def _job_ends(parent: int) -> None:
    """Standard input ends, the parent is gone, or somebody ends this process."""
    leave_notices_to_driver()
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)

    def read() -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            loop.remove_reader(sys.stdin.fileno())
            ended.set()

    loop.add_reader(sys.stdin.fileno(), read)
    while not ended.is_set() and os.getppid() == parent:
        with suppress(TimeoutError):
            async with asyncio.timeout(PARENT_S):
                await ended.wait()


async def _linger(server: HubServer) -> None:
    """Serve those who look on a little longer."""
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while server.sessions.viewers:
                await asyncio.sleep(LINGER_S / 30)


def _say(record: dict[str, object]) -> None:
    with suppress(OSError):
        sys.stdout.write(f"{json.dumps(record)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
