"""What the checks look at: the config and what it names, opened once. `Subject` is made by `preflight`."""

from __future__ import annotations

import math
from functools import cached_property
from pathlib import Path

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from nemo_rl.config.schema import MasterConfig
from nemo_rl.data.tokenizer import load_tokenizer, stop_token_ids
from nemo_rl.models.hf_folder import open_weights
from nemo_rl.models.loading import load_model_config

__all__ = ["Subject", "nearest_folder"]


class Subject:
    """Every property raises a `UserError` when what it opens cannot be opened."""

    def __init__(self, config: MasterConfig) -> None:
        self.config = config

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
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end a response."""
        chosen = self.config.policy.generation.stop_token_ids
        return stop_token_ids(self.config.policy.model_name, self.tokenizer) if chosen is None else tuple(chosen)


def nearest_folder(path: Path) -> Path:
    """`path`, or the first folder above it that exists."""
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path
