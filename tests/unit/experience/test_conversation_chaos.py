"""Hundreds of conversations whose processes misbehave and are killed at random: a thousand in the full suite."""

from __future__ import annotations

import os
import random
import threading
import uuid
from collections import Counter

import psutil
import pytest

from nemo_rl.config.env import Ending
from tests.helpers.case_selection import num_examples
from tests.helpers.conversations import conversations, engine_of, small_tokenizer
from tests.helpers.processes import MARK, marked, wait_for_none

NUM_CONVERSATIONS = 20 * num_examples(50)
NUM_KILLS = 3 * NUM_CONVERSATIONS // 10


def kill_some(mark: str, ended: threading.Event, killed: list[int]) -> None:
    """Kill processes of conversations, which are groups of their own below those that fork them."""
    rng, own = random.Random(0), psutil.Process()
    while len(killed) < NUM_KILLS and not ended.wait(0.05):
        found = []
        for process in marked(mark):
            try:
                depth = [parent.pid for parent in process.parents()].index(own.pid)
            except (psutil.NoSuchProcess, ValueError):
                continue
            if depth >= 2:
                found.append(process)
        for process in rng.sample(found, min(len(found), 8)):
            try:
                process.kill()
                killed.append(process.pid)
            except psutil.NoSuchProcess:
                continue


@pytest.mark.slow
def test_every_conversation_has_its_ending_and_nothing_is_left(monkeypatch, tmp_path):
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    killed, ended = list[int](), threading.Event()
    with conversations(
        environment="tests.helpers.failing_environments:Chaos",
        timeout_s=4,
        engine=engine_of(small_tokenizer(), places=128),
        max_open=200,
        endings={"env_error": "leave_out"},
    ) as setting:
        killer = threading.Thread(target=kill_some, args=(mark, ended, killed))
        killer.start()
        tasks = [setting.task(size=20, seed=seed) for seed in range(0, NUM_CONVERSATIONS, 20)]
        records = [record for group in setting.loop.run(tasks) for record in group.records]
        ended.set()
        killer.join()
        assert setting.loop.num_open == 0
    assert wait_for_none(mark, timeout_s=30) == []
    assert [name for name in os.listdir(tmp_path) if "pytest" not in name] == []
    endings = Counter(record.ending for record in records)
    # A reply of 1 MB leaves no room for another turn.
    expected = {Ending.ENVIRONMENT_DONE, Ending.ENV_ERROR, Ending.CONTEXT_FULL}
    assert len(records) == NUM_CONVERSATIONS and set(endings) <= expected
    # A busy machine makes some replies late as well.
    tenth = NUM_CONVERSATIONS // 10
    assert len(killed) > tenth and endings[Ending.ENV_ERROR] >= 1.5 * tenth
    assert endings[Ending.ENVIRONMENT_DONE] > tenth
    for record in records:
        assert record.rows and (record.is_scored == (record.ending is not Ending.ENV_ERROR))
        assert record.is_scored or record.error
