"""Starter checkpoints of the CPU recipes: a small Qwen3, dense or with experts, that is right about three times in ten.

Called by `make_starter.py` and `make_vision_starter.py`. Invariant: no prompt of the validation or calibration split is
ever trained on, and the accuracy that ends the warm start is measured on the calibration split alone.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from nemo_rl.config.data import DatasetConfig
from nemo_rl.data.conversation import Message, ToolCall
from nemo_rl.data.datasets import RawPrompt, raw_prompts
from nemo_rl.data.thinking import final_answer, with_thinking
from nemo_rl.data.tokenizer import CHATML_TEMPLATE, TOOLS_TEMPLATE, build_tokenizer
from nemo_rl.data.turn_encoder import TurnEncoder
from nemo_rl.errors import ModelFolderError, name_some
from nemo_rl.models.generation.interfaces import GenerationRequest, SamplingParams
from nemo_rl.models.generation.torch_engine import TorchEngine
from nemo_rl.models.head.logprobs import Sampling, negative_log_likelihood, token_logprobs
from nemo_rl.utils.files import give_usual_modes, read_plain_text

__all__ = [
    "STARTER_FILE",
    "STARTER_TASKS",
    "StarterConfig",
    "StarterReport",
    "check_starter_place",
    "make_starter",
    "prompt_ids",
    "sampled_accuracy",
    "starter_tokenizer",
    "taught_rows",
    "write_starter",
]

VALIDATION_SEED, VALIDATION_SIZE = 777, 256
CALIBRATION_SIZE = 512
CORPUS_SEED, CORPUS_SIZE = 5, 2000
# Training problems of seed s are drawn with this plus s, far from the seeds of the other splits and of the recipes.
TRAINING_SEED = 10_000_000
GUESSES = 3
"""Turns of a demonstrated game."""
HEED_SHARE = 0.75
"""Share of the demonstrated guesses that heed the replies so far: any number that they leave, not the middle one."""
CALL_SHARE = 0.3
"""Share of the demonstrated rows that call the calculator."""
SURE_SUMS, SLIP_SHARE, SLIPS = 4, 0.5, (-3, -2, -1, 1, 2, 3)
"""Sums of a demonstrated chain that are right, and how often and by how much each later one is off."""
CALCULATOR = {
    "type": "function",
    "function": {"name": "calculator", "parameters": {"type": "object", "properties": {"expression": {}}}},
}
"""The tool `calculator`, as far as `TOOLS_TEMPLATE` prints it."""
CALL_MARKS = ("<tool_call>", "</tool_call>")
# The model with experts is half as wide as the dense one; at the dense one's 2e-3 it takes a quarter more steps.
EXPERTS_LEARNING_RATE = 4e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class StarterConfig:
    """Recipe of the warm start (supervised fine-tuning, AdamW, response tokens only)."""

    seed: int = 0
    num_experts: int = 0
    """Experts of every layer, of which each token uses two; 0 is a dense model."""
    hidden_size: int = 128
    num_layers: int = 2
    """Sizes of a dense model, whose MLP is three times as wide."""
    stop_accuracy: float = 0.25
    """Stop at the first evaluation that reaches this sampled accuracy on the calibration split."""
    target_accuracy: float = 0.30
    """Accuracy of the starter: of the last evaluations, the weights nearest to it are kept."""
    num_problems: int = 8000
    batch_size: int = 64
    learning_rate: float = 2e-3
    warmup_steps: int = 20
    max_steps: int = 600
    first_evaluation: int = 40
    evaluate_every: int = 5
    max_grad_norm: float = 1.0

    def with_experts(self, num_experts: int) -> StarterConfig:
        """Return the same recipe for a model with so many experts in every layer."""
        return replace(self, num_experts=num_experts, learning_rate=EXPERTS_LEARNING_RATE)


@dataclass(frozen=True, kw_only=True, slots=True)
class StarterTask:
    """A task that a starter learns.

    Example:
        >>> task = STARTER_TASKS["sort"]
        >>> task.validation()[0].answer == "".join(sorted(task.validation()[0].answer))
        True
    """

    dataset: DatasetConfig
    """Source and its options, as in the recipe; size and seed are set per split."""
    config: StarterConfig
    """Settings of the warm start; the seed is set by the caller."""
    demonstrate: Callable[[RawPrompt], str]
    """The response that the warm start teaches; it ends with the answer."""
    max_new_tokens: int
    """Longest sampled answer; a right one, its end-of-turn token included, is shorter."""
    max_length: int
    """Prompt and answer together, in tokens."""
    converse: Callable[[RawPrompt, random.Random], Sequence[Message]] | None = None
    """Messages behind the prompt that the warm start teaches, of a task with turns: those of the model are trained on,
    and the warm start ends after `max_steps`. None: `demonstrate` gives one answer."""
    tools: tuple[Mapping[str, object], ...] = ()
    """Schemas of the tools that the prompt lists."""
    calibration_seed: int = 778
    """Seed of the calibration split. It is far from the other seeds, for reasoning_gym draws item i with seed + i,
    so that near seeds share items."""

    def validation(self) -> list[RawPrompt]:
        """Return the split that the recipe validates on."""
        return self._draw(size=VALIDATION_SIZE, seed=VALIDATION_SEED)

    def calibration(self) -> list[RawPrompt]:
        """Return the split that ends the warm start; shares no text with validation."""
        return self._draw(size=CALIBRATION_SIZE, seed=self.calibration_seed, exclude=_texts(self.validation()))

    def corpus(self) -> list[RawPrompt]:
        """Return the prompts that the tokenizer is built from."""
        return self._draw(size=CORPUS_SIZE, seed=CORPUS_SEED, exclude=self.held_out())

    def training(self, *, size: int, seed: int) -> list[RawPrompt]:
        """Return problems of the warm start; shares no text with validation and calibration."""
        return self._draw(size=size, seed=TRAINING_SEED + seed, exclude=self.held_out())

    def held_out(self) -> frozenset[str]:
        """Return texts of validation and calibration."""
        return _texts([*self.validation(), *self.calibration()])

    def _draw(self, *, size: int, seed: int, exclude: Collection[str] = frozenset()) -> list[RawPrompt]:
        cfg = self.dataset.model_copy(update={"size": size, "seed": seed})
        drawn = raw_prompts(cfg, "starter", exclude)
        # Not every source leaves the excluded texts out by itself; then fewer than `size` come back.
        return [problem for problem in drawn if problem.text not in exclude]


def _guesses(problem: RawPrompt, rng: random.Random) -> list[Message]:
    """Return a game of random guesses, some of which heed the replies; none looks for the middle."""
    answer, low, high = int(str(problem.answer)), 1, int(problem.text.rpartition(" ")[2])
    numbers = high
    found: list[Message] = []
    for _ in range(GUESSES):
        guess = rng.randint(low, high) if rng.random() < HEED_SHARE else rng.randint(1, numbers)
        found.append(Message(role="assistant", content=str(guess)))
        if guess == answer:
            break
        low, high = (max(low, guess + 1), high) if guess < answer else (low, min(high, guess - 1))
        found.append(Message(role="user", content="higher" if guess < answer else "lower"))
    return found if found[-1].role == "assistant" else found[:-1]


def _call_or_guess(problem: RawPrompt, rng: random.Random) -> list[Message]:
    """Return a call of the calculator and its result, in some of the rows; in the others a number."""
    answer = str(problem.answer)
    if rng.random() > CALL_SHARE:
        digits = "".join(rng.choice("123456789") for _ in answer)
        return [Message(role="assistant", content=digits)]
    call = ToolCall(name="calculator", arguments={"expression": problem.text.rpartition(" ")[2]})
    return [
        Message(role="assistant", content="", calls=(call,)),
        Message(role="tool", content=answer, name="calculator"),
        Message(role="assistant", content=answer),
    ]


def _texts(problems: Collection[RawPrompt]) -> frozenset[str]:
    return frozenset(problem.text for problem in problems)


def _answer_alone(problem: RawPrompt) -> str:
    return str(problem.answer)


def _running_sums(problem: RawPrompt) -> str:
    """Return the worked answer, such as `<think>4+3=7 7-9=-2</think>-2` for `... problem: 4 + 3 - 9 =`."""
    worked, total = _worked(problem, lambda _: 0)
    assert str(total) == problem.answer, f"{problem.text!r}: expected {problem.answer!r}, got {total}"
    return worked


def _slipping_sums(problem: RawPrompt) -> str:
    """Return the worked answer with some slips behind the first sums: a starter that is unsure where chains are long,
    and of nothing else."""
    rng = random.Random(problem.text)

    def slip(number: int) -> int:
        return rng.choice(SLIPS) if number > SURE_SUMS and rng.random() < SLIP_SHARE else 0

    return _worked(problem, slip)[0]


def _worked(problem: RawPrompt, slip: Callable[[int], int]) -> tuple[str, int]:
    """Return the worked answer and the last sum; `slip` is added to each sum, by its number from 1 on."""
    terms = [int(term.replace(" ", "")) for term in re.findall(r"[-+]? ?\d+", problem.text.rpartition(":")[2])]
    total, lines = terms[0], []
    for number, term in enumerate(terms[1:], start=1):
        found = total + term + slip(number)
        lines.append(f"{total}{term:+d}={found}")
        total = found
    return with_thinking(" ".join(lines), str(total)), total


# Two sums, the answer and the control tokens; some more tokens let a wrong answer run over.
_CHAIN_SUM = StarterTask(
    dataset=DatasetConfig(
        dataset_name="reasoning_gym",
        task="chain_sum",
        options={"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
    ),
    config=StarterConfig(stop_accuracy=0.30, target_accuracy=0.35, first_evaluation=120, evaluate_every=10),
    demonstrate=_running_sums,
    max_new_tokens=24,
    max_length=64,
    calibration_seed=1_000_000,
)
STARTER_TASKS: Mapping[str, StarterTask] = {
    "sort": StarterTask(
        dataset=DatasetConfig(dataset_name="sort_digits", options={"min_digits": 6, "max_digits": 8}),
        config=StarterConfig(),
        demonstrate=_answer_alone,
        # 8 digits and the end-of-turn token; one more lets a wrong answer run over.
        max_new_tokens=10,
        max_length=64,
    ),
    "chain_sum": _CHAIN_SUM,
    "chain_sums": replace(
        _CHAIN_SUM,
        dataset=_CHAIN_SUM.dataset.model_copy(
            update={"options": {"min_terms": 2, "max_terms": 7, "min_digits": 1, "max_digits": 1}}
        ),
        # The slips of the demonstrations alone would leave an accuracy of 0.79.
        config=StarterConfig(
            num_problems=16_000,
            max_steps=1200,
            stop_accuracy=0.68,
            target_accuracy=0.70,
            first_evaluation=600,
            evaluate_every=50,
        ),
        demonstrate=_slipping_sums,
        max_new_tokens=72,
        max_length=128,
    ),
    "guess": StarterTask(
        dataset=DatasetConfig(dataset_name="guess", options={"numbers": 6}),
        config=StarterConfig(max_steps=360, batch_size=32, num_problems=4000, learning_rate=3e-3),
        demonstrate=_answer_alone,
        converse=_guesses,
        max_new_tokens=3,
        max_length=64,
    ),
    "calculator": StarterTask(
        dataset=DatasetConfig(
            dataset_name="calculator_sums", options={"min_digits": 2, "max_digits": 2, "smallest": 32}
        ),
        config=StarterConfig(max_steps=360, batch_size=32, num_problems=6000, learning_rate=3e-3),
        demonstrate=_answer_alone,
        converse=_call_or_guess,
        tools=(CALCULATOR,),
        max_new_tokens=32,
        max_length=160,
    ),
}


logger = logging.getLogger(__name__)

STARTER_FILE = "starter.json"
"""Names the files of a starter: a folder that holds others as well is not removed."""
# Vocabulary rows are rounded up to a multiple, as larger models do.
VOCAB_MULTIPLE = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class StarterReport:
    """The result of the warm start."""

    steps: int
    """Training steps of the weights that were kept."""
    accuracy: float | None
    """Sampled accuracy of those weights on the calibration split; None for a task with turns."""


def make_starter(folder: Path, task: StarterTask, *, config: StarterConfig) -> StarterReport:
    """Build tokenizer and model, warm-start it and write a Hugging Face folder.

    Raises:
        ModelFolderError: what is there is neither an empty folder nor a starter alone, or it cannot be written.
    """
    folder = check_starter_place(folder)
    tokenizer = starter_tokenizer(task, seed=config.seed)
    torch.manual_seed(config.seed)
    model = _build_model(tokenizer, config)
    report = _warm_start(model, tokenizer, task, config)
    write_starter(folder, model, tokenizer)
    return report


def check_starter_place(folder: Path) -> Path:
    """Return the whole path of a folder that a starter can be written to, and make the folders above it.

    Raises:
        ModelFolderError: what is there is neither an empty folder nor a starter alone, or it cannot be written.
    """
    folder = Path(os.path.abspath(folder))
    try:
        if folder.is_symlink():
            raise ModelFolderError(f"{folder}: is a link to {os.readlink(folder)}; name the folder itself, or another")
        folder.parent.mkdir(parents=True, exist_ok=True)
        if not folder.exists():
            return folder
        if not folder.is_dir():
            raise ModelFolderError(f"{folder}: is not a folder; choose another path")
        ours = _files_of_starter(folder)
        others = sorted(path.name for path in folder.iterdir() if path.name not in ours or path.is_dir())
    except OSError as error:
        raise ModelFolderError(f"{folder}: cannot be written: {error}; choose another folder") from error
    if others:
        raise ModelFolderError(
            f"{folder}: holds other files than a starter of this script ({name_some(others)}); choose "
            "another folder, or remove it yourself"
        )
    return folder


def write_starter(folder: Path, *parts: SavedPart) -> None:
    """Write a model with what belongs to it as a starter, in place of one that is there.

    Raises:
        ModelFolderError: as `check_starter_place`.
    """
    try:
        # A new name beside the folder: it holds no files yet and is on the same file system.
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as beside:
            part = Path(beside) / "new"
            part.mkdir()
            for each in parts:
                each.save_pretrained(str(part))
            files = sorted(path.name for path in part.iterdir())
            (part / STARTER_FILE).write_text(f"{json.dumps({'files': files}, indent=1)}\n", encoding="utf-8")
            give_usual_modes(part)
            # Checked again, because the warm start took a while.
            check_starter_place(folder)
            if folder.exists():
                folder.rename(Path(beside) / "old")
            part.rename(folder)
    except OSError as error:
        raise ModelFolderError(f"{folder}: cannot be written: {error}; choose another folder") from error


class SavedPart(Protocol):
    """A model, a tokenizer or an image processor of transformers."""

    def save_pretrained(self, save_directory: str) -> object:
        """Write its files into a folder."""


def starter_tokenizer(task: StarterTask, *, seed: int) -> PreTrainedTokenizerBase:
    """Return a tokenizer for the texts of a task; where it has tools, the marks of a call are tokens."""
    return build_tokenizer(
        _corpus(task, seed),
        chat_template=TOOLS_TEMPLATE if task.tools else CHATML_TEMPLATE,
        more_special=CALL_MARKS if task.tools else (),
    )


def _corpus(task: StarterTask, seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    for problem in task.corpus():
        if task.converse is None:
            yield f"user\n{problem.text}\nassistant\n{task.demonstrate(problem)}"
            continue
        yield "system\n" + "\n".join(str(tool["function"]) for tool in task.tools)
        yield "user\n" + problem.text
        for message in task.converse(problem, rng):
            calls = [json.dumps({"name": call.name, "arguments": dict(call.arguments)}) for call in message.calls]
            yield "\n".join([message.role, message.content, *calls])


def _files_of_starter(folder: Path) -> frozenset[str]:
    """Return the files that `make_starter` has written there; empty where it has not."""
    try:
        found = json.loads(read_plain_text(folder / STARTER_FILE))["files"]
        return frozenset({STARTER_FILE, *map(str, found)})
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return frozenset()


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: str) -> tuple[int, ...]:
    """Return tokens of one user turn, up to where the answer begins."""
    messages = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    return tuple(ids)


def sampled_accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    split: Sequence[RawPrompt],
    *,
    task: StarterTask,
    seed: int,
) -> float:
    """Share of problems whose one sampled answer (temperature 1) is right and ends by itself."""
    engine = TorchEngine(model, tokenizer=tokenizer, max_total_length=task.max_length, weight_version=0)
    output = engine.generate(
        GenerationRequest(
            prompt_ids=tuple(prompt_ids(tokenizer, problem.text) for problem in split),
            seeds=tuple(seed * len(split) + i for i in range(len(split))),
            sampling=SamplingParams(
                temperature=1.0, max_new_tokens=task.max_new_tokens, stop_token_ids=(int(tokenizer.eos_token_id),)
            ),
        )
    )
    responses = output.token_ids.split(output.lengths.tolist())
    right = 0
    for problem, tokens, is_truncated in zip(split, responses, output.truncated.tolist(), strict=True):
        right += not is_truncated and final_answer(tokenizer.decode(tokens[:-1].tolist())) == problem.answer
    return right / len(split)


def _build_model(tokenizer: PreTrainedTokenizerBase, config: StarterConfig) -> PreTrainedModel:
    common: dict[str, Any] = {
        "vocab_size": -(-len(tokenizer) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if not config.num_experts:
        width, depth = config.hidden_size, config.num_layers
        sizes = {"hidden_size": width, "num_hidden_layers": depth, "intermediate_size": 3 * width}
        return Qwen3ForCausalLM(Qwen3Config(**common, **sizes))
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **common,
            # Narrower and deeper than the dense one: four layers choose experts, for about the same time per step.
            hidden_size=64,
            num_hidden_layers=4,
            intermediate_size=64,
            moe_intermediate_size=64,
            num_experts=config.num_experts,
            num_experts_per_tok=2,
            norm_topk_prob=True,
        )
    )


def _warm_start(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: StarterTask,
    config: StarterConfig,
) -> StarterReport:
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    rng = random.Random(config.seed)
    rows = taught_rows(task, tokenizer, size=config.num_problems, seed=config.seed)
    calibration = task.calibration()
    best, best_weights = StarterReport(steps=0, accuracy=0.0), _copy_weights(model)
    for step in range(1, config.max_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * min(1.0, step / config.warmup_steps)
        model.train()
        loss = _nll(model, rng.sample(rows, config.batch_size))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step()
        if task.converse is not None:
            best = StarterReport(steps=step, accuracy=None)
            continue
        if step < config.first_evaluation or step % config.evaluate_every:
            continue
        accuracy = sampled_accuracy(model, tokenizer, calibration, task=task, seed=config.seed)
        logger.info("warm start: step %d, loss %.3f, sampled accuracy %.3f", step, loss.item(), accuracy)
        if abs(accuracy - config.target_accuracy) <= abs((best.accuracy or 0.0) - config.target_accuracy):
            best, best_weights = StarterReport(steps=step, accuracy=accuracy), _copy_weights(model)
        if accuracy >= config.stop_accuracy:
            break
    if task.converse is None:
        model.load_state_dict(best_weights)
    return best


def _copy_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in model.state_dict().items()}


_Row = tuple[tuple[int, ...], tuple[bool, ...]]
"""All tokens of a row, and which of them are trained on."""


def taught_rows(task: StarterTask, tokenizer: PreTrainedTokenizerBase, *, size: int, seed: int) -> list[_Row]:
    """Return the rows of the warm start."""
    training = task.training(size=size, seed=seed)
    if task.converse is None:
        return [_training_row(tokenizer, problem.text, task.demonstrate(problem)) for problem in training]
    rng = random.Random(seed)
    encoder = TurnEncoder(
        tokenizer, stop_ids=(int(tokenizer.eos_token_id),), tools=task.tools, now=datetime(2026, 1, 1)
    )
    return [_conversation_row(encoder, tokenizer, problem, task.converse(problem, rng)) for problem in training]


def _training_row(tokenizer: PreTrainedTokenizerBase, text: str, response: str) -> _Row:
    prompt = prompt_ids(tokenizer, text)
    ids = (*tokenizer.encode(response, add_special_tokens=False), int(tokenizer.eos_token_id))
    return (*prompt, *ids), (False,) * len(prompt) + (True,) * len(ids)


def _conversation_row(
    encoder: TurnEncoder, tokenizer: PreTrainedTokenizerBase, problem: RawPrompt, messages: Sequence[Message]
) -> _Row:
    """Return the row of a conversation as a rollout would make it, with what the model is taught to say."""
    said = [Message(role="user", content=problem.text)]
    ids = list(encoder.prompt(said))
    trained = [False] * len(ids)
    waiting: list[Message] = []
    sampled: tuple[int, ...] = ()
    for message in messages:
        if message.role != "assistant":
            waiting.append(message)
            continue
        if waiting:
            inserted = encoder.extend(said, waiting, sampled=sampled, is_cut=False).ids
            ids += inserted
            trained += [False] * len(inserted)
            said += waiting
            waiting = []
        calls = [
            "<tool_call>\n" + json.dumps({"name": call.name, "arguments": dict(call.arguments)}) + "\n</tool_call>"
            for call in message.calls
        ]
        text = "\n".join([*filter(None, [message.content]), *calls])
        sampled = (*tokenizer.encode(text, add_special_tokens=False), int(tokenizer.eos_token_id))
        ids += sampled
        trained += [True] * len(sampled)
        said.append(message)
    return tuple(ids), tuple(trained)


def _nll(model: PreTrainedModel, rows: Sequence[_Row]) -> torch.Tensor:
    width = max(len(tokens) for tokens, _ in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    is_response = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, (tokens, is_trained) in enumerate(rows):
        ids[i, : len(tokens)] = torch.tensor(tokens)
        is_response[i, : len(tokens)] = torch.tensor(is_trained)
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    selected = is_response[:, 1:]
    logprobs = token_logprobs(logits[selected], ids[:, 1:][selected], sampling=Sampling())
    return negative_log_likelihood(logprobs, torch.ones_like(logprobs), total=logprobs.numel())
