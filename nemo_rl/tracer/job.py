"""`open_job`: the hub of a job, and the job's line to it, from the start of the job to its end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from nemo_rl.tracer.link import HubAddress, HubLink, OnMessage
from nemo_rl.tracer.process import OPEN_FILE, HubProcess, HubSpec
from nemo_rl.tracer.protocol import Role
from nemo_rl.tracer.tokens import token_path

__all__ = ["TracedJob", "open_job"]

DRIVER_BYTES = 1 << 20
"""Most bytes of the driver's messages that wait: numbers and keys."""
MAX_TEXT = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedJob:
    """A job whose hub is there."""

    address: HubAddress
    """For the ranks."""
    link: HubLink
    """Of the driver."""
    where: str
    """Where to look, for people."""


@contextmanager
def open_job(
    spec: HubSpec,
    facts: Mapping[str, object],
    *,
    reached_at: str | None = None,
    on_message: OnMessage | None = None,
) -> Iterator[TracedJob]:
    """Starts the hub, and tells it how the job ends.

    Args:
        facts: what the hub is told of the run: `name`, `model`, `layout`, `tokenizer`.
        reached_at: host where the ranks find the hub; None: where it listens.
        on_message: called by a thread with what the hub says to the driver.

    Raises:
        ResourceError: the hub does not start, such as where its port is taken.
    """
    with HubProcess(spec) as hub:
        address = HubAddress(host=reached_at or spec.host, port=hub.port, token=hub.tokens.job)
        link = HubLink(address, Role.DRIVER, hello={}, memory_bytes=DRIVER_BYTES, on_message=on_message)
        link.say({"type": "run", "run": spec.run, **facts})
        reason, text = "completed", ""
        try:
            page, token = spec.folder / OPEN_FILE, token_path(spec.folder, Role.CONTROLLER.value)
            where = f"http://{hub.address} (open {page}, or give the token of {token})"
            yield TracedJob(address=address, link=link, where=where)
        except BaseException as error:
            reason = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            text = str(error)[:MAX_TEXT]
            raise
        finally:
            link.say({"type": "finish", "reason": reason, "text": text})
            link.close()
