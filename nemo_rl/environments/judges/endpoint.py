"""`EndpointJudge`: asks a chat model behind an OpenAI-compatible server for verdicts.

Used by `JudgeEnvironment`, on its event loop. The only file that names httpx. Every request and every wait is within
the deadline of its row; what fails is tried again, and ends as a `Failure` that says which kind.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from nemo_rl.config.judges import JudgeConfig
from nemo_rl.environments.judges.kept import KeptVerdicts
from nemo_rl.environments.judges.verdicts import (
    Answer,
    Case,
    Failure,
    Verdict,
    messages_for,
    read_scores,
    response_format,
)
from nemo_rl.errors import ConfigError

__all__ = ["EndpointJudge"]

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 30.0
"""Seconds before the second try, which double with each; the longest of them."""
_TRIED_AGAIN = frozenset({408, 409, 425, 429, *range(500, 600)})
"""Statuses that another try may not have; all others are the request's fault."""
_RETRY_TEMPERATURE = 0.5
"""Least temperature of a further try."""
_MILLION = 1_000_000
_TEXT_SHOWN = 300


@dataclass(slots=True)
class _Tries:
    """Holds what has come of a case so far."""

    count: int = 0
    limited: int = 0
    text: str = ""
    tokens: tuple[int, int] = (0, 0)
    last: Failure = field(default_factory=lambda: Failure("late", "no place for a request in time"))


class EndpointJudge:
    """A chat model that gives verdicts.

    Args:
        name: in `env.judges`.
        kept: has the verdicts that are known, and what has been spent.
    """

    def __init__(self, name: str, config: JudgeConfig, kept: KeptVerdicts) -> None:
        self.name, self._config, self._kept = name, config, kept
        headers = {}
        if config.api_key_env is not None:
            key = os.environ.get(config.api_key_env)
            if not key:
                raise ConfigError(f"env.judges.{name}.api_key_env: the environment has no {config.api_key_env}; set it")
            headers["Authorization"] = f"Bearer {key}"
        limits = httpx.Limits(max_connections=config.max_concurrent)
        self._client = httpx.AsyncClient(headers=headers, limits=limits, timeout=config.request_timeout_s)
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
        """Close the connections."""
        await self._client.aclose()

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
                answer = await self._request(messages, count=len(case.responses), number=tries.count)
                tries.count += 1
                tries.text = answer.text
                if answer.tokens is not None:
                    tries.tokens = (tries.tokens[0] + answer.tokens[0], tries.tokens[1] + answer.tokens[1])
                return read_scores(answer, self._config, len(case.responses))
            except _Limited as limited:
                num_limited += 1
                tries.limited, tries.last = num_limited, limited
                # All requests of this judge wait.
                wait_s = wait_s if limited.wait_s is None else min(limited.wait_s, self._config.timeout_s)
                self._next_start = max(self._next_start, asyncio.get_running_loop().time() + wait_s)
            except Failure as failure:
                tries.last = failure
                tries.count += failure.kind != "unreadable"
                if failure.kind == "refused" or tries.count > self._config.retries:
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

    async def _request(self, messages: list[dict[str, str]], *, count: int, number: int) -> Answer:
        config = self._config
        # Without a draw another try would give the same text.
        temperature = config.temperature if number == 0 else max(config.temperature, _RETRY_TEMPERATURE)
        body: dict[str, Any] = {"model": config.model, "messages": messages, "temperature": temperature}
        body |= {"max_tokens": config.max_tokens, "seed": number}
        if config.json_schema:
            body["response_format"] = response_format(config, count)
        url = f"{str(config.base_url).rstrip('/')}/chat/completions"
        try:
            async with asyncio.timeout(config.request_timeout_s):
                response = await self._client.post(url, json=body)
        except TimeoutError as error:
            raise Failure("transport", f"{url}: no answer within {config.request_timeout_s:g} s") from error
        except httpx.HTTPError as error:
            raise Failure("transport", f"{url}: {type(error).__name__}: {error}") from error
        if response.status_code == 429:
            raise _Limited(f"{url}: status 429: {response.text[:_TEXT_SHOWN]}", wait_s=_retry_after(response))
        if response.status_code != 200:
            kind = "transport" if response.status_code in _TRIED_AGAIN else "refused"
            raise Failure(kind, f"{url}: status {response.status_code}: {response.text[:_TEXT_SHOWN]}")
        return self._answer(response)

    def _answer(self, response: httpx.Response) -> Answer:
        try:
            body = response.json()
            choice = body["choices"][0]
            text, reason = choice["message"]["content"], choice["finish_reason"]
            usage = body.get("usage") or {}
            tokens = (int(usage["prompt_tokens"]), int(usage["completion_tokens"])) if usage else None
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise Failure("transport", f"no completion of OpenAI's form: {response.text[:_TEXT_SHOWN]!r}") from error
        has_budget = self._config.budget_tokens is not None or self._config.budget_cost is not None
        if tokens is None and has_budget:
            raise Failure("refused", "the endpoint reports no usage, which a budget needs")
        return Answer(text=text if isinstance(text, str) else "", finish_reason=str(reason), tokens=tokens)


class _Limited(Failure):
    """The server asks to wait.

    Args:
        wait_s: how long; None: it does not say.
    """

    def __init__(self, text: str, *, wait_s: float | None) -> None:
        super().__init__("transport", text)
        self.wait_s = wait_s


def _retry_after(response: httpx.Response) -> float | None:
    """Return the seconds of Retry-After, a number or a date; None where there is none."""
    said = response.headers.get("retry-after", "")
    try:
        return max(0.0, float(said))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(said).timestamp() - time.time())
    except ValueError:
        return None
