"""Vision-language models: what a row with images consists of, and how its images enter a forward pass.

Called by the DTensor worker, the engines and the rollout. A row has its token ids, in which every image stands as a run
of placeholder tokens, one per feature, and tensors by the names under which the model's forward takes them. Invariant:
the placeholders of a row's images are the first ones in it, as many as the images have features; one that was sampled
after them is text, in the trainer as in the engines. Shapes: L tokens of a row, F features, n rows, s positions.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

__all__ = [
    "FAMILIES",
    "GRID",
    "PIXELS",
    "SMALL_FEATURES",
    "PromptImages",
    "VisionFamily",
    "family_of",
    "freeze_tower",
    "is_in_tower",
    "row_tensors",
    "stack_rows",
    "vision_columns",
]

SMALL_FEATURES = 4
"""Features of an image of a small model."""
PIXELS, GRID = "pixel_values", "image_grid_thw"
AXES = 3
"""Positions of a token in models with M-RoPE: time, height, width."""
RowTensors = Mapping[str, torch.Tensor]
"""Name of a column -> the tensor of one row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionColumn:
    """A column of tensors of images, one per row, whose first dimension differs from row to row."""

    name: str
    dtype: str
    dims: tuple[int, ...]
    """The dimensions after the first."""

    def empty(self) -> torch.Tensor:
        """Return the tensor of a row without images."""
        return torch.zeros(0, *self.dims, dtype=vars(torch)[self.dtype])


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptImages:
    """The images of one prompt, ready for the model; all samples of the prompt share them."""

    tensors: RowTensors = field(compare=False)
    digest: str
    """Digest of names, shapes and bytes: equal images have equal ones."""

    @classmethod
    def of(cls, tensors: RowTensors) -> PromptImages:
        found = hashlib.blake2b(digest_size=16)
        for name in sorted(tensors):
            tensor = tensors[name].contiguous()
            found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
            found.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        return cls(tensors=dict(tensors), digest=found.hexdigest())


@dataclass(frozen=True, kw_only=True, slots=True)
class RowPlaces:
    """Places of the features of a row's images, and the positions of its tokens."""

    feature_L: torch.Tensor
    """int64: number of the feature of the row that stands at a token; -1 at text."""
    position_3L: torch.Tensor | None
    """int64: M-RoPE positions; None where the model counts tokens."""


class VisionFamily(ABC):
    """Knowledge of a model type that giving images to it takes."""

    def __init__(self, config: PretrainedConfig) -> None:
        self.config: Any = config
        self.kind = str(config.model_type)
        self.image_token = int(self.config.image_token_id)
        """Id of the placeholder."""

    @property
    @abstractmethod
    def columns(self) -> tuple[VisionColumn, ...]:
        """Return the columns that rows with images have."""

    @property
    @abstractmethod
    def tower(self) -> tuple[str, ...]:
        """Return the names of the modules that make features of pixels, and project them to the language model."""

    def layers(self, named: Set[str]) -> Set[str]:
        """Return the names of classes whose modules are sharded one by one; `named` are those that the model names."""
        return named

    @abstractmethod
    def features_of(self, row: RowTensors) -> list[int]:
        """Return the number of features of each image of a row."""

    @abstractmethod
    def sample_row(self) -> dict[str, torch.Tensor]:
        """Return the tensors of a smallest image, for passes that have none but must run the tower."""

    @abstractmethod
    def noise(self, count: int, draw: torch.Generator) -> dict[str, torch.Tensor]:
        """Return the tensors of `count` images of noise for a small model, each of `SMALL_FEATURES` features."""

    @abstractmethod
    def small(self, text: PretrainedConfig, *, tokens: Sequence[int], deviation: float) -> PretrainedConfig:
        """Return the config with a small tower and this language model.

        Args:
            tokens: ids of the placeholder and of further tokens of images.
            deviation: of the weights at the start.
        """

    def hugging_face_inputs(self, ids_L: torch.Tensor, row: RowTensors) -> dict[str, torch.Tensor]:
        """Return what a user of transformers gives to the model for one prompt, which has no other placeholders."""
        return {"input_ids": ids_L[None], **({} if not self.features_of(row) else dict(row))}

    @abstractmethod
    def encode(self, model: PreTrainedModel, row: RowTensors) -> torch.Tensor:
        """Return the features `[F, hidden]` of all images in tensors of one or several rows laid end to end."""

    def positions(self, row: RowTensors, starts: Sequence[int], length: int) -> torch.Tensor | None:
        """Return `[3, L]` int64, or None where tokens are counted.

        Args:
            starts: first placeholder of each image.
        """
        return None

    def empty_row(self) -> dict[str, torch.Tensor]:
        """Return the tensors of a row without images."""
        return {column.name: column.empty() for column in self.columns}

    def row_problem(self, ids_L: torch.Tensor, row: RowTensors) -> str | None:
        """Return what is wrong with the images of a row, or None."""
        for column in self.columns:
            tensor = row.get(column.name)
            if tensor is None or tuple(tensor.shape[1:]) != column.dims:
                got = "nothing" if tensor is None else str(list(tensor.shape))
                return f"{column.name}: expected [*, {', '.join(map(str, column.dims))}], got {got}"
        counts = self.features_of(row)
        place_F = (ids_L == self.image_token).nonzero()[:, 0].tolist()
        needed = sum(counts)
        if len(place_F) < needed:
            return (
                f"expected {needed} placeholder tokens ({self.image_token}) for the features of {len(counts)} images, "
                f"got {len(place_F)}; was the prompt cut, or not expanded by the model's processor?"
            )
        for start, count in zip(accumulate(counts, initial=0), counts, strict=False):
            if place_F[start + count - 1] - place_F[start] != count - 1:
                return f"the placeholder tokens of an image from token {place_F[start]} on are not one run of {count}"
        return None

    def prompt_problem(self, ids_L: torch.Tensor, row: RowTensors) -> str | None:
        """Return what is wrong with the images of a prompt, of which every placeholder must be of an image."""
        problem = self.row_problem(ids_L, row)
        needed, got = sum(self.features_of(row)) if problem is None else 0, int((ids_L == self.image_token).sum())
        if problem is None and got != needed:
            return f"expected {needed} placeholder tokens ({self.image_token}) for its images, got {got}"
        return problem

    def places(self, ids_L: torch.Tensor, row: RowTensors) -> RowPlaces:
        """Return the places of a row without `row_problem`."""
        counts = self.features_of(row)
        feature_L = torch.full_like(ids_L, -1, dtype=torch.int64)
        place_F = (ids_L == self.image_token).nonzero()[: sum(counts), 0]
        feature_L[place_F] = torch.arange(len(place_F), device=ids_L.device)
        first = torch.tensor(list(accumulate(counts, initial=0))[:-1], dtype=torch.int64, device=ids_L.device)
        return RowPlaces(
            feature_L=feature_L, position_3L=self.positions(row, place_F[first].tolist(), length=len(ids_L))
        )

    def places_of_rows(
        self, rows: Sequence[RowTensors], ids: Sequence[torch.Tensor], at: Sequence[slice], position_nW: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return features and positions of rows that are laid out `[n, W]`: `[n, W]` the number of the feature among
        those of all rows, -1 at text, and `[3, n, W]`, or None where the model counts tokens.

        Args:
            ids: of each row, without padding.
            at: the columns of each row.
            position_nW: positions where no row lies.
        """
        feature_nW, position_3nW = torch.full_like(position_nW, -1), position_nW.repeat(AXES, 1, 1)
        first, has_axes = 0, False
        for number, (row, ids_L, columns) in enumerate(zip(rows, ids, at, strict=True)):
            places = self.places(ids_L, row)
            feature_nW[number, columns] = torch.where(places.feature_L >= 0, places.feature_L + first, -1)
            first += sum(self.features_of(row))
            if places.position_3L is not None:
                position_3nW[:, number, columns], has_axes = places.position_3L, True
        return feature_nW, position_3nW if has_axes else None

    def embed(
        self, model: PreTrainedModel, ids_ns: torch.Tensor, feature_ns: torch.Tensor, rows: Sequence[RowTensors]
    ) -> torch.Tensor:
        """Return embeddings `[n, s, hidden]` of tokens, with the features of images at their places.

        The tower runs in any case: with sharded weights every rank must run it, also one whose rows have no images.

        Args:
            feature_ns: number of the feature among those of all rows; -1 at text.
        """
        embeds: torch.Tensor = model.get_input_embeddings()(ids_ns)
        tensors = stack_rows(rows, self.columns)
        has_images = bool(tensors[PIXELS].shape[0])
        if not has_images:
            sample = self.sample_row()
            tensors = {name: tensor.to(ids_ns.device) for name, tensor in sample.items()}
        is_frozen = not any(weight.requires_grad for name in self.tower for weight in _module(model, name).parameters())
        with torch.no_grad() if is_frozen else nullcontext():
            features_FH = self.encode(model, tensors).to(embeds.dtype)
        if not has_images:
            # Nothing of it counts, but it is part of the graph, so that gradients are exchanged.
            return embeds + features_FH.sum() * 0.0
        placed_nsH = features_FH[feature_ns.clamp(min=0)]
        return torch.where((feature_ns >= 0)[..., None], placed_nsH, embeds)


class QwenVision(VisionFamily):
    """Qwen2.5-VL: patches of images of any size, and positions in time, height and width (M-RoPE)."""

    @cached_property
    def columns(self) -> tuple[VisionColumn, ...]:  # type: ignore[override]
        vision = self.config.vision_config
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        return (
            VisionColumn(name=PIXELS, dtype="float32", dims=(width,)),
            VisionColumn(name=GRID, dtype="int64", dims=(AXES,)),
        )

    @property
    def tower(self) -> tuple[str, ...]:
        return ("model.visual",)

    @property
    def merge(self) -> int:
        """Return the number of patches along each side of what becomes one feature."""
        return int(self.config.vision_config.spatial_merge_size)

    def features_of(self, row: RowTensors) -> list[int]:
        return [time * high * wide // self.merge**2 for time, high, wide in row[GRID].tolist()]

    def row_problem(self, ids_L: torch.Tensor, row: RowTensors) -> str | None:
        problem = super().row_problem(ids_L, row)
        patches = int(row[GRID].prod(1).sum()) if problem is None else 0
        if problem is None and len(row[PIXELS]) != patches:
            return f"{PIXELS}: expected {patches} patches for {GRID} {row[GRID].tolist()}, got {len(row[PIXELS])}"
        return problem

    def sample_row(self) -> dict[str, torch.Tensor]:
        grid = torch.tensor([[1, self.merge, self.merge]])
        return {PIXELS: torch.zeros(self.merge**2, *self.columns[0].dims), GRID: grid}

    def noise(self, count: int, draw: torch.Generator) -> dict[str, torch.Tensor]:
        # Squares and bars of the same area.
        sides = [(2, 2) if place % 2 == 0 else (1, 4) for place in range(count)]
        grids = [[1, high * self.merge, wide * self.merge] for high, wide in sides]
        grid = torch.tensor(grids, dtype=torch.int64).view(-1, AXES)
        pixels = torch.randn(int(grid.prod(1).sum()), *self.columns[0].dims, generator=draw)
        return {PIXELS: pixels, GRID: grid}

    def small(self, text: PretrainedConfig, *, tokens: Sequence[int], deviation: float) -> PretrainedConfig:
        heads = text.num_attention_heads
        # Thirds of a head's frequencies, of which the first takes what is left.
        part = text.hidden_size // heads // 2 // 3
        rope = {**text.rope_parameters, "mrope_section": [text.hidden_size // heads // 2 - 2 * part, part, part]}
        given = self.config.vision_config.to_dict()
        vision = {
            **given,
            **{"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 4},
            # A window of four features: bars have two of them.
            **{"window_size": 8 * self.merge, "out_hidden_size": text.hidden_size, "initializer_range": deviation},
            "fullatt_block_indexes": [1],
        }
        names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
        return type(self.config)(
            # The class's own begin token lies beyond a small vocabulary.
            text_config={**text.to_dict(), "rope_parameters": rope, "bos_token_id": None},
            vision_config=vision,
            tie_word_embeddings=self.config.tie_word_embeddings,
            **dict(zip(names, tokens, strict=True)),
        )

    def hugging_face_inputs(self, ids_L: torch.Tensor, row: RowTensors) -> dict[str, torch.Tensor]:
        found = super().hugging_face_inputs(ids_L, row)
        return {**found, "mm_token_type_ids": (ids_L == self.image_token).int()[None]} if GRID in found else found

    def encode(self, model: PreTrainedModel, row: RowTensors) -> torch.Tensor:
        found = model.get_image_features(row[PIXELS], row[GRID], return_dict=True)  # type: ignore[operator]
        return torch.cat(list(found.pooler_output))

    def positions(self, row: RowTensors, starts: Sequence[int], length: int) -> torch.Tensor | None:
        """Text counts on all three axes; an image is a block, and what follows it goes on after its longer side."""
        device = row[GRID].device
        parts, done, at = list[torch.Tensor](), 0, 0

        def text(count: int) -> torch.Tensor:
            return (torch.arange(count, device=device) + at).expand(AXES, count)

        for (time, high, wide), start in zip(row[GRID].tolist(), starts, strict=True):
            parts.append(text(start - done))
            at += start - done
            sides = time, high // self.merge, wide // self.merge
            axes = [torch.arange(side, device=device) for side in sides]
            block = torch.stack(torch.meshgrid(*axes, indexing="ij")).reshape(AXES, -1)
            parts.append(block + at)
            done = start + block.shape[1]
            at += max(high, wide) // self.merge
        return torch.cat([*parts, text(length - done)], dim=1)


class TileVision(VisionFamily):
    """SmolVLM: images and their tiles as squares of one size, which have equally many features; tokens are counted."""

    @cached_property
    def columns(self) -> tuple[VisionColumn, ...]:  # type: ignore[override]
        vision = self.config.vision_config
        return (VisionColumn(name=PIXELS, dtype="float32", dims=(vision.num_channels, *(vision.image_size,) * 2)),)

    @property
    def tower(self) -> tuple[str, ...]:
        return ("model.vision_model", "model.connector")

    def layers(self, named: Set[str]) -> Set[str]:
        # The model names the attention of a layer of the tower, which returns a view: nothing that FSDP can hook.
        return (named - {"SmolVLMVisionAttention"}) | {"SmolVLMEncoderLayer"}

    @property
    def features_per_tile(self) -> int:
        vision = self.config.vision_config
        return int((vision.image_size // vision.patch_size // self.config.scale_factor) ** 2)

    def features_of(self, row: RowTensors) -> list[int]:
        return [self.features_per_tile] * len(row[PIXELS])

    def row_problem(self, ids_L: torch.Tensor, row: RowTensors) -> str | None:
        problem = super().row_problem(ids_L, row)
        # The model takes tiles of zeros for padding, and leaves them out.
        if problem is None and len(row[PIXELS]) and bool((row[PIXELS].flatten(1) == 0).all(1).any()):
            return f"{PIXELS}: a tile of zeros, which the model takes for padding"
        return problem

    def sample_row(self) -> dict[str, torch.Tensor]:
        return {PIXELS: torch.ones(1, *self.columns[0].dims)}

    def noise(self, count: int, draw: torch.Generator) -> dict[str, torch.Tensor]:
        return {PIXELS: torch.randn(count, *self.columns[0].dims, generator=draw)}

    def small(self, text: PretrainedConfig, *, tokens: Sequence[int], deviation: float) -> PretrainedConfig:
        patch, factor = 4, self.config.scale_factor
        vision = {
            **self.config.vision_config.to_dict(),
            **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
            **{"patch_size": patch, "image_size": 2 * patch * factor, "initializer_range": deviation},
        }
        return type(self.config)(
            text_config=text.to_dict(),
            vision_config=vision,
            image_token_id=tokens[0],
            scale_factor=factor,
            tie_word_embeddings=self.config.tie_word_embeddings,
        )

    def hugging_face_inputs(self, ids_L: torch.Tensor, row: RowTensors) -> dict[str, torch.Tensor]:
        found = super().hugging_face_inputs(ids_L, row)
        return {**found, PIXELS: found[PIXELS][None]} if PIXELS in found else found

    def encode(self, model: PreTrainedModel, row: RowTensors) -> torch.Tensor:
        found = model.model.get_image_features(row[PIXELS][None], return_dict=True)
        return torch.cat(list(found.pooler_output))


FAMILIES: Mapping[str, type[VisionFamily]] = {"qwen2_5_vl": QwenVision, "smolvlm": TileVision}
"""Model types whose images are understood."""


def family_of(config: PretrainedConfig) -> VisionFamily | None:
    """Return what is known of a vision-language model, or None for other models."""
    kind = FAMILIES.get(str(config.model_type))
    return None if kind is None else kind(config)


def vision_columns(config: PretrainedConfig) -> tuple[VisionColumn, ...]:
    """Return the columns that a rollout with images writes for a model; none for models of text."""
    family = family_of(config)
    return () if family is None else family.columns


def stack_rows(rows: Sequence[RowTensors], columns: Sequence[VisionColumn]) -> dict[str, torch.Tensor]:
    return {
        column.name: torch.cat([row[column.name] for row in rows]) if rows else column.empty() for column in columns
    }


def freeze_tower(model: PreTrainedModel) -> None:
    """Let the weights of the vision tower and of its projection stay as they are."""
    family = family_of(model.config)
    assert family is not None, f"{model.config.model_type} has no vision tower that is known"
    for name in family.tower:
        _module(model, name).requires_grad_(False)


def is_in_tower(name: str, family: VisionFamily) -> bool:
    """Return whether a module or weight is of the vision tower."""
    return any(f"{name}.".startswith(f"{part}.") for part in family.tower)


def _module(model: PreTrainedModel, name: str) -> torch.nn.Module:
    return model.get_submodule(name)


def row_tensors(extras: Mapping[str, Sequence[torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
    names = list(extras)
    for tensors in zip(*extras.values(), strict=True):
        yield dict(zip(names, tensors, strict=True))
