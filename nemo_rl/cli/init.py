"""`nemo-rl init`: the three files of a first run. `examples/first` has what it writes for the starter checkpoint."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Annotated

import typer

from nemo_rl.errors import UserError, boundary
from nemo_rl.utils.console import make_console
from nemo_rl.utils.files import write_text

__all__ = ["init"]

RECIPE, REWARD, PROMPTS = "recipe.yaml", "reward.py", "prompts.jsonl"
SMALL_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
NUM_PROMPTS, SEED = 512, 1
_RECIPE = """\
# GRPO on your prompts with your reward. Run it: nemo-rl train {folder}/recipe.yaml
policy:
  model_name: {model}  # a folder, or a name on the hub
  precision: float32  # fast on CPUs; leave it out on GPUs
  train_global_batch_size: 128  # rows of an optimizer step: two steps for each rollout of 32 x 8 rows
  max_total_sequence_length: 80
  optimizer:
    kwargs: {{lr: {rate}}}
  generation:
    max_new_tokens: 16
grpo:
  num_prompts_per_step: 32
  num_generations_per_prompt: 8
  max_num_steps: 40
  use_generation_logprobs_as_prev: true
loss_fn:
  reference_policy_kl_penalty: 0
data:
  train:
    dataset_name: jsonl
    data_path: prompts.jsonl  # beside this file; one {{"input": ..., "output": ...}} per line
  validation: null
  max_input_seq_length: 64
env:
  name: custom
  reward_function: reward.py:sorted_digits
logger:
  log_dir: results/first
"""
_REWARD = '''\
"""The reward of recipe.yaml: called once for each response, with the "output" of its prompt as the answer."""


def sorted_digits(prompt: str, response: str, answer: str) -> float:
    """Return 1 for the right answer, else half the share of digits at their places."""
    said = response.strip()
    if said == answer:
        return 1.0
    right = sum(mine == theirs for mine, theirs in zip(said, answer, strict=False))
    return 0.5 * right / max(len(said), len(answer))
'''


def init(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="folder for the files, which may not be there yet")],
    model: Annotated[str, typer.Option("--model", metavar="NAME", help="folder of a model, or its name on the hub")] = (
        SMALL_MODEL
    ),
    rate: Annotated[float, typer.Option("--lr", min=0, help="learning rate")] = 1e-5,
) -> None:
    """Write a recipe, its reward and its prompts to FOLDER: the model learns to sort digits.

    Exit code: 0, or 2 where one of the files is there already.
    """
    draw = random.Random(SEED)
    texts = ["".join(draw.choices("0123456789", k=draw.randint(6, 8))) for _ in range(NUM_PROMPTS)]
    rows = [json.dumps({"input": f"sort {text}", "output": "".join(sorted(text))}) for text in texts]
    recipe = _RECIPE.format(folder=folder, model=model, rate=f"{rate:.1e}")
    files = {RECIPE: recipe, REWARD: _REWARD, PROMPTS: "".join(f"{row}\n" for row in rows)}
    if there := [str(folder / name) for name in files if (folder / name).exists()]:
        raise UserError(f"{', '.join(there)}: there already, and not written over; name another folder")
    with boundary(UserError, f"{folder}: cannot be written"):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            write_text(folder / name, text)
    make_console().print(f"wrote {', '.join(files)} to {folder}; run: nemo-rl train {folder / RECIPE}")
