"""Layout of the weight files of a Hugging Face folder: known from names, shapes and dtypes alone.

Called by the writers of a folder. Names here are those of the module's state dict, where the experts of a layer are one
tensor; files hold every expert by itself, under the names of its model type (`FileNames`). Invariant: header and order
of a file are, byte for byte, those of `safetensors.torch.save_file` with the metadata that transformers gives.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    revert_weight_conversion,
)

from nemo_rl.errors import ModelFolderError, boundary
from nemo_rl.models.policy.interfaces import TensorInfo

__all__ = [
    "INDEX_FILE",
    "MAX_SHARD_BYTES",
    "SINGLE_FILE",
    "Box",
    "FileNames",
    "StoredTensor",
    "WeightFile",
    "as_stored",
    "chunk_of",
    "index_text",
    "local_shard",
    "own_copy",
    "plan_files",
]


MAX_SHARD_BYTES = 5_000_000_000
"""Most bytes of a weight file, as transformers writes it."""
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
LENGTH_BYTES = 8
"""Bytes of the number that a file begins with, which its header is padded to as well."""
CODES: Mapping[torch.dtype, str] = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Dtypes by their name in a header, in the order in which a file holds them."""
ORDER = {dtype: number for number, dtype in enumerate(CODES)}


PROBE_ROWS = 12
"""Size of a probe along each dim that does not count experts: halves, thirds and quarters come out even."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """A tensor of a file.

    Example:
        `model.layers.0.mlp.experts.3.up_proj.weight` of shape `[I, H]` is the box of start `(3, I, 0)` and size
        `(1, I, H)` of `model.layers.0.mlp.experts.gate_up_proj`.
    """

    name: str
    weight: str
    """Name of the weight that it is a part of."""
    box: Box
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class FileNames:
    """Names of a model's weights in its files, and the part of a weight that each tensor of a file is.

    transformers says so itself: its own conversion on saving is applied to small tensors that hold their positions.

    Example:
        A Mixtral's `model.layers.0.mlp.experts.down_proj` of shape `[E, H, I]` lies in its files as
        `model.layers.0.block_sparse_moe.experts.{0..E-1}.w2.weight` of shape `[H, I]`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Args:
        model: with or without weights.

        Raises:
            ModelFolderError: files of this type hold values in an order that cannot be written in parts.
        """
        self._kind = model.config.model_type
        # A prefix only says that a folder may hold a larger model that this one is a part of.
        found = get_model_conversion_mapping(model, add_legacy=False)
        conversions = [one for one in found if not isinstance(one, PrefixChange)]
        reverse = [one.reverse_transform() for one in conversions[::-1]]
        self._renamings = [one for one in reverse if isinstance(one, WeightRenaming)]
        converters = [one for one in reverse if isinstance(one, WeightConverter)]
        probes = {
            name: weight.shape
            for name, weight in model.state_dict(keep_vars=True).items()
            if any(one.rename_source_key(name)[1] is not None for one in converters)
        }
        self._parts = self._cut(model, probes) if probes else {}

    def stored(self, name: str, info: TensorInfo) -> Iterator[StoredTensor]:
        dtype: torch.dtype = vars(torch)[info.dtype]
        whole = Box.whole(info.shape)
        if name not in self._parts:
            stored = name
            for renaming in self._renamings:
                stored = renaming.rename_source_key(stored)[0]
            yield StoredTensor(name=stored, weight=name, box=whole, shape=info.shape, dtype=dtype)
            return
        for stored, start, size, dims in self._parts[name]:
            box = whole
            for dim, (first, count, of) in enumerate(zip(start, size, _probe_shape(info.shape), strict=True)):
                box = box.along(dim, first * info.shape[dim] // of, count * info.shape[dim] // of)
            yield StoredTensor(name=stored, weight=name, box=box, shape=box.size[len(box.size) - dims :], dtype=dtype)

    def _cut(self, model: PreTrainedModel, shapes: Mapping[str, torch.Size]) -> dict[str, list[_Part]]:
        """Return which parts of each weight lie where, found with tensors of positions in place of the weights."""
        offsets, probes, total = dict[int, str](), dict[str, torch.Tensor](), 0
        for name, shape in shapes.items():
            small = _probe_shape(shape)
            probes[name] = torch.arange(total, total + math.prod(small)).view(small)
            offsets[total] = name
            total += math.prod(small)
        what = f"the files of {self._kind!r} cannot be written: transformers stores its weights in another order"
        starts = sorted(offsets)
        found: dict[str, list[_Part]] = {name: [] for name in shapes}
        with boundary(ModelFolderError, what):
            for stored, values in revert_weight_conversion(model, dict(probes)).items():
                first = int(values.flatten()[0])
                offset = starts[bisect_right(starts, first) - 1]
                name = offsets[offset]
                shape = probes[name].shape
                start = tuple(int(at) for at in torch.unravel_index(torch.tensor(first - offset), shape))
                size = (*[1] * (len(shape) - values.dim()), *values.shape)
                box = Box(start=start, size=size)
                if not torch.equal(box.of(probes[name], held=Box.whole(tuple(shape))).view(values.shape), values):
                    raise ModelFolderError(f"{what} ({stored!r})")
                found[name].append((stored, start, size, values.dim()))
        incomplete = [
            name
            for name, parts in found.items()
            if sum(math.prod(size) for _, _, size, _ in parts) != probes[name].numel()
        ]
        if incomplete:
            raise ModelFolderError(f"{what} ({incomplete[0]!r})")
        return {name: sorted(parts, key=lambda part: part[1]) for name, parts in found.items()}


_Part = tuple[str, tuple[int, ...], tuple[int, ...], int]
"""Name in the file; start and size in the probe; number of dims in the file."""


def _probe_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a small size: fused experts keep their number; every other size becomes one that divides well."""
    small = tuple(PROBE_ROWS for _ in shape)
    return (shape[0], *small[1:]) if len(shape) > 2 else small


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFile:
    """The layout of one weight file."""

    name: str
    tensors: tuple[StoredTensor, ...]
    """Tensors in the order of their bytes, which follow the header without gaps."""

    @property
    def header(self) -> bytes:
        """Return the bytes that the file begins with."""
        described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for tensor in self.tensors:
            begin, end = end, end + tensor.num_bytes
            described[tensor.name] = {
                "dtype": CODES[tensor.dtype],
                "shape": tensor.shape,
                "data_offsets": (begin, end),
            }
        text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % LENGTH_BYTES)
        return len(text).to_bytes(LENGTH_BYTES, "little") + text


def plan_files(
    infos: Mapping[str, TensorInfo], names: FileNames, *, max_shard_bytes: int = MAX_SHARD_BYTES
) -> tuple[WeightFile, ...]:
    """Return the files for weights that come in this order."""
    shards = list(_shards([tensor for name in infos for tensor in names.stored(name, infos[name])], max_shard_bytes))
    return tuple(
        WeightFile(
            name=SINGLE_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors",
            tensors=tuple(sorted(shard, key=lambda tensor: (ORDER[tensor.dtype], tensor.name.encode()))),
        )
        for number, shard in enumerate(shards, start=1)
    )


def index_text(files: Sequence[WeightFile]) -> str:
    """Return contents of `INDEX_FILE`, of a folder with several files."""
    index: Mapping[str, Any] = {
        "metadata": {"total_size": sum(tensor.num_bytes for file in files for tensor in file.tensors)},
        "weight_map": {tensor.name: file.name for file in files for tensor in file.tensors},
    }
    return json.dumps(index, indent=2, sort_keys=True) + "\n"


def as_stored(name: str, weight: torch.Tensor, names: FileNames) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a weight of a module as files hold it: every expert by itself, sharing its memory."""
    info = TensorInfo(shape=tuple(weight.shape), dtype=str(weight.dtype).removeprefix("torch."))
    for tensor in names.stored(name, info):
        yield tensor.name, tensor.box.of(weight, held=Box.whole(info.shape)).view(tensor.shape)


def _shards(tensors: Sequence[StoredTensor], max_bytes: int) -> Iterator[list[StoredTensor]]:
    """Run of tensors that fit into a file; a larger tensor has one for itself."""
    held: list[StoredTensor] = []
    held_bytes = 0
    for tensor in tensors:
        if held and held_bytes + tensor.num_bytes > max_bytes:
            yield held
            held, held_bytes = [], 0
        held.append(tensor)
        held_bytes += tensor.num_bytes
    yield held


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """A part of a tensor, given by a start and a size along every dim.

    Example:
        >>> rows = Box(start=(2, 0), size=(4, 8))
        >>> rows.meet(Box(start=(4, 0), size=(4, 8)))
        Box(start=(4, 0), size=(2, 8))
    """

    start: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        return cls(start=(0,) * len(shape), size=shape)

    @property
    def count(self) -> int:
        return math.prod(self.size)

    def along(self, dim: int, start: int, size: int) -> Box:
        """Return a part of it along one dim.

        Args:
            start: within the box.
        """
        starts, sizes = list(self.start), list(self.size)
        starts[dim] += start
        sizes[dim] = size
        return Box(start=tuple(starts), size=tuple(sizes))

    def meet(self, other: Box) -> Box | None:
        """Return the part that both have, or None where they do not meet."""
        starts = tuple(max(a, b) for a, b in zip(self.start, other.start, strict=True))
        ends = (min(a + b, c + d) for a, b, c, d in zip(self.start, self.size, other.start, other.size, strict=True))
        sizes = tuple(max(0, end - start) for start, end in zip(starts, ends, strict=True))
        return Box(start=starts, size=sizes) if all(sizes) else None

    def of(self, tensor: torch.Tensor, *, held: Box) -> torch.Tensor:
        """Return this box of a tensor that is the box `held`; shares its memory."""
        for dim, (start, size) in enumerate(zip(self.start, self.size, strict=True)):
            tensor = tensor.narrow(dim, start - held.start[dim], size)
        return tensor


def chunk_of(length: int, *, place: int, count: int) -> tuple[int, int]:
    """Start and size of one of `count` parts, as `torch.chunk` cuts; the last ones may be empty.

    Example:
        >>> [chunk_of(5, place=place, count=4) for place in range(4)]
        [(0, 2), (2, 2), (4, 1), (5, 0)]
    """
    size = -(-length // count)
    start = min(place * size, length)
    return start, min(size, length - start)


def local_shard(weight: torch.Tensor) -> torch.Tensor:
    """Return this rank's part, sharing memory."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def own_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the CPU that shares no memory; of a tensor that is split, this rank's part."""
    return tensor.detach().to("cpu", copy=True)
