"""Which bytes the weight files of a Hugging Face folder hold: known from names, shapes and dtypes alone.

Called by the writers of a folder. Names here are those of the module's state dict, where the experts of a layer are one
tensor; files hold every expert by itself, under the names of its model type. Invariant: header and order of a file are,
byte for byte, those of `safetensors.torch.save_file` with the metadata that transformers gives.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig

from nemo_rl.models.boxes import Box, chunk_of
from nemo_rl.models.policy.interfaces import TensorInfo

__all__ = [
    "INDEX_FILE",
    "MAX_SHARD_BYTES",
    "SINGLE_FILE",
    "ExpertNames",
    "StoredTensor",
    "WeightFile",
    "as_stored",
    "expert_names",
    "index_text",
    "plan_files",
]

MAX_SHARD_BYTES = 5_000_000_000
"""Of a weight file: what transformers writes, too."""
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
LENGTH_BYTES = 8
"""Of the number that a file begins with, and what its header is padded to."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertNames:
    """How the files of a model type name what a module calls `mlp.gate` and `mlp.experts`."""

    block: str
    """In place of `mlp`, in layers with experts."""
    gate_up_proj: tuple[str, str]
    down_proj: tuple[str]

    def pieces(self) -> dict[str, tuple[str, ...]]:
        """Names of an expert's weights in the files, in the order in which their rows make up the module's."""
        return {"gate_up_proj": self.gate_up_proj, "down_proj": self.down_proj}


EXPERT_NAMES = {
    "mixtral": ExpertNames(block="block_sparse_moe", gate_up_proj=("w1", "w3"), down_proj=("w2",)),
}
COMMON_EXPERT_NAMES = ExpertNames(block="mlp", gate_up_proj=("gate_proj", "up_proj"), down_proj=("down_proj",))


def expert_names(config: PretrainedConfig) -> ExpertNames:
    """Those of a model's type."""
    return EXPERT_NAMES.get(config.model_type, COMMON_EXPERT_NAMES)


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
    """Of that weight."""
    shape: tuple[int, ...]
    """In the file."""
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFile:
    """One file."""

    name: str
    tensors: tuple[StoredTensor, ...]
    """In the order of their bytes, which follow the header without gaps."""

    @property
    def header(self) -> bytes:
        """What the file begins with."""
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
    infos: Mapping[str, TensorInfo], names: ExpertNames, *, max_shard_bytes: int = MAX_SHARD_BYTES
) -> tuple[WeightFile, ...]:
    """The files for weights that come in this order."""
    shards = list(_shards([tensor for name in infos for tensor in _stored(name, infos[name], names)], max_shard_bytes))
    return tuple(
        WeightFile(
            name=SINGLE_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors",
            tensors=tuple(sorted(shard, key=lambda tensor: (ORDER[tensor.dtype], tensor.name.encode()))),
        )
        for number, shard in enumerate(shards, start=1)
    )


def index_text(files: Sequence[WeightFile]) -> str:
    """Contents of `INDEX_FILE`, of a folder with several files."""
    index: Mapping[str, Any] = {
        "metadata": {"total_size": sum(tensor.num_bytes for file in files for tensor in file.tensors)},
        "weight_map": {tensor.name: file.name for file in files for tensor in file.tensors},
    }
    return json.dumps(index, indent=2, sort_keys=True) + "\n"


def as_stored(name: str, weight: torch.Tensor, names: ExpertNames) -> Iterator[tuple[str, torch.Tensor]]:
    """A weight of a module as files hold it: every expert by itself, sharing its memory."""
    info = TensorInfo(shape=tuple(weight.shape), dtype=str(weight.dtype).removeprefix("torch."))
    for tensor in _stored(name, info, names):
        yield tensor.name, tensor.box.of(weight, held=Box.whole(info.shape)).view(tensor.shape)


def _shards(tensors: Sequence[StoredTensor], max_bytes: int) -> Iterator[list[StoredTensor]]:
    """Runs of tensors that fit into a file; a larger tensor has one for itself."""
    held: list[StoredTensor] = []
    held_bytes = 0
    for tensor in tensors:
        if held and held_bytes + tensor.num_bytes > max_bytes:
            yield held
            held, held_bytes = [], 0
        held.append(tensor)
        held_bytes += tensor.num_bytes
    yield held


def _stored(name: str, info: TensorInfo, names: ExpertNames) -> Iterator[StoredTensor]:
    dtype: torch.dtype = vars(torch)[info.dtype]
    whole = Box.whole(info.shape)
    layer, experts, kind = name.rpartition(".mlp.experts.")
    if not experts:
        # Only the block with experts has a `gate`; that of other layers has a `gate_proj`.
        stored = name.replace(".mlp.gate.", f".{names.block}.gate.")
        yield StoredTensor(name=stored, weight=name, box=whole, shape=info.shape, dtype=dtype)
        return
    pieces = names.pieces()[kind]
    for number in range(info.shape[0]):
        for place, piece in enumerate(pieces):
            rows = chunk_of(info.shape[1], place=place, count=len(pieces))
            box = whole.along(0, number, 1).along(1, *rows)
            stored = f"{layer}.{names.block}.experts.{number}.{piece}.weight"
            yield StoredTensor(name=stored, weight=name, box=box, shape=box.size[1:], dtype=dtype)
