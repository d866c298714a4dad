"""An executed step of the demo: the code it enters, the depth of its calls, and that the walk of the docs is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.tiny_model import write_tiny_folder
from tests.repo.step_trace import StepTrace, trace_step

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
MOST_LINES, MOST_FILES = 7600, 100
"""Of the functions that one step enters; these may only fall."""
MOST_FRAMES_TO_LOSS, MOST_FRAMES_TO_COLUMN = 11, 12
NOT_IN_THE_DEMO = {
    # The demo takes the sampler's log-probabilities.
    *("TQWorker.get_logprobs_presharded", "Passes.get_logprobs"),
    # Without advantages per token.
    "TQWorkerMixin.map_rows",
    # The test has another reward.
    "exact_match",
    # After the step.
    *("GRPOTrainer.fit", "WeightSync.sync"),
}


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> StepTrace:
    """The demo with a random model, whose answers a reward tells apart."""
    model = write_tiny_folder(tmp_path_factory.mktemp("model"))
    reward = ["env.name=custom", "env.reward_function=tests.helpers.rewards:odd_share"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return trace_step(overrides=[f"policy.model_name={model}", *reward])


def test_one_step_enters_no_more_code_than_before(trace: StepTrace) -> None:
    assert trace.num_lines <= MOST_LINES and len(trace.functions) <= MOST_FILES, trace.text()


def test_the_loss_and_the_bytes_of_a_column_are_no_deeper_than_before(trace: StepTrace) -> None:
    assert 0 < len(trace.loss) <= MOST_FRAMES_TO_LOSS, trace.text()
    assert 0 < len(trace.column) <= MOST_FRAMES_TO_COLUMN, trace.text()


def test_every_function_of_the_walk_is_entered(trace: StepTrace) -> None:
    text = (ROOT / "docs" / "one_step.md").read_text(encoding="utf-8")
    named = {(file, name) for name, file in re.findall(r"\[`([\w.]+)`\]\(\.\./([\w/]+\.py)\)", text)}
    functions = {(file, name) for file, name in named if name[0].islower() or "." in name}
    # A name may be that of an abstract method or of a base class: what is entered ends with it.
    entered = {(file, name) for file, lines in trace.functions.items() for name in lines}
    missing = sorted(
        f"{name} ({file})" for file, name in functions if name not in NOT_IN_THE_DEMO and (file, name) not in entered
    )
    assert len(functions) > 15 and missing == []
