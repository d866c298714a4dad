"""`EngineModel`: a chat model in an embedded engine of the run's own, as a judge.

Made by `JudgeEnvironment` in the rollout worker, and ended with it. Invariant: no refit reaches the engine, so its
weights are those of the folder until the run ends.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from nemo_rl.config.judges import JudgeConfig
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.data.tokenizer import load_tokenizer, stop_token_ids
from nemo_rl.environments.judges.verdicts import Answer, Failure, Question
from nemo_rl.errors import ConfigError, UserError
from nemo_rl.models.generation.requests import GenerationRequest, SamplingParams
from nemo_rl.models.generation.torch_engine.engine import TorchEngine
from nemo_rl.models.hf.loading import load_model_config, model_folder

__all__ = ["EngineModel"]


class EngineModel:
    """A `JudgeModel` on the CPUs of this process, in float32, one request at a time.

    Args:
        name: in `env.judges`.

    Raises:
        ConfigError: the folder holds no model that can be loaded, or no chat template.
    """

    def __init__(self, *, name: str, config: JudgeConfig) -> None:
        assert config.model is not None, "a rule asks for it"
        self._config, key = config, f"env.judges.{name}.model"
        try:
            folder = model_folder(config.model, where=key)
            self._most = int(load_model_config(folder).get_text_config().max_position_embeddings)
            self._tokenizer = load_tokenizer(folder)
            self._stop_ids = stop_token_ids(folder, self._tokenizer)
            policy = PolicyConfig(model_name=folder, precision="float32", max_total_sequence_length=self._most)
            self._engine = TorchEngine.from_config(policy, weight_version=0)
        except UserError as error:
            raise ConfigError(f"{key}: {error}") from error
        if not self._tokenizer.chat_template:
            raise ConfigError(f"{key}: the tokenizer of {config.model!r} has no chat template; name a chat model")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="judge engine")

    async def ask(self, question: Question) -> Answer:
        """See `JudgeModel`."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._sample, question)

    async def close(self) -> None:
        """End the engine, behind the request that it may have."""
        self._thread.submit(self._engine.shutdown)
        self._thread.shutdown(wait=False)

    def _sample(self, question: Question) -> Answer:
        messages = [dict(message) for message in question.messages]
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        if len(ids) >= self._most:
            raise Failure("too_long", f"{len(ids)} tokens of a request, and the model takes {self._most}")
        sampling = SamplingParams(
            temperature=question.temperature, max_new_tokens=self._config.max_tokens, stop_token_ids=self._stop_ids
        )
        output = self._engine.generate(GenerationRequest(prompt_ids=(ids,), seeds=(question.seed,), sampling=sampling))
        said = output.token_ids.tolist()
        return Answer(
            text=self._tokenizer.decode(said, skip_special_tokens=True),
            finish_reason="length" if output.truncated.item() else "stop",
            tokens=(len(ids), len(said)),
        )
