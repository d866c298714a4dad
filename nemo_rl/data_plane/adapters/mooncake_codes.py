"""Mooncake's codes and what they mean to the data plane: pure functions from codes to errors.

Used by `mooncake.MooncakeStore`, which finds out who is dead before it asks. A code alone does not say: a full store
and a store whose holder has died answer alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from nemo_rl.data_plane.keys import owner_of
from nemo_rl.errors import (
    CapacityExceeded,
    DataPlaneClosed,
    DataPlaneError,
    DataPlaneTimeout,
    KeysNotFound,
    PayloadLost,
    name_some,
)

__all__ = ["CONNECTION_BROKEN", "NOT_FOUND", "NO_SPACE", "OK", "TRANSFER_FAILED", "call_error", "read_error"]

OK = 0
NO_SPACE = -200
NOT_FOUND = -704
TRANSFER_FAILED = -800
CONNECTION_BROKEN = -900
MASTER_SILENT = -901


def call_error(what: str, codes: Sequence[int], *, dead: Sequence[str], segment_bytes: int) -> DataPlaneError:
    """Return the error of a put or a drop.

    Args:
        dead: the run's servers that do not listen any more.
    """
    found = _in_words(codes)
    if dead:
        return DataPlaneClosed(f"Mooncake has lost {name_some(dead)}; {what} ended with {found}")
    if MASTER_SILENT in codes:
        return DataPlaneTimeout(f"the Mooncake master did not answer a {what} in time: {found}")
    if NO_SPACE in codes:
        return CapacityExceeded(
            f"Mooncake has no space for {codes.count(NO_SPACE)} of {len(codes)} chunks; raise "
            f"data_plane.mooncake.segment_bytes (now {segment_bytes}), or clear rows sooner"
        )
    return DataPlaneError(f"Mooncake failed in a {what} of {len(codes)} chunks: {found}")


def read_error(
    chunk_ids: Sequence[str], codes: Sequence[int], expected: Sequence[int], *, dead: Sequence[str]
) -> DataPlaneError:
    """Return the error of a read whose codes are not the byte counts that were expected.

    Args:
        dead: servers and producers that held these chunks and do not listen any more.
    """
    bad = [(chunk, code) for chunk, code, size in zip(chunk_ids, codes, expected, strict=True) if code != size]
    names, bad_codes = [chunk for chunk, _ in bad], [code for _, code in bad]
    share = f"{len(bad)} of {len(codes)} chunks"
    if dead or TRANSFER_FAILED in bad_codes:
        owners = name_some(sorted({owner_of(chunk) if chunk.count("/") > 1 else chunk for chunk in names}))
        held = f"{name_some(dead)}, which is gone" if dead else "a process that answers no more"
        return PayloadLost(
            f"{share} are lost: they were held by {held}; they came from {owners} ({_in_words(bad_codes)})"
        )
    if MASTER_SILENT in bad_codes:
        return DataPlaneTimeout(f"the Mooncake master did not answer a get in time: {_in_words(bad_codes)}")
    if set(bad_codes) == {NOT_FOUND}:
        return KeysNotFound(f"{share} are gone: {name_some(names)}")
    return DataPlaneError(
        f"Mooncake read {share} wrongly: {name_some(names)}: expected "
        f"{name_some([size for size, code in zip(expected, codes, strict=True) if size != code])} bytes, got "
        f"{name_some(bad_codes)}"
    )


def _in_words(codes: Sequence[int]) -> str:
    return name_some(f"code {code} ({count} times)" for code, count in sorted(Counter(codes).items()) if code < 0)
