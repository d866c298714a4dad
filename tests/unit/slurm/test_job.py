"""The script of a job, against golden files; what is refused before Slurm is asked."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nemo_rl.cli.main import main
from nemo_rl.errors import UserError
from nemo_rl.slurm.job import JobOptions, render_job, submit_job

ROOT = Path(__file__).parents[3]
DEMO, GPU = Path("configs/grpo_sort_cpu.yaml"), Path("configs/recipes/grpo_math_1b.yaml")
GOLDEN = Path(__file__).with_name("golden")
CASES = {
    "demo_two_nodes": (DEMO, ["grpo.max_num_steps=3"], JobOptions(nodes=2, time="1:00:00")),
    "gpu_container": (
        GPU,
        ["cluster.num_nodes=2"],
        JobOptions(
            account="me",
            partition="h100",
            job_name="math 1b",
            container="/images/nemo rl.sqsh",
            mounts="/data:/data",
            setup="source env.sh && ulimit -n 65536",
            cpus_per_node=64,
            log_dir=Path("/shared/logs"),
            requeue=False,
            sbatch=["--qos=high"],
        ),
    ),
    "spare_nodes": (DEMO, ["cluster.num_nodes=2", "cluster.spare_nodes=1"], JobOptions(requeue=False)),
    "own_ways_to_resume": (
        DEMO,
        ["checkpointing.resume=true", "checkpointing.must_save_by=1:00:00"],
        JobOptions(time="9"),
    ),
}


@pytest.fixture(autouse=True)
def from_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture
def command(monkeypatch, capsys):
    """Exit code, standard output, standard error."""

    def run(*words: str) -> tuple[object, str, str]:
        monkeypatch.setattr("sys.argv", ["nemo-rl", "launch", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capsys.readouterr()

    return run


def without_model(script: str) -> str:
    """The module of the model is only known where its folder has been made."""
    return script.replace("transformers.models.qwen3.modeling_qwen3 ", "")


@pytest.mark.parametrize("name", CASES)
def test_scripts_are_the_golden_ones(name):
    """GOLDEN=1 writes them."""
    text = without_model(render_job(*CASES[name]))
    path = GOLDEN / f"{name}.sh"
    if os.environ.get("GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()
    subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=30)


def test_the_command_line_prints_what_is_rendered(command):
    code, shown, _ = command(
        "slurm", str(DEMO), "grpo.max_num_steps=3", "--nodes", "2", "--time", "1:00:00", "--render"
    )
    assert not code and without_model(shown) == (GOLDEN / "demo_two_nodes.sh").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["slurm", "nix.yaml"], "nix.yaml: no such file"),
        (["slurm", str(DEMO), "cluster.num_nodes=2", "--nodes", "1"], "--nodes: expected at least cluster.num_nodes=2"),
        (
            ["slurm", str(DEMO), "cluster.num_nodes=2", "cluster.spare_nodes=1", "--nodes", "2"],
            "--nodes: expected at least cluster.num_nodes=2 + cluster.spare_nodes=1",
        ),
        (["slurm", str(DEMO), "--mounts", "/a:/a"], "--mounts: '/a:/a' would be ignored without --container"),
        (["slurm", str(DEMO)], "no Slurm here: sbatch is not on PATH"),
        (["attach", "1"], "no Slurm here: scontrol is not on PATH"),
        (["local", str(DEMO), "cluster.num_nodes=2", "cluster.address=auto"], "launch local: this is 1 node"),
        (["ray", str(DEMO), "--address", "head"], "--address: expected HOST:PORT of Ray's head, got 'head'"),
        (["ray", str(DEMO), "--address", "127.0.0.1:1"], "--address: no Ray answers at 127.0.0.1:1"),
    ],
)
def test_what_a_user_can_fix_ends_with_2_and_one_message(command, monkeypatch, words, said):
    monkeypatch.setenv("PATH", str(ROOT))
    code, _, errors = command(*words)
    assert code == 2 and said in errors and "Traceback" not in errors and errors.count("error: ") == 1


def test_a_refusal_of_slurm_is_passed_on(monkeypatch, tmp_path):
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/sh\necho 'sbatch: error: invalid partition specified: h100' >&2\nexit 1\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(UserError, match="sbatch refuses the job: sbatch: error: invalid partition specified: h100"):
        submit_job(f"cd {tmp_path}\nsbatch ray.sub")


def test_ray_sub_says_that_it_needs_slurm_and_a_command():
    assert (ROOT / "ray.sub").read_text().count("\n") <= 250
    for variables, said in (({}, "ray.sub runs inside a Slurm job"), ({"SLURM_JOB_ID": "1"}, "COMMAND is not set")):
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "COMMAND"))}
        done = subprocess.run(
            ["bash", "ray.sub"], env={**clean, **variables}, capture_output=True, text=True, timeout=30, check=False
        )
        assert done.returncode == 2 and f"error: {said}" in done.stderr


HOSTILE = st.lists(
    st.sampled_from(
        ["\n", "'", '"', "$(touch PWNED)", "`touch PWNED`", "; touch PWNED;", "-", " ", "\u00e9", "\\", "%", "x"]
    ),
    min_size=1,
    max_size=4,
).map("".join)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.tuples(*[HOSTILE] * 8))
def test_no_value_runs_in_the_shell_that_submits(texts, tmp_path_factory):
    name, job, account, partition, image, mounts, setup, folder = texts
    home = tmp_path_factory.mktemp("job")
    recipe = home / f"{name}.yaml"
    recipe.write_text(f"defaults: {ROOT / DEMO}\n")
    options = JobOptions(
        job_name=job,
        account=account,
        partition=partition,
        container=image,
        mounts=mounts,
        setup=setup,
        log_dir=Path(folder),
    )
    script = render_job(recipe, [f"logger.log_dir={json.dumps(folder)}"], options)
    (home / "sbatch").write_text(
        '#!/bin/sh\nprintf "%s\\0" "$@" "$LOG_DIR" "$CONTAINER" "$MOUNTS" "$SETUP_COMMAND" > words\n'
    )
    (home / "sbatch").chmod(0o755)
    environment = {**os.environ, "PATH": f"{home}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], cwd=home, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not list(home.rglob("PWNED"))
    words = (home / "words").read_text().split("\0")[:-1]
    assert {f"--job-name={job}", f"--account={account}", f"--partition={partition}"} <= set(words)
    assert words[-3:] == [image, mounts, setup] and Path(words[-4]) == Path(folder)
