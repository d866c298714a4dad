"""Checkpoint folders of all policy workers: whole or absent, and safe to read.

All functions but `refuse_code` and the random state's are collective: every rank calls them in the same
order. Those that write take the group that they talk in, for they may run beside the training; None is the default one.
Invariant: a folder appears under its name only when it is complete; a failure on any rank is raised on every rank.
"""

from __future__ import annotations

import io
import pickle
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from transformers import PreTrainedTokenizerBase

from nemo_rl.config.backends import LoraConfig
from nemo_rl.errors import CheckpointError, ModelFolderError, shorten
from nemo_rl.models.adapters.folder import base_of, read_adapter, write_adapter
from nemo_rl.models.hf.files import own_copy
from nemo_rl.models.hf.loading import PROCESSOR_FILES
from nemo_rl.models.policy.interfaces import TensorInfo
from nemo_rl.utils.checkpoint import Upload
from nemo_rl.utils.console import bytes_text
from nemo_rl.utils.files import give_usual_modes, open_plain
from nemo_rl.utils.object_store import ObjectStore

__all__ = [
    "WRITE_ERRORS",
    "AdapterBase",
    "AdapterPart",
    "cause_text",
    "complete_or_nothing",
    "raise_together",
    "random_state",
    "read_adapter_together",
    "refuse_code",
    "save_tokenizer",
    "set_random_state",
    "upload_together",
]

WRITE_ERRORS = (OSError, RuntimeError, SafetensorError, CheckpointException)
"""Errors of writing a folder that disk or permissions cause."""

MAX_CAUSE_CHARACTERS = 300
INDEX_FILE = ".metadata"
_METADATA, _STORAGE = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_PLANNER = "torch.distributed.checkpoint.planner"
_INDEX_PARTS = frozenset(
    {
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        (_METADATA, "BytesStorageMetadata"),
        (_METADATA, "ChunkStorageMetadata"),
        (_METADATA, "Metadata"),
        (_METADATA, "MetadataIndex"),
        (_METADATA, "StorageMeta"),
        (_METADATA, "TensorProperties"),
        (_METADATA, "TensorStorageMetadata"),
        (_METADATA, "_MEM_FORMAT_ENCODING"),
        (_STORAGE, "_StorageInfo"),
        (_PLANNER, "SavePlan"),
        (_PLANNER, "TensorWriteData"),
        (_PLANNER, "WriteItem"),
        (_PLANNER, "WriteItemType"),
    }
)
"""All that the index of a sharded checkpoint is made of, besides dtypes."""


_WRITER = re.compile(r"/__([0-9]{1,9})_[0-9]+\.distcp$")
"""A file of a sharded state, with the rank that wrote it."""


@contextmanager
def complete_or_nothing(folder: Path, *, group: dist.ProcessGroup | None = None) -> Iterator[Path]:
    """Yield a folder next to `folder` that takes its name when every rank is done; all ranks enter and leave together.

    Raises:
        CheckpointError: on every rank; what was in `folder` before is left as it was.
    """
    target = _open_part(folder, group)
    problem = None
    try:
        yield target
    except WRITE_ERRORS as error:
        problem = cause_text(error)
    _close_part(folder, problem, group)


def raise_together(
    problem: str | None,
    folder: Path,
    *,
    doing: Literal["write", "read", "upload"],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Compare notes.

    Args:
        problem: of this rank; None where all went well.

    Raises:
        CheckpointError: on every rank, when any has a problem; names the first.
    """
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem, group=group)
    advice = "resume from another checkpoint, or start afresh in another checkpointing.checkpoint_dir"
    if doing == "write":
        free = shutil.disk_usage(next(parent for parent in folder.absolute().parents if parent.exists())).free
        advice = f"{bytes_text(free)} of disk are free there; earlier checkpoints stay valid"
    elif doing == "upload":
        advice = "earlier checkpoints stay valid"
    for rank, text in enumerate(problems):
        if text is not None:
            raise CheckpointError(f"checkpoint {str(folder)!r}: rank {rank} could not {doing} it: {text}; {advice}")


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterBase:
    """The settings and the base of an adapter, which its folder names besides its matrices."""

    config: LoraConfig
    model_name: str
    identity: Callable[[], str]
    """Reads all weights of the base, and returns their digest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterPart:
    """An adapter, which rank 0 writes."""

    base: AdapterBase
    adapter: Mapping[str, torch.Tensor]
    """Whole tensors on rank 0, none elsewhere: an adapter is small."""

    @classmethod
    def of(cls, adapter: Iterator[tuple[str, torch.Tensor]], base: AdapterBase, *, copies: bool) -> AdapterPart:
        """(collective) Gather it; of the model's weights nothing is copied."""
        is_writer, held = dist.get_rank() == 0, dict[str, torch.Tensor]()
        for name, whole in adapter:
            if is_writer:
                held[name] = own_copy(whole) if copies else whole
        return cls(base=base, adapter=held)

    def write(self, target: Path, *, group: dist.ProcessGroup) -> None:
        if dist.get_rank(group) != 0:
            return
        base = self.base
        try:
            identity = base.identity()
        except ModelFolderError as error:
            raise OSError(f"the base of the adapter cannot be read: {error}") from error
        write_adapter(target, self.adapter, base.config, model_name=base.model_name, base=identity)


def read_adapter_together(folder: Path, infos: Mapping[str, TensorInfo], base: AdapterBase) -> dict[str, torch.Tensor]:
    """(collective) Return A and B of every layer; see `read_adapter`.

    Raises:
        CheckpointError: on every rank; the folder is missing, incomplete, or of another base, rank, scale or other
            layers.
    """
    problem, values = None, dict[str, torch.Tensor]()
    try:
        # One rank reads the whole base to compare it.
        compares = dist.get_rank() == 0 and base_of(folder) is not None
        identity = base.identity() if compares else None
        values = read_adapter(folder, infos, base.config, base=identity)
    except (CheckpointError, ModelFolderError) as error:
        problem = str(error)
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    for text in problems:
        if text is not None:
            raise CheckpointError(text)
    return values


def cause_text(error: BaseException) -> str:
    """Return the cause of an error in one line that is not too long."""
    if isinstance(error, CheckpointException):
        # The text of the exception is the traceback of every rank.
        error = next(iter(error.failures.values()))[0]
    # torch names all other tensors beside the missing one.
    return f"{type(error).__name__}: {shorten(' '.join(str(error).split()), limit=MAX_CAUSE_CHARACTERS)}"


def save_tokenizer(
    tokenizer: PreTrainedTokenizerBase, folder: Path, *, model: Path, group: dist.ProcessGroup | None = None
) -> None:
    """Add the files of the tokenizer and of the processor of pictures to `folder`, which may be the one of the weights;
    rank 0 writes.

    Args:
        model: folder that the run started from, which has those of the processor if there is one.

    Raises:
        CheckpointError: on every rank.
    """
    problem = None
    if dist.get_rank() == 0:
        try:
            tokenizer.save_pretrained(str(folder))
            for name in PROCESSOR_FILES:
                if (model / name).is_file():
                    shutil.copyfile(model / name, folder / name)
        except OSError as error:
            problem = str(error)
    raise_together(problem, folder, doing="write", group=group)


def upload_together(upload: Upload, *, group: dist.ProcessGroup) -> None:
    """(collective over the group: the ranks of the job) Upload what the ranks have written of a checkpoint.

    A file of the sharded state goes up from the rank that wrote it, which has it in its page cache; the others are
    spread by their sizes.

    Raises:
        CheckpointError: on every rank; nothing names what was uploaded.
    """
    problem = None
    shares: list[Any] = [[[]] * group.size()]
    if group.rank() == 0:
        try:
            shares = [_shares(upload.folder, group.size())]
        except OSError as error:
            problem = cause_text(error)
    # What one node has written another may not list at once.
    dist.broadcast_object_list(shares, group=group, group_src=0)
    try:
        store = ObjectStore(upload.url, timeout_s=upload.timeout_s)
        store.upload({name: upload.folder / name for name in shares[0][group.rank()]})
    except CheckpointError as error:
        problem = str(error)
    raise_together(problem, upload.folder, doing="upload", group=group)


def _shares(folder: Path, num_ranks: int) -> list[list[str]]:
    """Return the names of the files that each rank uploads."""
    files = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    shares, loads = [list[str]() for _ in range(num_ranks)], [0] * num_ranks
    for name, size in sorted(files.items(), key=lambda item: (not _WRITER.search(item[0]), -item[1])):
        writer = _WRITER.search(name)
        rank = int(writer[1]) % num_ranks if writer else loads.index(min(loads))
        shares[rank].append(name)
        loads[rank] += size
    return shares


def random_state() -> dict[str, torch.Tensor]:
    """Return the random state of this process: `cpu`, and `cuda` where there is a GPU."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, torch.Tensor]) -> None:
    """Set what `random_state` gave; a GPU's is left out where there is none."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def refuse_code(folder: Path) -> None:
    """Look through a sharded checkpoint before torch reads it: torch would unpickle its index and objects freely.

    Raises:
        CheckpointError: no such checkpoint, damaged, or it holds pickles of anything but tensors and plain values.
    """
    try:
        with open_plain(folder / INDEX_FILE) as file:
            index = _IndexUnpickler(file).load()
        if not isinstance(index, Metadata):
            raise pickle.UnpicklingError(f"{INDEX_FILE} holds a {type(index).__name__}")
        for key, place in index.storage_data.items():
            if isinstance(index.state_dict_metadata[key.fqn], BytesStorageMetadata):
                with open_plain(folder / place.relative_path) as file:
                    file.seek(place.offset)
                    torch.load(io.BytesIO(file.read(place.length)), weights_only=True)
    except (OSError, EOFError, KeyError, AttributeError, TypeError, RuntimeError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"checkpoint {str(folder)!r}: the optimizer state cannot be read: {error}; resume from another checkpoint"
        ) from error


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) == ("builtins", "getattr"):
            # Early versions of Python 3.11 (Debian 12 has one) pickle a member of an Enum as an attribute of its class.
            return _member
        is_dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if not is_dtype and (module, name) not in _INDEX_PARTS:
            raise pickle.UnpicklingError(f"{module}.{name} has no place in the index of a checkpoint")
        return super().find_class(module, name)


def _member(kind: object, name: object) -> Enum:
    """Return the member of an Enum; no other attribute of anything."""
    if isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__:
        return kind[str(name)]
    raise pickle.UnpicklingError(f"attribute {name!r} has no place in the index of a checkpoint")


def _open_part(folder: Path, group: dist.ProcessGroup | None) -> Path:
    """Return an empty folder next to `folder`, where its content is written; an error is raised on every rank."""
    target = _part(folder)
    problem = None
    if dist.get_rank() == 0:
        try:
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir(parents=True)
        except OSError as error:
            problem = str(error)
    raise_together(problem, folder, doing="write", group=group)
    return target


def _close_part(folder: Path, problem: str | None, group: dist.ProcessGroup | None) -> None:
    """Give what was written its name; when any rank had a problem remove it, leave what was in `folder` before, and
    raise CheckpointError on every rank."""
    target = _part(folder)
    is_writer = dist.get_rank() == 0
    try:
        raise_together(problem, folder, doing="write", group=group)
        if is_writer:
            give_usual_modes(target)
            shutil.rmtree(folder, ignore_errors=True)
            target.rename(folder)
    finally:
        if is_writer:
            shutil.rmtree(target, ignore_errors=True)
    dist.barrier(group)


def _part(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.part")
