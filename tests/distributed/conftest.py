"""Models of one-rank jobs in this process are freed after each file, and the threads of their groups with them."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def groups_are_freed() -> Iterator[None]:
    """A model is a ring of references; while it lives, so do some fifty threads of gloo for each worker."""
    yield
    gc.collect()
