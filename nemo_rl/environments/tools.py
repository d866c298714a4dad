"""Built-in tools: `calculator`, `python`, `lookup`. They run in processes of `ToolHost`; standard library only.

`ToolHost`: calls of tools in processes that can be killed.

Used by the rollout worker inside one event loop. What the model can change is told to the model as the text of a
result: a wrong name, wrong arguments, an exception, a call that takes too long. The death of the process of a user's
tool is a failure of the infrastructure; the process of a tool that runs the model's own code may die of that code.
"""

from __future__ import annotations

import ast
import asyncio
import json
import math
import operator
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, cast

from nemo_rl.data.conversation import ToolCall
from nemo_rl.environments.conversation import EnvironmentFailure, ToolError, ToolResult
from nemo_rl.environments.tool_schema import argument_problems
from nemo_rl.environments.wire import shorten_text, sound_text
from nemo_rl.environments.zygote import Fork, ForkError, ForkLate, HostLimits, Zygote, ZygoteFailed
from nemo_rl.errors import ConfigError
from nemo_rl.utils.console import printable
from nemo_rl.utils.files import read_plain_text

__all__ = ["HostedTool", "ToolHost", "calculator", "lookup", "python", "unknown_tool"]


_EXPRESSION_LIMIT = 1000
"""Characters of an expression."""
_INTEGER_BITS = 4096
"""Most bits of an integer, about 1,200 digits: larger ones take time and no conversation needs them."""
_OUTPUT_LIMIT_BYTES = 1 << 20
_VARIABLES = ("PATH", "HOME", "LANG", "TMPDIR")
"""Environment variables that every program of `python` gets."""
_OPERATORS: Mapping[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "abs": abs,
    "min": min,
    "max": max,
    "round": round,
    "sqrt": math.sqrt,
    "exp": math.exp,
    "log": math.log,
    "sin": math.sin,
    "cos": math.cos,
    "tan": math.tan,
    "gcd": math.gcd,
}
_CONSTANTS = {"pi": math.pi, "e": math.e}


def calculator(expression: str) -> str:
    """Calculate the value of an arithmetic expression.

    Args:
        expression: in the form of Python, such as 12*(3+4) or sqrt(2)
    """
    if len(expression) > _EXPRESSION_LIMIT:
        raise ValueError(f"expected at most {_EXPRESSION_LIMIT} characters, got {len(expression)}")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("expected an arithmetic expression such as 12*(3+4)") from error
    return str(value)


def _value(node: ast.AST) -> int | float:
    match node:
        case ast.Constant(value=int() | float()) if not isinstance(node.value, bool):
            return _bounded(node.value)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _OPERATORS:
            return _bounded(_OPERATORS[type(sign)](_value(operand)))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            return _combined(sign, _value(left), _value(right))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _bounded(_FUNCTIONS[name](*map(_value, arguments)))
    raise ValueError(f"expected numbers, operators and {', '.join([*_FUNCTIONS, *_CONSTANTS])}")


def _combined(sign: ast.operator, left: int | float, right: int | float) -> int | float:
    if isinstance(sign, ast.Pow) and _power_bits(left, right) > _INTEGER_BITS:
        raise ValueError(f"a power is too large: more than {_INTEGER_BITS} bits")
    return _bounded(_OPERATORS[type(sign)](left, right))


def _power_bits(base: int | float, exponent: int | float) -> float:
    is_large = isinstance(base, int) and isinstance(exponent, int) and abs(base) > 1
    return exponent * math.log2(abs(base)) if is_large else 0.0


def _bounded(value: Any) -> int | float:
    if isinstance(value, int) and value.bit_length() > _INTEGER_BITS:
        raise ValueError(f"a number is too large: more than {_INTEGER_BITS} bits")
    if not isinstance(value, (int, float)):
        raise ValueError(f"expected a real number, got {value!r}")
    return value


def python(code: str, *, variables: Sequence[str] = ()) -> str:
    """Run a Python program and return what it prints.

    Args:
        code: the program; print what you want to see
    """
    # A file of its own: a text of 1 MB is no argument of a command, and standard input is empty.
    Path("program.py").write_text(code, encoding="utf-8", errors="surrogatepass")
    command = [sys.executable, "-I", "program.py"]
    # Code that the model wrote sees no other variables: they hold keys.
    known = {name: os.environ[name] for name in (*_VARIABLES, *variables) if name in os.environ}
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=known
    ) as process:
        assert process.stdout is not None, "it was asked for a pipe"
        output, num_dropped = bytearray(), 0
        while part := os.read(process.stdout.fileno(), 1 << 16):
            kept = part[: _OUTPUT_LIMIT_BYTES - len(output)]
            output += kept
            num_dropped += len(part) - len(kept)
    text = output.decode("utf-8", "replace")
    if num_dropped:
        text += f"\n... and {num_dropped} more bytes"
    if process.returncode:
        text = f"{text.rstrip()}\nexit code {process.returncode}"
    return text.strip("\n")


vars(python)["runs_code"] = True


def _check_python(*, variables: object = ()) -> None:
    if not isinstance(variables, list | tuple) or not all(isinstance(name, str) for name in variables):
        raise ValueError(f"python: options.variables: expected names of environment variables, got {variables!r}")


vars(python)["check_options"] = _check_python


def lookup(key: str, *, table: Mapping[str, object] | None = None, file: str | None = None) -> object:
    """Look up the entry of a key in the table.

    Args:
        key: the key
    """
    entries = table if table is not None else _table_of(file)
    if key not in entries:
        raise KeyError("no such key")
    return entries[key]


def _check_lookup(*, table: Mapping[str, object] | None = None, file: str | None = None) -> None:
    if table is None:
        _table_of(file)


vars(lookup)["check_options"] = _check_lookup


@cache
def _table_of(file: str | None) -> Mapping[str, object]:
    if file is None:
        raise ValueError("lookup: set options.table to a table, or options.file to a JSON file that holds one")
    entries = json.loads(read_plain_text(Path(file)))
    if not isinstance(entries, dict):
        raise ValueError(f"{file}: expected a JSON object, got {type(entries).__name__}")
    return entries


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


def unknown_tool(name: str, known: Iterable[str]) -> str:
    """Return what the model is told of a call of a tool that is not there."""
    return f"error: no tool {name[:_TOLD_LIMIT]!r}; there are: {', '.join(known)}"


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
            return "unknown_tool", unknown_tool(call.name, self._by_name)
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
