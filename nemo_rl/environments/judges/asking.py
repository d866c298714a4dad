"""`AskingJudge`: asks a `JudgeModel` for verdicts, within limits of time, number and money.

Used by `JudgeEnvironment`, on its event loop. Every request and every wait is within the deadline of its row; what
fails is tried again, and ends as a `Failure` that says which kind.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nemo_rl.config.judges import JudgeConfig
from nemo_rl.environments.judges.kept import KeptVerdicts
from nemo_rl.environments.judges.verdicts import (
    Answer,
    Case,
    Failure,
    JudgeModel,
    Limited,
    Question,
    Verdict,
    messages_for,
    read_scores,
    response_format,
)

__all__ = ["AskingJudge"]

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 30.0
"""Seconds before the second try, which double with each; the longest of them."""
_RETRY_TEMPERATURE = 0.5
"""Least temperature of a further try."""
_MILLION = 1_000_000


@dataclass(slots=True)
class _Tries:
    """Holds what has come of a case so far."""

    count: int = 0
    limited: int = 0
    text: str = ""
    tokens: tuple[int, int] = (0, 0)
    last: Failure = field(default_factory=lambda: Failure("late", "no place for a request in time"))


class AskingJudge:
    """A judge whose verdicts are texts of a model.

    Args:
        name: in `env.judges`.
        kept: has the verdicts that are known, and what has been spent.
    """

    def __init__(self, name: str, config: JudgeConfig, kept: KeptVerdicts, model: JudgeModel) -> None:
        self.name, self._config, self._kept, self._model = name, config, kept, model
        self._slots = asyncio.Semaphore(config.max_concurrent)
        self._running: dict[str, asyncio.Future[Verdict]] = {}
        self._next_start = 0.0
        """Time of the loop before which no request begins."""

    async def verdict(self, case: Case) -> Verdict:
        """Return the verdict of a case, or why there is none; equal cases are asked about once."""
        key = self._kept.key(self.name, case)
        running = self._running.get(key)
        if running is not None:
            found = await asyncio.shield(running)
            return Verdict(scores=found.scores, failure=found.failure, kind=found.kind, is_kept=True)
        if (known := self._kept.find(key)) is not None:
            return known
        future = self._running[key] = asyncio.get_running_loop().create_future()
        try:
            async with self._slots:
                found, asked = await self._ask(case, key)
            self._kept.keep(self.name, key, case, found, asked=asked)
            future.set_result(found)
            return found
        except BaseException:
            future.cancel()
            raise
        finally:
            del self._running[key]

    async def close(self) -> None:
        """Close the model."""
        await self._model.close()

    async def _ask(self, case: Case, key: str) -> tuple[Verdict, Sequence[Mapping[str, str]]]:
        tries, started, messages = _Tries(), time.monotonic(), list[dict[str, str]]()
        scores: tuple[float, ...] | None = None
        try:
            messages = messages_for(case, self._config)
            async with asyncio.timeout(self._config.timeout_s):
                scores = await self._scores(case, messages, tries, jitter=random.Random(key))
        except Failure as failure:
            tries.last = failure
        except TimeoutError:
            limit = f"no verdict within timeout_s {self._config.timeout_s:g} s"
            tries.last = Failure("late", f"{limit}; the last try: {tries.last}")
        verdict = Verdict(
            scores=scores,
            failure="" if scores is not None else str(tries.last),
            kind="" if scores is not None else tries.last.kind,
            text=tries.text,
            seconds=time.monotonic() - started,
            tries=tries.count,
            limited=tries.limited,
            tokens=tries.tokens,
        )
        return verdict, messages

    async def _scores(
        self, case: Case, messages: list[dict[str, str]], tries: _Tries, *, jitter: random.Random
    ) -> tuple[float, ...]:
        """Return the scores of the first try that gives them; raise the Failure of the last one."""
        num_limited = 0
        while True:
            self._check_budget(tries)
            await self._wait_for_turn()
            wait_s = min(_FIRST_WAIT_S * 2 ** (tries.count + num_limited), _LONGEST_WAIT_S) * jitter.uniform(0.5, 1.5)
            try:
                answer = await self._request(case, messages, number=tries.count)
                tries.count += 1
                tries.text = answer.text
                if answer.tokens is not None:
                    tries.tokens = (tries.tokens[0] + answer.tokens[0], tries.tokens[1] + answer.tokens[1])
                return read_scores(answer, self._config, len(case.responses))
            except Limited as limited:
                num_limited += 1
                tries.limited, tries.last = num_limited, limited
                # All requests of this judge wait.
                wait_s = wait_s if limited.wait_s is None else min(limited.wait_s, self._config.timeout_s)
                self._next_start = max(self._next_start, asyncio.get_running_loop().time() + wait_s)
            except Failure as failure:
                tries.last = failure
                tries.count += failure.kind != "unreadable"
                if failure.kind in ("refused", "too_long") or tries.count > self._config.retries:
                    raise
                await asyncio.sleep(0.0 if failure.kind == "unreadable" else wait_s)

    async def _wait_for_turn(self) -> None:
        """Wait until the rate limit has room for another request."""
        clock, per_minute = asyncio.get_running_loop().time, self._config.max_requests_per_minute
        while (now := clock()) < self._next_start:
            await asyncio.sleep(self._next_start - now)
        if per_minute is not None:
            self._next_start = clock() + 60.0 / per_minute

    def _check_budget(self, tries: _Tries) -> None:
        config = self._config
        read, written = self._kept.spent.get(self.name, (0, 0))
        read, written = read + tries.tokens[0], written + tries.tokens[1]
        if config.budget_tokens is not None and read + written >= config.budget_tokens:
            raise Failure("budget", f"{read + written} tokens are spent, and budget_tokens is {config.budget_tokens}")
        cost = (read * config.price_per_million_tokens[0] + written * config.price_per_million_tokens[1]) / _MILLION
        if config.budget_cost is not None and cost >= config.budget_cost:
            raise Failure("budget", f"{cost:g} is spent, and budget_cost is {config.budget_cost:g}")

    async def _request(self, case: Case, messages: list[dict[str, str]], *, number: int) -> Answer:
        config, place = self._config, self._config.base_url or self._config.kind
        # Without a draw another try would give the same text.
        temperature = config.temperature if number == 0 else max(config.temperature, _RETRY_TEMPERATURE)
        question = Question(
            case=case,
            messages=messages,
            temperature=temperature,
            seed=number,
            response_format=response_format(config, len(case.responses)),
        )
        try:
            async with asyncio.timeout(config.request_timeout_s):
                answer = await self._model.ask(question)
        except Failure:
            raise
        except TimeoutError as error:
            raise Failure("transport", f"{place}: no answer within {config.request_timeout_s:g} s") from error
        except Exception as error:
            # Code of the user may fail in any way.
            raise Failure("transport", f"{place}: {type(error).__name__}: {error}") from error
        if not isinstance(answer, Answer):
            raise Failure("refused", f"{place}: expected an Answer, got {type(answer).__name__}")
        has_budget = config.budget_tokens is not None or config.budget_cost is not None
        if answer.tokens is None and has_budget:
            raise Failure("refused", f"{place}: reports no usage, which a budget needs")
        return answer
