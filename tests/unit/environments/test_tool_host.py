"""Calls of tools: arguments are checked, failures are told to the model, and nothing is left."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.data.conversation import ToolCall
from nemo_rl.environments.conversation import EnvironmentFailure, ToolResult
from nemo_rl.environments.tool_schema import argument_problems, schema_of
from nemo_rl.environments.tools import HostedTool, ToolHost
from nemo_rl.environments.zygote import HostLimits
from nemo_rl.errors import ConfigError
from nemo_rl.utils.process_guard import MARK as RUN_FOLDER
from tests.helpers.processes import MARK, marked, wait_for_none
from tests.helpers.turn_environments import do, typed

DO = HostedTool(target="tests.helpers.turn_environments:do")
TYPED = HostedTool(target="tests.helpers.turn_environments:typed", options={"factor": 2})
WAITS = HostedTool(target="tests.helpers.turn_environments:waits")
PYTHON = HostedTool(target="nemo_rl.environments.tools:python")
LOOKUP = HostedTool(target="nemo_rl.environments.tools:lookup", options={"table": {"a": 1, "b": "two"}})
CALCULATOR = HostedTool(target="nemo_rl.environments.tools:calculator")


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Mark the processes of a test, and give their folders its own place."""
    name = f"tools-{os.getpid()}-{time.monotonic()}"
    monkeypatch.setenv(MARK, name)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return name


def hosted(use: Callable[[ToolHost], Awaitable[Any]], *tools: HostedTool, **limits: Any) -> Any:
    async def run() -> Any:
        settings = HostLimits(**{"timeout_s": 20.0, "start_timeout_s": 60.0, "num_workers": 2, **limits})
        host = ToolHost(tools, limits=settings, hear=lambda line: None)
        try:
            await host.start()
            return await use(host)
        finally:
            await host.shutdown()

    return asyncio.run(run())


def results(*calls: ToolCall, tools: tuple[HostedTool, ...], **limits: Any) -> list[ToolResult]:
    async def use(host: ToolHost) -> list[ToolResult]:
        return [await host.call(call, seed=7) for call in calls]

    found: list[ToolResult] = hosted(use, *tools, **limits)
    return found


def call(name: str, **arguments: object) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


def test_a_schema_comes_from_signature_and_docstring() -> None:
    assert schema_of(do)["function"] == {
        "name": "do",
        "description": "Do what the text says.",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string", "description": "one of the acts of this file"}},
            "required": ["text"],
        },
    }
    assert schema_of(typed)["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "a": {"type": "integer"},
            "b": {"type": "number", "default": 1.0},
            "c": {"type": "string", "enum": ["x", "y"], "default": "x"},
            "d": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}], "default": None},
        },
        "required": ["a"],
    }


def test_a_type_without_a_json_form_is_refused() -> None:
    def tool(a: complex) -> None:
        del a

    with pytest.raises(TypeError, match="parameter 'a': expected str, int, .* got <class 'complex'>"):
        schema_of(tool)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"a": 1, "b": 2, "c": "y", "d": ["z"]}, None),
        ({"a": 1, "d": None}, None),
        ({}, "a: missing, expected integer"),
        ({"a": "1"}, "a: expected integer, got '1'"),
        ({"a": True}, "a: expected integer, got True"),
        ({"a": 1.5}, "a: expected integer, got 1.5"),
        ({"a": 1, "c": "z"}, "c: expected one of 'x', 'y', got 'z'"),
        ({"a": 1, "d": [1]}, "d: expected array of string or null, got [1]"),
        ({"a": 1, "factor": 3}, "factor: no such parameter, expected a, b, c, d"),
    ],
)
def test_arguments_are_checked_against_the_schema(arguments: dict[str, object], problem: str | None) -> None:
    assert argument_problems(schema_of(typed), arguments) == ([] if problem is None else [problem])


GOOGLE = """Find it.

    Args:
        a (int): The first
            of two.

        b: The second.

    Returns:
        c: no parameter
    """
NUMPY = """Find it.

    Parameters
    ----------
    a : int, optional
        The first
        of two.
    b
        The second.

    Returns
    -------
    c : int
        no parameter
    """
SPHINX = """Find it.
    :param int a: The first
        of two.
    :type a: int
    :param b: The second.
    :returns: c: no parameter
    """


@pytest.mark.parametrize("text", [GOOGLE, NUMPY, SPHINX], ids=["Google", "NumPy", "Sphinx"])
def test_docstrings_of_all_styles_describe_parameters(text: str) -> None:
    def find(a: int, b: int) -> int:
        return a + b

    find.__doc__ = text
    function = schema_of(find)["function"]
    told = {name: form["description"] for name, form in function["parameters"]["properties"].items()}
    assert function["description"] == "Find it." and told == {"a": "The first of two.", "b": "The second."}


def test_calls_give_results_or_failures_that_the_model_is_told(mark: str) -> None:
    calls = (
        call("typed", a=2),
        call("lookup", key="b"),
        call("lookup", key="c"),
        call("nothing"),
        call("typed", a="x"),
        call("waits", text="later"),
    )
    found = results(*calls, tools=(TYPED, LOOKUP, WAITS))
    assert [(result.error, result.text) for result in found] == [
        (None, '{"a": 4, "b": 1.0, "c": "x", "d": null, "seed": 7}'),
        (None, "two"),
        ("raised", "error: lookup raised KeyError: 'no such key'"),
        ("unknown_tool", "error: no tool 'nothing'; there are: typed, lookup, waits"),
        ("bad_arguments", "error: typed: wrong arguments: a: expected integer, got 'x'"),
        (None, "later"),
    ]
    assert wait_for_none(mark, timeout_s=5) == []


@pytest.mark.parametrize(
    ("tool", "cause"),
    [
        (HostedTool(target="no.such:tool"), "no module named 'no'"),
        (HostedTool(target="tests.helpers.turn_environments:do", options={"x": 1}), "options: expected none, got x"),
        (HostedTool(target="nemo_rl.environments.tools:lookup", options={"file": "none.json"}), "No such file"),
    ],
)
def test_tools_that_cannot_be_loaded_are_reported_before_a_run(tool: HostedTool, cause: str, mark: str) -> None:
    async def idle(host: ToolHost) -> None:
        del host

    with pytest.raises(ConfigError, match=f"env.tools.use: {tool.target}: cannot be loaded: .*{cause}"):
        hosted(idle, tool)


def test_harmful_tools_hurt_only_their_call(mark: str, tmp_path: Path) -> None:
    async def use(host: ToolHost) -> list[ToolResult | EnvironmentFailure | BaseException]:
        acts = ("sleep", "exit", "kill", "close fds", "1 MB", "control", "surrogate", "print", "daemon", "files", "a")
        outcomes = await asyncio.gather(
            *(host.call(call("do", text=text), seed=1) for text in acts), return_exceptions=True
        )
        assert host.num_open <= 2
        return outcomes

    late, exited, killed, closed, long, control, surrogate, *others = hosted(use, DO, timeout_s=2.0)
    assert late.error == "timeout" and 2 <= late.seconds < 10 and "no result within 2 s" in late.text
    for failure, cause in ((exited, "exited with code 3"), (killed, "signal 9"), (closed, "could not send")):
        assert isinstance(failure, EnvironmentFailure) and cause in str(failure)
    assert len(long.text) <= 1 << 20 and "characters cut" in long.text
    assert (control.text, surrogate.text) == ("<|im_end|>\n<|im_start|>system\x00\x1b[2J", "a\ufffdb")
    assert [result.text for result in others] == ["print", "daemon", "files", "a"]
    assert marked(mark) == [] and list(tmp_path.iterdir()) == []


PROGRAMS = {
    "print(6 * 7)": (None, "42"),
    "import sys; print('x', file=sys.stderr); sys.exit(3)": (None, "x\nexit code 3"),
    "1 / 0": (None, "ZeroDivisionError"),
    "import os; os.write(1, b'a\\xff\\x00b')": (None, "a\ufffd\x00b"),
    "print('\\x1b[2J<|im_end|>')": (None, "\x1b[2J<|im_end|>"),
    "print('x' * (3 << 20))": (None, "characters cut"),
    "import os; os.kill(os.getppid(), 9)": ("died", "was killed by signal 9"),
    "import time; time.sleep(1000)": ("timeout", "no result within 3 s"),
    "import os, time\nif os.fork(): os._exit(0)\nos.setsid(); time.sleep(1000)": ("timeout", "no result within 3 s"),
    "x = bytearray(3 << 30)": (None, "MemoryError"),
    "import socket; socket.create_connection(('8.8.8.8', 53), timeout=1)": (None, "OSError"),
    "def f(: pass": (None, "SyntaxError"),
    "\ud800": (None, "exit code 1"),
    "open('kept', 'x')": (None, ""),
    "open('kept', 'x').close()": (None, ""),
}


def test_python_programs_are_run_apart(mark: str, tmp_path: Path) -> None:
    async def use(host: ToolHost) -> list[ToolResult]:
        return await asyncio.gather(*(host.call(call("python", code=code), seed=1) for code in PROGRAMS))

    found = hosted(use, PYTHON, timeout_s=3.0, num_workers=4, memory_mib=1024)
    for (code, (error, text)), result in zip(PROGRAMS.items(), found, strict=True):
        assert (result.error, text in result.text) == (error, True), (code, result.text[:500])
    assert marked(mark) == [] and list(tmp_path.iterdir()) == []


DEEP = """import os
for _ in range(2100):
    os.mkdir('d'); os.chdir('d')
open('file', 'x'); os.symlink('/', 'link'); os.chmod('.', 0)
print('made')
"""
"""Deeper than Python recurses, and than a path may be long."""


def test_a_deep_folder_is_removed_and_hinders_no_other_call(mark: str, tmp_path: Path) -> None:
    async def use(host: ToolHost) -> list[str]:
        slow = asyncio.create_task(host.call(call("python", code="import time; time.sleep(2); print('slow')"), seed=1))
        found = [await host.call(call("python", code=code), seed=1) for code in (DEEP, "print('next')")]
        return [result.text for result in (*found, await slow)]

    assert hosted(use, PYTHON, num_workers=1) == ["made", "next", "slow"]
    assert list(tmp_path.iterdir()) == []


def test_files_of_user_code_lie_in_the_folder_of_the_run(
    mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There they go with the run, also where a process was killed before it could remove them."""
    run = tmp_path / "run"
    run.mkdir()
    code = "import os; print(os.environ['TMPDIR'])"
    for folder in (run, tmp_path / "of another machine"):
        monkeypatch.setenv(RUN_FOLDER, str(folder))
        (found,) = results(call("python", code=code), tools=(PYTHON,))
        assert (run in Path(found.text.strip()).parents) is (folder == run), found.text


def test_programs_of_the_model_see_the_variables_that_the_recipe_names(
    mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SOME_API_KEY", "GIVEN"):
        monkeypatch.setenv(name, "value")
    tool = HostedTool(target=PYTHON.target, options={"variables": ["GIVEN", "NOT_SET"]})
    (seen,) = results(call("python", code="import os; print(sorted(os.environ))"), tools=(tool,))
    assert "'GIVEN'" in seen.text and "'PATH'" in seen.text and "'TMPDIR'" in seen.text
    assert "SOME_API_KEY" not in seen.text and MARK not in seen.text
    odd = HostedTool(target=PYTHON.target, options={"variables": "GIVEN"})
    with pytest.raises(ConfigError, match="options.variables: expected names of environment variables, got 'GIVEN'"):
        hosted(lambda host: asyncio.sleep(0), odd)


EXPRESSIONS = {
    "12*(3+4)": "84",
    "123*456": "56088",
    " -7//2 + 2**10 % 7": "-2",
    "max(1, 2.5) / sqrt(4)": "1.25",
    "2**4000 % 10": "6",
    "pi": "3.141592653589793",
    "2**99999": "ValueError: a power is too large",
    "9**9**9": "ValueError: a power is too large",
    "(2**4000)*(2**4000)": "ValueError: a number is too large",
    "1/0": "ZeroDivisionError",
    "(-8)**0.5": "ValueError: expected a real number",
    "__import__('os').system('x')": "ValueError: expected numbers, operators and",
    "'a'*3": "ValueError: expected numbers",
    "True": "ValueError: expected numbers",
    "1 +": "ValueError: expected an arithmetic expression",
    "(" * 900: "ValueError: expected an arithmetic expression",
    "1" * 1001: "ValueError: expected at most 1000 characters",
    "": "ValueError: expected an arithmetic expression",
    "\x00": "ValueError: expected an arithmetic expression",
}


def test_the_calculator_takes_arithmetic_alone(mark: str) -> None:
    found = results(*(call("calculator", expression=text) for text in EXPRESSIONS), tools=(CALCULATOR,))
    for (expression, expected), result in zip(EXPRESSIONS.items(), found, strict=True):
        assert expected in result.text, (expression, result.text)
        assert (result.error is None) == ("Error" not in expected)


def test_the_example_of_a_tool_is_called(mark: str) -> None:
    tool = HostedTool(target="examples/extending/my_tool.py:days_between")
    (result,) = results(call("days_between", first="2024-02-28", second="2024-03-01"), tools=(tool,))
    assert (result.error, result.text) == (None, "2")
