"""Weights of a Hugging Face folder, read one at a time.

Called by the loader and the checkpoints of the policy workers. Names here are those of the module's state dict, where
the experts of a layer are one tensor; files hold every expert by itself, under the names of its model type.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PretrainedConfig

from nemo_rl.errors import ModelFolderError, boundary, name_some
from nemo_rl.models.hf.files import INDEX_FILE, SINGLE_FILE, Box, FileNames, StoredTensor
from nemo_rl.models.hf.loading import check_model_folder, model_without_weights, named_weights
from nemo_rl.models.policy.interfaces import TensorInfo
from nemo_rl.utils.files import open_plain

__all__ = [
    "ALL_ROWS",
    "FolderWeights",
    "ModelWeights",
    "WeightSource",
    "open_weights",
]

ALL_ROWS = slice(None)
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class WeightSource(ABC):
    """Weights of a model under the names of its state dict; a tied head is left out."""

    where: str
    """Name of the source, for messages."""

    @abstractmethod
    def names(self) -> Set[str]:
        """Return the names of all weights and persistent buffers."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a weight without reading it."""

    @abstractmethod
    def get(self, name: str, *, rows: slice = ALL_ROWS) -> torch.Tensor:
        """Return a weight, or some of its rows, on the CPU in the dtype in which it is stored; not to be changed in
        place."""


class ModelWeights(WeightSource):
    """The weights of a model in memory."""

    def __init__(self, model: torch.nn.Module, *, where: str) -> None:
        self.where = where
        self._weights = {name: weight.detach() for name, weight in named_weights(model)}

    def names(self) -> Set[str]:
        return self._weights.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._weights[name].shape)

    def get(self, name: str, *, rows: slice = ALL_ROWS) -> torch.Tensor:
        weight = self._weights[name]
        return weight[rows] if weight.dim() else weight


class FolderWeights(WeightSource):
    """The weights of a folder with safetensors, read when they are asked for.

    Example:
        `model.layers.0.mlp.experts.down_proj` of shape `[E, H, I]` is stacked from the file's
        `model.layers.0.mlp.experts.{0..E-1}.down_proj.weight` of shape `[H, I]`.
    """

    def __init__(self, folder: Path, config: PretrainedConfig) -> None:
        """Open every file, which reads its header.

        Raises:
            ModelFolderError: a file is missing, truncated or no safetensors file, an expert is incomplete, or a tied
                head is not the embedding.
        """
        self.where = f"model folder {str(folder)!r}"
        self._folder = folder
        self._files: dict[str, Any] = {}
        self._file_of = self._find_names()
        unused = _unused_names(config)
        self._stored = self._join_names(config, [name for name in self._file_of if not unused.fullmatch(name)])
        self._check_tied_head()

    def names(self) -> Set[str]:
        return self._stored.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises:
        ModelFolderError: the file does not hold what the index says.
        """
        parts = self._stored[name]
        shapes = [tuple(self._files[self._file_of[part.name]].get_slice(part.name).get_shape()) for part in parts]
        if len(parts) == 1:
            return shapes[0]
        wrong = [shape for shape, part in zip(shapes, parts, strict=True) if shape != part.shape]
        # The shape that experts of other sizes than the config describes would make up.
        return (len(parts), *wrong[0]) if wrong else self._whole(parts)

    def get(self, name: str, *, rows: slice = ALL_ROWS) -> torch.Tensor:
        """Raises:
        ModelFolderError: the file does not hold what the index says, or experts differ in shape.
        """
        parts = self._stored[name]
        if len(parts) == 1:
            return self._read(parts[0].name, rows)
        shape = self._whole(parts)
        wanted = range(shape[0])[rows]
        held = Box.whole(shape).along(0, wanted.start, len(wanted))
        pieces = [(part, held.meet(part.box)) for part in parts]
        read = [(self._read(part.name), part, box) for part, box in pieces if box is not None]
        whole = torch.empty(held.size, dtype=read[0][0].dtype)
        for tensor, part, box in read:
            if tuple(tensor.shape) != part.shape:
                raise ModelFolderError(
                    f"{self.where}: {part.name!r}: expected shape {part.shape}, got {tuple(tensor.shape)}; the experts "
                    f"of {name!r} differ"
                )
            box.of(whole, held=held).copy_(box.of(tensor.view(part.box.size), held=part.box))
        return whole

    @staticmethod
    def _whole(parts: Sequence[StoredTensor]) -> tuple[int, ...]:
        last = parts[-1].box
        return tuple(start + size for start, size in zip(last.start, last.size, strict=True))

    def _find_names(self) -> dict[str, str]:
        """Return the file of each stored weight; a single file goes before an index, as in transformers."""
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
                open_plain(path).close()
                self._files[file] = safe_open(str(path), framework="pt", device="cpu")
        return self._files[file]

    def _join_names(self, config: PretrainedConfig, stored_names: Sequence[str]) -> dict[str, tuple[StoredTensor, ...]]:
        """Return the weights that the files make up; what no weight of the module is made of stays under its name."""
        model = model_without_weights(config, self._folder)
        names, left, found = FileNames(model), dict.fromkeys(stored_names), dict[str, tuple[StoredTensor, ...]]()
        for name, weight in named_weights(model):
            info = TensorInfo(shape=tuple(weight.shape), dtype="float32")
            parts = tuple(names.stored(name, info))
            lost = [part for part in parts if part.name not in left]
            if len(lost) < len(parts):
                if lost:
                    raise ModelFolderError(
                        f"{self.where}: expert {lost[0].box.start[0]} of {name!r} lacks {lost[0].name.split('.')[-2]}"
                    )
                found[name] = parts
                for part in parts:
                    del left[part.name]
        return found | {name: (_as_it_is(name),) for name in left}

    def _check_tied_head(self) -> None:
        """Refuse a head that differs from the embedding: a folder may hold the head of a model that is tied, but not
        another one than the embedding."""
        if HEAD not in self._file_of or HEAD in self._stored or EMBEDDING not in self._file_of:
            return
        if not torch.equal(self._read(HEAD), self._read(EMBEDDING)):
            raise ModelFolderError(
                f"{self.where}: config.json says tie_word_embeddings, but {HEAD} differs from {EMBEDDING}; set "
                "tie_word_embeddings to false in config.json"
            )

    def _read(self, name: str, rows: slice = ALL_ROWS) -> torch.Tensor:
        file = self._file_of[name]
        try:
            tensor: torch.Tensor = self._files[file].get_tensor(name)
        except SafetensorError as error:
            raise ModelFolderError(f"{self.where}: {name!r} in {file} cannot be read: {error}") from error
        return tensor[rows] if tensor.dim() else tensor


def _as_it_is(name: str) -> StoredTensor:
    """Return a tensor of a file that no weight of the module is made of, or is under the very same name."""
    return StoredTensor(name=name, weight=name, box=Box.whole(()), shape=(), dtype=torch.float32)


def open_weights(folder: str | Path, config: PretrainedConfig) -> WeightSource:
    """Return the weights of a model folder.

    Raises:
        ModelFolderError: the folder is missing, incomplete or unreadable.
    """
    return FolderWeights(check_model_folder(folder), config)


def _unused_names(config: PretrainedConfig) -> re.Pattern[str]:
    """Return the weights that a folder may hold besides those of the module."""
    given = config.to_dict()
    patterns = [r".*rotary_emb\.inv_freq"]
    if given["tie_word_embeddings"]:
        patterns.append(re.escape(HEAD))
    if predictors := given.get("num_nextn_predict_layers"):
        first: int = given["num_hidden_layers"]
        layers = "|".join(str(layer) for layer in range(first, first + predictors))
        patterns.append(rf"model\.layers\.({layers})\..*")
    return re.compile("|".join(patterns))
