"""`nemo-rl train` and `init`, and `nemo-rl launch local|ray|slurm|attach`: one recipe here, on a running Ray, or as a
Slurm job.

`examples/first` has what `init` writes for the starter checkpoint.
"""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
from pathlib import Path
from typing import Annotated

import typer

from nemo_rl.cli.doors import Verbs
from nemo_rl.cli.run_recipe import extent_of, run_recipe
from nemo_rl.errors import UserError, boundary
from nemo_rl.utils.console import make_console
from nemo_rl.utils.files import write_text

__all__ = ["app", "init", "sft", "train"]

app = typer.Typer(
    cls=Verbs,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Run a recipe here, on a running Ray, or as a Slurm job.",
)

AUTO = "auto"
ANSWER_S = 5.0
"""Seconds for the answer of a Ray on the same network."""

Recipe = Annotated[Path, typer.Argument(metavar="RECIPE", help="YAML recipe")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="changes of the recipe")]


def train(
    recipe: Recipe,
    overrides: Overrides = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="print the resolved config with variables, and exit")
    ] = False,
    validate_only: Annotated[bool, typer.Option("--validate-only", help="check the config alone and exit")] = False,
    preflight: Annotated[
        bool, typer.Option("--preflight", help="check all that a run needs, start nothing, and exit")
    ] = False,
) -> None:
    """Train a model as RECIPE says.

    Exit code: 0 done, 1 a worker or the data plane failed, 2 something the user can fix, 75 saved and ended before
    checkpointing.must_save_by, 130 interrupted.
    """
    extent = extent_of(print_config=print_config, validate_only=validate_only, preflight=preflight)
    raise typer.Exit(run_recipe(recipe, overrides or [], extent=extent, print_config=print_config))


def sft(
    recipe: Recipe,
    overrides: Overrides = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="print the resolved config with variables, and exit")
    ] = False,
    validate_only: Annotated[bool, typer.Option("--validate-only", help="check the config alone and exit")] = False,
    preflight: Annotated[
        bool, typer.Option("--preflight", help="check all that a run needs, start nothing, and exit")
    ] = False,
) -> None:
    """Train a model on the finished conversations that RECIPE names, before GRPO goes on with it.

    Exit codes are those of `nemo-rl train`.
    """
    extent = extent_of(print_config=print_config, validate_only=validate_only, preflight=preflight)
    given = ["sft.enabled=true", *(overrides or [])]
    raise typer.Exit(run_recipe(recipe, given, extent=extent, print_config=print_config))


RECIPE, REWARD, PROMPTS = "recipe.yaml", "reward.py", "prompts.jsonl"
SMALL_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
NUM_PROMPTS, SEED = 512, 1
_RECIPE = """\
# GRPO on your prompts with your reward. Run it: nemo-rl train {folder}/recipe.yaml
policy:
  model_name: {model}  # a folder, or a name on the hub
  precision: float32  # fast on CPUs; leave it out on GPUs
  train_global_batch_size: 128  # rows of an optimizer step: two steps for each rollout of 32 x 8 rows
  max_total_sequence_length: 80
  optimizer:
    kwargs: {{lr: {rate}}}
  scheduler: {{name: linear, min_factor: 0.1}}
  generation:
    max_new_tokens: 16
grpo:
  num_prompts_per_step: 32
  num_generations_per_prompt: 8
  max_num_steps: 80
  use_generation_logprobs_as_prev: true
loss_fn:
  reference_policy_kl_penalty: 0
  ratio_clip_max: 0.28
data:
  train:
    dataset_name: jsonl
    data_path: prompts.jsonl  # beside this file; one {{"input": ..., "output": ...}} per line
  validation: null
  max_input_seq_length: 64
env:
  name: custom
  reward_function: reward.py:sorted_digits
logger:
  log_dir: results/{name}
"""
_REWARD = '''\
"""The reward of recipe.yaml: called once for each response, with the "output" of its prompt as the answer."""


def sorted_digits(prompt: str, response: str, answer: str) -> float:
    """Return 1 where the digits of the response are the answer, else half the share of digits at their places."""
    digits = "".join(filter(str.isdigit, response))
    if digits == answer:
        return 1.0
    right = sum(mine == theirs for mine, theirs in zip(digits, answer, strict=False))
    return 0.5 * right / max(len(digits), len(answer))
'''


def init(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="folder for the files, which may not be there yet")],
    model: Annotated[str, typer.Option("--model", metavar="NAME", help="folder of a model, or its name on the hub")] = (
        SMALL_MODEL
    ),
    rate: Annotated[float, typer.Option("--lr", min=0, help="learning rate")] = 2e-5,
) -> None:
    """Write a recipe, its reward and its prompts to FOLDER: the model learns to sort digits.

    Exit code: 0, or 2 where one of the files is there already.
    """
    draw = random.Random(SEED)
    texts = ["".join(draw.choices("0123456789", k=draw.randint(6, 8))) for _ in range(NUM_PROMPTS)]
    rows = [json.dumps({"input": f"sort {text}", "output": "".join(sorted(text))}) for text in texts]
    recipe = _RECIPE.format(folder=folder, name=folder.absolute().name, model=model, rate=f"{rate:.1e}")
    files = {RECIPE: recipe, REWARD: _REWARD, PROMPTS: "".join(f"{row}\n" for row in rows)}
    if there := [str(folder / name) for name in files if (folder / name).exists()]:
        raise UserError(f"{', '.join(there)}: there already, and not written over; name another folder")
    with boundary(UserError, f"{folder}: cannot be written"):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            write_text(folder / name, text)
    make_console().print(f"wrote {', '.join(files)} to {folder}; run: nemo-rl train {folder / RECIPE}")


@app.callback()
def _root() -> None:
    """Run a recipe here, on a running Ray, or as a Slurm job."""


@app.command(short_help="Run RECIPE on this machine, with its own Ray.")
def local(recipe: Recipe, overrides: Overrides = None) -> None:
    """Run RECIPE as `nemo-rl train` does. Exit codes as there."""
    given = overrides or []
    from nemo_rl.config.load import load_config  # noqa: PLC0415

    num_nodes = load_config(recipe, given).cluster.num_nodes
    if num_nodes > 1:
        raise UserError(
            f"launch local: this is 1 node, and {recipe} asks for cluster.num_nodes={num_nodes}; use launch slurm or "
            "launch ray, or set cluster.num_nodes=1"
        )
    raise typer.Exit(run_recipe(recipe, [*given, "cluster.address=null"]))


@app.command(short_help="Run RECIPE on a Ray cluster that is running.")
def ray(
    recipe: Recipe,
    overrides: Overrides = None,
    address: Annotated[
        str, typer.Option("--address", help="HOST:PORT of its head; auto: RAY_ADDRESS, or found")
    ] = AUTO,
) -> None:
    """Run RECIPE on the nodes of a Ray cluster, which goes on afterwards. Exit codes as those of `nemo-rl train`."""
    _check_answer(address)
    raise typer.Exit(run_recipe(recipe, [*(overrides or []), f"cluster.address={address}"]))


@app.command(short_help="Run RECIPE as a Slurm job over several nodes.")
def slurm(
    recipe: Recipe,
    overrides: Overrides = None,
    nodes: Annotated[int | None, typer.Option("--nodes", min=1, help="default: all that the recipe asks for")] = None,
    time: Annotated[str | None, typer.Option("--time", help="limit as Slurm writes it; saved before it")] = None,
    account: Annotated[str | None, typer.Option("--account", help="of Slurm")] = None,
    partition: Annotated[str | None, typer.Option("--partition", help="of Slurm")] = None,
    job_name: Annotated[str | None, typer.Option("--job-name", help="in the queue; default: nemo_rl")] = None,
    container: Annotated[str | None, typer.Option("--container", help="image, with pyxis; default: none")] = None,
    mounts: Annotated[str | None, typer.Option("--mounts", help="A:B,C:D of the container")] = None,
    setup: Annotated[str | None, typer.Option("--setup", help="shell command first on every node")] = None,
    cpus_per_node: Annotated[
        int | None, typer.Option("--cpus-per-node", min=1, help="default: what the recipe's actors need")
    ] = None,
    log_dir: Annotated[Path, typer.Option("--log-dir", help="on a file system that all nodes share")] = Path(
        "slurm_logs"
    ),
    requeue: Annotated[
        bool, typer.Option("--requeue/--no-requeue", help="start again after a lost node or at the limit, and resume")
    ] = True,
    sbatch: Annotated[list[str] | None, typer.Option("--sbatch", help="a further option of sbatch; repeatable")] = None,
    render: Annotated[bool, typer.Option("--render", help="print the script instead; needs no Slurm")] = False,
) -> None:
    """Submit a job that runs RECIPE on a Ray cluster over its nodes (`ray.sub`)."""
    # The planes' and engines' tables are read; other commands need none of them.
    from nemo_rl.slurm.job import JobOptions, render_job, submit_job  # noqa: PLC0415

    options = JobOptions(
        nodes=nodes,
        time=time,
        account=account,
        partition=partition,
        job_name=job_name,
        container=container,
        mounts=mounts,
        setup=setup,
        cpus_per_node=cpus_per_node,
        log_dir=log_dir,
        requeue=requeue,
        sbatch=sbatch or (),
    )
    script = render_job(recipe, overrides or [], options)
    typer.echo(script if render else f"{submit_job(script)}; its log: {log_dir}/slurm-<job>.log", nl=not render)


@app.command(short_help="Open a shell, or run a command, inside a running Slurm job.")
def attach(
    job: Annotated[str, typer.Argument(metavar="JOBID", help="of Slurm")],
    command: Annotated[list[str] | None, typer.Argument(metavar="[-- COMMAND...]", help="default: a shell")] = None,
) -> None:
    """Run COMMAND on the job's head, with RAY_ADDRESS and the token of its Ray set."""
    from nemo_rl.slurm.job import attach_words  # noqa: PLC0415

    raise typer.Exit(subprocess.run(attach_words(job, command or ()), check=False).returncode)


def _check_answer(address: str) -> None:
    """Check that Ray answers: Ray itself would try for half a minute."""
    given = os.environ.get("RAY_ADDRESS", "") if address == AUTO else address
    host, _, port = given.rpartition(":")
    if not given:
        return
    if not host or not port.isdecimal():
        raise UserError(f"--address: expected HOST:PORT of Ray's head, got {given!r}")
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER_S).close()
    except (OSError, OverflowError) as error:
        raise UserError(f"--address: no Ray answers at {given} ({error}); see that it runs, and its port") from error
