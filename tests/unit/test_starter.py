"""The warm start, cut short."""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import replace
from datetime import datetime
from itertools import groupby
from operator import eq
from pathlib import Path

import pytest

from examples.starter import (
    STARTER_FILE,
    STARTER_TASKS,
    VALIDATION_SEED,
    VALIDATION_SIZE,
    StarterConfig,
    StarterReport,
    make_starter,
    sampled_accuracy,
    starter_tokenizer,
    taught_rows,
)
from nemo_rl.config.load import load_config
from nemo_rl.data.conversation import Message
from nemo_rl.data.thinking import final_answer
from nemo_rl.data.tokenizer import load_tokenizer
from nemo_rl.data.turn_encoder import TurnEncoder
from nemo_rl.environments.tool_schema import schema_of
from nemo_rl.environments.tools import calculator
from nemo_rl.errors import ModelFolderError
from nemo_rl.models.hf.loading import load_causal_lm
from nemo_rl.models.hf.modules import HFRouters

ROOT = Path(__file__).parents[2]
SORT = STARTER_TASKS["sort"]
RECIPES = {
    "sort": "configs/grpo_sort_cpu.yaml",
    "chain_sum": "configs/recipes/grpo_chain_sum_cpu.yaml",
    "chain_sums": "configs/recipes/grpo_curriculum_cpu.yaml",
    "guess": "configs/recipes/grpo_guess_cpu.yaml",
    "calculator": "configs/recipes/grpo_calculator_cpu.yaml",
}
LONGEST = {"min_terms": 7, "max_terms": 7, "min_digits": 1, "max_digits": 1}
"""Options of the prompts on which the recipe of a curriculum validates; the starter trains on all kinds of them."""
WITH_TURNS = ("guess", "calculator")


def test_a_short_warm_start_writes_a_loadable_folder_and_replaces_a_starter_alone(tmp_path: Path) -> None:
    folder, neighbour = tmp_path / "new" / "starter", tmp_path / "new" / "starter.part"
    neighbour.mkdir(parents=True)
    (neighbour / "thesis.txt").write_text("years of work")
    folder.mkdir()
    short = StarterConfig(max_steps=2, first_evaluation=2, evaluate_every=1, num_problems=200)
    report = make_starter(folder, SORT, config=short)
    assert report.steps == 2
    before = (folder / "model.safetensors").stat().st_ino
    make_starter(folder, SORT, config=replace(short, seed=1))
    assert (folder / "model.safetensors").stat().st_ino != before
    assert sorted(path.name for path in folder.parent.iterdir()) == ["starter", "starter.part"]
    assert (neighbour / "thesis.txt").read_text() == "years of work"
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ModelFolderError, match=r"holds other files than a starter of this script \(notes.txt\)"):
        make_starter(folder, SORT, config=short)
    (folder / "notes.txt").unlink()
    model, tokenizer = load_causal_lm(folder), load_tokenizer(folder)
    assert model.config.vocab_size >= len(tokenizer)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert sampled_accuracy(model, tokenizer, SORT.validation()[:8], task=SORT, seed=0) == 0.0


def _file(place: Path) -> None:
    place.write_text("years of work")


def _folder(place: Path) -> None:
    (place / "model.safetensors").mkdir(parents=True)
    (place / STARTER_FILE).write_text('{"files": ["model.safetensors"]}')


def _link_to_a_folder(place: Path) -> None:
    place.with_name("real").mkdir()
    place.symlink_to(place.with_name("real"))


@pytest.mark.parametrize(
    ("make", "inside", "cause"),
    [
        (_file, "", "is not a folder"),
        (_file, "starter", "cannot be written: .*File exists"),
        (
            lambda place: (place / "thesis").mkdir(parents=True),
            "",
            r"other files than a starter of this script \(thesis\)",
        ),
        (_folder, "", r"other files than a starter of this script \(model.safetensors\)"),
        (_link_to_a_folder, "", "is a link to .*real; name the folder itself"),
        (lambda place: place.symlink_to("nowhere"), "", "is a link to nowhere"),
        (lambda place: place.symlink_to(place), "", "is a link to"),
        (lambda place: place.symlink_to(place), "starter", "cannot be written: .*symbolic links|File exists"),
        (os.mkfifo, "", "is not a folder"),
    ],
)
def test_what_is_no_starter_is_never_replaced(tmp_path, make, inside, cause) -> None:
    place = tmp_path / "place"
    make(place)
    before = sorted((path.name, path.lstat().st_ino) for path in tmp_path.rglob("*"))
    with pytest.raises(ModelFolderError, match=cause):
        make_starter(place / inside if inside else place, SORT, config=SORT.config)
    assert sorted((path.name, path.lstat().st_ino) for path in tmp_path.rglob("*")) == before


def test_a_starter_with_experts_is_a_mixture_with_a_choice_in_every_layer(tmp_path: Path) -> None:
    short = StarterConfig(max_steps=1, first_evaluation=2, num_problems=200).with_experts(8)
    make_starter(tmp_path / "starter", SORT, config=short)
    model = load_causal_lm(tmp_path / "starter")
    routers = HFRouters(model)
    assert routers.layers == tuple(range(model.config.num_hidden_layers)) and len(routers.layers) >= 4
    assert (routers.num_experts, routers.top_k, model.config.norm_topk_prob) == (8, 2, True)


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "experts", "low", "high"), [("sort", 0, 0.18, 0.40), ("sort", 8, 0.18, 0.40), ("chain_sum", 0, 0.20, 0.45)]
)
def test_the_starter_solves_about_three_in_ten_held_out_problems(tmp_path, name, experts, low, high):
    task = STARTER_TASKS[name]
    config = task.config.with_experts(experts) if experts else task.config
    report = make_starter(tmp_path / "starter", task, config=replace(config, seed=0))
    assert 0.25 <= report.accuracy <= 0.40
    model, tokenizer = load_causal_lm(tmp_path / "starter"), load_tokenizer(tmp_path / "starter")
    held_out = task.validation()
    accuracy = sum(sampled_accuracy(model, tokenizer, held_out, task=task, seed=s) for s in range(4)) / 4
    # Four samples of 256 prompts: standard error below 0.016.
    assert low <= accuracy < high


@pytest.mark.parametrize("name", sorted(STARTER_TASKS))
def test_the_warm_start_never_sees_validation_or_calibration_prompts(name: str) -> None:
    task = STARTER_TASKS[name]
    validation, calibration, training = (
        {problem.text for problem in split}
        for split in (task.validation(), task.calibration(), task.training(size=2000, seed=0))
    )
    assert len(validation) > 200 and len(calibration) > 200 and len(training) > 500
    assert not validation & calibration
    assert not (validation | calibration) & training
    assert not (validation | calibration) & {problem.text for problem in task.corpus()}


@pytest.mark.parametrize("name", sorted(STARTER_TASKS))
def test_the_recipe_validates_on_the_split_that_the_starter_holds_out(name: str) -> None:
    config = load_config(ROOT / RECIPES[name])
    split = {"size": VALIDATION_SIZE, "seed": VALIDATION_SEED}
    if name == "chain_sums":
        split["options"] = LONGEST
    assert config.data.validation == STARTER_TASKS[name].dataset.model_copy(update=split)
    assert config.policy.model_name == f"checkpoints/starter_{name}"
    assert config.policy.generation.max_new_tokens == STARTER_TASKS[name].max_new_tokens


@pytest.mark.parametrize("worker", ["megatron", "dtensor"])
def test_recipes_with_experts_use_the_starter_with_experts_on_the_task_of_the_demo(worker: str) -> None:
    config = load_config(ROOT / f"configs/recipes/grpo_sort_moe_r3_{worker}_cpu.yaml")
    assert config.policy.model_name == "checkpoints/starter_sort_moe"
    assert config.data == load_config(ROOT / RECIPES["sort"]).data
    assert config.policy.megatron_cfg.enabled == (worker == "megatron")
    # What replay is for: rollouts that choose other experts now and then than the trainer would.
    assert config.policy.router_replay.enabled
    assert (config.policy.generation.precision, config.policy.precision) == ("bfloat16", "float32")


@pytest.mark.parametrize("name", sorted(set(STARTER_TASKS) - {*WITH_TURNS, "chain_sums"}))
def test_every_demonstration_ends_with_the_answer(name: str) -> None:
    task = STARTER_TASKS[name]
    problems = task.training(size=500, seed=3)
    assert [final_answer(task.demonstrate(problem)) for problem in problems] == [problem.answer for problem in problems]


def test_a_chain_of_sums_is_written_out_step_by_step() -> None:
    task = STARTER_TASKS["chain_sum"]
    problem = next(p for p in task.training(size=50, seed=0) if " - " in p.text and p.text.count(" ") > 12)
    terms = problem.text.rpartition(": ")[2].removesuffix(" =").replace("+ ", "").replace("- ", "-").split()
    first, second, third = (int(term) for term in terms)
    one, two = f"{first}{second:+d}={first + second}", f"{first + second}{third:+d}={first + second + third}"
    assert task.demonstrate(problem) == f"<think>{one} {two}</think>{problem.answer}"


def test_long_chains_are_taught_with_slips_behind_their_first_sums_and_short_ones_without() -> None:
    task = STARTER_TASKS["chain_sums"]
    share_of_right = {}
    for terms in (5, 6, 7):
        only = task.dataset.model_copy(
            update={"options": {**task.dataset.options, "min_terms": terms, "max_terms": terms}}
        )
        problems = replace(task, dataset=only).training(size=400, seed=3)
        found = [final_answer(task.demonstrate(problem)) for problem in problems]
        share_of_right[terms] = sum(map(eq, found, [problem.answer for problem in problems])) / len(found)
    assert share_of_right[5] == 1.0 and 0.4 < share_of_right[6] < 0.6
    # A later slip may make up for an earlier one.
    assert 0.2 < share_of_right[7] < 0.45


def games(seed: int) -> list[tuple[int, list[Message]]]:
    task = STARTER_TASKS["guess"]
    assert task.converse is not None
    rng = random.Random(seed)
    problems = task.training(size=400, seed=0)
    return [(int(str(problem.answer)), list(task.converse(problem, rng))) for problem in problems]


def test_a_demonstrated_game_has_true_replies_and_does_not_look_for_the_middle() -> None:
    turns, firsts = load_config(ROOT / RECIPES["guess"]).experience.conversation.max_turns, Counter[int]()
    for answer, messages in games(0):
        guesses = [int(message.content) for message in messages[::2]]
        replies = [message.content for message in messages[1::2]]
        assert replies == ["higher" if guess < answer else "lower" for guess in guesses[: len(replies)]]
        assert len(replies) == len(guesses) - 1 < turns and answer not in guesses[:-1]
        firsts[guesses[0]] += 1
    assert min(firsts[number] for number in range(1, 7)) > 40, firsts


def test_demonstrations_of_the_calculator_call_it_in_some_rows_and_otherwise_guess() -> None:
    task = STARTER_TASKS["calculator"]
    assert task.converse is not None
    rng, called, right = random.Random(0), 0, 0
    problems = task.training(size=1000, seed=0)
    for problem in problems:
        first, *others = task.converse(problem, rng)
        if not first.calls:
            right += first.content == problem.answer
            continue
        called += 1
        assert calculator(**first.calls[0].arguments) == problem.answer
        assert [message.content for message in others] == [problem.answer] * 2
    assert 0.25 < called / len(problems) < 0.35 and right < 5


@pytest.mark.parametrize("name", WITH_TURNS)
def test_a_short_warm_start_of_turns_writes_a_model_and_a_tokenizer_that_renders_them(tmp_path, name):
    task = STARTER_TASKS[name]
    short = replace(task.config, max_steps=2, batch_size=4, num_problems=50)
    report = make_starter(tmp_path / "starter", task, config=short)
    assert report == StarterReport(steps=2, accuracy=None)
    model, tokenizer = load_causal_lm(tmp_path / "starter"), load_tokenizer(tmp_path / "starter")
    assert model.config.vocab_size >= len(tokenizer)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "x"}], tools=list(task.tools) or None, tokenize=True, return_dict=False
    )
    assert ("calculator(expression)" in tokenizer.decode(ids)) == (name == "calculator")
    assert ("<tool_call>" in tokenizer.get_vocab()) == (name == "calculator")


@pytest.mark.parametrize("name", WITH_TURNS)
def test_every_taught_conversation_fits_the_row_of_the_recipe_and_its_turns_fit_theirs(name: str) -> None:
    task, recipe = STARTER_TASKS[name], load_config(ROOT / RECIPES[name])
    assert recipe.policy.max_total_sequence_length == task.max_length
    rows = taught_rows(task, starter_tokenizer(task, seed=0), size=200, seed=0)
    for ids, is_trained in rows:
        assert len(ids) == len(is_trained) <= task.max_length
        longest = max(len(list(group)) for value, group in groupby(is_trained) if value)
        assert longest <= task.max_new_tokens


def test_the_calculator_starter_has_learned_the_prompt_that_a_run_gives_it() -> None:
    task = STARTER_TASKS["calculator"]
    tokenizer = starter_tokenizer(task, seed=0)
    messages = [Message(role="user", content="calculate 45*67")]
    taught, of_run = (
        TurnEncoder(tokenizer, stop_ids=(int(tokenizer.eos_token_id),), tools=tools, now=datetime(2026, 1, 1))
        for tools in (task.tools, (schema_of(calculator),))
    )
    assert taught.prompt(messages) == of_run.prompt(messages)
