"""The warning of a mismatch: once, above the threshold alone, with causes and the command that explains it; and that
of a jump."""

from __future__ import annotations

import pytest

from nemo_rl.algorithms.observers import MISMATCH_METRIC, MISMATCH_THRESHOLD, JumpWarning, MismatchWarning
from nemo_rl.config.load import load_config

DEMO = "configs/grpo_sort_cpu.yaml"
ABOVE = {MISMATCH_METRIC: MISMATCH_THRESHOLD + 0.01, "train/gen_probs_ratio": 0.97}


class Heard:
    """A warning and the lines that it gives."""

    def __init__(self, *overrides: str) -> None:
        self._lines: list[str] = []
        config = load_config(DEMO, ["logger.log_dir=results/mine", *overrides])
        self._warning = MismatchWarning(
            config.grpo,
            config.policy,
            keeps_steps=config.diagnostics.keep_steps.enabled,
            log_dir=config.logger.log_dir,
            note=self._lines.append,
        )

    def lines(self, number: int, metrics: dict[str, float]) -> list[str]:
        """The lines of one step."""
        self._lines.clear()
        self._warning.report(number, metrics)
        return list(self._lines)


def test_it_is_said_once_with_the_command() -> None:
    said = Heard("diagnostics.keep_steps.enabled=true")
    assert said.lines(1, {MISMATCH_METRIC: MISMATCH_THRESHOLD}) == []
    assert said.lines(2, {}) == []
    (line,) = said.lines(3, ABOVE)
    assert "is 1.0600 in step 3, above 1.05" in line
    assert line.endswith("nemo-rl inspect results/mine step 3 mismatch")
    assert said.lines(4, ABOVE) == []


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("grpo.use_generation_logprobs_as_prev=true", "several updates per rollout"),
        ("policy.generation.top_p=0.9", "sampling masks"),
        ("policy.router_replay.enabled=false", "experts chosen otherwise"),
        ("diagnostics.keep_steps.enabled=false", "diagnostics.keep_steps.enabled=true"),
    ],
)
def test_causes_are_those_that_the_config_leaves_open(override: str, words: str) -> None:
    assert words in Heard(override).lines(1, ABOVE)[-1]


def test_a_filter_without_recorded_sets_tells_its_bias_once() -> None:
    quiet = {MISMATCH_METRIC: 1.0, "train/gen_probs_ratio": 0.97}
    for override in ("policy.generation.top_p=0.9", "policy.generation.top_k=5"):
        said = Heard(override)
        (line,) = said.lines(1, quiet)
        assert "policy.generation.record_support" in line and "0.9700" in line
        assert said.lines(2, quiet) == []
    assert Heard("policy.generation.top_p=0.9", "policy.generation.record_support=true").lines(1, quiet) == []
    assert Heard().lines(1, quiet) == []


def test_a_jump_is_told_once_until_it_is_over() -> None:
    lines: list[str] = []
    warning = JumpWarning(note=lines.append)
    usual = [2.0, 3.0, 1.0] * 4  # of which the median is 2
    for number, norm in enumerate([9.0, *usual, 9.9, 10.1, 50.0, 2.0, float("nan"), float("inf"), 1e9], start=1):
        # A KL that is small, and one that is missing.
        warning.report(number, {"train/grad_norm": norm, "train/policy_kl": 0.04 if number % 11 == 0 else 0.0})
    assert [line.split(" in step ")[1].split(";")[0] for line in lines] == ["15", "19"]
    assert lines[0] == ("WARNING: train/grad_norm jumped to 10.1 in step 15; its median of the last 14 steps is 2"), (
        "neither the first step, of which nothing is known, nor less than five times the median"
    )


def test_a_small_kl_may_rise_by_any_factor() -> None:
    lines: list[str] = []
    warning = JumpWarning(note=lines.append)
    for number, kl in enumerate([*[1e-4] * 12, 0.05, 0.0501], start=1):
        warning.report(number, {"train/reference_kl": kl})
    assert len(lines) == 1 and "train/reference_kl jumped to 0.0501 in step 14" in lines[0]
