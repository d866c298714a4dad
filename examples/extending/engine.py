"""A generation engine of your own: the plainest loop there is, one row at a time and without a cache."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from nemo_rl.models.generation.interfaces import EngineSpec, GenerationInterface, GenerationOutput, GenerationRequest
from nemo_rl.models.hf.loading import load_causal_lm
from nemo_rl.models.weight_sync.target import ModuleRefitTarget

__all__ = ["PlainEngine"]


class PlainEngine(ModuleRefitTarget, GenerationInterface):
    """Temperature alone shapes what is sampled. `ModuleRefitTarget` takes the new weights.

    Options: `float64`, true computes in double precision.
    """

    def __init__(self, spec: EngineSpec) -> None:
        torch.set_num_threads(spec.threads)
        dtype = torch.float64 if spec.policy.generation.options.get("float64") else torch.float32
        self._model = load_causal_lm(spec.policy.model_name, dtype=dtype).eval()
        self._version = -1

    @property
    def refit_module(self) -> torch.nn.Module:
        return self._model

    def hold_version(self, version: int) -> None:
        self._version = version

    @property
    def weight_version(self) -> int:
        return self._version

    @torch.no_grad()
    def generate(self, request: GenerationRequest) -> GenerationOutput:
        given = request.forced or (None,) * len(request.seeds)
        rows = [
            self._sample(request.prompt_ids[row // request.group_size], seed, request, given[row])
            for row, seed in enumerate(request.seeds)
        ]
        return GenerationOutput(
            token_ids=torch.tensor([token for tokens, _, _ in rows for token in tokens], dtype=torch.int32),
            logprobs=torch.tensor([value for _, logprobs, _ in rows for value in logprobs]),
            lengths=torch.tensor([len(tokens) for tokens, _, _ in rows], dtype=torch.int64),
            truncated=torch.tensor([truncated for _, _, truncated in rows], dtype=torch.bool),
            weight_version=self._version,
        )

    def _sample(
        self, prompt: tuple[int, ...], seed: int, request: GenerationRequest, given: tuple[int, ...] | None
    ) -> tuple[list[int], list[float], bool]:
        """Tokens, drawn or given, their log-probabilities, and whether the length limit ended them."""
        sampling, random = request.sampling, torch.Generator().manual_seed(seed)
        tokens: list[int] = []
        logprobs: list[float] = []
        for place in range(sampling.max_new_tokens if given is None else len(given)):
            logits = self._model(torch.tensor([[*prompt, *tokens]])).logits[0, -1].float()
            # Temperature 0 is greedy: the log-probability is then that of the unchanged distribution.
            scores = (logits / (sampling.temperature or 1.0)).log_softmax(-1)
            drawn = torch.multinomial(scores.exp(), 1, generator=random) if sampling.temperature else scores.argmax()
            token = int(drawn) if given is None else given[place]
            tokens.append(token)
            logprobs.append(float(scores[token]))
            if token in sampling.stop_token_ids:
                return tokens, logprobs, False
        return tokens, logprobs, True

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int) -> int:
        self._model.load_state_dict(dict(weights))
        self.hold_version(version)
        return version

    def prepare_for_generation(self) -> None:
        """Nothing to wake."""

    def finish_generation(self) -> None:
        """Nothing to free."""

    def shutdown(self) -> None:
        self.leave_refit()
