"""Runs that keep their checkpoints in an object store: the same numbers, whatever is killed, resumed in any layout."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import fsspec
import pytest
from typer.testing import CliRunner

from nemo_rl.cli.main import app
from tests.e2e.conftest import CommandLine
from tests.helpers.object_server import (
    BUCKET,
    KEY,
    KEY_VARIABLE,
    PROTOCOL,
    ObjectFileSystem,
    entry_point,
    object_server,
)
from tests.helpers.runs import LOCAL, logged_steps, run_cli, start_cli, write_recipe

pytestmark = pytest.mark.slow

FAR_S = 180.0
ONE_PROCESS = [f"{key}={value}" for key, value in LOCAL.items()]
RESUME = "checkpointing.resume=true"
SLOW_S = 0.4
"""Seconds of each upload to the server of the test that kills amid one."""


@pytest.fixture(autouse=True)
def protocol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The protocol here, and as a package that the processes of runs find."""
    fsspec.register_implementation(PROTOCOL, ObjectFileSystem, clobber=True)
    monkeypatch.setenv("PYTHONPATH", str(entry_point(tmp_path / "packages")))
    monkeypatch.setenv(KEY_VARIABLE, KEY)


def _recipe(folder: Path, model: Path, place: object, *, steps: int = 3) -> Path:
    saving = {"enabled": True, "save_period": 1, "checkpoint_dir": str(place), "async_save": True}
    return write_recipe(folder, model, checkpointing=saving, grpo={"max_num_steps": steps})


def _objects(store: Path) -> list[str]:
    return sorted(path.name.replace("%2F", "/") for path in (store / BUCKET).iterdir())


def _run(recipe: Path, *overrides: str) -> str:
    code, output = run_cli(recipe, *overrides)
    assert code == 0, output[-3000:]
    return output


@pytest.mark.full
def test_a_url_changes_no_number_also_when_it_is_resumed_on_other_ranks(
    tmp_path: Path, model: Path, command_line: CommandLine
) -> None:
    with object_server(tmp_path / "store") as url:
        for name, place in (("path", tmp_path / "saved"), ("url", f"{url}/run")):
            recipe = _recipe(tmp_path / name, model, place)
            assert command_line(recipe, "grpo.max_num_steps=2", *ONE_PROCESS)[0] == 0
            # Two ranks, over Ray: both upload, and both read what one process has written.
            output = _run(recipe, RESUME)
            assert f"resuming after step 2 from {place}/step_2" in output
    in_path, in_url = (logged_steps(tmp_path / name / "logs") for name in ("path", "url"))
    assert len(in_path) == 3 and in_path == in_url
    assert {name.split("/")[1].split(".")[0] for name in _objects(tmp_path / "store")} == {
        *("latest", "step_1", "step_2", "step_3")
    }


def test_a_kill_amid_an_upload_leaves_the_checkpoint_before_it(tmp_path: Path, model: Path) -> None:
    store, log = tmp_path / "store", tmp_path / "log.txt"
    with object_server(store, slow_s=SLOW_S) as url, log.open("w") as output:
        recipe = _recipe(tmp_path / "run", model, f"{url}/run", steps=2)
        process = start_cli(recipe, *ONE_PROCESS, log=output)
        deadline = time.monotonic() + FAR_S
        while not any(name.startswith("run/step_2.") for name in _objects(store)):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(FAR_S)
        killed = _objects(store)
        assert "run/step_1.json" in killed and "run/step_2.json" not in killed
        assert f"resuming after step 1 from {url}/run/step_1" in _run(recipe, RESUME, *ONE_PROCESS)
        named = {name.split("/")[1] for name in _objects(store)}
        assert sorted(name.partition(".")[0] for name in named) == ["latest", *["step_1"] * 2, *["step_2"] * 2]
        for given in (f"{url}/run/step_1", str(tmp_path / "run" / "logs")):
            out = tmp_path / f"exported_{Path(given).name}"
            result = CliRunner().invoke(app, ["export", given, "--out", str(out)])
            assert result.exit_code == 0, result.output
            assert (out / "model.safetensors").is_file()


def test_a_wrong_bucket_and_a_used_url_are_refused_before_anything_starts(
    tmp_path: Path, model: Path, command_line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with object_server(tmp_path / "store") as url:
        good, wrong = (
            _recipe(tmp_path / name, model, f"{place}/run") for name, place in (("a", url), ("b", f"{url}x"))
        )
        assert command_line(good, "--preflight", *ONE_PROCESS)[0] == 0
        assert _objects(tmp_path / "store") == []
        code, output = command_line(wrong, *ONE_PROCESS)
        assert code == 2 and "could not write .nemo_rl_probe" in output and "correct checkpointing" in output
        (tmp_path / "store" / BUCKET / "run%2Fstep_4.json").write_text("{}")
        code, output = command_line(good, "--preflight", *ONE_PROCESS)
        assert code == 2 and f"1 checkpoints in {url}/run, the newest step_4" in output
        monkeypatch.setenv(KEY_VARIABLE, "wrongkey-99")
        code, output = command_line(good, *ONE_PROCESS)
        assert code == 2 and "PermissionError" in output and "wrongkey" not in output
    assert not (tmp_path / "a" / "logs").exists()
