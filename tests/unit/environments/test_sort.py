"""Exact match."""

from __future__ import annotations

from nemo_rl.data.datasets import Prompt
from nemo_rl.environments.interfaces import Response
from nemo_rl.environments.process_environment import SortEnvironment


def test_only_the_whole_right_text_that_ended_by_itself_scores() -> None:
    prompt = Prompt(index=0, text="sort 4135", answer="1345", ids=(1,))
    texts = ["1345", " 1345\n", "13455", "", "1345"]
    responses = [Response(text=text, num_tokens=5, truncated=row == 4) for row, text in enumerate(texts)]
    report = SortEnvironment().score([prompt] * 5, responses)
    assert report.rewards == (1.0, 1.0, 0.0, 0.0, 0.0)
