"""The benchmark of conversations: figures from timed rollouts, and rollouts one by one that miss the bound."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.common import check_figures
from benchmarks.conversations import HOLDS, Setting, TimedConversation, TimedRollout, WaitCalls, figures_of, main


def rollout_of(*needed: tuple[float, float], seconds: float) -> TimedRollout:
    """A rollout of conversations with these seconds of engine and tools."""
    timed = [TimedConversation(engine_s=engine, tool_s=tool, took_s=engine + tool) for engine, tool in needed]
    return TimedRollout(seconds=seconds, conversations=tuple(timed))


def test_the_critical_path_is_the_longest_conversation_or_all_decoding_over_the_places() -> None:
    rollout = rollout_of((1.0, 2.0), (2.0, 0.5), seconds=3.0)
    assert (rollout.critical_s(2), rollout.critical_s(1)) == (3.0, 3.0)
    assert rollout_of((1.0, 0.0), (1.0, 0.0), (1.0, 0.0), seconds=3.0).critical_s(2) == 1.5


def test_the_bound_can_be_missed() -> None:
    good = figures_of(Setting(), [rollout_of((1.0, 2.0), (2.0, 0.5), seconds=3.3)])
    assert good["vs_critical_path"] == pytest.approx(1.1) and check_figures(good, HOLDS) == []
    slow = figures_of(Setting(), [rollout_of((1.0, 2.0), (2.0, 0.5), seconds=5.5)])
    assert [line.split(":")[0] for line in check_figures(slow, HOLDS)] == ["vs_critical_path"]


def test_the_time_of_a_call_is_a_function_of_the_tokens() -> None:
    calls = WaitCalls(None)
    assert calls.parse([1, 2, 3]) == calls.parse((1, 2, 3)) != calls.parse([1, 2, 4])


@pytest.mark.slow
@pytest.mark.parametrize("waits", [pytest.param(False, marks=pytest.mark.full), True])
def test_conversations_wait_for_nobody_unless_one_is_open_at_a_time(tmp_path: Path, waits: bool) -> None:
    path = tmp_path / "report.json"
    main(["--quick", "--json", str(path), *(["--one-by-one"] if waits else [])])
    report = json.loads(path.read_text())
    assert {"versions", "commit", "load_before", "load_after"} < report.keys()
    (rollout,) = report["rollouts"]
    assert len(rollout["conversations"]) == 8 and rollout["endings"] == {"turn_limit": 8}
    figures = report["figures"]
    assert (figures["vs_critical_path"] > 2.5) is waits and figures["vs_critical_path"] >= 1.0
    assert (figures["serial_vs_rollout"] > 1.1) is not waits
