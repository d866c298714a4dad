"""`ClassifierJudge`: scores of a Hugging Face model for sequence classification (a Bradley-Terry reward model).

Used by `JudgeEnvironment`. A row is the conversation in the model's own template. The score is that of the row's last
token, whatever its id: a row that ends in the padding token is not cut there.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from nemo_rl.config.judges import JudgeConfig
from nemo_rl.environments.judges.kept import KeptVerdicts
from nemo_rl.environments.judges.verdicts import Case, Verdict
from nemo_rl.errors import ConfigError

__all__ = ["ClassifierJudge"]


class ClassifierJudge:
    """A reward model in this process, on CPUs.

    Args:
        name: in `env.judges`.
        kept: has the scores that are known.

    Raises:
        ConfigError: the folder has no head, several scores, or no chat template.
    """

    def __init__(self, name: str, config: JudgeConfig, kept: KeptVerdicts) -> None:
        self._config, self._kept, self._name = config, kept, name
        key = f"env.judges.{name}.model"
        assert config.model is not None, "a rule asks for it"
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(config.model)
            model, found = AutoModelForSequenceClassification.from_pretrained(
                config.model, dtype=torch.float32, output_loading_info=True
            )
        except (OSError, ValueError) as error:
            raise ConfigError(f"{key}: {config.model!r} cannot be loaded as a sequence classifier: {error}") from error
        if wrong := sorted([*found["missing_keys"], *found["mismatched_keys"]]):
            raise ConfigError(
                f"{key}: {config.model!r} has no weights of {wrong[0]}, which would be random numbers; name a reward "
                "model, not a model that it was made from"
            )
        if model.config.num_labels != 1:
            raise ConfigError(f"{key}: expected a model with one score (num_labels 1), got {model.config.num_labels}")
        if not isinstance(dict(model.named_children()).get("score"), torch.nn.Linear):
            raise ConfigError(
                f"{key}: {type(model).__name__} has no head named 'score' over its last token, as reward models have; "
                "serve it behind an endpoint"
            )
        if not self._tokenizer.chat_template:
            raise ConfigError(f"{key}: the tokenizer of {config.model!r} has no chat template, by which it was trained")
        self._model = model.eval()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="classifier")

    async def verdict(self, case: Case) -> Verdict:
        """Return the score of a case, as the model gives it, without bounds."""
        key = self._kept.key(self._name, case)
        if (known := self._kept.find(key)) is not None:
            return known
        verdict = await asyncio.get_running_loop().run_in_executor(self._thread, self._score, case)
        self._kept.keep(self._name, key, case, verdict)
        return verdict

    async def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False)

    def _score(self, case: Case) -> Verdict:
        started = time.monotonic()
        ids = self.token_ids(case.prompt, case.responses[0])
        if len(ids) > self._config.max_tokens:
            why = f"{len(ids)} tokens of prompt and response, and max_tokens is {self._config.max_tokens}"
            return Verdict(scores=None, failure=why, kind="too_long")
        score = self.scores([ids])[0]
        return Verdict(scores=(score,), seconds=time.monotonic() - started, tries=1, tokens=(len(ids), 0))

    def token_ids(self, prompt: str, response: str) -> list[int]:
        """Return the tokens of a row, in the model's own template."""
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
        # The template has the token of the beginning already.
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def scores(self, rows: list[list[int]]) -> list[float]:
        """Return the score of the last token of each row; rows are padded on the right."""
        lengths = torch.tensor([len(row) for row in rows])
        ids = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
        mask = torch.arange(ids.shape[1]) < lengths[:, None]
        ids[mask] = torch.tensor([token for row in rows for token in row])
        with torch.inference_mode():
            hidden = self._model.base_model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
            last = hidden[torch.arange(len(rows)), lengths - 1]
            return self._model.score(last).squeeze(-1).float().tolist()
