"""Tiny random vision-language models of both families that are known, rows with images, and what Hugging Face makes of
them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import (
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2_5_VLConfig,
    SmolVLMConfig,
)

from nemo_rl.data.tokenizer import build_tokenizer
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.vision import GRID, PIXELS, family_of
from tests.helpers.tiny_model import tiny_batch

if TYPE_CHECKING:
    from PIL import Image

FAMILIES = ("qwen2_5_vl", "smolvlm")
SPECIAL = {
    "qwen2_5_vl": ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    "smolvlm": ("<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>", "<row_1_col_1>"),
}
TEXT = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
}
"""Heads of 32, which vLLM's kernels for CPUs need."""
SIZE = 16
"""Side of SmolVLM's squares."""
GRIDS: tuple[tuple[tuple[int, int], ...], ...] = (
    ((4, 6),),
    (),
    ((2, 2), (6, 2)),
    ((8, 4),),
    ((4, 4),),
    ((2, 6),),
    (),
    ((6, 6),),
)
"""Patches (high, wide) of each image of each row."""


def vision_tokenizer(family: str) -> PreTrainedTokenizerBase:
    corpus = ["how many shapes are there? one two three red blue circle square triangle 1 2 3 4"] * 4
    return build_tokenizer(corpus, more_special=SPECIAL[family])


def vision_config(family: str, tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL[family]}
    text = {**TEXT, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    if family == "smolvlm":
        vision = {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": SIZE,
            "patch_size": 4,
        }
        text |= {"model_type": "llama"}
        return SmolVLMConfig(text_config=text, vision_config=vision, image_token_id=ids["<image>"], scale_factor=2)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 4,
        "window_size": 16,
        "out_hidden_size": TEXT["hidden_size"],
        "fullatt_block_indexes": [1],
    }
    return Qwen2_5_VLConfig(
        text_config={**text, "rope_parameters": rope},
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )


def write_vision_model(folder: Path, family: str) -> Path:
    """Write model and tokenizer; biases and norms are random as well."""
    tokenizer = vision_tokenizer(family)
    model = AutoModelForImageTextToText.from_config(vision_config(family, tokenizer)).eval()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=draw) * 0.12
            weight.copy_(weight + noise if weight.dim() == 1 else noise)
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    return folder


def write_vision_folder(folder: Path, family: str) -> Path:
    """Write model, tokenizer and image processor."""
    # Machines with a GPU have no pillow.
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    write_vision_model(folder, family)
    if family == "smolvlm":
        sizes = {"size": {"longest_edge": 2 * SIZE}, "max_image_size": {"longest_edge": SIZE}}
        SmolVLMImageProcessorPil(**sizes, do_image_splitting=False).save_pretrained(str(folder))
    else:
        Qwen2VLImageProcessorPil(min_pixels=16**2, max_pixels=64**2, patch_size=4).save_pretrained(str(folder))
    return folder


def picture(seed: int, size: tuple[int, int] = (24, 16)) -> Image.Image:
    """Return an image of noise, wide and high as given."""
    from PIL import Image

    pixels = torch.randint(0, 256, (size[1], size[0], 3), generator=torch.Generator().manual_seed(seed))
    return Image.fromarray(pixels.to(torch.uint8).numpy())


def image_row(config: PretrainedConfig, grids: Sequence[tuple[int, int]], *, seed: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a row with random images."""
    family, draw = family_of(config), torch.Generator().manual_seed(seed)
    assert family is not None
    dims = family.columns[0].dims
    if config.model_type == "smolvlm":
        return {PIXELS: torch.randn(len(grids), *dims, generator=draw)}
    patches = sum(high * wide for high, wide in grids)
    grid = torch.tensor([[1, high, wide] for high, wide in grids], dtype=torch.int64).view(-1, 3)
    return {PIXELS: torch.randn(patches, *dims, generator=draw), GRID: grid}


def vision_batch(config: PretrainedConfig, *, with_images: bool = True) -> BatchedDataDict:
    """Return rows of `tiny_batch` with the placeholders of images between their first tokens."""
    family, text = family_of(config), tiny_batch(len(GRIDS))
    assert family is not None
    rows, columns = list[list[int]](), {column.name: list[torch.Tensor]() for column in family.columns}
    lengths, shifts = text.tensor("input_lengths").tolist(), list[int]()
    for number, (ids, length, grids) in enumerate(zip(text.tensor("input_ids").tolist(), lengths, GRIDS, strict=True)):
        # Sampled placeholders are text.
        own = [20 + token % 250 for token in ids[:length]]
        if number == 3:
            own[-2] = family.image_token
        row = image_row(config, grids if with_images else (), seed=number)
        parts = [own[0]]
        for place, count in enumerate(family.features_of(row)):
            parts += [*[family.image_token] * count, own[1 + place]]
        taken = 1 + len(family.features_of(row))
        rows.append([*parts, *own[taken:]])
        shifts.append(len(rows[-1]) - length)
        for name, tensor in row.items():
            columns[name].append(tensor)
    width = max(map(len, rows))
    found: dict[str, torch.Tensor | list[object]] = {
        "input_ids": torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=torch.int32),
        "input_lengths": torch.tensor([len(row) for row in rows]),
        "sample_mask": text.tensor("sample_mask"),
        "keys": text["keys"],
    }
    for name in ("token_mask", "generation_logprobs", "prev_logprobs", "reference_policy_logprobs", "advantages"):
        column = text.tensor(name)
        wide = column.new_zeros(len(rows), width)
        for number, (shift, length) in enumerate(zip(shifts, lengths, strict=True)):
            wide[number, shift : shift + length] = column[number, :length]
        found[name] = wide
    if with_images:
        found |= {name: list(tensors) for name, tensors in columns.items()}
    return BatchedDataDict(found)


def hf_logits(model: PreTrainedModel, batch: BatchedDataDict, row: int) -> torch.Tensor:
    """Return `[L, V]` of a row, from what a user of Hugging Face gives to the model."""
    family = family_of(model.config)
    assert family is not None
    length = int(batch.tensor("input_lengths")[row])
    ids = batch.tensor("input_ids")[row, :length].long()
    given: dict[str, torch.Tensor] = {}
    images = {c.name: batch[c.name][row] for c in family.columns if c.name in batch}
    count = sum(family.features_of(images)) if images else 0
    if count:
        is_image = (ids == family.image_token) & ((ids == family.image_token).cumsum(0) <= count)
        given = {PIXELS: images[PIXELS]}
        if GRID in images:
            given |= {GRID: images[GRID], "mm_token_type_ids": is_image.int()[None]}
        else:
            given = {PIXELS: images[PIXELS][None]}
        # Another placeholder than those of images is text: Hugging Face counts them all.
        if bool(((ids == family.image_token) & ~is_image).any()):
            return _with_text_placeholder(model, ids, is_image, given)
    return model(input_ids=ids[None], use_cache=False, **given).logits[0]


def _with_text_placeholder(
    model: PreTrainedModel, ids: torch.Tensor, is_image: torch.Tensor, given: dict[str, torch.Tensor]
) -> torch.Tensor:
    """As `hf_logits`: the embedding of a placeholder that is text is given to another token for the pass."""
    stand_in = int(max(set(range(300, 380)) - set(ids.tolist())))
    token = int(ids[is_image][0])
    weight = model.get_input_embeddings().weight
    hook = model.get_input_embeddings().register_forward_hook(
        lambda _, args, output: torch.where((args[0] == stand_in)[..., None], weight[token], output)
    )
    try:
        swapped = torch.where((ids == token) & ~is_image, stand_in, ids)
        return model(input_ids=swapped[None], use_cache=False, **given).logits[0]
    finally:
        hook.remove()
