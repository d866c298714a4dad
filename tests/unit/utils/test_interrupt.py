"""An interrupt is known wherever it arrived, and what to type next is told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from nemo_rl.cli.run_recipe import resume_hint
from nemo_rl.config.schema import MasterConfig
from nemo_rl.utils import interrupt
from nemo_rl.utils.checkpoint import CheckpointManager

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def handlers():
    before = {number: signal.getsignal(number) for number in interrupt.SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    interrupt._received.clear()


@pytest.mark.parametrize("number", interrupt.SIGNALS)
def test_an_interrupt_that_a_library_swallowed_is_raised_again(number):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests themselves were started under nohup
    interrupt.install()
    interrupt.raise_if_received()
    with suppress(KeyboardInterrupt):
        signal.raise_signal(number)
    assert interrupt.received()
    with pytest.raises(KeyboardInterrupt):
        interrupt.raise_if_received()


@pytest.mark.parametrize("second", interrupt.SIGNALS)
def test_a_second_signal_leaves_the_teardown_of_the_first_alone(second, monkeypatch):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    interrupt.install()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(second)
    monkeypatch.setattr(interrupt, "AGAIN_AFTER_S", -1.0)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(second)


@pytest.mark.parametrize("number", interrupt.NOTICES)
@pytest.mark.parametrize(
    ("then", "grace_s"),
    [(signal.SIGTERM, 60.0), (signal.SIGINT, 60.0), (None, 0.05)],
    ids=["SIGTERM", "SIGINT", "late"],
)
def test_a_notice_lets_the_step_end_and_a_second_signal_or_the_end_of_the_grace_interrupts(
    number, then, grace_s, monkeypatch
):
    monkeypatch.setattr(interrupt, "TWICE_S", 0.0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupt.install()
    told, has_gone_on = [], False
    with pytest.raises(KeyboardInterrupt), interrupt.finishing(grace_s, tell=told.append):
        assert not interrupt.is_noticed()
        signal.raise_signal(number)
        assert interrupt.is_noticed() and not interrupt.received()
        signal.raise_signal(signal.SIGUSR1)  # a cluster may repeat it
        has_gone_on = True
        if then is not None:
            signal.raise_signal(then)
        time.sleep(30)
    assert has_gone_on and interrupt.received()
    assert told[0].startswith(f"{number.name}: ending after this step, which may take {grace_s:g} s (cluster.grace_s)")
    assert (then is None) == ("raise cluster.grace_s" in told[-1])


def test_a_save_may_take_longer_than_the_grace_and_what_follows_is_undisturbed():
    interrupt.install()
    with interrupt.finishing(0.01, tell=lambda text: None):
        signal.raise_signal(signal.SIGTERM)
        with interrupt.saving():
            time.sleep(0.5)
    signal.raise_signal(signal.SIGTERM)  # amid the teardown
    assert interrupt.is_noticed()


def test_what_is_ignored_stays_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    interrupt.install()
    signal.raise_signal(signal.SIGHUP)
    assert not interrupt.received()


def config(folder: Path, **checkpointing: object) -> MasterConfig:
    sections = {"checkpointing": checkpointing, "logger": {"log_dir": folder}}
    return MasterConfig.model_validate({"policy": {"model_name": "m"}, **sections})


def test_the_command_that_continues_is_the_one_that_was_typed(tmp_path):
    command = ["python", "examples/run_grpo.py", "--config", "my recipe.yaml", "logger.overwrite=true", "grpo.seed=7"]
    assert resume_hint(config(tmp_path), command) == "no checkpoint was saved yet: checkpointing.save_period is 10"
    assert "enabled is false" in resume_hint(config(tmp_path, enabled=False), command)
    manager = CheckpointManager(tmp_path / "checkpoints", keep_top_k=None, metric_name="")
    manager.save(4, write=lambda folder: None, state={"sampler": {}})
    assert resume_hint(config(tmp_path), command) == (
        f"the last checkpoint is {tmp_path}/checkpoints/step_4; to continue:\n"
        "  python examples/run_grpo.py --config 'my recipe.yaml' grpo.seed=7 checkpointing.resume=true"
    )


STANDS_STILL_AT_PYDANTIC = """
import sys, time
from pathlib import Path

class StandsStill:
    def find_spec(self, name, path=None, target=None):
        if name == "pydantic":
            Path({reached!r}).touch()
            time.sleep(60)

sys.meta_path.insert(0, StandsStill())
"""
"""Run by Python before a command: the import of pydantic, which every command needs, waits for the signal."""


@pytest.mark.parametrize(
    ("command", "number"),
    [
        (["examples/run_grpo.py", "--config", "configs/grpo_sort_cpu.yaml", "--validate-only"], signal.SIGHUP),
        (["examples/run_grpo.py", "--config", "configs/grpo_sort_cpu.yaml", "--validate-only"], signal.SIGINT),
        (["-m", "nemo_rl.cli.main", "plan", "configs/grpo_sort_cpu.yaml"], signal.SIGTERM),
    ],
)
def test_a_signal_amid_the_imports_ends_a_command_with_one_line(command, number, tmp_path):
    reached = tmp_path / "reached"
    (tmp_path / "sitecustomize.py").write_text(STANDS_STILL_AT_PYDANTIC.format(reached=str(reached)))
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not reached.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and said.startswith("interrupted") and said.count("\n") == 1, said
