"""The path of docs/debugging.md from "the loss of this step looks wrong" to the first site that differs, run whole."""

from __future__ import annotations

import io
import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3MLP
from typer.testing import CliRunner, Result

from nemo_rl.algorithms.run import run
from nemo_rl.cli.main import app
from nemo_rl_tools.verdict import Verdict
from tests.helpers.runs import LOCAL, load_recipe, write_recipe
from tests.helpers.tiny_model import write_tiny_folder

LOOKED_AT = {
    "grpo.max_num_steps": "2",
    "checkpointing.enabled": "true",
    "checkpointing.save_period": "1",
    "diagnostics.keep_steps.enabled": "true",
    "diagnostics.record.steps": "[2]",
    "diagnostics.record.sites": "'*'",
}


@contextmanager
def wrong_kernel() -> Iterator[None]:
    """Within it the MLP of layer 1 gives one percent too much, as a wrong kernel on one machine would."""
    with pytest.MonkeyPatch.context() as patch:
        made, forward = Qwen3DecoderLayer.__init__, Qwen3MLP.forward

        def init(layer: Qwen3DecoderLayer, config: object, layer_idx: int) -> None:
            made(layer, config, layer_idx)
            layer.mlp.is_wrong = layer_idx == 1

        def wrong(mlp: Qwen3MLP, x: torch.Tensor) -> torch.Tensor:
            return forward(mlp, x) * (1.01 if mlp.is_wrong else 1.0)

        patch.setattr(Qwen3DecoderLayer, "__init__", init)
        patch.setattr(Qwen3MLP, "forward", wrong)
        yield


def nemo_rl(line: str) -> Result:
    return CliRunner().invoke(app, shlex.split(line.removeprefix("nemo-rl ")))


def test_two_commands_lead_from_a_wrong_loss_to_the_first_site_that_differs(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, write_tiny_folder(tmp_path / "model"))
    config = load_recipe(recipe, {**LOCAL, **LOOKED_AT})
    logs = config.logger.log_dir
    with wrong_kernel():
        run(config, console=Console(file=io.StringIO()))
    looked = nemo_rl(f"nemo-rl inspect {logs} step 2")
    assert looked.exit_code == 0 and "train/loss" in looked.output
    (command,) = [line[line.index("nemo-rl ") :] for line in looked.output.splitlines() if "kept steps" in line]
    assert command == f"nemo-rl compare {logs} replay step 2"
    found = nemo_rl(command)
    assert found.exit_code == Verdict.MISMATCH.value, found.output
    assert "sites differ, first prev_logprobs of step 2: 96 of 320 tokens" in found.output
    assert "first divergence: prev_logprobs/mlp.out[1]; prev_logprobs/" in found.output
    assert "mlp.act[1] -> train/mlp.out[1]: rms_rel from 0 to 0.0099" in found.output
    sites = json.loads(nemo_rl(f"{command} --json").output)["recorded"]
    assert sites["first_divergence"]["site"] == "prev_logprobs/mlp.out[1]"
    # Where the kernel is wrong still, run and replay agree at every site to the last bit.
    with wrong_kernel():
        again = nemo_rl(command)
    assert again.exit_code == Verdict.PASS.value and "208 sites compared, 0 fail" in again.output, again.output
