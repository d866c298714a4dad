"""Deltas: the changes of a weight since it was sent last, in the fewest bytes, by pure functions over its bytes.

Used by `delta_buckets`. The change of a part of a weight is written as one block: a header, a stream that says where,
and the new elements. Invariant: `apply_block` after `encode_block` gives the sender's bytes to the last bit, whatever
numbers they stand for: elements are compared and copied as integers, so NaN and -0.0 are bits like others.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

from nemo_rl.errors import WorkerError

__all__ = ["HEADER_BYTES", "Block", "DeltaForm", "apply_block", "encode_block", "read_block", "write_block"]

HEADER_BYTES = 24
"""Form, bytes of the stream, bytes of the elements: three int64."""
FILLER = 255
"""Byte of a stream of numbers that stands for 255 more of a number that goes on."""
MASK_BITS = 8
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Element size -> a dtype that compares and copies bits."""


class DeltaForm(IntEnum):
    """The form in which a block says which elements it holds."""

    WHOLE = 0
    """All of them; nothing of the old bytes is used."""
    SAME = 1
    """No element has changed."""
    INDEX = 2
    """Each by its distance from the one before."""
    RUNS = 3
    """Neighbours together, by the distance from the run before and their number."""
    MASK = 4
    """A bit for each element of the part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """The change of a part of a weight.

    Example:
        Of elements `[a, b, c, d]` only `c` is new: `DeltaForm.INDEX`, stream `[2]` (two are left out), values `[c]`.
    """

    form: DeltaForm
    stream: torch.Tensor
    """`[n]` uint8."""
    values: torch.Tensor
    """`[n]` uint8, the new elements end to end."""

    @property
    def num_bytes(self) -> int:
        return HEADER_BYTES + self.stream.numel() + self.values.numel()


def encode_block(base: torch.Tensor | None, part: torch.Tensor, *, unit: int) -> Block:
    """Return the smallest block that makes `part` of `base`.

    Args:
        base: `[n]` uint8, the bytes that the receiver holds; None: not known.
        part: `[n]` uint8, on the same device.
        unit: bytes of an element; divides n.
    """
    whole = Block(form=DeltaForm.WHOLE, stream=_no_bytes(part), values=part)
    if base is None:
        return whole
    new = part.view(INTEGERS[unit])
    changed = new != base.view(INTEGERS[unit])
    count = int(changed.count_nonzero())
    if count == 0:
        return Block(form=DeltaForm.SAME, stream=_no_bytes(part), values=_no_bytes(part))
    sizes = {DeltaForm.WHOLE: part.numel() - count * unit, DeltaForm.MASK: -(-changed.numel() // MASK_BITS)}
    numbers: dict[DeltaForm, torch.Tensor] = {}
    # A number takes a byte at least. Where a mask takes less, runs could save a third at the most.
    if count < min(sizes.values()):
        places = changed.nonzero()[:, 0]
        gaps = torch.diff(places, prepend=places.new_full((1,), -1)) - 1
        numbers = {DeltaForm.INDEX: gaps, DeltaForm.RUNS: _runs(gaps)}
    sizes |= {form: _numbers_bytes(each) for form, each in numbers.items()}
    form = min(sizes, key=sizes.__getitem__)
    if form is DeltaForm.WHOLE:
        return whole
    if form is DeltaForm.MASK:
        return Block(form=form, stream=_pack_mask(changed), values=new[changed].view(torch.uint8))
    return Block(form=form, stream=_pack_numbers(numbers[form]), values=new[places].view(torch.uint8))


def write_block(block: Block, buffer: torch.Tensor) -> int:
    """Put it at the head of `buffer` (uint8, on any device); return its size."""
    header = torch.tensor([block.form, block.stream.numel(), block.values.numel()], dtype=torch.int64)
    at = 0
    for piece in (header.view(torch.uint8), block.stream, block.values):
        buffer[at : at + piece.numel()].copy_(piece)
        at += piece.numel()
    return at


def read_block(buffer: torch.Tensor) -> Block:
    """Return the block at the head of `buffer`; it shares the memory.

    Raises:
        WorkerError: there is none.
    """
    # A copy, because a block may start at any byte.
    header = buffer[:HEADER_BYTES].cpu().clone()
    form, stream, values = header.view(torch.int64).tolist() if header.numel() == HEADER_BYTES else (-1, 0, 0)
    end = HEADER_BYTES + stream + values
    if form not in list(DeltaForm) or min(stream, values) < 0 or end > buffer.numel():
        raise WorkerError(
            f"refit: expected the block of a weight, got form {form} of {end} bytes in {buffer.numel()}", stage="refit"
        )
    middle = HEADER_BYTES + stream
    return Block(form=DeltaForm(form), stream=buffer[HEADER_BYTES:middle], values=buffer[middle:end])


def apply_block(block: Block, target: torch.Tensor, *, unit: int) -> None:
    """Make the new bytes of the old ones in `target`, `[n]` uint8, on any device.

    Raises:
        WorkerError: the block is that of another part.
    """
    if block.form is DeltaForm.WHOLE:
        _expect(block.values.numel(), target.numel())
        target.copy_(block.values)
    if block.form in (DeltaForm.WHOLE, DeltaForm.SAME):
        return
    elements = target.view(INTEGERS[unit])
    # A copy starts where an element of any size may start.
    values = block.values.to(target.device).clone().view(INTEGERS[unit])
    stream = block.stream.to(target.device)
    if block.form is DeltaForm.MASK:
        mask = _unpack_mask(stream, elements.numel())
        _expect(int(mask.count_nonzero()), values.numel())
        elements.masked_scatter_(mask, values)
        return
    numbers = _unpack_numbers(stream)
    places = _places_of_runs(numbers) if block.form is DeltaForm.RUNS else (numbers + 1).cumsum(0) - 1
    _expect(places.numel(), values.numel())
    if places.numel():
        _expect(max(elements.numel(), int(places[-1]) + 1), elements.numel())
        elements[places] = values


def _expect(got: int, expected: int) -> None:
    if got != expected:
        raise WorkerError(f"refit: a block does not fit its weight: expected {expected}, got {got}", stage="refit")


def _no_bytes(like: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=like.device)


def _runs(gaps: torch.Tensor) -> torch.Tensor:
    """Yield alternately: elements left out before a run, elements of the run but one."""
    is_first = gaps > 0
    is_first[0] = True
    at = is_first.nonzero()[:, 0]
    lengths = torch.diff(at, append=at.new_full((1,), gaps.numel()))
    return torch.stack([gaps[at], lengths - 1], dim=1).view(-1)


def _places_of_runs(numbers: torch.Tensor) -> torch.Tensor:
    left_out, lengths = numbers.view(-1, 2).unbind(1)
    lengths = lengths + 1
    ends = (left_out + lengths).cumsum(0)
    # For each run, the distance of its elements from their number among all values.
    shifts = ends - lengths.cumsum(0)
    return shifts.repeat_interleave(lengths) + torch.arange(int(lengths.sum()), device=numbers.device)


def _numbers_bytes(numbers: torch.Tensor) -> int:
    return numbers.numel() + int((numbers // FILLER).sum())


def _pack_numbers(numbers: torch.Tensor) -> torch.Tensor:
    """Return a byte for each below 255; a larger one has a filler for every 255 before its last byte."""
    ends = (numbers // FILLER + 1).cumsum(0)
    stream = torch.full((int(ends[-1]),), FILLER, dtype=torch.uint8, device=numbers.device)
    stream[ends - 1] = (numbers % FILLER).to(torch.uint8)
    return stream


def _unpack_numbers(stream: torch.Tensor) -> torch.Tensor:
    totals = stream.to(torch.int64).cumsum(0)[stream != FILLER]
    return torch.diff(totals, prepend=totals.new_zeros(1))


def _pack_mask(mask: torch.Tensor) -> torch.Tensor:
    padded = torch.nn.functional.pad(mask.to(torch.uint8), (0, -mask.numel() % MASK_BITS)).view(-1, MASK_BITS)
    return (padded << _bits(mask)).sum(1, dtype=torch.uint8)


def _unpack_mask(stream: torch.Tensor, count: int) -> torch.Tensor:
    _expect(stream.numel(), -(-count // MASK_BITS))
    return ((stream[:, None] >> _bits(stream)) & 1).view(-1)[:count].to(torch.bool)


def _bits(like: torch.Tensor) -> torch.Tensor:
    return torch.arange(MASK_BITS, dtype=torch.uint8, device=like.device)
