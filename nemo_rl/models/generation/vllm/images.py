"""Images of prompts in vLLM: they come as tensors, as the trainer has them, and not as pictures.

So no processor of vLLM or transformers runs in the engine; those of vision-language models also need torchvision, for
videos. `use_tensors` says so to vLLM before it starts. Called by `VllmEngine`. Invariant: the features of images that
vLLM keeps are found by rows of the same weights alone, since a salt of the weights is part of their names.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence

import torch
from transformers import BatchFeature
from vllm.inputs import MultiModalInput, mm_input
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange
from vllm.multimodal.processing import BaseDummyInputsBuilder, BaseMultiModalProcessor, BaseProcessingInfo

from nemo_rl.models.generation.requests import RowRequest
from nemo_rl.models.generation.vllm.start import VISION_MODELS
from nemo_rl.models.vision import GRID, PIXELS, VisionFamily

__all__ = ["image_prompt", "use_tensors"]

IMAGE = "image"
NO_PICTURES = "images come as tensors, never as pictures"


class TensorProcessingInfo(BaseProcessingInfo):
    """Answers to what vLLM asks before it starts: the kinds of inputs, and how large they may be."""

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {IMAGE: None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        return {IMAGE: seq_len}


class TensorDummyInputs(BaseDummyInputsBuilder[TensorProcessingInfo]):
    """Examples that vLLM would profile its memory with; `skip_mm_profiling` is set, so that it asks for none."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        raise NotImplementedError(NO_PICTURES)

    def get_dummy_mm_data(self, *_: object, **__: object) -> dict[str, object]:
        raise NotImplementedError(NO_PICTURES)


class TensorProcessor(BaseMultiModalProcessor[TensorProcessingInfo]):
    """The processor of pictures, which is never called."""

    def _get_mm_fields_config(self, *_: object) -> Mapping[str, MultiModalFieldConfig]:
        raise NotImplementedError(NO_PICTURES)

    def _get_prompt_updates(self, *_: object) -> Sequence[object]:
        raise NotImplementedError(NO_PICTURES)


def use_tensors(kind: str) -> None:
    """Let vLLM's model of this type take tensors in this process: of vLLM's scheduler, or of a rank."""
    module, _, name = VISION_MODELS[kind][1].partition(":")
    served = vars(importlib.import_module(f"vllm.model_executor.models.{module}"))[name]
    register = MULTIMODAL_REGISTRY.register_processor(
        TensorProcessor, info=TensorProcessingInfo, dummy_inputs=TensorDummyInputs
    )
    register(served)


def image_prompt(row: RowRequest, family: VisionFamily, *, salt: str) -> MultiModalInput:
    """Return a prompt with images as vLLM takes it after its own processing."""
    assert row.images is not None, "the row has images"
    tensors, counts = row.images.tensors, family.features_of(row.images.tensors)
    places = [place for place, token in enumerate(row.prompt) if token == family.image_token]
    ranges, first = list[PlaceholderRange](), 0
    for count in counts:
        ranges.append(PlaceholderRange(offset=places[first], length=count))
        first += count
    fields, config = _fields(tensors, len(counts))
    return mm_input(
        list(row.prompt),
        MultiModalKwargsItems.from_hf_inputs(BatchFeature(fields), config),
        {IMAGE: [f"{salt}.{row.images.digest}.{number}" for number in range(len(counts))]},
        {IMAGE: ranges},
        cache_salt=salt,
    )


def _fields(
    tensors: Mapping[str, torch.Tensor], num_images: int
) -> tuple[dict[str, torch.Tensor], dict[str, MultiModalFieldConfig]]:
    """Return the tensors that vLLM's model takes, and how each is cut into images."""
    batched, flat = MultiModalFieldConfig.batched, MultiModalFieldConfig.flat_from_sizes
    if GRID in tensors:
        sizes = tensors[GRID].prod(1)
        fields = {**tensors, "num_image_patches": sizes}
        return fields, {
            PIXELS: flat(IMAGE, sizes),
            GRID: batched(IMAGE, keep_on_cpu=True),
            "num_image_patches": batched(IMAGE, keep_on_cpu=True),
        }
    pixels, sizes = tensors[PIXELS], torch.ones(num_images, dtype=torch.int64)
    mask = torch.ones(num_images, *pixels.shape[-2:], dtype=torch.bool)
    return {PIXELS: pixels, "pixel_attention_mask": mask, "num_patches": sizes}, {
        PIXELS: flat(IMAGE, sizes),
        "pixel_attention_mask": flat(IMAGE, sizes),
        "num_patches": batched(IMAGE),
    }
