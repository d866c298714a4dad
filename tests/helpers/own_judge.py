"""A judge as a user would write it: `tests.helpers.own_judge:OwnJudge`."""

from __future__ import annotations

import asyncio
import json

from nemo_rl.config.judges import JudgeConfig
from nemo_rl.environments.judges.verdicts import Answer, Question

__all__ = ["OwnJudge"]


class OwnJudge:
    """Gives the response `options.best` 10, others 1; `raise`, `hang` and `later` misbehave as they are called."""

    def __init__(self, *, name: str, config: JudgeConfig) -> None:
        self._best, self._counts = config.options["best"], config.options.get("counts", True)

    async def ask(self, question: Question) -> Answer:
        [response] = question.case.responses
        if response == "raise":
            raise KeyError(response)
        if response == "hang":
            await asyncio.sleep(600)
        score = 10 if response == self._best else 1
        text = "hm" if response == "later" and question.seed == 0 else json.dumps({"score": score})
        return Answer(text=text, tokens=(5, 2) if self._counts else None)

    async def close(self) -> None:
        """Nothing is open."""
