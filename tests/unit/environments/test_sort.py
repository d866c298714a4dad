"""Exact match."""

from __future__ import annotations

from nemo_rl.data.datasets import Prompt
from nemo_rl.environments.sort import SortEnvironment


def test_only_the_whole_right_text_that_ended_by_itself_scores() -> None:
    prompt = Prompt(index=0, text="sort 4135", answer="1345", ids=(1,))
    responses = ["1345", " 1345\n", "13455", "", "1345"]
    report = SortEnvironment().score([prompt] * 5, responses, [False, False, False, False, True])
    assert report.rewards == (1.0, 1.0, 0.0, 0.0, 0.0)
