"""`ToolHost`: calls of tools in processes that can be killed.

Used by the rollout worker inside one event loop. What the model can change is told to the model as the text of a
result: a wrong name, wrong arguments, an exception, a call that takes too long. The death of the process of a user's
tool is a failure of the infrastructure; the process of a tool that runs the model's own code may die of that code.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from nemo_rl.data.conversation import ToolCall
from nemo_rl.environments.conversation import EnvironmentFailure, ToolError, ToolResult
from nemo_rl.environments.tool_schema import argument_problems
from nemo_rl.environments.wire import shorten_text, sound_text
from nemo_rl.environments.zygote import Fork, ForkError, ForkLate, HostLimits, Zygote, ZygoteFailed
from nemo_rl.errors import ConfigError
from nemo_rl.utils.console import printable

__all__ = ["HostedTool", "ToolHost"]

_ERROR_LIMIT = 4000
"""Characters of an error's text."""
_TOLD_LIMIT = 400
"""Characters of what the model has written that a result repeats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostedTool:
    """One tool that a recipe names."""

    target: str
    """`module:function` or `FILE.py:function`. A function with the attribute `runs_code` set runs code of the model:
    each call gets a new process, whose death is told to the model."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Keyword-only arguments of the function, which the model does not see; its attribute `check_options`, if there is
    one, is called with them once."""


class ToolHost:
    """Runs calls, each in one of `num_workers` processes; one that is late or dies is replaced.

    Args:
        tools: at least one.
        limits: `num_workers` is the most calls at one time; see `EnvironmentHost` for what is guaranteed without a
            network.
        hear: gets what tools print, line by line, from another thread.
    """

    has_cut = False
    """Results are as long as the tools have made them."""

    def __init__(
        self,
        tools: Sequence[HostedTool],
        *,
        limits: HostLimits,
        hear: Callable[[str], None],
    ) -> None:
        self._names = ", ".join(tool.target for tool in tools)
        described = [{"target": tool.target, "options": dict(tool.options)} for tool in tools]
        self._request = {"service": "tools", "tools": described}
        self._limits, self._hear = limits, hear
        self._places = asyncio.Semaphore(limits.num_workers)
        self._idle: list[Fork] = []
        self._zygote: Zygote | None = None
        self._replacing = asyncio.Lock()
        self._is_closed = False
        self._by_name: dict[str, Mapping[str, Any]] = {}
        self._runs_code: frozenset[str] = frozenset()
        self.source = ""
        """Digest of the sources of the tools."""

    @property
    def schemas(self) -> tuple[Mapping[str, Any], ...]:
        """Return the schema of each tool in the form that chat templates take."""
        return tuple(self._by_name.values())

    @property
    def num_open(self) -> int:
        """Return the number of processes that have not ended."""
        return self._zygote.num_open if self._zygote is not None else 0

    async def start(self) -> None:
        """Load the tools.

        Raises:
            ConfigError: one cannot be loaded, or its signature or options do not fit.
        """
        self._zygote = Zygote(self._request, limits=self._limits, hear=self._hear)
        try:
            ready = await self._zygote.start()
        except ZygoteFailed as error:
            await self.shutdown()
            cause = printable(str(error), limit=_ERROR_LIMIT, keep_lines=True)
            raise ConfigError(f"env.tools.use: {self._names}: cannot be loaded: {cause}") from error
        schemas = cast("list[Mapping[str, Any]]", ready["schemas"])
        self._by_name = {str(schema["function"]["name"]): schema for schema in schemas}
        self._runs_code = frozenset(cast("list[str]", ready["runs_code"]))
        self.source = str(ready["source"])

    async def call(self, call: ToolCall, *, seed: int) -> ToolResult:
        """Return the result of a call, or the failure that the model is told of.

        Args:
            seed: of `random` while the tool runs, and of its keyword-only parameter `seed`.

        Raises:
            EnvironmentFailure: the process of a tool that runs no code of the model died, or cannot be started.
        """
        started = time.monotonic()
        error, text = await self._outcome(call, seed)
        return ToolResult(text=shorten_text(sound_text(text)), error=error, seconds=time.monotonic() - started)

    async def shutdown(self) -> None:
        """End every process and remove every folder. Idempotent."""
        self._is_closed = True
        self._idle.clear()
        if self._zygote is not None:
            await self._zygote.shutdown()

    def kill(self) -> None:
        """End every process and remove every folder, without the event loop. Idempotent."""
        self._is_closed = True
        if self._zygote is not None:
            self._zygote.kill()

    async def _outcome(self, call: ToolCall, seed: int) -> tuple[ToolError | None, str]:
        schema = self._by_name.get(call.name)
        if schema is None:
            return "unknown_tool", f"error: no tool {call.name[:_TOLD_LIMIT]!r}; there are: {', '.join(self._by_name)}"
        if problems := argument_problems(schema, call.arguments):
            return "bad_arguments", f"error: {call.name}: wrong arguments: {'; '.join(problems)}"
        async with self._places:
            fork = await self._take(is_new=call.name in self._runs_code, name=call.name)
            request = {"tool": call.name, "arguments": dict(call.arguments), "seed": seed}
            try:
                answer = await fork.ask(request, form={"text": str}, timeout_s=self._limits.timeout_s)
                if answer.get("changed"):  # by an earlier call
                    await asyncio.shield(fork.end())
                    fork = await self._take(is_new=True, name=call.name)
                    answer = await fork.ask(request, form={"text": str}, timeout_s=self._limits.timeout_s)
                return None, answer["text"]
            except ForkError as error:
                return "raised", f"error: {call.name} {error.text}"
            except ForkLate:
                return "timeout", f"error: {call.name} gave no result within {self._limits.timeout_s:g} s"
            except EnvironmentFailure as error:
                if call.name in self._runs_code and not self._is_closed:
                    return "died", f"error: the process of {call.name} died: {error}"
                raise self._failure(call.name, str(error)) from error
            finally:
                if fork.can_answer and call.name not in self._runs_code:
                    self._idle.append(fork)
                else:
                    await asyncio.shield(fork.end())

    async def _take(self, *, is_new: bool, name: str) -> Fork:
        while self._idle and not is_new:
            fork = self._idle.pop()
            if fork.can_answer:
                return fork
        try:
            return await (await self._living_zygote()).fork(timeout_s=self._limits.timeout_s)
        except (EnvironmentFailure, ZygoteFailed) as error:
            raise self._failure(name, str(error)) from error

    async def _living_zygote(self) -> Zygote:
        async with self._replacing:
            if self._zygote is None or self._is_closed:
                raise EnvironmentFailure("its host is not running")
            if not self._zygote.is_alive:
                await self._zygote.shutdown()
                self._zygote = Zygote(self._request, limits=self._limits, hear=self._hear)
                await self._zygote.start()
            return self._zygote

    def _failure(self, name: str, cause: str) -> EnvironmentFailure:
        return EnvironmentFailure(f"tool {name!r}: {printable(cause, limit=_ERROR_LIMIT, keep_lines=True)}")
