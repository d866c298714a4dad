"""`EndpointModel`: a chat model behind an OpenAI-compatible server, as a judge.

Made by `JudgeEnvironment`. The only file that names httpx.
"""

from __future__ import annotations

import os
import time
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from nemo_rl.config.judges import JudgeConfig
from nemo_rl.environments.judges.verdicts import Answer, Failure, Limited, Question
from nemo_rl.errors import ConfigError

__all__ = ["EndpointModel"]

_TRIED_AGAIN = frozenset({408, 409, 425, 429, *range(500, 600)})
"""Statuses that another try may not have; all others are the request's fault."""
_TEXT_SHOWN = 300


class EndpointModel:
    """A `JudgeModel` behind a server.

    Args:
        name: in `env.judges`.
    """

    def __init__(self, *, name: str, config: JudgeConfig) -> None:
        self._config = config
        headers = {}
        if config.api_key_env is not None:
            key = os.environ.get(config.api_key_env)
            if not key:
                raise ConfigError(f"env.judges.{name}.api_key_env: the environment has no {config.api_key_env}; set it")
            headers["Authorization"] = f"Bearer {key}"
        limits = httpx.Limits(max_connections=config.max_concurrent)
        self._client = httpx.AsyncClient(headers=headers, limits=limits, timeout=config.request_timeout_s)

    async def ask(self, question: Question) -> Answer:
        """See `JudgeModel`."""
        config = self._config
        body: dict[str, Any] = {"model": config.model, "messages": question.messages}
        body |= {"temperature": question.temperature, "max_tokens": config.max_tokens, "seed": question.seed}
        if config.json_schema:
            body["response_format"] = question.response_format
        url = f"{str(config.base_url).rstrip('/')}/chat/completions"
        try:
            response = await self._client.post(url, json=body)
        except httpx.HTTPError as error:
            raise Failure("transport", f"{url}: {type(error).__name__}: {error}") from error
        if response.status_code == 429:
            raise Limited(f"{url}: status 429: {response.text[:_TEXT_SHOWN]}", wait_s=_retry_after(response))
        if response.status_code != 200:
            kind = "transport" if response.status_code in _TRIED_AGAIN else "refused"
            raise Failure(kind, f"{url}: status {response.status_code}: {response.text[:_TEXT_SHOWN]}")
        return _answer(response)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()


def _answer(response: httpx.Response) -> Answer:
    try:
        body = response.json()
        choice = body["choices"][0]
        text, reason = choice["message"]["content"], choice["finish_reason"]
        usage = body.get("usage") or {}
        tokens = (int(usage["prompt_tokens"]), int(usage["completion_tokens"])) if usage else None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise Failure("transport", f"no completion of OpenAI's form: {response.text[:_TEXT_SHOWN]!r}") from error
    return Answer(text=text if isinstance(text, str) else "", finish_reason=str(reason), tokens=tokens)


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
