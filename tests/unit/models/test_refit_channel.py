"""Channels of a refit between real processes' ends: what is read, who is lost, which errors arrive, what is left."""

from __future__ import annotations

import gc
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import pytest
import torch

from nemo_rl.errors import CollectiveTimeout, WorkerError
from nemo_rl.models.weight_sync.transport import BucketReader, BucketSender, ChannelSpec, SharedSlots

NUM_BUCKETS, SLOT_BYTES = 7, 1000


def bucket(number: int) -> torch.Tensor:
    return torch.full((SLOT_BYTES - number,), number, dtype=torch.uint8)


def made(*, num_slots: int = 2, timeout_s: float = 20.0) -> BucketSender:
    return BucketSender(
        "127.0.0.1",
        num_buckets=NUM_BUCKETS,
        num_slots=num_slots,
        slot_bytes=SLOT_BYTES,
        timeout_s=timeout_s,
        memory=SharedSlots(num_slots=num_slots, slot_bytes=SLOT_BYTES),
    )


def write(sender: BucketSender, slot: int, number: int) -> int:
    place, value = slot * SLOT_BYTES, bucket(number)
    sender._memory.slots[place : place + len(value)] = value
    return len(value)


def send_all(sender: BucketSender, num_readers: int, *, up_to: int = NUM_BUCKETS) -> None:
    sender.accept(num_readers)
    for number in range(up_to):
        sender.send(write(sender, sender.slot(), number))


def read(spec: ChannelSpec, *, up_to: int = NUM_BUCKETS, pause_s: float = 0.0) -> list[torch.Tensor]:
    found = list[torch.Tensor]()
    with closing(BucketReader(spec)) as reader:
        while len(found) < up_to and reader.num_missing:
            time.sleep(pause_s)
            found.append(reader.next().clone())
            reader.done()
    return found


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(max_workers=4) as made_pool:
        yield made_pool


def test_every_reader_gets_every_byte_from_memory_or_over_its_connection(pool) -> None:
    # What earlier tests left to the collector must not go meanwhile.
    gc.collect()
    files = len(os.listdir("/proc/self/fd"))
    sender = made()
    # A stranger is no reader, and on another machine the path leads nowhere, or to another run's memory.
    anybody = socket.create_connection((sender.spec.address, sender.spec.port))
    anybody.sendall(b"x" * 64)
    stranger = SharedSlots(num_slots=2, slot_bytes=SLOT_BYTES)
    specs = [sender.spec, replace(sender.spec, path="/nowhere"), replace(sender.spec, path=stranger.path)]
    readers = [pool.submit(read, spec, pause_s=0.01 * place) for place, spec in enumerate(specs)]
    send_all(sender, len(specs))
    for reader in readers:
        found = reader.result(timeout=20)
        assert all(torch.equal(each, bucket(number)) for number, each in enumerate(found)) and len(found) == NUM_BUCKETS
    for each in (sender, stranger, anybody):
        each.close()
    # Mapped memory has a descriptor of its own, as long as a tensor is there.
    del sender, stranger, found, reader, readers, each
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= files, "no connection and no memory is left"


def test_a_reader_that_dies_holds_up_nobody(pool) -> None:
    sender, started = made(), time.monotonic()
    dying, living = pool.submit(read, sender.spec, up_to=2), pool.submit(read, sender.spec)
    send_all(sender, 2)
    assert len(dying.result(timeout=20)) == 2 and len(living.result(timeout=20)) == NUM_BUCKETS
    assert time.monotonic() - started < 10
    sender.close()


def test_errors_and_the_end_of_the_sender_reach_the_readers(pool) -> None:
    sender = made()
    reader = pool.submit(read, sender.spec)
    send_all(sender, 1, up_to=3)
    sender.send_error("RuntimeError: no memory")
    with pytest.raises(WorkerError, match="the policy could not send weights: RuntimeError: no memory"):
        reader.result(timeout=20)
    sender.close()
    sender = made()
    reader = pool.submit(read, sender.spec)
    send_all(sender, 1, up_to=1)
    sender.close()
    with pytest.raises(CollectiveTimeout, match="lost the other members"):
        reader.result(timeout=20)
    with pytest.raises(CollectiveTimeout, match="lost the other members"):
        read(sender.spec)


def test_waits_end_with_the_deadline(pool) -> None:
    sender = made(timeout_s=0.5)
    with pytest.raises(CollectiveTimeout, match="0 of 1 engines came in"):
        sender.accept(1)
    reader = pool.submit(read, sender.spec)
    sender.accept(1)
    with pytest.raises(CollectiveTimeout, match="waited 0 s|timed out"):
        reader.result(timeout=20)
    sender.close()


def test_kept_buckets_are_read_by_one_after_the_other(pool) -> None:
    sender = made(num_slots=NUM_BUCKETS)
    sizes = [write(sender, number, number) for number in range(NUM_BUCKETS)]
    sender.serve(sizes)
    assert len(read(sender.spec, up_to=2)) == 2
    for _ in range(2):
        found = read(sender.spec)
        assert all(torch.equal(each, bucket(number)) for number, each in enumerate(found)) and len(found) == NUM_BUCKETS
    sender.close()
