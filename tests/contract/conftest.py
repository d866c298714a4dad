"""One data plane per adapter and mode for the whole suite, one Ray cluster for all that need one.

Tests are ordered so that each plane is opened once: planes without Ray, planes under Ray, then tests that open planes
of their own on the cluster. A plane is closed, and the cluster ended, when the next test needs another one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

import psutil
import pytest

from tests.helpers.data_plane_peers import Mode, forking
from tests.helpers.data_planes import PLANES, Plane, open_plane, ray_cluster, segments, wait_until

FEW: set[tuple[str, Mode]] = {("noop", "threads"), ("shm", "processes"), ("ray-producer", "actors")}
"""One per ledger host, for tests of what all stores share; every one of them in `make test-full`."""
ONLY_FULL = {"transfer_queue-connect", "transfer_queue-native-mooncake"}
"""Planes that differ from another one only in whose processes hold the rows."""
EVERY_PLANE = [(name, mode) for name, kind in PLANES.items() for mode in kind.modes]


@dataclass
class Pool:
    """What is open now."""

    cluster: ExitStack = field(default_factory=ExitStack)
    has_cluster: bool = False
    opened: ExitStack = field(default_factory=ExitStack)
    key: tuple[str, Mode] | None = None
    plane: Plane | None = None
    before: tuple[set[threading.Thread], set[int]] = (set(), set())

    def start_cluster(self) -> None:
        if not self.has_cluster:
            self.cluster.enter_context(ray_cluster())
            self.has_cluster = True

    def end_cluster(self) -> None:
        self.has_cluster = False
        self.cluster.close()

    def take(self, name: str, mode: Mode) -> Plane:
        if self.key != (name, mode) or self.plane is None:
            self.close_plane()
            if PLANES[name].needs_ray:
                self.start_cluster()
            if mode == "processes":
                forking()
            self.before = set(threading.enumerate()), _children()
            self.plane, self.key = self.opened.enter_context(open_plane(name, mode=mode)), (name, mode)
        return self.plane

    def close_plane(self) -> None:
        """Ends it; without Ray, every thread and process it started must be gone."""
        key, plane, self.key, self.plane = self.key, self.plane, None, None
        self.opened.close()
        if key is None or plane is None:
            return
        left_segments = segments(plane.owner.address.run_id)
        assert not left_segments, f"shared memory is left after {key}: {left_segments}"
        if not PLANES[key[0]].needs_ray:
            left = {thread.name for thread in set(threading.enumerate()) - self.before[0]}
            assert not left, f"threads outlive the data plane {key}: {left}"
            wait_until(lambda: _children() <= self.before[1])


POOL = Pool()


def _children() -> set[int]:
    found = set()
    for process in psutil.Process().children(recursive=True):
        # One may end between the list and the look.
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.add(process.pid)
    return found


def _plane_of(item: pytest.Item) -> tuple[str, Mode] | None:
    callspec = getattr(item, "callspec", None)
    return None if callspec is None else callspec.params.get("plane")


def _uses_cluster(item: pytest.Item) -> bool:
    own = _plane_of(item)
    return "cluster" in item.fixturenames or (own is not None and PLANES[own[0]].needs_ray)  # type: ignore[attr-defined]


def _order(item: pytest.Item) -> tuple[bool, bool, int, bool]:
    own = _plane_of(item)
    # Many calls come first: each checks all partitions that the tests of this plane have left.
    is_late = item.path.name != "test_stress.py"
    return _uses_cluster(item), own is None, 0 if own is None else EVERY_PLANE.index(own), is_late


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        plane = _plane_of(item)
        is_seldom = plane is not None and plane[0] in ONLY_FULL
        if is_seldom or (item.get_closest_marker("few_planes") is not None and plane not in {None, *FEW}):
            item.add_marker("full")
    here = [i for i, item in enumerate(items) if "/tests/contract/" in item.path.as_posix()]
    ordered = sorted((items[i] for i in here), key=_order)
    for i, item in zip(here, ordered, strict=True):
        items[i] = item


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    is_ours = nextitem is not None and "/tests/contract/" in nextitem.path.as_posix()
    following = _plane_of(nextitem) if is_ours else None
    if POOL.key is not None and POOL.key != following:
        POOL.close_plane()
    if POOL.has_cluster and not (is_ours and _uses_cluster(nextitem)):
        POOL.end_cluster()


@pytest.fixture
def cluster() -> None:
    """The suite's Ray cluster, for tests that open data planes of their own on it."""
    POOL.start_cluster()


def _param(key: tuple[str, Mode]) -> object:
    """Planes that start servers are left out of `make test-fast`."""
    is_slow = PLANES[key[0]].needs_ray or "mooncake" in key[0]
    return pytest.param(key, marks=[pytest.mark.slow] if is_slow else [], id="-".join(key))


@pytest.fixture(params=[_param(key) for key in EVERY_PLANE])
def plane(request: pytest.FixtureRequest) -> Iterator[Plane]:
    plane = POOL.take(*request.param)
    try:
        yield plane
        plane.settle()
    except BaseException:
        POOL.close_plane()
        raise
