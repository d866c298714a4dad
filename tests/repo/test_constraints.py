"""The two lists of versions: one environment holds both, and nothing in it breaks another package."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
BASE, VLLM = "constraints.txt", "constraints-vllm-cpu.txt"
FORBIDDEN = {"torchvision", "torchaudio", "torchcodec", "triton", "torch", "vllm"}
"""Built for CUDA where the index has them; torch is chosen before, and vllm is the package for CUDA."""


def pins(name: str) -> dict[str, list[Requirement]]:
    lines = [line for line in (ROOT / name).read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    found: dict[str, list[Requirement]] = {}
    for each in map(Requirement, lines):
        assert re.fullmatch(r"==[^*]+", str(each.specifier)), f"{name}: {each} is no exact version"
        found.setdefault(canonicalize_name(each.name), []).append(each)
    return found


def test_what_vllm_needs_is_pinned_once_and_breaks_nothing() -> None:
    base, vllm = pins(BASE), pins(VLLM)
    assert base.keys() & vllm.keys() == set()
    assert vllm.keys() & FORBIDDEN == set()
    assert all(len(each) == 1 and each[0].marker is None for each in vllm.values())
    assert str(vllm["vllm-cpu"][0].specifier) == "==0.30.0"
    # What vLLM's own package asks for, of what we have as well.
    assert str(base["numpy"][0].specifier) == "==2.3.5", "numba of vLLM knows no later one"
    assert str(base["setuptools"][0].specifier) == "==77.0.3"


@pytest.mark.parametrize("name", [BASE, VLLM])
def test_a_list_is_sorted(name: str) -> None:
    lines = [line for line in (ROOT / name).read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    assert lines == sorted(lines, key=str.lower)
