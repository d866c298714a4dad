"""Writing a Hugging Face folder: from full weights that come one by one, or from the shards of all ranks.

Called by the checkpoints of the policy workers, and `cast_folder` by `nemo-rl export`. Invariant: what is written here,
`open_weights` and transformers both read without a missing or an unexpected weight, and the files do not depend on how
the model was split.

torch's `HuggingFaceStorageWriter` writes each rank's shards to files and joins these into a second copy: 0.94 GB of two
ranks take 8 to 12 s and a whole share of memory in each, and here 14 MiB. It has no names for experts.
"""

from __future__ import annotations

import copy
import json
import os
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

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
    own_copy,
    plan_files,
)
from nemo_rl.models.hf.loading import CONFIG_FILE, load_model_config, model_without_weights
from nemo_rl.models.policy.interfaces import TensorInfo
from nemo_rl.models.vision import family_of

__all__ = [
    "Givers",
    "ModelDescription",
    "ModelPart",
    "agree_on_givers",
    "cast_folder",
    "kept_in_float32",
    "write_folder",
]

WINDOW_BYTES = 4 << 20
"""Bytes of a file that are brought together and written at once: enough for a disk and a network, and little for a node
with many ranks."""
OWN_RUN_BYTES = 64 << 10
"""Fewest bytes in a row that a rank writes by itself, without another one that brings them together with others."""
DESCRIBER = 0
"""The rank that writes what is no weight: headers, index, configuration."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelDescription:
    """The contents of a model folder besides the weights."""

    config: PretrainedConfig
    infos: Mapping[str, TensorInfo]
    """Shapes and dtypes of the full weights, as `named_weights` names them and in its order."""
    generation_config: GenerationConfig | None = None

    def file_names(self) -> FileNames:
        return FileNames(model_without_weights(self.config, "checkpoint"))


Shards = Iterable[tuple[str, Box, torch.Tensor]]
"""Parts of weights that a rank holds: name of the weight, box of it, values."""
Givers = Mapping[str, Sequence[tuple[int, Box]]]
"""Weight -> its parts, which make it up without overlap, each with the rank that gives it."""


def agree_on_givers(shards: Shards, *, group: dist.ProcessGroup | None = None) -> Givers:
    """(collective over the group) Return who gives which part of a model: of ranks that hold the same, the one that
    gives least so far."""
    held = [(name, box) for name, box, _ in shards]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, held, group=group)
    holders: dict[tuple[str, Box], list[int]] = {}
    for rank, parts in enumerate(found):
        for part in parts:
            holders.setdefault(part, []).append(rank)
    given: dict[str, list[tuple[int, Box]]] = {}
    counts = [0] * len(found)
    for (name, box), ranks in holders.items():
        giver = min(ranks, key=counts.__getitem__)
        counts[giver] += box.count
        given.setdefault(name, []).append((giver, box))
    # Weights that are split alike share what is said of them.
    same: dict[tuple[tuple[int, Box], ...], tuple[tuple[int, Box], ...]] = {}
    return {name: same.setdefault(tuple(parts), tuple(parts)) for name, parts in given.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelPart:
    """One rank's part of a model whose weights lie in the memory of several ranks."""

    model: ModelDescription
    givers: Givers
    held: Mapping[tuple[str, Box], torch.Tensor]
    """The parts that this rank gives, on any device."""

    @classmethod
    def of(cls, model: ModelDescription, shards: Shards, givers: Givers, *, copies: bool) -> ModelPart:
        """
        Args:
            copies: in memory of its own on the CPU; else it is good until the next step.
        """
        rank = dist.get_rank()
        own = {(name, box) for name, parts in givers.items() for giver, box in parts if giver == rank}
        held = {
            (name, box): own_copy(values) if copies else values for name, box, values in shards if (name, box) in own
        }
        return cls(model=model, givers=givers, held=held)

    def write(self, target: Path, *, group: dist.ProcessGroup, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
        """(collective over `group`: the ranks of the job) Write the parts of all ranks into a folder, like
        `write_folder`.

        The ranks go through the files in windows of a few MB. Where the parts of a window are runs of its bytes each
        rank writes its own; else whoever holds most writes the window, and the others send it theirs. Every rank needs
        memory for two windows. After an error it goes on to take what the others send.

        Args:
            target: exists, and every rank sees it.
            group: of a backend that sends from the CPU; used by nobody else meanwhile.

        Raises:
            OSError: a file cannot be written; at the ranks that write it.
        """
        files = plan_files(self.model.infos, self.model.file_names(), max_shard_bytes=max_shard_bytes)
        rank, holders, output = group.rank(), _Holders(self.givers), _Output()
        for file in files:
            output.open(target / file.name)
            if rank == DESCRIBER:
                output.write(file.header, 0)
            offset = len(file.header)
            for number, window in enumerate(_windows(file)):
                given = holders.of(window)
                if rank in given:
                    writer = _writer_of(given, number)
                    if _are_runs(window, given):
                        _write_runs(output, window, given[rank], self.held, offset)
                    elif rank == writer:
                        output.write(_content(_filled(window, given, self.held, group)), offset)
                    else:
                        _send(window, given[rank], self.held, group, writer)
                offset += sum(piece.num_bytes for piece in window)
            output.close()
        if output.problem is not None:
            raise output.problem
        if rank == DESCRIBER:
            _write_descriptions(target, self.model, files)


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
                sink = stack.enter_context(_opened(folder / file.name))
                _write_at(sink, file.header, 0)
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
    sink: int
    offset: int

    def fill(self, weight: torch.Tensor) -> None:
        """Write the tensor, a part of the whole `weight`."""
        expected = f"{self.tensor.weight}: expected {self.tensor.dtype}, got {weight.dtype}"
        assert weight.dtype is self.tensor.dtype, expected
        own = self.tensor.box.of(weight.detach(), held=Box.whole(tuple(weight.shape)))
        _write_at(self.sink, _content(own.to("cpu").contiguous()), self.offset)


def _places(file: WeightFile, sink: int) -> Iterator[_TensorPlace]:
    offset = len(file.header)
    for tensor in file.tensors:
        yield _TensorPlace(tensor=tensor, sink=sink, offset=offset)
        offset += tensor.num_bytes


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open a file that other ranks write too: nothing of theirs is cut off, and no page is read to change a part of
    it. What was written lies on the disk at the end."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        yield file
        os.fsync(file)
    finally:
        os.close(file)


def _write_at(file: int, content: bytes | memoryview, offset: int) -> None:
    rest = memoryview(content)
    while rest:
        written = os.pwrite(file, rest, offset)
        rest, offset = rest[written:], offset + written


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

    @property
    def num_bytes(self) -> int:
        return self.box.count * self.tensor.dtype.itemsize


_Window = list[_FilePiece]
"""Runs of bytes of one dtype that follow one another in a file."""


def _windows(file: WeightFile) -> Iterator[_Window]:
    held: _Window = []
    held_bytes = 0
    for piece in (_FilePiece(tensor=tensor, box=box) for tensor in file.tensors for box in _rows(tensor)):
        num_bytes = piece.num_bytes
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """A rank's part of a window."""

    number: int
    """Of the piece."""
    box: Box
    """The part of the weight."""
    held: Box
    """The box that the rank has of the weight."""


_Held = Mapping[tuple[str, Box], torch.Tensor]
_Given = Mapping[int, Sequence[_Part]]
"""Rank -> its parts of a window, in the order of its pieces; ranks with nothing are missing."""


class _Holders:
    """Which ranks give what of a window, found without a look at every rank."""

    def __init__(self, givers: Givers) -> None:
        self._givers = givers
        self._sorted: dict[int, _SortedBoxes] = {}
        """By the identity of the parts, which weights that are split alike share."""

    def of(self, window: _Window) -> _Given:
        given: dict[int, list[_Part]] = {}
        for number, piece in enumerate(window):
            parts = self._givers[piece.tensor.weight]
            found = self._sorted.get(id(parts)) or self._sorted.setdefault(id(parts), _SortedBoxes.of(parts))
            for rank, box, held in found.meeting(piece.box):
                given.setdefault(rank, []).append(_Part(number=number, box=box, held=held))
        return dict(sorted(given.items()))


@dataclass(frozen=True, kw_only=True, slots=True)
class _SortedBoxes:
    """Boxes by their start along the first dimension."""

    boxes: Sequence[tuple[int, Box]]
    starts: Sequence[int]
    ends: Sequence[int]
    """The largest end of a box and all before it."""

    @classmethod
    def of(cls, parts: Sequence[tuple[int, Box]]) -> _SortedBoxes:
        held = sorted(parts, key=lambda part: (part[1].start[:1], part[0]))
        starts = [sum(box.start[:1]) for _, box in held]
        ends = accumulate((sum(box.start[:1]) + sum(box.size[:1]) for _, box in held), max)
        return cls(boxes=held, starts=starts, ends=list(ends))

    def meeting(self, box: Box) -> Iterator[tuple[int, Box, Box]]:
        """Yield rank, common part and the rank's box of those that meet a box."""
        first, last = 0, len(self.boxes)
        if box.start:
            first, last = bisect_right(self.ends, box.start[0]), bisect_left(self.starts, box.start[0] + box.size[0])
        for rank, held in self.boxes[first:last]:
            part = held.meet(box)
            if part is not None:
                yield rank, part, held


def _are_runs(window: _Window, given: _Given) -> bool:
    """Return whether every rank's parts of a window are long runs of its bytes."""
    return all(
        _is_run(part.box, window[part.number].tensor.box)
        and part.box.count * window[part.number].tensor.dtype.itemsize >= OWN_RUN_BYTES
        for parts in given.values()
        for part in parts
    )


def _is_run(part: Box, whole: Box) -> bool:
    """Return whether a part of a tensor lies in one piece where the tensor does."""
    is_cut = False
    for size, of in zip(part.size, whole.size, strict=True):
        if is_cut and size < of:
            return False
        is_cut = is_cut or size > 1
    return True


def _write_runs(output: _Output, window: _Window, parts: Sequence[_Part], held: _Held, offset: int) -> None:
    ends = list(accumulate((piece.num_bytes for piece in window), initial=offset))
    for part, own in zip(parts, _own_parts(window, parts, held), strict=True):
        piece = window[part.number].box
        before = 0
        for start, first, size in zip(part.box.start, piece.start, piece.size, strict=True):
            before = before * size + start - first
        output.write(_content(own.to("cpu").contiguous()), ends[part.number] + before * own.dtype.itemsize)


def _writer_of(given: _Given, number: int) -> int:
    """Return the rank that has most of a window; of several, by turns."""
    counts = {rank: sum(part.box.count for part in parts) for rank, parts in given.items()}
    most = max(counts.values())
    largest = [rank for rank, count in counts.items() if count == most]
    return largest[number % len(largest)]


def _own_parts(window: _Window, parts: Sequence[_Part], held: _Held) -> Iterator[torch.Tensor]:
    for part in parts:
        yield part.box.of(held[window[part.number].tensor.weight, part.held].detach(), held=part.held)


def _send(window: _Window, parts: Sequence[_Part], held: _Held, group: dist.ProcessGroup, writer: int) -> None:
    flat = [part.reshape(-1) for part in _own_parts(window, parts, held)]
    together = torch.cat(flat) if len(flat) > 1 else flat[0]
    dist.send(together.to("cpu").view(torch.uint8), group=group, group_dst=writer)


class _Output:
    """Files that are written one after the other. After the first error nothing more is written."""

    def __init__(self) -> None:
        self.problem: OSError | None = None
        self._path: Path | None = None
        self._files = ExitStack()
        self._file: int | None = None

    def open(self, path: Path) -> None:
        """Name the next file, which is opened when something is written to it."""
        self._path = path

    def write(self, content: bytes | memoryview, offset: int) -> None:
        self._try(lambda: _write_at(self._sink(), content, offset))

    def close(self) -> None:
        """Some file systems report here what they could not write."""
        self._file = None
        self._try(self._files.close)

    def _sink(self) -> int:
        if self._file is None:
            assert self._path is not None, "name the file first"
            self._file = self._files.enter_context(_opened(self._path))
        return self._file

    def _try(self, action: Callable[[], object]) -> None:
        if self.problem is None:
            try:
                action()
            except OSError as error:
                self.problem = error


def _filled(window: _Window, given: _Given, held: _Held, group: dist.ProcessGroup) -> torch.Tensor:
    """(at the writer) Return the elements of a window, from all ranks that hold some."""
    dtype = window[0].tensor.dtype
    counts = [piece.box.count for piece in window]
    content = torch.empty(sum(counts), dtype=dtype)
    views = [view.view(piece.box.size) for view, piece in zip(content.split(counts), window, strict=True)]
    num_filled = 0
    for rank, parts in given.items():
        sizes = [part.box.count for part in parts]
        num_filled += sum(sizes)
        if rank == group.rank():
            values: Iterable[torch.Tensor] = _own_parts(window, parts, held)
        else:
            came = torch.empty(sum(sizes), dtype=dtype)
            dist.recv(came.view(torch.uint8), group=group, group_src=rank)
            values = came.split(sizes)
        for part, value in zip(parts, values, strict=True):
            part.box.of(views[part.number], held=window[part.number].box).copy_(value.reshape(part.box.size))
    assert num_filled == len(content), f"the ranks gave {num_filled} of {len(content)} elements of {window[0]}"
    return content
