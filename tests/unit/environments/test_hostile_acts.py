"""A hundred acts of hostile code, three hundred in `make test-full`: each ends, its neighbours go on, nothing is left.

The acts are drawn by a seed from all that `hostile_acts` knows, for each place in which code of the model, of users and
of programs runs. `NEMO_RL_TEST_SEED=7` draws others.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.data.conversation import ToolCall
from nemo_rl.environments.conversation import ConversationRow, EnvironmentFailure, Reply, ToolResult, Turn
from nemo_rl.environments.conversation_host import EnvironmentHost
from nemo_rl.environments.programs import ProgramResult, ProgramSpec, run_program
from nemo_rl.environments.scorer_pool import ScoreOutcome, ScorerItem, ScorerPool, ScorerSpec
from nemo_rl.environments.tools import HostedTool, ToolHost
from nemo_rl.environments.wire import NUMBER_LIMIT, TEXT_LIMIT
from nemo_rl.environments.zygote import HostLimits
from nemo_rl.utils.process_guard import remove_folder
from tests.helpers.case_selection import num_examples
from tests.helpers.hostile_acts import DEEDS, OUTER, VALUES
from tests.helpers.hostile_surfaces import LAST_LINES, NEIGHBOUR
from tests.helpers.processes import MARK, wait_for_none

SEED = int(os.environ.get("NEMO_RL_TEST_SEED", "46"))
SURFACES = "tests.helpers.hostile_surfaces"
ROOT = Path(__file__).parents[3]
FIELDS = ("reward", "component", "components", "columns", "messages", "content", "name", "stop", "done", "whole")
ALWAYS: dict[str, set[tuple[str, str]]] = {
    "tool": {("flood channel with lines", ""), ("say lists", ""), ("recursion limit", ""), ("text that lies", "")},
    "python": {("SIGSTOP to parent", ""), ("many files", "")},
    "environment": {("say no keys", "open"), ("SIGSTOP to grandparent", "reply"), ("many names", "components")},
    "program": {("digits", ""), ("SIGSTOP to parent", ""), ("SIGKILL to parent", ""), ("print without end", "")},
    "reward": {("say odd scores", "one"), ("1e308", "parts"), ("no stdout", "one"), ("many names", "batch")},
}
"""Acts that once ended a run, hung it, or left something."""
AT_ONCE = 8
ACT_TIMEOUT_S = 60.0
LIMITS = HostLimits(timeout_s=3.0, start_timeout_s=60.0, num_workers=4, memory_mib=2048)
Acts = Sequence[tuple[str, str]]
"""Names of acts, each with its place."""


def drawn(surface: str, count: int) -> Acts:
    """Return acts for one surface, of which `make test` draws a third."""
    count = num_examples(count)
    inner = {
        "environment": [(name, place) for name in VALUES for place in FIELDS]
        + [(name, place) for name in (*DEEDS, *OUTER) for place in ("open", "reply", "close")],
        "tool": [(name, "") for name in (*VALUES, *DEEDS, *OUTER)],
        "python": [(name, "") for name in (*DEEDS, *OUTER)],
        "program": [(name, "") for name in (*LAST_LINES, *DEEDS)],
        "reward": [(name, form) for name in (*VALUES, *DEEDS) for form in ("one", "parts", "batch")],
    }[surface]
    always = [act for act in inner if act in ALWAYS[surface]]
    return random.Random(f"{SEED} {surface}").sample(inner, count - len(always)) + always


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """Mark the processes of a test, and give it its own folder."""
    name = f"acts-{os.getpid()}-{time.monotonic()}"
    monkeypatch.setenv(MARK, name)
    (tmp_path / "hostile-work").mkdir()
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    # Whoever has stopped what is to end it is waited for that long.
    for module in ("zygote", "programs", "user_process"):
        monkeypatch.setattr(f"nemo_rl.environments.{module}._END_TIMEOUT_S", 3.0)
    yield name
    # Folders may lie deeper in it than pytest can remove.
    remove_folder(str(tmp_path / "hostile-work"))


async def check(acts: Acts, do: Callable[[str, str], Awaitable[object]], right: Callable[[Any], bool]) -> None:
    """Do the acts, some at a time; then a neighbour must have its right answer, as a loop that tries again gets it."""

    async def ending(name: str, place: str) -> object:
        try:
            async with asyncio.timeout(ACT_TIMEOUT_S):
                return await do(name, place)
        except EnvironmentFailure as failure:
            assert str(failure)
            return failure

    for start in range(0, len(acts), AT_ONCE):
        chosen = acts[start : start + AT_ONCE]
        found = await asyncio.gather(*(ending(*act) for act in chosen), return_exceptions=True)
        for act, outcome in zip(chosen, found, strict=True):
            assert is_sound(outcome), (act, repr(outcome)[:500])
        tries = [await ending(NEIGHBOUR, "")]
        while not right(tries[-1]) and len(tries) < 4:
            tries.append(await ending(NEIGHBOUR, ""))
        assert right(tries[-1]), (chosen, tries)


def is_sound(outcome: object) -> bool:
    """Return whether an outcome is an ending whose numbers and texts are within their limits."""
    match outcome:
        case EnvironmentFailure():
            return True
        case ToolResult(text=text):
            return len(text.encode()) <= 4 * TEXT_LIMIT
        case Reply(reward=reward, components=parts, messages=messages):
            texts = [message.content for message in messages]
            return all(map(is_number, (reward, *parts.values()))) and sum(map(len, texts)) <= TEXT_LIMIT
        case ProgramResult(reward=reward, components=parts):
            return reward is None or all(map(is_number, (reward, *parts.values())))
        case ScoreOutcome(score=score, error=error):
            parts = score.values() if isinstance(score, dict) else [score]
            return all(map(is_number, parts)) and (error is None or "\n" * 50 not in error)
    return False


def is_number(value: object) -> bool:
    return type(value) is float and abs(value) <= NUMBER_LIMIT


def nothing_is_left(mark: str, folder: Path) -> bool:
    return wait_for_none(mark, timeout_s=10) == [] and list((folder / "temporary").iterdir()) == []


@pytest.mark.parametrize(("surface", "count"), [("tool", 80), ("python", 40)])
def test_acts_of_tools(surface: str, count: int, mark: str, tmp_path: Path) -> None:
    target = "nemo_rl.environments.tools:python" if surface == "python" else f"{SURFACES}:act"
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from {SURFACES} import act; print(act(%r))"

    async def run() -> None:
        host = ToolHost([HostedTool(target=target)], limits=LIMITS, hear=lambda line: None)

        async def do(name: str, place: str) -> ToolResult:
            given = {"code": code % name} if surface == "python" else {"name": name}
            return await host.call(ToolCall(name=surface if surface == "python" else "act", arguments=given), seed=1)

        try:
            await host.start()
            await check(drawn(surface, count), do, lambda result: getattr(result, "text", None) == "fine")
        finally:
            await host.shutdown()

    asyncio.run(run())
    assert nothing_is_left(mark, tmp_path)


def test_acts_of_environments(mark: str, tmp_path: Path) -> None:
    async def run() -> None:
        limits = HostLimits(timeout_s=3.0, start_timeout_s=60.0, num_workers=1, memory_mib=2048)
        host = EnvironmentHost(f"{SURFACES}:Hostile", {}, limits=limits, hear=lambda line: None)

        async def do(name: str, place: str) -> Reply:
            conversation = await host.open(ConversationRow(prompt=name, answer=place))
            try:
                return await conversation.reply(Turn(number=0, text="x", num_tokens=1))
            finally:
                await conversation.close()

        try:
            await host.start()
            await check(drawn("environment", 90), do, lambda reply: getattr(reply, "reward", None) == 0.25)
            assert host.num_open == 0
        finally:
            await host.shutdown()

    asyncio.run(run())
    assert nothing_is_left(mark, tmp_path)


def test_acts_of_programs(mark: str, tmp_path: Path) -> None:
    spec = ProgramSpec(command=(sys.executable, f"{ROOT}/tests/helpers/hostile_surfaces.py"), timeout_s=10.0)

    async def do(name: str, place: str) -> ProgramResult:
        row = ConversationRow(prompt=name)
        return await run_program(spec, row, base_url="http://127.0.0.1:1/v1", token="", hear=lambda line: None)

    asyncio.run(check(drawn("program", 40), do, lambda result: getattr(result, "reward", None) == 0.25))
    assert nothing_is_left(mark, tmp_path)


def test_acts_of_rewards(mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path / "hostile-work")
    acts = drawn("reward", 50)
    for form in ("one", "parts", "batch"):
        spec = ScorerSpec(target=f"{SURFACES}:reward_{form}", in_batches=form == "batch")
        pool = ScorerPool(spec, num_workers=2, timeout_s=2.0, start_timeout_s=60.0, hear=lambda line: None)

        async def do(name: str, place: str, pool: ScorerPool = pool) -> ScoreOutcome:
            item = ScorerItem(prompt="", response=name, answer=None)
            return (await asyncio.to_thread(pool.score, [item]))[0]

        try:
            mine = [act for act in acts if act[1] == form]
            asyncio.run(check(mine, do, lambda outcome: outcome.score in (0.25, {"part": 0.25})))
        finally:
            pool.shutdown()
    assert nothing_is_left(mark, tmp_path)
