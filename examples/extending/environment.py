"""An environment of your own: right or wrong, less a little for every token, so that short answers win."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_rl.config.env import EnvConfig
from nemo_rl.data.datasets import Prompt
from nemo_rl.environments.interfaces import EnvReport, Response
from nemo_rl.environments.process_environment import EnvironmentStart

__all__ = ["ShortAnswers"]


class ShortAnswers:
    """Options: `token_cost`, subtracted for each token of the response."""

    def __init__(self, cfg: EnvConfig, start: EnvironmentStart) -> None:
        del start  # nothing is started, and nothing is printed
        self._token_cost = float(str(cfg.options.get("token_cost", 0.0)))

    def score(self, prompts: Sequence[Prompt], responses: Sequence[Response]) -> EnvReport:
        """Rewards, and their two parts, which get a curve each."""
        pairs = zip(prompts, responses, strict=True)
        right = tuple(float(response.text.strip() == str(prompt.answer)) for prompt, response in pairs)
        cost = tuple(-self._token_cost * response.num_tokens for response in responses)
        rewards = tuple(map(sum, zip(right, cost, strict=True)))
        return EnvReport(rewards=rewards, components={"right": right, "cost": cost})

    def shutdown(self) -> None:
        """Nothing to end."""
