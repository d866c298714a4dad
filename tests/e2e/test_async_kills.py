"""An asynchronous run over Ray that loses a rollout worker, an engine and its trainer, one after the other."""

from __future__ import annotations

import pytest

from tests.helpers.async_kills import AsyncKills
from tests.helpers.tiny_model import write_tiny_folder

pytestmark = pytest.mark.slow


def test_no_prompt_is_lost_or_trained_twice_whichever_process_dies(tmp_path):
    model = write_tiny_folder(tmp_path / "model")
    result = AsyncKills(tmp_path, ["rollout", "engine", "trainer"], model=model).run()
    assert result.problems == []
    assert sum(result.kills.values()) == 3 and result.groups > 0
