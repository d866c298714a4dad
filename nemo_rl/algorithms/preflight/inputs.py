"""Checks of what a user gives to a run: model, tokenizer, prompts, reward, extras."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from importlib.metadata import version
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from nemo_rl.algorithms.advantage_estimator import UsesRows
from nemo_rl.algorithms.preflight import model_check
from nemo_rl.algorithms.run_folder import first_start, model_digest, same_or_refused
from nemo_rl.algorithms.token_work import TokenEstimator
from nemo_rl.config.data import DatasetConfig
from nemo_rl.config.grpo import GRPOConfig
from nemo_rl.config.parts import (
    ADVANTAGE_ESTIMATORS,
    AUTO,
    ENGINE_CAPABILITIES,
    ENGINES,
    GENERATED_DATASETS,
    JUDGE,
    LOSSES,
    PROGRAM,
    SELECTIONS,
    STORES,
    EngineCapabilities,
)
from nemo_rl.config.schema import MasterConfig
from nemo_rl.data.datasets import Prompt, PromptSet, build_prompt_sets, raw_prompts
from nemo_rl.data.messages import PromptEncoder, prompt_messages
from nemo_rl.data.template_check import PatternCheck, check_template, role_patterns
from nemo_rl.data.tokenizer import load_tokenizer, stop_token_ids, tokenizer_identity
from nemo_rl.data.turn_encoder import TurnEncoder
from nemo_rl.environments.answers import AnswerCheck, drop_unreadable
from nemo_rl.environments.interfaces import IsProbed, Response
from nemo_rl.environments.process_environment import ProcessEnvironment
from nemo_rl.errors import ConfigError, DatasetError, RewardError, UserError
from nemo_rl.experience.conversation_setup import EXAMPLE_TOOLS, FormatCheck, RolloutEnvironment, check_format
from nemo_rl.experience.rollouts import RolloutSpec
from nemo_rl.models.dtensor.train_step import LearningRate, build_optimizer
from nemo_rl.models.hf.folder import open_weights
from nemo_rl.models.hf.loading import decoder_sizes, load_model_config, model_folder
from nemo_rl.models.policy.fit import check_policy_fits
from nemo_rl.models.vision.processor import encoder_of
from nemo_rl.records.sites import Selector
from nemo_rl.tracer.process import HUB_MODULE
from nemo_rl.tracer.watch import SiteWatch
from nemo_rl.utils.checkpoint import Checkpoint
from nemo_rl.utils.logger import check_trackers
from nemo_rl.utils.remote_checkpoints import open_checkpoints

__all__ = [
    "Subject",
    "check_answers",
    "check_engine",
    "check_identity",
    "check_model",
    "check_optimizer",
    "check_parts",
    "check_prompts",
    "check_records",
    "check_reward",
    "check_teacher",
    "check_tokenizer",
    "check_trackers_are_installed",
    "check_turns",
    "nearest_folder",
    "too_few_prompts",
    "turn_lines",
    "unknown_tokens",
    "with_teacher_folder",
]

MAX_ROWS = 20_000
"""Rows of each source that are looked at when no run follows, which reads all of them: seconds of templates."""


TEACHER = "loss_fn.distillation.teacher.model_name"


class Subject:
    """Every property raises a `UserError` when what it opens cannot be opened.

    Args:
        is_alone: whether no run follows, which would look at every row and compare it with a checkpoint itself.
    """

    def __init__(self, config: MasterConfig, *, is_alone: bool = False) -> None:
        self.config, self.is_alone = config, is_alone

    @cached_property
    def model_config(self) -> PretrainedConfig:
        return load_model_config(self.config.policy.model_name)

    @cached_property
    def num_parameters(self) -> int:
        """Parameters by the headers of the weight files, every one of which is opened."""
        weights = open_weights(self.config.policy.model_name, self.model_config)
        return sum(math.prod(weights.shape(name)) for name in weights.names())

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        given = self.config.policy.tokenizer
        return load_tokenizer(given.name or self.config.policy.model_name, chat_template=given.chat_template)

    @cached_property
    def resume_from(self) -> Checkpoint | None:
        """The checkpoint that a run would continue from; its contents are not compared."""
        section = self.config.checkpointing
        if not (section.enabled and section.resume):
            return None
        manager = open_checkpoints(section, self.config.logger.log_dir)
        return manager.choose(with_optimizer=section.load_optimizer, reads_files=False).checkpoint

    @cached_property
    def prompt_sets(self) -> Mapping[str, PromptSet]:
        """Prompts by the dotted paths of their sections, of large sources the first ones."""
        data = self.config.data
        now = first_start(self.resume_from)
        return build_prompt_sets(
            data,
            self.tokenizer,
            now=now,
            max_rows=MAX_ROWS,
            tools=self.schemas,
            pictures=encoder_of(self.config.policy, data, self.tokenizer),
        )

    @cached_property
    def schemas(self) -> tuple[Mapping[str, Any], ...]:
        if not self.config.env.tools.use:
            return ()
        environment = RolloutEnvironment(RolloutSpec.of(self.config))
        try:
            return environment.schemas
        finally:
            environment.shutdown()

    @cached_property
    def turn_checks(self) -> tuple[PatternCheck, ...]:
        """Findings on the chat template for the conversations that the recipe can produce; empty without them."""
        config, tools = self.config, self.config.env.tools
        if not config.experience.conversation.enabled:
            return ()
        names = [tool.name.rpartition(":")[2] for tool in tools.use]
        patterns = role_patterns(tools=names, max_parallel_calls=tools.max_parallel_calls)
        return check_template(self.turn_encoder, self.tokenizer, patterns)

    @cached_property
    def turn_encoder(self) -> TurnEncoder:
        return TurnEncoder(
            self.tokenizer, stop_ids=self.stop_ids, tools=self.schemas, now=first_start(self.resume_from)
        )

    @cached_property
    def format_check(self) -> FormatCheck | None:
        """The finding on `env.tools.format`; None where turns are not searched for calls."""
        config, key = self.config, self.config.env.tools.format
        is_program = config.env.name == PROGRAM
        schemas = EXAMPLE_TOOLS if is_program else self.schemas
        if not config.experience.conversation.enabled or not schemas:
            return None
        found = check_format(key, self.turn_encoder.with_tools(schemas))
        # A program may have no tools; its requests with tools are refused.
        return replace(found, is_refused=False) if is_program and key == AUTO else found

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        chosen = self.config.policy.generation.stop_token_ids
        return self.known_stop_ids if chosen is None else tuple(chosen)

    @cached_property
    def known_stop_ids(self) -> tuple[int, ...]:
        """Stop tokens that model and tokenizer name."""
        return stop_token_ids(self.config.policy.model_name, self.tokenizer)


def nearest_folder(path: Path) -> Path:
    """`path`, or the first folder above it that exists."""
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


PROMPTS_ENCODED = 4
"""Prompts that go through template and tokenizer; all of them do later."""
MAX_BYTES = 256 * 2**20
"""Limit of a `huggingface` dataset, which is read as a whole: a larger one would be read twice for minutes."""


def check_model(subject: Subject) -> list[str]:
    """The folder is whole, its weights can be opened, and the model has its own numbers in what is asked of it."""
    check_policy_fits(subject.config.policy)
    if not subject.num_parameters:
        return [f"model folder {subject.config.policy.model_name!r}: holds no weight"]
    return model_check.check_model(subject.config.policy)


def check_optimizer(subject: Subject) -> list[str]:
    """Optimizer and schedule of the DTensor worker, whose import paths and arguments nothing else has tried yet."""
    policy = subject.config.policy
    if policy.dtensor_cfg.enabled:
        optimizer = build_optimizer(policy.optimizer, [torch.nn.Parameter(torch.zeros(1))])
        LearningRate(policy.scheduler, optimizer, num_steps=subject.config.grpo.max_num_steps)
    return []


def check_tokenizer(subject: Subject) -> list[str]:
    """It loads, and the model knows the tokens that end a response."""
    return unknown_tokens(subject, "tokens that end a response", subject.stop_ids)


def check_prompts(subject: Subject) -> list[str]:
    """All datasets open, their rows become tokens, and there is a step's worth of prompts."""
    data, lines = subject.config.data, list[str]()
    grpo = subject.config.grpo
    if _all_rows_count(subject):
        if not data.train.named and len(subject.prompt_sets["data.train"]) < grpo.prompts_at_once:
            lines.append(too_few_prompts(grpo, len(subject.prompt_sets["data.train"])))
        for where, found in subject.prompt_sets.items():
            ids = tuple({token for prompt in found.prompts for token in prompt.ids})
            lines += unknown_tokens(subject, f"tokens of prompts of {where}", ids)
        return lines
    for where, source in data.sections.items():
        try:
            lines += _first_prompts(subject, source, where, grpo.prompts_at_once if where == "data.train" else 1)
        except DatasetError as error:
            lines.append(str(error))
    return lines


def check_turns(subject: Subject) -> list[str]:
    """The chat template has a form for every reply that the recipe's conversations can have."""
    lines = [
        f"policy.tokenizer.chat_template: {found.line()}; set one that has a form for it"
        for found in subject.turn_checks
        if found.verdict == "refused" and found.is_needed
    ]
    about_calls = subject.format_check
    return [*lines, about_calls.line] if about_calls is not None and about_calls.is_refused else lines


def turn_lines(config: MasterConfig) -> list[str]:
    """Return what the chat template makes of each way in which a conversation can go on, for people."""
    subject = Subject(config)
    found, about_calls = subject.turn_checks, subject.format_check
    if not found:
        return []
    history = config.history
    kept = "a new row is started" if history == "new_row" else "those tokens stay in the row"
    head = f"turns of conversations (data.history: {history}; new_row: {kept}):"
    return [head, *(f"  {check.line()}" for check in found), *([f"  {about_calls.line}"] if about_calls else [])]


def check_reward(subject: Subject) -> list[str]:
    """The reward's extra is installed; its function can be loaded in its own process, and one of the user's gives
    an empty response to the first row a number."""
    # As patient as the run itself: what is merely slow must not be refused.
    environment = RolloutEnvironment(RolloutSpec.of(subject.config))
    try:
        for where, source in subject.config.data.sources.items():
            _score_first(subject.config, environment.scorer_of(where), source, where)
    finally:
        environment.shutdown()
    return []


def _score_first(config: MasterConfig, scorer: object, source: DatasetConfig, where: str) -> None:
    """Give the first row of a source an empty response, where a function of the user's scores it.

    Raises:
        RewardError: the reward gives no number.
    """
    env = source.env or config.env
    has_judges = env.name == JUDGE
    is_asked = env.preflight_reward and (env.reward_function is not None or has_judges) and not _is_too_large(source)
    if not is_asked or not (has_judges or isinstance(scorer, ProcessEnvironment)):
        return
    try:
        raw = next(raw_prompts(_first_rows(source, 1), where), None)
    except DatasetError:
        # The check of the prompts tells it.
        return
    if raw is None or not isinstance(raw.text, str):
        return
    prompt = Prompt(index=0, text=raw.text, answer=raw.answer, ids=(), metadata=raw.metadata)
    if has_judges:
        assert isinstance(scorer, IsProbed)
        scorer.probe(prompt, where=where)
        return
    assert isinstance(scorer, ProcessEnvironment)
    if scorer.answer_problems([prompt]) != [None]:
        return
    try:
        if not scorer.score([prompt], [Response(text="", num_tokens=0)]).num_timeouts:
            return
        problem = f"reward function {env.reward_function!r} took longer than env.timeout_s {env.timeout_s:g} s"
    except RewardError as error:
        problem = str(error)
    form = "(prompt, response, answer) -> a finite number, or a dict of them"
    if env.reward_batch_size is not None:
        form = "(prompts, responses, answers) -> a list with a finite number, or a dict of them, for each"
    raise RewardError(
        f"{problem}\n  expected: {form}; also for an empty response to the first row of {where}, which it is given "
        "before the run (env.preflight_reward=false leaves this out)"
    )


def check_answers(subject: Subject) -> list[str]:
    """The reward can read the gold answers; of a run that is resumed, it is the same reward."""
    if not _all_rows_count(subject):
        return []
    config = subject.config
    environment = RolloutEnvironment(RolloutSpec.of(config))
    try:
        AnswerCheck(environment.scorer, drop_unreadable(config.data, environment.scorer, subject.prompt_sets)).look()
        _compare(subject, {"reward": environment.identity})
    finally:
        environment.shutdown()
    return []


def check_identity(subject: Subject) -> list[str]:
    """A run that is resumed goes on with the data, model, tokenizer and chat template that it had."""
    if not subject.is_alone or subject.resume_from is None:
        return []
    identity = tokenizer_identity(subject.tokenizer, stop_ids=subject.known_stop_ids)
    identity["model"] = model_digest(subject.config.policy.model_name)
    if _all_rows_count(subject) and all(found.is_whole for found in subject.prompt_sets.values()):
        identity |= {where: found.digest for where, found in subject.prompt_sets.items()}
    _compare(subject, identity)
    return []


def check_parts(subject: Subject) -> list[str]:
    """User-defined parts can be imported; environments, datasets and trackers have checks of their own."""
    config, lines = subject.config, list[str]()
    named = [
        ("loss_fn.name", config.loss_fn.name, LOSSES),
        ("grpo.adv_estimator.name", config.grpo.adv_estimator.name, ADVANTAGE_ESTIMATORS),
        ("grpo.async.selection", config.grpo.async_.selection, SELECTIONS),
        ("policy.generation.backend", config.policy.generation.backend, ENGINES),
        ("data_plane.impl", config.active_data_plane.impl or "noop", STORES),
    ]
    for key, name, kind in named:
        if not kind.is_builtin(name):
            try:
                part = kind.load(name, key=key)
            except ConfigError as error:
                lines += error.problems
                continue
            if kind is ADVANTAGE_ESTIMATORS and _misses_rows(part):
                lines.append(
                    f"{key}: {name!r} takes `rows`, which only subclasses of UsesRows are given; let it inherit"
                )
    return lines


def _misses_rows(estimator: object) -> bool:
    """Return whether a class of advantages per row expects `rows` and does not say so."""
    if not isinstance(estimator, type) or issubclass(estimator, UsesRows | TokenEstimator):
        return False
    return "rows" in inspect.signature(estimator.__call__).parameters


def check_engine(subject: Subject) -> list[str]:
    """Check that what the engine of the rollout needs is installed, and that its own settings make sense."""
    backend = subject.config.policy.generation.backend
    check = ENGINE_CAPABILITIES.get(backend, EngineCapabilities()).check
    if check is None:
        return []
    module, _, name = check.partition(":")
    lines: list[str] = vars(importlib.import_module(module))[name](subject.config.policy)
    return lines


def check_trackers_are_installed(subject: Subject) -> list[str]:
    check_trackers(subject.config.logger)
    return []


def _compare(subject: Subject, identity: dict[str, str]) -> None:
    found = subject.resume_from
    if found is not None:
        same_or_refused(found.state, identity, allowed=subject.config.checkpointing.allow_changed, where=found.path)


def _all_rows_count(subject: Subject) -> bool:
    """Return whether rows are all read here: nothing else would, and they are not too large to be read for it."""
    data = subject.config.data
    return subject.is_alone and not any(map(_is_too_large, data.sections.values()))


def _is_too_large(source: DatasetConfig) -> bool:
    path = source.data_path if source.dataset_name == "huggingface" else None
    return path is not None and _bytes_of(path) > MAX_BYTES


def _first_prompts(subject: Subject, source: DatasetConfig, where: str, needed: int) -> list[str]:
    if _is_too_large(source):
        return []
    if source.dataset_name in GENERATED_DATASETS and source.size is not None and source.size < needed:
        return [too_few_prompts(subject.config.grpo, source.size)]
    found = list(islice(raw_prompts(_first_rows(source, needed), where), needed))
    if not found:
        return [f"{where}: no prompt is left of 0 read"]
    lines = [too_few_prompts(subject.config.grpo, len(found))] if len(found) < needed else []
    encoder = PromptEncoder(subject.tokenizer, with_template=source.apply_chat_template)
    for raw in found[:PROMPTS_ENCODED]:
        # Longer ones are the loader's to skip or to refuse.
        shown = str(raw.text)[: subject.config.data.max_input_seq_length]
        messages = prompt_messages(
            shown, system_prompt=source.system_prompt, prompt_template=source.prompt_template, history=raw.history
        )
        lines += unknown_tokens(subject, f"tokens of a prompt of {where}", encoder.encode(messages))
    return list(dict.fromkeys(lines))


def _first_rows(source: DatasetConfig, needed: int) -> DatasetConfig:
    """Return a source that begins with the same rows; a generated one makes no others."""
    if source.dataset_name not in GENERATED_DATASETS or source.size is None:
        return source
    return source.model_copy(update={"size": min(source.size, needed)})


def _bytes_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) if path.is_dir() else 0


def too_few_prompts(grpo: GRPOConfig, found: int) -> str:
    is_round = grpo.use_dynamic_sampling and found >= grpo.num_prompts_per_step
    times = f" x grpo.batch_multiplier {grpo.batch_multiplier:g} = {grpo.prompts_per_round}" if is_round else ""
    return (
        f"data.train: expected at least grpo.num_prompts_per_step={grpo.num_prompts_per_step}{times} prompts, got "
        f"{found}; add prompts or lower {'batch_multiplier' if is_round else 'it'}"
    )


def unknown_tokens(subject: Subject, what: str, ids: tuple[int, ...]) -> list[str]:
    size = subject.model_config.get_text_config().vocab_size
    unknown = [token for token in ids if token >= size]
    if not unknown:
        return []
    return [
        f"policy.tokenizer.name: the {what} go up to {max(unknown)}, the model knows {size}; is this its tokenizer?"
    ]


def check_records(subject: Subject) -> list[str]:
    """The sites that are to be recorded or watched exist, and so does the hub of the tracer."""
    record, tracer = subject.config.diagnostics.record, subject.config.diagnostics.tracer
    problems = []
    if tracer.enabled and find_spec(HUB_MODULE.partition(".")[0]) is None:
        problems.append(
            "diagnostics.tracer.enabled: the hub of the tracer is part of the package nemo-rl-tools, which is not "
            f"installed; install it: pip install nemo-rl-tools=={version('nemo-rl')}, or set it to false"
        )
    try:
        Selector.parse(record.sites)
    except UserError as error:
        problems.append(f"diagnostics.record.sites: {error}")
    for number, text in enumerate(tracer.selectors):
        try:
            SiteWatch.parse(text)
        except UserError as error:
            problems.append(f"diagnostics.tracer.selectors[{number}]: {error}")
    return problems


def with_teacher_folder(config: MasterConfig) -> MasterConfig:
    """Return the config with the folder of the teacher in place of its name on the hub.

    Raises:
        ModelFolderError: it is neither in the cache, nor can the hub be reached or has it.
    """
    distillation = config.loss_fn.distillation
    if not distillation.enabled or distillation.teacher.model_name is None:
        return config
    folder = model_folder(distillation.teacher.model_name, where=TEACHER)
    teacher = distillation.teacher.model_copy(update={"model_name": folder})
    loss = config.loss_fn.model_copy(update={"distillation": distillation.model_copy(update={"teacher": teacher})})
    return config.model_copy(update={"loss_fn": loss})


def check_teacher(subject: Subject) -> list[str]:
    """Its model runs in its layout with its own numbers, has the policy's tokens, and enough of them."""
    config = subject.config
    if not config.loss_fn.distillation.enabled:
        return []
    teacher = config.teacher_policy
    try:
        check_policy_fits(teacher)
    except ConfigError as error:
        return [f"{TEACHER}: as a policy of its own: {line}" for line in error.problems]
    sizes = [decoder_sizes(load_model_config(each.model_name))["vocab_size"] for each in (config.policy, teacher)]
    lines, top_k = [], config.loss_fn.distillation.top_k
    if top_k > min(sizes):
        lines.append(
            f"loss_fn.distillation.top_k: there are logits for {sizes[0]} (policy) and {sizes[1]} tokens; expected "
            f"at most {min(sizes)}, got {top_k}"
        )
    tokenizer = load_tokenizer(teacher.model_name)
    if problem := _first_difference(subject.tokenizer, tokenizer):
        lines.append(
            f"{TEACHER}: its tokenizer has other tokens than the policy's, and a distribution over others cannot be "
            f"learned: {problem}; set a teacher of the same family"
        )
    return [*lines, *(f"{TEACHER}: {line}" for line in model_check.check_model(teacher))]


def _first_difference(own: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> str | None:
    """Return the first token that the two do not share, or None where they are the same."""
    mine, theirs = own.get_vocab(), other.get_vocab()
    for token, number in sorted(mine.items(), key=lambda item: item[1]):
        if theirs.get(token) != number:
            found = theirs.get(token)
            return f"{token!r} is token {number} of the policy and {'missing' if found is None else found} there"
    more = next((token for token in theirs if token not in mine), None)
    return None if more is None else f"{more!r} is token {theirs[more]} of the teacher alone"
