"""`VisionProcessor`: the pictures of a prompt to placeholders and tensors, as the model's own processor makes them.

Called by the rollout. Pictures are resized and normalized by the image processor of the model's folder, on PIL and
numpy (`backend="pil"`): the processors of transformers for whole prompts also need torchvision, for videos. Invariant:
the ids hold a placeholder for every feature of the images, and none besides.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoImageProcessor, PreTrainedTokenizerBase
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from nemo_rl.config.data import DataConfig
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.data.datasets import Prompt
from nemo_rl.errors import DatasetError, ModelFolderError, boundary
from nemo_rl.models.hf.loading import PROCESSOR_FILES, load_model_config
from nemo_rl.models.vision import GRID, PIXELS, PromptImages, VisionFamily, family_of

__all__ = ["PromptPictures", "VisionProcessor", "encoder_of", "processor_for"]

KEPT_PROMPTS = 64
"""Prompts whose tensors are kept: those of a batch, for engines and rows."""


class VisionProcessor(ABC):
    """Makes prompts with images for one model.

    Args:
        pixels: the image processor of transformers.
    """

    def __init__(self, family: VisionFamily, tokenizer: PreTrainedTokenizerBase, pixels: Any) -> None:
        self._family, self._tokenizer, self._pixels = family, tokenizer, pixels
        self._token = str(tokenizer.convert_ids_to_tokens(family.image_token))

    @property
    def image_text(self) -> str:
        """Return what stands for an image in a text, where the chat template does not write it."""
        return self._token

    def count(self, ids: Sequence[int]) -> int:
        """Return the number of places for images among the ids."""
        return sum(token == self._family.image_token for token in ids)

    def expand(self, ids: Sequence[int], pictures: Sequence[Image.Image]) -> tuple[tuple[int, ...], PromptImages]:
        """Return the ids with a placeholder for every feature, and the tensors.

        Args:
            ids: with one placeholder for each picture.

        Raises:
            DatasetError: another number of placeholders, or a picture cannot be used.
        """
        if self.count(ids) != len(pictures):
            raise DatasetError(f"expected {len(pictures)} places for pictures, got {self.count(ids)}")
        with boundary(DatasetError, "an image of a prompt cannot be used"):
            row, expanded = self._process([picture.convert("RGB") for picture in pictures])
        texts, found = iter(expanded), list[int]()
        for token in ids:
            found += self._ids(next(texts)) if token == self._family.image_token else (token,)
        problem = self._family.prompt_problem(torch.tensor(found), row)
        if problem is not None:
            raise DatasetError(f"a prompt with {len(pictures)} images: {problem}")
        return tuple(found), PromptImages.of(row)

    @abstractmethod
    def _process(self, images: list[Image.Image]) -> tuple[dict[str, torch.Tensor], list[str]]:
        """Return the tensors, and the text that takes the place of each image's placeholder."""

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(int(token) for token in self._tokenizer(text, add_special_tokens=False)["input_ids"])


class PatchProcessor(VisionProcessor):
    """Qwen2.5-VL: a placeholder for every square of patches."""

    @property
    def image_text(self) -> str:
        config = self._family.config
        begin, end = (
            str(self._tokenizer.convert_ids_to_tokens(token))
            for token in (config.vision_start_token_id, config.vision_end_token_id)
        )
        return f"{begin}{self._token}{end}"

    def _process(self, images: list[Image.Image]) -> tuple[dict[str, torch.Tensor], list[str]]:
        found = self._pixels(images, return_tensors="np")
        row = {PIXELS: torch.from_numpy(found[PIXELS]).float(), GRID: torch.from_numpy(found[GRID]).long()}
        return row, [self._token * count for count in self._family.features_of(row)]


class TileProcessor(VisionProcessor):
    """SmolVLM: runs of placeholders for an image, and for its tiles where the image processor cuts it."""

    def _process(self, images: list[Image.Image]) -> tuple[dict[str, torch.Tensor], list[str]]:
        found = self._pixels([images], return_tensors="np", return_row_col_info=True)
        if "pixel_attention_mask" in found and not np.asarray(found["pixel_attention_mask"]).all():
            raise DatasetError("the image processor pads images, which nothing here masks; let it resize them")
        row = {PIXELS: torch.from_numpy(np.ascontiguousarray(found[PIXELS][0])).float()}
        [count] = {*self._family.features_of(row)}
        return row, [
            get_image_prompt_string(
                rows,
                columns,
                count,
                fake_token_around_image="<fake_token_around_image>",
                image_token=self._token,
                global_image_token="<global-img>",
            )
            for rows, columns in zip(found["rows"][0], found["cols"][0], strict=True)
        ]


PROCESSORS: Mapping[str, type[VisionProcessor]] = {"qwen2_5_vl": PatchProcessor, "smolvlm": TileProcessor}
"""Model type -> its processor."""


class PromptPictures:
    """The tensors of the pictures of prompts, made when they are asked for; those of the last prompts are kept.

    Args:
        encoder: None where no prompt has pictures.
    """

    def __init__(self, encoder: VisionProcessor | None) -> None:
        self.encoder = encoder
        self._kept: OrderedDict[tuple[str, ...], PromptImages] = OrderedDict()

    def of(self, prompts: Sequence[Prompt]) -> tuple[PromptImages | None, ...]:
        """Return the images of each prompt; empty where none has any.

        Raises:
            DatasetError: a picture cannot be read any more.
        """
        if not any(prompt.pictures for prompt in prompts):
            return ()
        return tuple(self._images(prompt) if prompt.pictures else None for prompt in prompts)

    def _images(self, prompt: Prompt) -> PromptImages:
        key = tuple(picture.digest for picture in prompt.pictures)
        if key not in self._kept:
            assert self.encoder is not None, "prompts with pictures were encoded"
            pictures = [picture.decode() for picture in prompt.pictures]
            self._kept[key] = self.encoder.expand(prompt.unexpanded, pictures)[1]
            while len(self._kept) > KEPT_PROMPTS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]


def encoder_of(policy: PolicyConfig, data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> VisionProcessor | None:
    """Return the processor of a run's model; None where its prompts have no images.

    Raises:
        ModelFolderError: as `processor_for`.
    """
    return processor_for(policy.model_name, tokenizer) if data.has_images else None


def processor_for(folder: str | Path, tokenizer: PreTrainedTokenizerBase) -> VisionProcessor:
    """Return the processor of a model folder.

    Raises:
        ModelFolderError: the folder holds no vision-language model that is known, or no image processor.
    """
    family = family_of(load_model_config(folder))
    if family is None:
        raise ModelFolderError(
            f"model folder {str(folder)!r}: prompts have images, and the model takes none; known are "
            f"{', '.join(PROCESSORS)}"
        )
    if not any((Path(folder) / name).is_file() for name in PROCESSOR_FILES[:2]):
        raise ModelFolderError(
            f"model folder {str(folder)!r}: expected {' or '.join(PROCESSOR_FILES[:2])}, which are missing"
        )
    with boundary(ModelFolderError, f"model folder {str(folder)!r}: its image processor cannot be used"):
        pixels = AutoImageProcessor.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False, backend="pil"
        )
    return PROCESSORS[family.kind](family, tokenizer, pixels)
