"""Checks that every rank follows the driver's plan: digests are compared before any row is touched.

Called by workers at the start of a stage. A worker never plans, so ranks with different plans would wait for each
other in different microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from nemo_rl.distributed.pack_plan import DIGEST_BYTES, PackPlan
from nemo_rl.errors import SchemaMismatch

__all__ = ["check_plans"]


@dataclass(frozen=True, slots=True)
class _Digests:
    found: str
    """Of the plan as it arrived."""
    sealed: str
    """Of the plan as the driver sent it."""
    whole: str
    """Of the plan of all ranks."""


def check_plans(plan: PackPlan | None, *, rank: int, replica: Sequence[int]) -> None:
    """(collective over the default group, if there is one) Compares this rank's view with everybody's.

    Args:
        plan: this rank's part, sealed by `PackPlan.for_rank`; None on every rank where there is no plan.
        replica: ranks that share this rank's shard, itself included.

    Raises:
        SchemaMismatch: names the rank whose plan changed on its way, or that follows another plan than its peers. A
            changed plan, or one of another step, is an error on every rank.
    """
    mine = _Digests(plan.digest(), plan.sealed_digest, plan.whole_digest) if plan is not None else _Digests("", "", "")
    is_alone = not dist.is_initialized() or dist.get_world_size() == 1
    everybody = {rank: mine} if is_alone else dict(enumerate(_gather(mine)))
    first = min(everybody)
    for other, digests in everybody.items():
        if digests.found != digests.sealed:
            _refuse(other, f"its part changed since the driver sealed it with {_name(digests.sealed)}", digests.found)
        if digests.whole != everybody[first].whole:
            _refuse(other, f"rank {first} follows the plan {_name(everybody[first].whole)}", digests.whole)
    for other in replica:
        if everybody.get(other, mine).sealed != everybody[replica[0]].sealed:
            _refuse(
                other,
                f"rank {replica[0]} of its replica group follows the view {_name(everybody[replica[0]].sealed)}",
                everybody[other].sealed,
            )


def _refuse(rank: int, expected: str, got: str) -> None:
    raise SchemaMismatch(
        f"pack plan of rank {rank}: {expected}, got {_name(got)}; workers follow the driver's plan (PackPlan.for_rank "
        "of one plan for all ranks) and never make their own"
    )


def _name(digest: str) -> str:
    return f"digest {digest}" if digest.strip("0") else "no digest"


def _gather(mine: _Digests) -> list[_Digests]:
    raw = b"".join(_bytes(digest) for digest in (mine.found, mine.sealed, mine.whole))
    row = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return [_Digests(*(_text(part) for part in row.split(DIGEST_BYTES))) for row in rows]


def _bytes(digest: str) -> bytes:
    return bytes.fromhex(digest).ljust(DIGEST_BYTES, b"\0")


def _text(part: torch.Tensor) -> str:
    return bytes(part.tolist()).hex()
