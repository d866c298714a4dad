"""Writing a Hugging Face folder: from full weights that come one by one, or from the shards of all ranks.

Called by the checkpoints of the policy workers, and `cast_folder` by `nemo-rl export`. Invariant: what is written here,
`open_weights` and transformers both read without a missing or an unexpected weight, and the files do not depend on how
the model was split.

torch's `HuggingFaceStorageWriter` writes each rank's shards to files and joins these into a second copy: 0.94 GB of two
ranks take 8 to 12 s and a whole share of memory in each, and here 3 to 4 s and 14 MiB. It has no names for experts.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from nemo_rl.errors import ModelFolderError, boundary
from nemo_rl.models.hf.files import (
    INDEX_FILE,
    MAX_SHARD_BYTES,
    Box,
    FileNames,
    StoredTensor,
    WeightFile,
    index_text,
    plan_files,
)
from nemo_rl.models.hf.loading import CONFIG_FILE, load_model_config, model_without_weights
from nemo_rl.models.policy.interfaces import TensorInfo
from nemo_rl.models.vision import family_of

__all__ = ["ModelDescription", "ModelShare", "cast_folder", "kept_in_float32", "write_folder", "write_shares"]

WINDOW_BYTES = 4 << 20
"""Bytes of a file that are gathered and written at once: enough for a disk and a network, and little for a node with
many ranks."""
WRITER = 0
"""The rank that writes files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelDescription:
    """The contents of a model folder besides the weights."""

    config: PretrainedConfig
    infos: Mapping[str, TensorInfo]
    """Shapes and dtypes of the full weights, as `named_weights` names them and in its order."""
    generation_config: GenerationConfig | None = None

    def file_names(self) -> FileNames:
        return FileNames(model_without_weights(self.config, "checkpoint"))


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShare:
    """One rank's part of a model whose weights lie in the memory of several ranks."""

    boxes: Callable[[str], Sequence[Box | None]]
    """Weight -> box that each rank gives, by rank, or None for nothing. Together they are the weight, without
    overlap."""
    held: Mapping[str, torch.Tensor]
    """This rank's boxes of the weights, on any device."""


def write_folder(
    folder: Path,
    model: ModelDescription,
    weights: Iterable[tuple[str, torch.Tensor]],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write what `from_pretrained` reads, with one weight in memory at a time.

    Files appear at once and are filled in place: a caller that must not leave half a folder writes into one that it
    renames. `weights` is read to its end even after an error, because other ranks may take part in making them.

    Args:
        weights: those of the description, on any device; each may change when the next is asked for.

    Raises:
        OSError: a file cannot be written.
    """
    stream = iter(weights)
    files = plan_files(model.infos, model.file_names(), max_shard_bytes=max_shard_bytes)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            places = {name: list[_TensorPlace]() for name in model.infos}
            for file in files:
                sink = stack.enter_context((folder / file.name).open("wb"))
                for place in _places(file, sink):
                    places[place.tensor.weight].append(place)
            for name, weight in stream:
                for place in places.pop(name):
                    place.fill(weight)
            assert not places, f"weights that were not received: {list(places)[:3]}"
        _write_descriptions(folder, model, files)
    finally:
        for _ in stream:
            pass


def write_shares(
    folder: Path,
    model: ModelDescription,
    share: ModelShare,
    *,
    group: dist.ProcessGroup,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """(collective over `group`: the ranks of the job) Write the shares of all ranks into a folder, like `write_folder`;
    the first rank writes, a few MB at a time.

    Every rank needs memory for one window of a file, the writer for two. After an error the writer goes on to take
    what the others send.

    Args:
        folder: exists.
        group: of a backend that sends from the CPU; used by nobody else meanwhile.

    Raises:
        OSError: a file cannot be written; at the writer alone.
    """
    files = plan_files(model.infos, model.file_names(), max_shard_bytes=max_shard_bytes)
    if group.rank() != WRITER:
        for window in (window for file in files for window in _windows(file)):
            _send(window, share, group)
        return
    output = _Output()
    for file in files:
        output.open(folder / file.name)
        output.write(file.header)
        for window in _windows(file):
            output.write(_content(_filled(window, share, group)))
        output.close()
    if output.problem is not None:
        raise output.problem
    _write_descriptions(folder, model, files)


def cast_folder(folder: Path, dtype: torch.dtype) -> None:
    """Rewrite the weights of a folder in another dtype, file by file.

    What the model's class keeps in float32 (the score correction of a router, for example) stays as it is, and so do
    tensors of integers.

    Raises:
        ModelFolderError: the folder is unreadable, or a weight is too large for the dtype.
    """
    config = load_model_config(folder)
    model = model_without_weights(config, folder)
    keeps = kept_in_float32(model, dtype)
    total = 0
    for path in sorted(folder.glob("*.safetensors")):
        with boundary(ModelFolderError, f"{path}: cannot be read"):
            weights = load_file(path)
        for name, weight in weights.items():
            if weight.is_floating_point() and not keeps(name):
                weights[name] = weight.to(dtype)
                if weights[name].isfinite().sum() < weight.isfinite().sum():
                    raise ModelFolderError(f"{path}: {name}: has values too large for {dtype}; take another dtype")
            total += weights[name].nbytes
        # What is unchanged still lies in the file that is read.
        changed = path.with_suffix(".tmp")
        save_file(weights, changed, metadata={"format": "pt"})
        changed.replace(path)
    if (folder / INDEX_FILE).is_file():
        index = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))
        index["metadata"] = {**index.get("metadata", {}), "total_size": total}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    described = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    described["dtype"] = str(dtype).removeprefix("torch.")
    (folder / CONFIG_FILE).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def kept_in_float32(model: PreTrainedModel, dtype: torch.dtype) -> Callable[[str], bool]:
    """Return whether a weight of this name stays in float32 in a folder of this dtype, as its class wants it."""
    kept = [*(model._keep_in_fp32_modules_strict or ())]
    if dtype is torch.float16:
        kept += model._keep_in_fp32_modules or ()
    pattern = re.compile("|".join(rf"(?:^|\.){name}(?:\.|$)" for name in kept) or "(?!)")
    return lambda name: pattern.search(name) is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class _TensorPlace:
    tensor: StoredTensor
    sink: BinaryIO
    offset: int

    def fill(self, weight: torch.Tensor) -> None:
        """Write the tensor, a part of the whole `weight`."""
        expected = f"{self.tensor.weight}: expected {self.tensor.dtype}, got {weight.dtype}"
        assert weight.dtype is self.tensor.dtype, expected
        self.sink.seek(self.offset)
        own = self.tensor.box.of(weight.detach(), held=Box.whole(tuple(weight.shape)))
        self.sink.write(_content(own.to("cpu").contiguous()))


def _places(file: WeightFile, sink: BinaryIO) -> Iterator[_TensorPlace]:
    offset = sink.write(file.header)
    for tensor in file.tensors:
        yield _TensorPlace(tensor=tensor, sink=sink, offset=offset)
        offset += tensor.num_bytes


def _write_descriptions(folder: Path, model: ModelDescription, files: Sequence[WeightFile]) -> None:
    if len(files) > 1:
        (folder / INDEX_FILE).write_text(index_text(files))
    written = copy.deepcopy(model.config)
    written.dtype = vars(torch)[next(iter(model.infos.values())).dtype]
    is_plain = family_of(model.config) is None
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if is_plain else MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    written.architectures = [names[model.config.model_type]]
    written.save_pretrained(str(folder))
    if model.generation_config is not None:
        model.generation_config.save_pretrained(str(folder))


def _content(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


# ---- from shards


@dataclass(frozen=True, kw_only=True, slots=True)
class _FilePiece:
    tensor: StoredTensor
    box: Box


_Window = list[_FilePiece]
"""Runs of bytes of one dtype that follow one another in a file."""


def _windows(file: WeightFile) -> Iterator[_Window]:
    held: _Window = []
    held_bytes = 0
    for piece in (_FilePiece(tensor=tensor, box=box) for tensor in file.tensors for box in _rows(tensor)):
        num_bytes = piece.box.count * piece.tensor.dtype.itemsize
        if held and (held_bytes + num_bytes > WINDOW_BYTES or held[0].tensor.dtype is not piece.tensor.dtype):
            yield held
            held, held_bytes = [], 0
        held.append(piece)
        held_bytes += num_bytes
    if held:
        yield held


def _rows(tensor: StoredTensor) -> Iterator[Box]:
    """Yield a tensor in parts of about a window, each a run of its bytes."""
    box = tensor.box
    if tensor.num_bytes <= WINDOW_BYTES:
        if box.count:
            yield box
        return
    dim = next(dim for dim, size in enumerate(box.size) if size > 1)
    length = box.size[dim]
    step = max(1, WINDOW_BYTES * length // tensor.num_bytes)
    for start in range(0, length, step):
        yield box.along(dim, start, min(step, length - start))


def _given(window: _Window, share: ModelShare, rank: int) -> list[tuple[int, Box, Box]]:
    """Return what a rank gives of a window: the piece, the part of the weight, and the box that the rank has of it."""
    found = []
    for number, piece in enumerate(window):
        held = share.boxes(piece.tensor.weight)[rank]
        part = held.meet(piece.box) if held is not None else None
        if held is not None and part is not None:
            found.append((number, part, held))
    return found


def _own_parts(window: _Window, share: ModelShare, rank: int) -> Iterator[torch.Tensor]:
    for number, part, held in _given(window, share, rank):
        yield part.of(share.held[window[number].tensor.weight].detach(), held=held)


def _send(window: _Window, share: ModelShare, group: dist.ProcessGroup) -> None:
    parts = [part.reshape(-1) for part in _own_parts(window, share, group.rank())]
    if parts:
        together = torch.cat(parts) if len(parts) > 1 else parts[0]
        dist.send(together.to("cpu").view(torch.uint8), group=group, group_dst=WRITER)


class _Output:
    """Files that are written one after the other. After the first error nothing more is written."""

    def __init__(self) -> None:
        self.problem: OSError | None = None
        self._sink: BinaryIO | None = None

    def open(self, path: Path) -> None:
        self._try(lambda: self._set(path.open("wb")))

    def write(self, content: bytes | memoryview) -> None:
        self._try(lambda: self._sink and self._sink.write(content))

    def close(self) -> None:
        """Some file systems report here what they could not write."""
        sink, self._sink = self._sink, None
        if sink is not None:
            self._try(sink.close)
            with suppress(OSError):
                sink.close()

    def _set(self, sink: BinaryIO) -> None:
        self._sink = sink

    def _try(self, action: Callable[[], object]) -> None:
        if self.problem is None:
            try:
                action()
            except OSError as error:
                self.problem = error


def _filled(window: _Window, share: ModelShare, group: dist.ProcessGroup) -> torch.Tensor:
    """(at the writer) Return the elements of a window, from all ranks."""
    dtype = window[0].tensor.dtype
    counts = [piece.box.count for piece in window]
    content = torch.empty(sum(counts), dtype=dtype)
    views = [view.view(piece.box.size) for view, piece in zip(content.split(counts), window, strict=True)]
    num_filled = 0
    for rank in range(group.size()):
        given = _given(window, share, rank)
        if not given:
            continue
        sizes = [part.count for _, part, _ in given]
        num_filled += sum(sizes)
        if rank == WRITER:
            parts: Iterable[torch.Tensor] = _own_parts(window, share, rank)
        else:
            came = torch.empty(sum(sizes), dtype=dtype)
            dist.recv(came.view(torch.uint8), group=group, group_src=rank)
            parts = came.split(sizes)
        for (number, part, _), values in zip(given, parts, strict=True):
            part.of(views[number], held=window[number].box).copy_(values.reshape(part.size))
    assert num_filled == len(content), f"the ranks gave {num_filled} of {len(content)} elements of {window[0]}"
    return content
