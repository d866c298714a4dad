"""What the checks look at: the config and what it names, opened once. `Subject` is made by `preflight`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from nemo_rl.algorithms.identity import first_start
from nemo_rl.config.schema import MasterConfig
from nemo_rl.data.datasets import PromptSet, build_prompt_sets
from nemo_rl.data.tokenizer import load_tokenizer, stop_token_ids
from nemo_rl.models.hf_folder import open_weights
from nemo_rl.models.loading import load_model_config
from nemo_rl.utils.checkpoint import Checkpoint, CheckpointManager

__all__ = ["Subject", "nearest_folder"]


MAX_ROWS = 20_000
"""Rows of each source that are looked at when no run follows, which reads all of them: seconds of templates."""


class Subject:
    """Every property raises a `UserError` when what it opens cannot be opened.

    Args:
        is_alone: whether no run follows, which would look at every row and compare it with a checkpoint itself.
    """

    def __init__(self, config: MasterConfig, *, is_alone: bool = False) -> None:
        self.config, self.is_alone = config, is_alone

    @cached_property
    def model_config(self) -> PretrainedConfig:
        """config.json of the model folder."""
        return load_model_config(self.config.policy.model_name)

    @cached_property
    def num_parameters(self) -> int:
        """From the headers of the weight files, every one of which is opened."""
        weights = open_weights(self.config.policy.model_name, self.model_config)
        return sum(math.prod(weights.shape(name)) for name in weights.names())

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """With the chat template of the config, if it has one."""
        given = self.config.policy.tokenizer
        return load_tokenizer(given.name or self.config.policy.model_name, chat_template=given.chat_template)

    @cached_property
    def resume_from(self) -> Checkpoint | None:
        """The checkpoint that a run would continue from; its contents are not compared."""
        section = self.config.checkpointing
        if not (section.enabled and section.resume):
            return None
        manager = CheckpointManager(self.config.checkpoint_dir, keep_top_k=None, metric_name=section.metric_name)
        return manager.choose(with_optimizer=section.load_optimizer, reads_files=False).checkpoint

    @cached_property
    def prompt_sets(self) -> Mapping[str, PromptSet]:
        """Prompts by the dotted paths of their sections, of large sources the first ones."""
        data = self.config.data
        now = first_start(self.resume_from)
        train, held_out = build_prompt_sets(data, self.tokenizer, now=now, max_rows=MAX_ROWS)
        return {"data.train": train, **{data.held_out_key(name): found for name, found in held_out.items()}}

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end a response."""
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
