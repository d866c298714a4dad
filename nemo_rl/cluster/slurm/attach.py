"""A shell or a command inside a running job of `ray.sub`, on its head, with Ray's address and token set."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from nemo_rl.cluster.slurm.settings import HEAD_FILE, TOKEN_FILE
from nemo_rl.errors import UserError

__all__ = ["attach_words"]

CONTAINER_FILE = "container"
"""Options of `srun` for the job's container, a line each, written by `ray.sub`."""
SCONTROL_S = 30.0


def attach_words(job: str, command: Sequence[str]) -> list[str]:
    """The call of `srun`.

    Args:
        command: empty: a shell on a terminal.

    Raises:
        UserError: there is no such job of ours, or its Ray is not there (yet).
    """
    folder = _job_folder(job)
    try:
        facts = json.loads((folder / HEAD_FILE).read_text(encoding="utf-8"))
        container = (folder / CONTAINER_FILE).read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise UserError(f"job {job}: {folder} says nothing of its head yet ({error}); try again in a while") from error
    if "ray" not in facts:
        raise UserError(f"job {job}: Ray is still starting on {facts['node']}; try again in a while")
    variables = {
        "RAY_ADDRESS": facts["ray"],
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(folder / TOKEN_FILE),
    }
    words = ["srun", f"--jobid={job}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={facts['node']}"]
    words += ["--cpu-bind=none", *filter(None, container)]
    inside = ["env", *(f"{name}={value}" for name, value in variables.items())]
    if command:
        return [*words, *inside, "bash", "-c", shlex.join(command)]
    return [*words, "--pty", *inside, "bash", "-i"]


def _job_folder(job: str) -> Path:
    """As the job itself has noted it in Slurm."""
    if shutil.which("scontrol") is None:
        raise UserError("no Slurm here: scontrol is not on PATH; run this on a login node of the cluster")
    done = subprocess.run(
        ["scontrol", "show", "job", "--oneliner", job], capture_output=True, text=True, timeout=SCONTROL_S, check=False
    )
    state = re.search(r" JobState=(\S+)", done.stdout)
    if done.returncode or state is None:
        raise UserError(f"job {job}: Slurm knows no such job ({done.stderr.strip()}); squeue --me lists yours")
    if state[1] != "RUNNING":
        raise UserError(
            f"job {job}: expected a running job, got one that is {state[1]}; wait for it, or submit it again"
        )
    folder = re.search(r" Comment=NEMO_RL_JOB_DIR=(\S+)", done.stdout)
    if folder is None:
        raise UserError(f"job {job}: runs, but has not begun as a job of ray.sub; try again in a while")
    return Path(folder[1])
