"""Weights in a Hugging Face folder: read one at a time, written in shards.

Called by the loader and the checkpoints of the Megatron worker. Names here are those of the module's state dict, where
the experts of a layer are one tensor; files hold every expert by itself, under the names of its model type. Invariant:
what `write_folder` writes, `open_weights` and transformers both read without a missing or an unexpected weight.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import GenerationConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from nemo_rl.errors import ModelFolderError, boundary, name_some
from nemo_rl.models.loading import check_model_folder, named_weights

__all__ = [
    "ALL_ROWS",
    "MAX_SHARD_BYTES",
    "FolderWeights",
    "ModelWeights",
    "WeightSource",
    "as_stored",
    "open_weights",
    "write_folder",
]

MAX_SHARD_BYTES = 5_000_000_000
"""Of a weight file: what transformers writes, too."""
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
ALL_ROWS = slice(None)
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


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


class WeightSource(Protocol):
    """Weights of a model under the names of its state dict; a tied head is left out."""

    @property
    def where(self) -> str:
        """Where they come from, for messages."""

    def names(self) -> Set[str]:
        """Of all weights and persistent buffers."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Without reading the weight."""

    def get(self, name: str, *, rows: slice = ALL_ROWS) -> torch.Tensor:
        """A weight, or some of its rows, on the CPU in the dtype in which it is stored; not to be changed in place."""


class ModelWeights:
    """The weights of a model in memory."""

    def __init__(self, model: torch.nn.Module, *, where: str) -> None:
        self.where = where
        self._weights = {name: weight.detach() for name, weight in named_weights(model)}

    def names(self) -> Set[str]:
        """See `WeightSource`."""
        return self._weights.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """See `WeightSource`."""
        return tuple(self._weights[name].shape)

    def get(self, name: str, *, rows: slice = ALL_ROWS) -> torch.Tensor:
        """See `WeightSource`."""
        return self._weights[name][rows]


@dataclass(slots=True)
class _Stored:
    """Where a weight of the module lies in the files."""

    name: str = ""
    """In the files, of a weight that is stored whole."""
    experts: dict[int, dict[str, str]] = field(default_factory=dict)
    """Else the names of each expert's pieces, by the piece."""


class FolderWeights:
    """The weights of a folder with safetensors, read when they are asked for.

    Example:
        `model.layers.0.mlp.experts.down_proj` of shape `[E, H, I]` is stacked from the file's
        `model.layers.0.mlp.experts.{0..E-1}.down_proj.weight` of shape `[H, I]`.
    """

    def __init__(self, folder: Path, config: PretrainedConfig) -> None:
        """Opens every file, which reads its header.

        Raises:
            ModelFolderError: a file is missing, truncated or no safetensors file, an expert is incomplete, or a tied
                head is not the embedding.
        """
        self.where = f"model folder {str(folder)!r}"
        self._folder = folder
        self._expert_names = EXPERT_NAMES.get(config.model_type, COMMON_EXPERT_NAMES)
        self._files: dict[str, Any] = {}
        self._file_of = self._find_names()
        unused = _unused_names(config)
        self._stored = self._join_names(name for name in self._file_of if not unused.fullmatch(name))
        self._check_tied_head()

    def names(self) -> Set[str]:
        """See `WeightSource`."""
        return self._stored.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """See `WeightSource`.

        Raises:
            ModelFolderError: the file does not hold what the index says.
        """
        stored = self._stored[name]
        if stored.name:
            return self._shape_in_file(stored.name)
        shapes = [self._shape_in_file(piece) for piece in stored.experts[0].values()]
        return (len(stored.experts), sum(shape[0] for shape in shapes), *shapes[0][1:])

    def get(self, name: str, *, rows: slice = ALL_ROWS) -> torch.Tensor:
        """See `WeightSource`.

        Raises:
            ModelFolderError: the file does not hold what the index says, or experts differ in shape.
        """
        stored = self._stored[name]
        if stored.name:
            return self._read(stored.name, rows)
        wanted = range(len(stored.experts))[rows]
        experts = [torch.cat([self._read(piece) for piece in stored.experts[expert].values()]) for expert in wanted]
        try:
            return torch.stack(experts)
        except RuntimeError as error:
            raise ModelFolderError(f"{self.where}: the experts of {name!r} differ: {error}") from error

    def _find_names(self) -> dict[str, str]:
        """The file of each stored weight; a single file goes before an index, as in transformers."""
        if (self._folder / SINGLE_FILE).is_file():
            return dict.fromkeys(self._open(SINGLE_FILE).keys(), SINGLE_FILE)
        with boundary(ModelFolderError, f"{self.where}: {INDEX_FILE} cannot be read"):
            file_of: dict[str, str] = json.loads((self._folder / INDEX_FILE).read_text(encoding="utf-8"))["weight_map"]
            outside = [file for file in file_of.values() if Path(file).name != file]
            if outside:
                raise ModelFolderError(f"{self.where}: {INDEX_FILE}: expected names of files in it, got {outside[0]!r}")
        held = {file: set(self._open(file).keys()) for file in sorted(set(file_of.values()))}
        lost = [name for name, file in file_of.items() if name not in held[file]]
        if lost:
            raise ModelFolderError(
                f"{self.where}: {file_of[lost[0]]} lacks {name_some(lost)}, which {INDEX_FILE} lists"
            )
        return file_of

    def _open(self, file: str) -> Any:
        if file not in self._files:
            path = self._folder / file
            with boundary(ModelFolderError, f"{self.where}: {file} cannot be read"):
                # safetensors says of a file without permission that it does not exist.
                path.open("rb").close()
                self._files[file] = safe_open(str(path), framework="pt", device="cpu")
        return self._files[file]

    def _join_names(self, stored_names: Iterable[str]) -> dict[str, _Stored]:
        names, found = self._expert_names, dict[str, _Stored]()
        weight_of = {piece: weight for weight, pieces in names.pieces().items() for piece in pieces}
        expert = re.compile(rf"(.*)\.{names.block}\.experts\.(\d+)\.({'|'.join(weight_of)})\.weight")
        for name in stored_names:
            match = expert.fullmatch(name)
            if match is None:
                found[name.replace(f".{names.block}.gate.", ".mlp.gate.")] = _Stored(name=name)
            else:
                layer, number, piece = match.groups()
                joined = found.setdefault(f"{layer}.mlp.experts.{weight_of[piece]}", _Stored())
                joined.experts.setdefault(int(number), {})[piece] = name
        for name, stored in found.items():
            if not stored.name:
                self._order_pieces(name, stored)
        return found

    def _order_pieces(self, name: str, stored: _Stored) -> None:
        pieces = self._expert_names.pieces()[name.rpartition(".")[2]]
        for expert in range(max(stored.experts) + 1):
            held = stored.experts.get(expert, {})
            lost = [piece for piece in pieces if piece not in held]
            if lost:
                raise ModelFolderError(f"{self.where}: expert {expert} of {name!r} lacks {lost[0]}.weight")
            stored.experts[expert] = {piece: held[piece] for piece in pieces}

    def _check_tied_head(self) -> None:
        """A folder may hold the head of a model that is tied, but not another one than the embedding."""
        if HEAD not in self._file_of or HEAD in self._stored or EMBEDDING not in self._file_of:
            return
        if not torch.equal(self._read(HEAD), self._read(EMBEDDING)):
            raise ModelFolderError(
                f"{self.where}: config.json says tie_word_embeddings, but {HEAD} differs from {EMBEDDING}; set "
                "tie_word_embeddings to false in config.json"
            )

    def _shape_in_file(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[self._file_of[name]].get_slice(name).get_shape())

    def _read(self, name: str, rows: slice = ALL_ROWS) -> torch.Tensor:
        file = self._file_of[name]
        try:
            tensor: torch.Tensor = self._files[file].get_tensor(name)
        except SafetensorError as error:
            raise ModelFolderError(f"{self.where}: {name!r} in {file} cannot be read: {error}") from error
        return tensor[rows]


def open_weights(folder: str | Path, config: PretrainedConfig) -> WeightSource:
    """The weights of a model folder.

    Raises:
        ModelFolderError: the folder is missing, incomplete or unreadable.
    """
    return FolderWeights(check_model_folder(folder), config)


def write_folder(
    folder: Path,
    config: PretrainedConfig,
    weights: Iterable[tuple[str, torch.Tensor]],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    generation_config: GenerationConfig | None = None,
) -> None:
    """Writes what `from_pretrained` reads, with one shard in memory at a time.

    Files appear one by one: a caller that must not leave half a folder writes into one that it renames. `weights` is
    read to its end even after an error, because other ranks may take part in making them.

    Args:
        weights: as `named_weights` names them, on any device; each may change when the next is asked for.

    Raises:
        OSError: a file cannot be written. SafetensorError: likewise.
    """
    stream = iter(weights)
    shards = _Shards(folder, max_bytes=max_shard_bytes)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, weight in stream:
            for stored_name, tensor in as_stored(name, weight, config.model_type):
                shards.add(stored_name, tensor)
        shards.finish()
        _write_config(folder, config, dtype=shards.dtype)
        if generation_config is not None:
            generation_config.save_pretrained(str(folder))
    finally:
        for _ in stream:
            pass


def as_stored(name: str, weight: torch.Tensor, model_type: str) -> Iterator[tuple[str, torch.Tensor]]:
    """A weight of a module as the files of its model type hold it: every expert by itself, sharing its memory."""
    names = EXPERT_NAMES.get(model_type, COMMON_EXPERT_NAMES)
    layer, experts, kind = name.rpartition(".mlp.experts.")
    if not experts:
        # Only the block with experts has a `gate`; that of other layers has a `gate_proj`.
        yield name.replace(".mlp.gate.", f".{names.block}.gate."), weight
        return
    pieces = names.pieces()[kind]
    for number, expert in enumerate(weight):
        for piece, tensor in zip(pieces, expert.chunk(len(pieces)), strict=True):
            yield f"{layer}.{names.block}.experts.{number}.{piece}.weight", tensor


def _unused_names(config: PretrainedConfig) -> re.Pattern[str]:
    """Weights that a folder may hold besides those of the module."""
    given = config.to_dict()
    patterns = [r".*rotary_emb\.inv_freq"]
    if given["tie_word_embeddings"]:
        patterns.append(re.escape(HEAD))
    if predictors := given.get("num_nextn_predict_layers"):
        first: int = given["num_hidden_layers"]
        layers = "|".join(str(layer) for layer in range(first, first + predictors))
        patterns.append(rf"model\.layers\.({layers})\..*")
    return re.compile("|".join(patterns))


def _write_config(folder: Path, config: PretrainedConfig, *, dtype: torch.dtype) -> None:
    written = copy.deepcopy(config)
    written.dtype = dtype
    written.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    written.save_pretrained(str(folder))


class _Shards:
    """Weight files of bounded size; their number is known at the end only, and so are their names."""

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        self.dtype = torch.float32
        """Of the first weight."""
        self._folder, self._max_bytes = folder, max_bytes
        self._held: dict[str, torch.Tensor] = {}
        self._held_bytes = self._total_bytes = 0
        self._written: list[Sequence[str]] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Takes a copy."""
        if not self._total_bytes:
            self.dtype = tensor.dtype
        size = tensor.numel() * tensor.element_size()
        if self._held and self._held_bytes + size > self._max_bytes:
            self._flush()
        self._held[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._held_bytes += size
        self._total_bytes += size

    def finish(self) -> None:
        """Writes the last shard, names the files and writes their index."""
        self._flush()
        count = len(self._written)
        file_of: dict[str, str] = {}
        for number, names in enumerate(self._written):
            file = SINGLE_FILE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            self._part(number).rename(self._folder / file)
            file_of.update(dict.fromkeys(names, file))
        if count > 1:
            index: Mapping[str, Any] = {"metadata": {"total_size": self._total_bytes}, "weight_map": file_of}
            (self._folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

    def _flush(self) -> None:
        save_file(self._held, str(self._part(len(self._written))), metadata={"format": "pt"})
        self._written.append(tuple(self._held))
        self._held, self._held_bytes = {}, 0

    def _part(self, number: int) -> Path:
        return self._folder / f"{SINGLE_FILE}.part{number}"
