"""One data plane per module and adapter; every test leaves it empty."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.helpers.planes import PLANES, Plane, open_plane, ray_cluster


@pytest.fixture(scope="module", params=PLANES)
def module_plane(request: pytest.FixtureRequest) -> Iterator[Plane]:
    if request.param == "transfer_queue":
        with ray_cluster(), open_plane(request.param) as plane:
            yield plane
    else:
        before = set(threading.enumerate())
        with open_plane(request.param) as plane:
            yield plane
        left = {thread.name for thread in set(threading.enumerate()) - before}
        assert not left, f"threads outlive the data plane: {left}"


@pytest.fixture
def plane(module_plane: Plane) -> Iterator[Plane]:
    yield module_plane
    module_plane.settle()
