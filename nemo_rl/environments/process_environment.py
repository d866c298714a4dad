"""Rewards from a function that runs in killable processes: math, reasoning_gym and custom rewards.

Built by the factory. A response whose scoring takes too long gets 0 or stops the run, as `env.on_timeout` says; a
function that raises, or returns no finite number, always stops it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nemo_rl.config.schema import EnvConfig
from nemo_rl.data.datasets import Prompt
from nemo_rl.environments.interfaces import EnvReport
from nemo_rl.environments.scorer_pool import Outcome, ScorerItem, ScorerPool, ScorerSpec
from nemo_rl.errors import RewardError

__all__ = ["ProcessEnvironment"]

# Characters of a prompt or response in an error message.
TEXT_SHOWN = 200


class ProcessEnvironment:
    """Scores with one function.

    Args:
        cfg: limits and number of processes.
        spec: the function.
        answer_of: what the function gets as `answer`.
    """

    def __init__(self, cfg: EnvConfig, spec: ScorerSpec, *, answer_of: Callable[[Prompt], object]) -> None:
        self._cfg = cfg
        self._spec = spec
        self._answer_of = answer_of
        self._pool = ScorerPool(spec, num_workers=cfg.num_workers, timeout_s=cfg.timeout_s)

    def score(self, prompts: Sequence[Prompt], responses: Sequence[str], truncated: Sequence[bool]) -> EnvReport:
        """Scores every response, truncated ones included: the function sees what the model wrote."""
        del truncated
        items = [
            ScorerItem(prompt=prompt.text, response=response, answer=self._answer_of(prompt))
            for prompt, response in zip(prompts, responses, strict=True)
        ]
        outcomes = self._pool.score(items)
        for item, outcome in zip(items, outcomes, strict=True):
            self._check(item, outcome)
        return EnvReport(
            rewards=tuple(self._reward(outcome) for outcome in outcomes),
            num_timeouts=sum(outcome.timed_out for outcome in outcomes),
        )

    def shutdown(self) -> None:
        """Ends the scoring processes. Idempotent."""
        self._pool.shutdown()

    def _check(self, item: ScorerItem, outcome: Outcome) -> None:
        cause = outcome.error
        if outcome.timed_out and self._cfg.on_timeout == "error":
            cause = (
                f"took longer than env.timeout_s {self._cfg.timeout_s:g} s; raise it, or set env.on_timeout=zero to "
                "give such responses reward 0"
            )
        if cause is not None:
            raise RewardError(
                f"reward function {self._spec.target!r} {cause}\n  prompt: {item.prompt[:TEXT_SHOWN]!r}\n"
                f"  response: {item.response[:TEXT_SHOWN]!r}"
            )

    def _reward(self, outcome: Outcome) -> float:
        threshold = self._cfg.score_threshold
        return outcome.reward if threshold is None else float(outcome.reward >= threshold)
