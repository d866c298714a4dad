"""`nemo-rl inspect DIR routes`: exit codes, output for people and machines, a real job of several processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from nemo_rl.cli.main import app, main
from nemo_rl.errors import UserError
from nemo_rl.models.policy.trace_parts import Vectors
from nemo_rl_tools.vector_file import convert_vector
from tests.helpers.route_traces import RouteRun


class WrongLayerMap(RouteRun):
    def layer_map(self, held):
        return [(layer, 1 - column) for column, layer in enumerate(held)]


def without_forward_checks(folder: Path) -> None:
    for path in folder.glob("*"):
        lines = [
            line for line in path.read_text().splitlines(keepends=True) if "router_replay_forward_verify" not in line
        ]
        path.write_text("".join(lines))


def test_the_verdict_is_the_exit_code(tmp_path: Path, ended) -> None:
    right, wrong = RouteRun(tmp_path / "right").write(), WrongLayerMap(tmp_path / "wrong").write()
    code, shown, _ = ended("inspect", right, "routes", "--require-forward-verify", "--require-cp-identity")
    assert code == 0 and shown.startswith("PASS: all 6 sites agree\n")
    code, shown, _ = ended("inspect", wrong, "routes")
    assert code == 3 and shown.startswith("MISMATCH: ")
    assert "first bad hop: assignment, stage prev_logprobs, step 0, microbatch 0\n" in shown
    assert "sample a_g0, position 0, layer 1\n" in shown and "rank 0 cp=0 dp=0 pp=0 tp=0" in shown
    assert "guess: wrong layer map: layer 1 holds the routes of layer 2\n" in shown
    without_forward_checks(right)
    assert ended("inspect", right, "routes")[0] == 0
    code, shown, _ = ended("inspect", right, "routes", "--require-forward-verify")
    assert code == 4 and shown.startswith("INCOMPLETE: ") and "no verified forward pass of" in shown
    (tmp_path / "empty").mkdir()
    code, shown, _ = ended("inspect", tmp_path / "empty", "routes")
    assert code == 5 and shown.startswith("VACUOUS: ")


def test_json_holds_the_whole_report(tmp_path: Path, ended) -> None:
    code, shown, _ = ended("inspect", WrongLayerMap(tmp_path / "trace").write(), "routes", "--json")
    told = json.loads(shown)
    assert (told["verdict"], told["exit_code"], code) == ("mismatch", 3, 3)
    assert told["mismatch"]["coords"] == {"dp": 0, "cp": 0, "tp": 0, "pp": 0} and told["mismatch"]["layer"] == 1
    assert told["bad_records"]["assignment"] == 64 and told["num_processes"] == 9


def test_a_folder_that_is_none_is_an_error_of_the_user(tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "absent", tmp_path / "file"):
        monkeypatch.setattr("sys.argv", ["nemo-rl", "inspect", str(place), "routes"])
        with pytest.raises(SystemExit) as ended:
            main()
        error = capsys.readouterr().err
        assert ended.value.code == 2 and error.count("\n") == 1 and f"{place} is not a directory; pass" in error


JOB = """
import os, sys
from pathlib import Path
import torch
from tests.helpers.route_traces import RouteRun
torch.set_num_threads(1)
job = RouteRun(Path(sys.argv[1]))
bodies = [job.write_driver, *(lambda p=place: job.write_rank(p[1], p[2], p[0]) for place in job.places())]
for body in bodies:
    child = os.fork()
    if child == 0:
        body()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.slow
def test_a_job_of_several_processes_passes(tmp_path: Path, ended) -> None:
    switches = {"NRL_R3_TRACE": "1", "NRL_R3_TRACE_VERIFY_FORWARD": "yes", "NRL_R3_TRACE_DIR": str(tmp_path)}
    environment = {**os.environ, **switches, "PYTHONPATH": str(Path(__file__).parents[3])}
    subprocess.run([sys.executable, "-c", JOB, str(tmp_path)], env=environment, check=True, timeout=120)
    assert len(list(tmp_path.glob("r3_trace_*_pid*.jsonl"))) == 9
    code, shown, _ = ended("inspect", tmp_path, "routes", "--json", "--require-forward-verify", "--require-cp-identity")
    assert code == 0, shown
    assert json.loads(shown)["num_processes"] == 9


@pytest.mark.parametrize("normalize", [False, True])
def test_a_torch_vector_becomes_one_to_project_on(tmp_path: Path, normalize: bool) -> None:
    given = torch.tensor([[3.0, 4.0], [0.0, 2.0]], dtype=torch.bfloat16)
    torch.save(given, tmp_path / "theirs.pt")
    out = tmp_path / "vectors" / "ours.safetensors"
    arguments = ["trace", "vector", str(tmp_path / "theirs.pt"), "--out", str(out)]
    done = CliRunner().invoke(app, [*arguments, *(["--normalize"] if normalize else [])])
    assert done.exit_code == 0 and "2 x 2" in done.output
    assert out.stat().st_mode == (tmp_path / "theirs.pt").stat().st_mode, "as the umask says"
    wanted = torch.tensor([[0.6, 0.8], [0.0, 1.0]]) if normalize else given.float()
    for layer in (0, 1):
        assert torch.equal(Vectors(out.parent).of_layer("ours", layer, size=2), wanted[layer])


def test_a_vector_that_is_none_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "v.safetensors"
    for value, normalize, message in (
        (torch.zeros(2, 2, 2), False, "expected floating-point numbers of shape"),
        (torch.tensor([1.0, float("nan")]), False, "expected finite numbers"),
        (torch.zeros(4), True, "cannot be normalised"),
        (Fraction(1, 2), False, "loadable without running code"),
    ):
        torch.save(value, tmp_path / "v.pt")
        with pytest.raises(UserError, match=message):
            convert_vector(tmp_path / "v.pt", out, normalize=normalize)
    torch.save(torch.ones(2), tmp_path / "v.pt")
    with pytest.raises(UserError, match=r"expected NAME.safetensors"):
        convert_vector(tmp_path / "v.pt", tmp_path / "v.bin", normalize=False)
    assert not out.exists()
