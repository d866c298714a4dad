"""Mooncake's codes become the data plane's errors, by who is dead."""

from __future__ import annotations

import logging
import stat
from pathlib import Path

import pytest

from nemo_rl.data_plane.adapters.mooncake_link import call_error, read_error
from nemo_rl.data_plane.adapters.mooncake_master import StoreAddress, executable, missing_library, own_address
from nemo_rl.errors import (
    CapacityExceeded,
    DataPlaneClosed,
    DataPlaneError,
    DataPlaneTimeout,
    KeysNotFound,
    PayloadLost,
    ResourceError,
)

IDS = ["run/node:7.abc/0", "run/node:7.abc/1", "run/other:8.def/0"]


@pytest.mark.parametrize(
    ("codes", "dead", "kind", "text"),
    [
        ([0, -200, -200], [], CapacityExceeded, "no space for 2 of 3 chunks; raise data_plane.mooncake.segment_bytes"),
        (
            [0, -200, -200],
            ["its holder at h:1"],
            DataPlaneClosed,
            "has lost its holder at h:1; put ended with code -200",
        ),
        ([-901] * 3, [], DataPlaneTimeout, "master did not answer a put"),
        ([0, -600, -200], [], CapacityExceeded, "no space for 1 of 3"),
        ([0, -600, 0], [], DataPlaneError, r"failed in a put of 3 chunks: code -600 \(1 times\)"),
    ],
)
def test_codes_of_a_put(codes: list[int], dead: list[str], kind: type[DataPlaneError], text: str) -> None:
    error = call_error("put", codes, dead=dead, segment_bytes=5)
    with pytest.raises(kind, match=text):
        raise error
    assert type(error) is kind


@pytest.mark.parametrize(
    ("codes", "dead", "kind", "text"),
    [
        ([10, -704, 30], [], KeysNotFound, "1 of 3 chunks are gone: run/node:7.abc/1"),
        ([10, 20, -800], [], PayloadLost, "1 of 3 chunks are lost: .* answers no more; they came from other:8.def"),
        ([-704, -704, 30], ["a producer at n:5"], PayloadLost, "held by a producer at n:5, .* from node:7.abc"),
        ([-901, -901, -901], [], DataPlaneTimeout, "did not answer a get"),
        ([10, 19, 30], [], DataPlaneError, "expected 20 bytes, got 19"),
        ([10, -704, -600], [], DataPlaneError, "read 2 of 3 chunks wrongly"),
    ],
)
def test_codes_of_a_read(codes: list[int], dead: list[str], kind: type[DataPlaneError], text: str) -> None:
    error = read_error(IDS, codes, [10, 20, 30], dead=dead)
    with pytest.raises(kind, match=text):
        raise error
    assert type(error) is kind


def test_a_missing_system_library_is_named_with_its_package() -> None:
    text = "libibverbs.so.1: cannot open shared object file: No such file or directory"
    assert "apt-get install libibverbs1; Fedora: libibverbs" in missing_library(text)
    assert "mooncake-cuda12" in missing_library("libcudart.so.12: cannot open shared object file")


def test_an_address_travels_as_text() -> None:
    for address in (StoreAddress(master="10.0.0.1:5", holder="10.0.0.1:6"), StoreAddress(master="h:5", holder="")):
        assert StoreAddress.parse(str(address)) == address


def test_the_own_address_is_the_one_that_the_master_is_reached_from() -> None:
    assert own_address("127.0.0.1:50051") == "127.0.0.1"
    with pytest.raises(DataPlaneClosed, match="no route"):
        own_address("no-such-host.invalid:50051")


@pytest.mark.parametrize(("before", "after"), [(0o644, 0o755), (0o640, 0o750), (0o600, 0o700), (0o755, 0o755)])
def test_a_program_without_its_executable_bits_gets_them_back(tmp_path, before, after, caplog):
    program = tmp_path / "mooncake_master"
    program.write_text("#!/bin/sh\n")
    program.chmod(before)
    with caplog.at_level(logging.WARNING):
        assert executable(program) == program
    assert stat.S_IMODE(program.stat().st_mode) == after
    assert ("without its executable bits" in caplog.text) == (before != after)


def test_a_program_that_is_missing_or_not_ours_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ResourceError, match="mooncake_client: Mooncake's package lacks this program; install it"):
        executable(tmp_path / "mooncake_client")
    program = tmp_path / "mooncake master"
    program.write_text("")
    program.chmod(0o644)

    def refuse(self: Path, mode: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "chmod", refuse)
    with pytest.raises(ResourceError, match=r"Operation not permitted.*run `chmod \+x '.*mooncake master'`"):
        executable(program)
