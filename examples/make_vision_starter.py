"""Writes a starter checkpoint of the vision demo: a tiny Qwen2.5-VL that answers questions about pictures of shapes.

Usage: python examples/make_vision_starter.py --out checkpoints/starter_shapes [--task count] [--seed 0]

The model sees its first picture here: tower and language model are trained together from random weights, with
supervised fine-tuning on answers, until the sampled accuracy is about 0.3. Pictures of the recipes and of validation
have other seeds than those trained on.
"""

from __future__ import annotations

import io
import logging
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

# A script's own folder is on the path, its package is not.
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import typer
from PIL import Image
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from examples.starter import check_starter_place, write_starter
from nemo_rl.data.sources import CELL, ShapeProblem, shape_problems
from nemo_rl.data.tokenizer import build_tokenizer
from nemo_rl.errors import UserError
from nemo_rl.models.generation.interfaces import GenerationRequest, SamplingParams
from nemo_rl.models.generation.torch_engine import TorchEngine
from nemo_rl.models.vision import GRID, PIXELS, PromptImages, family_of, stack_rows
from nemo_rl.models.vision.processor import PatchProcessor, VisionProcessor

USER_ERROR = 2
TRAINING_SEED, CALIBRATION_SEED = 10_000_000, 20_000_000
CALIBRATION_SIZE = 256
BEGIN, END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}" + BEGIN + IMAGE + END + "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML in which a message may have parts, of which images have a place each."""
PATCH = CELL // 2
"""Four patches, of which the model makes one feature, lie on the cell of a shape."""
MAX_NEW_TOKENS = 12
MAX_LENGTH = 128

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """Settings of the warm start (AdamW, answers only)."""

    stop_accuracy: float = 0.28
    batch_size: int = 64
    learning_rate: float = 2e-3
    warmup_steps: int = 20
    max_steps: int = 2000
    evaluate_every: int = 3
    num_problems: int = 8000


@dataclass(frozen=True, kw_only=True, slots=True)
class TaughtRow:
    """A prompt with its picture, and the answer."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    images: PromptImages


def main(  # noqa: PLR0917 - options of a command
    out: Annotated[Path, typer.Option(help="Folder to write: a new or empty one, or a starter, which is replaced.")],
    task: Annotated[str, typer.Option(help="count: how many shapes; name: which shape.")] = "count",
    cells: Annotated[int, typer.Option(min=1, help="Cells along each side of a picture.")] = 2,
    most: Annotated[int, typer.Option(min=1, help="Most shapes of a picture.")] = 4,
    stop_accuracy: Annotated[float, typer.Option(help="Sampled accuracy that ends the warm start.")] = 0.28,
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the training order.")] = 0,
    threads: Annotated[int, typer.Option(help="Torch threads.")] = 1,
) -> None:
    """Warm-starts a Qwen2.5-VL of about 300 thousand parameters on pictures of shapes."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    torch.set_num_threads(threads)
    try:
        folder = check_starter_place(out)
        draw = partial(shape_problems, cells=cells, most=most, task=task)
        problems = draw(Training().num_problems, seed=TRAINING_SEED + seed)
        calibration = draw(CALIBRATION_SIZE, seed=CALIBRATION_SEED)
        tokenizer = starter_tokenizer(problems)
        torch.manual_seed(seed)
        model = starter_model(tokenizer)
        pixels = Qwen2VLImageProcessorPil(
            min_pixels=(2 * PATCH) ** 2, max_pixels=(32 * CELL) ** 2, patch_size=PATCH, merge_size=2
        )
        family = family_of(model.config)
        assert family is not None
        encode = PatchProcessor(family, tokenizer, pixels)
        training = Training(stop_accuracy=stop_accuracy)
        rows = [taught_row(problem, encode, tokenizer) for problem in problems]
        held_out = [taught_row(problem, encode, tokenizer) for problem in calibration]
        steps, accuracy = warm_start(model, rows, held_out, training, seed=seed, tokenizer=tokenizer)
        write_starter(folder, model, tokenizer, pixels)
    except UserError as error:
        logging.error("error: %s", error)
        sys.exit(USER_ERROR)
    logging.info("wrote %s: %d steps, sampled accuracy %.3f", out, steps, accuracy)


def starter_tokenizer(problems: Sequence[ShapeProblem]) -> PreTrainedTokenizerBase:
    """Return a tokenizer of the questions and answers, with the tokens of Qwen2.5-VL for images."""
    texts = sorted({f"user\n{problem.prompt}\nassistant\n{problem.answer}" for problem in problems})
    return build_tokenizer(texts * 20, chat_template=TEMPLATE, more_special=(BEGIN, END, IMAGE, VIDEO))


def starter_model(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in (BEGIN, END, IMAGE, VIDEO)}
    text = {
        "vocab_size": -(-len(tokenizer) // 64) * 64,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        # Heads of 32, which vLLM's kernels for CPUs need.
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "patch_size": PATCH,
        "window_size": 4 * PATCH,
        "out_hidden_size": text["hidden_size"],
        "fullatt_block_indexes": [1],
    }
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config=text,
            vision_config=vision,
            image_token_id=ids[IMAGE],
            video_token_id=ids[VIDEO],
            vision_start_token_id=ids[BEGIN],
            vision_end_token_id=ids[END],
            tie_word_embeddings=True,
        )
    )


def taught_row(problem: ShapeProblem, encode: VisionProcessor, tokenizer: PreTrainedTokenizerBase) -> TaughtRow:
    content = [{"type": "image"}, {"type": "text", "text": problem.prompt}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    ids = tokenizer.encode(str(text), add_special_tokens=False)
    prompt, images = encode.expand(ids, [Image.open(io.BytesIO(problem.picture))])
    answer = (*tokenizer.encode(problem.answer, add_special_tokens=False), int(tokenizer.eos_token_id))
    return TaughtRow(prompt=prompt, answer=answer, images=images)


def warm_start(
    model: PreTrainedModel,
    rows: Sequence[TaughtRow],
    held_out: Sequence[TaughtRow],
    training: Training,
    *,
    seed: int,
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[int, float]:
    """Return steps and sampled accuracy."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    rng = random.Random(seed)
    accuracy, step = 0.0, 0
    for step in range(1, training.max_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = training.learning_rate * min(1.0, step / training.warmup_steps)
        model.train()
        loss = answer_loss(model, rng.sample(rows, training.batch_size))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % training.evaluate_every:
            continue
        accuracy = sampled_accuracy(model, held_out, tokenizer)
        logger.info("warm start: step %d, loss %.3f, sampled accuracy %.3f", step, loss.item(), accuracy)
        if accuracy >= training.stop_accuracy:
            break
    return step, accuracy


def answer_loss(model: PreTrainedModel, rows: Sequence[TaughtRow]) -> torch.Tensor:
    """Return the mean negative log-likelihood of the tokens of the answers."""
    family = family_of(model.config)
    assert family is not None
    width = max(len(row.prompt) + len(row.answer) for row in rows)
    ids, targets = torch.zeros(2, len(rows), width, dtype=torch.int64)
    mask = torch.zeros(len(rows), width, dtype=torch.int64)
    targets.fill_(-100)
    for place, row in enumerate(rows):
        whole = torch.tensor([*row.prompt, *row.answer])
        ids[place, : len(whole)], mask[place, : len(whole)] = whole, 1
        targets[place, len(row.prompt) : len(whole)] = whole[len(row.prompt) :]
    tensors = stack_rows([row.images.tensors for row in rows], family.columns)
    logits = model(
        input_ids=ids,
        attention_mask=mask,
        pixel_values=tensors[PIXELS],
        image_grid_thw=tensors[GRID],
        mm_token_type_ids=(ids == family.image_token).int(),
        use_cache=False,
    ).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())


def sampled_accuracy(model: PreTrainedModel, rows: Sequence[TaughtRow], tokenizer: PreTrainedTokenizerBase) -> float:
    """Return the share of rows whose one sampled answer is right and ends by itself."""
    engine = TorchEngine(model, tokenizer=None, max_total_length=MAX_LENGTH, weight_version=0)
    stop = (int(tokenizer.eos_token_id),)
    output = engine.generate(
        GenerationRequest(
            prompt_ids=tuple(row.prompt for row in rows),
            seeds=tuple(range(len(rows))),
            sampling=SamplingParams(temperature=1.0, max_new_tokens=MAX_NEW_TOKENS, stop_token_ids=stop),
            images=tuple(row.images for row in rows),
        )
    )
    answers = output.token_ids.split(output.lengths.tolist())
    return sum(tuple(found.tolist()) == row.answer for found, row in zip(answers, rows, strict=True)) / len(rows)


if __name__ == "__main__":
    typer.run(main)
