"""Runs that are watched: the numbers stay, a page may change what is watched, and the first NaN is named."""

from __future__ import annotations

import io
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, Phi3Config
from typer.testing import CliRunner

from nemo_rl.algorithms.grpo_sync import GRPOTrainer
from nemo_rl.algorithms.run import run
from nemo_rl.algorithms.setup import open_trainer
from nemo_rl.cli.main import app
from nemo_rl.errors import NonFiniteError, PreflightError, UserError
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker
from nemo_rl.tracer.frame import Frame
from nemo_rl.tracer.protocol import Role, read_token, token_path
from nemo_rl_tools.tracer.client import HubGone, LiveClient
from nemo_rl_tools.tracer.entry import EntryKind
from nemo_rl_tools.tracer.stream_reader import StreamReader
from tests.helpers.model_families import FAMILY_SIZES, write_family, write_with_tokenizer
from tests.helpers.runs import LOCAL, load_recipe, logged_steps, write_recipe

WATCHED = {"diagnostics.tracer.enabled": "true", "diagnostics.tracer.max_hz": "1000"}
WAIT_S = 60.0


@contextmanager
def opened(folder: Path, model: Path, overrides: dict[str, str]) -> Iterator[GRPOTrainer]:
    """A trainer in this process, of which the test takes the steps."""
    config = load_recipe(write_recipe(folder, model), {**LOCAL, **WATCHED, **overrides})
    with open_trainer(config, console=Console(file=io.StringIO())) as trainer:
        trainer.open_run()
        yield trainer


def worker_of(trainer: GRPOTrainer) -> PolicyWorker:
    worker = trainer._parts.policy.workers._worker
    assert isinstance(worker, PolicyWorker)
    return worker


def frames_of(folder: Path) -> list[Frame]:
    entries = StreamReader(folder).entries()
    frames = [entry.frame() for entry in entries if entry.kind is EntryKind.FRAME]
    return [frame for frame in frames if isinstance(frame, Frame)]


def trained(folder: Path, model: Path, overrides: dict[str, str]) -> tuple[list[dict[str, float]], str]:
    config, text = load_recipe(write_recipe(folder, model), {**LOCAL, **overrides}), io.StringIO()
    run(config, console=Console(file=text, width=300, markup=False, highlight=False))
    return logged_steps(config.logger.log_dir), text.getvalue()


def test_a_watched_run_has_the_numbers_of_one_that_is_not(tmp_path: Path, model: Path) -> None:
    plain, _ = trained(tmp_path / "plain", model, {})
    watched, text = trained(tmp_path / "watched", model, WATCHED)
    assert plain == watched
    assert text.count("tracer: http://127.0.0.1:") == 1
    frames = frames_of(tmp_path / "watched" / "logs" / "tracer")
    assert {frame.where.step for frame in frames} == {1, 2, 3}
    assert not any(frame.missing or frame.dropped or frame.num_not_finite for frame in frames)
    assert not (tmp_path / "plain" / "logs" / "tracer").exists()
    listed = CliRunner().invoke(app, ["inspect", str(tmp_path / "watched" / "logs"), "tracer", "--json"])
    assert json.loads(listed.output)["runs"][0]["state"].startswith("ended")


def test_a_hub_that_is_killed_changes_nothing(tmp_path: Path, model: Path) -> None:
    plain, _ = trained(tmp_path / "plain", model, {})
    with opened(tmp_path / "killed", model, {}) as trainer:
        trainer._after_step(trainer.step())
        os.kill(json.loads((tmp_path / "killed" / "logs" / "tracer" / "hub.json").read_text())["pid"], signal.SIGKILL)
        for _ in range(2):
            trainer._after_step(trainer.step())
    assert logged_steps(tmp_path / "killed" / "logs") == plain


def test_what_is_watched_can_be_changed_while_the_run_goes_on(tmp_path: Path, model: Path) -> None:
    with opened(tmp_path, model, {"grpo.max_num_steps": "1000"}) as trainer:
        folder = tmp_path / "logs" / "tracer"
        trainer.step()
        address = json.loads((folder / "hub.json").read_text())["address"]
        token = read_token(token_path(folder, Role.CONTROLLER.value))
        with LiveClient.connect(address, token, role=Role.CONTROLLER) as client:
            client.watch(["attn.q & layer in 1 | norm", "param & name=model.norm.weight | stats"])
            heard, give_up = None, time.monotonic() + WAIT_S
            while (heard is None or heard["effective_step"] is None) and time.monotonic() < give_up:
                # On a busy machine the run may hear of it some steps later, and the hub says nothing in between.
                trainer.step()
                with suppress(HubGone):
                    heard = client.wait_for("plan", timeout_s=1.0)
            effective = heard["effective_step"]
            trainer.step()
    after = [frame.where for frame in frames_of(folder) if frame.where.step >= effective]
    assert {(where.site.text, str(where.reducer)) for where in after} == {
        ("attn.q[1]", "norm"),
        ("param[model.norm.weight]", "stats"),
    }


def test_a_planted_nan_is_named_with_its_layer_and_step(tmp_path: Path, model: Path) -> None:
    with pytest.raises(NonFiniteError), opened(tmp_path, model, {"grpo.max_num_steps": "9"}) as trainer:
        for _ in range(4):
            trainer._after_step(trainer.step())
        with torch.no_grad():
            worker_of(trainer).engine.model.hf.model.layers[1].mlp.down_proj.weight[3, 5] = torch.nan
        trainer.step()
    listed = CliRunner().invoke(app, ["inspect", str(tmp_path / "logs"), "tracer", "--json"])
    assert listed.exit_code == 0, listed.output
    [found] = json.loads(listed.output)["runs"]
    assert found["first_non_finite"]["step"] == 5
    assert found["first_non_finite"]["site"] == {"kind": "mlp.out", "layer": 1, "direction": "forward"}
    assert "failed" in json.dumps(found)
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path / "logs"), "tracer"])
    assert "step 5" in shown.output and "mlp.out[1]" in shown.output


def test_what_cannot_be_watched_is_said_before_anything_starts(tmp_path: Path, model: Path) -> None:
    wrong = {**WATCHED, "diagnostics.tracer.selectors": '["layers | stats", "layer.out | eval(1)"]'}
    with pytest.raises((PreflightError, UserError)) as caught:
        trained(tmp_path, model, wrong)
    assert "selectors[0]" in str(caught.value) and "selectors[1]" in str(caught.value)
    assert not (tmp_path / "logs" / "tracer").exists()


def test_sites_that_a_model_cannot_show_are_said_with_the_reason(tmp_path: Path) -> None:
    fused = write_with_tokenizer(tmp_path / "phi3", AutoModelForCausalLM.from_config(Phi3Config(**FAMILY_SIZES)))
    with opened(tmp_path, fused, {}) as trainer:
        trainer.step()
    listed = CliRunner().invoke(app, ["inspect", str(tmp_path / "logs"), "tracer", "--json"])
    [found] = json.loads(listed.output)["runs"]
    assert found["unobserved"]["attn.k"] == "attention has no part named k_proj"
    assert "attn.out" not in found["unobserved"]


def test_a_pass_for_comparison_alone_is_not_shown(tmp_path: Path) -> None:
    replay = {"policy.router_replay.enabled": "true", "policy.router_replay.compare_microbatches": "1"}
    replay["grpo.use_generation_logprobs_as_prev"] = "false"
    with opened(tmp_path, write_family(tmp_path / "moe", "qwen3_moe"), replay) as trainer:
        trainer.step()
    shown = Counter(frame.where for frame in frames_of(tmp_path / "logs" / "tracer"))
    assert {where.phase for where in shown} >= {"prev_logprobs", "train"} and set(shown.values()) == {1}


def test_a_run_that_starts_over_leaves_no_frame_of_the_one_before(tmp_path: Path, model: Path) -> None:
    short = {**WATCHED, "grpo.max_num_steps": "1"}
    trained(tmp_path, model, short)
    trained(tmp_path, model, {**short, "logger.overwrite": "true"})
    assert len({frame.where.run for frame in frames_of(tmp_path / "logs" / "tracer")}) == 1
