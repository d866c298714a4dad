"""One run, from the config to the summary and the curve at its end; called by the command line.

`open_evaluator`: engines on the weights of a folder, and an `Evaluator` over them, without a policy or a data plane.

Called by `nemo-rl eval`. Invariant: a checkpoint of step N is sampled with the seeds of the validation after step N.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import datetime
from functools import partial
from pathlib import Path

from rich.console import Console

from nemo_rl.algorithms.engines import EngineStarts, engine_scheduler, engine_spec, local_engines
from nemo_rl.algorithms.grpo_sync import GRPOTrainer, RunSummary
from nemo_rl.algorithms.preflight.checks import run_checks
from nemo_rl.algorithms.processes import num_engine_bundles, run_environment, worker_forks
from nemo_rl.algorithms.run_folder import CONFIG_FILE, CURVE_FILE
from nemo_rl.algorithms.saver import build_checkpoints
from nemo_rl.algorithms.setup import open_parts
from nemo_rl.config.r3_trace_env import r3_trace_enabled, trace_folder
from nemo_rl.config.schema import MasterConfig
from nemo_rl.data.datasets import load_held_out
from nemo_rl.data.tokenizer import load_tokenizer, stop_token_ids
from nemo_rl.distributed.fork_server import ForkServer
from nemo_rl.distributed.ray_worker_groups import RayWorkerGroup
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.worker_groups import WorkerFleet
from nemo_rl.environments.answers import AnswerCheck, drop_unreadable
from nemo_rl.errors import ConfigError, NodeLost
from nemo_rl.experience.conversation_setup import RolloutSampling
from nemo_rl.experience.evaluation.evaluator import Evaluator
from nemo_rl.experience.rollout_worker import REWARD_LOG
from nemo_rl.experience.rollouts import RolloutSpec, sampling_params
from nemo_rl.utils import interrupt
from nemo_rl.utils.deadlines import SaveDeadline, StartUp
from nemo_rl.utils.files import replace_file
from nemo_rl.utils.logger import REWARD_METRIC, VAL_ACCURACY_METRIC, VAL_REWARD_METRIC
from nemo_rl.utils.memory import PeakMemory
from nemo_rl.utils.panel import final_lines
from nemo_rl.utils.rollout_file import ROLLOUTS
from nemo_rl.utils.trackers import METRICS_FILE, read_metrics

__all__ = ["CHECKED", "NODES_LOST_METRIC", "config_after_loss", "open_evaluator", "run", "write_reward_curve"]


NODES_LOST_METRIC = "cluster/nodes_lost"
"""Nodes that a run has lost so far, beside the metrics of the step from which it has gone on."""
CHECKED = ("model", "tokenizer", "reward", "engine", "GPUs")
"""Checks of a run that concern an evaluation, too."""


@contextmanager
def open_evaluator(
    given: MasterConfig,
    *,
    report: Callable[[str], None],
    forks: ForkServer | None = None,
    now: datetime | None = None,
) -> Iterator[Evaluator]:
    """Starts engines, reward and, with `cluster.launcher: ray`, Ray; ends all of them with its block.

    Args:
        given: `policy.model_name` is what is evaluated; `logger.log_dir` gets the engines' logs.
        now: the time that the chat template sees: that of the run of a checkpoint; None: the clock's.
        report: gets lines for the person at the terminal while something starts.

    Raises:
        UserError: the recipe has no held-out prompts, or what the checks find.
    """
    if not given.data.held_out:
        raise ConfigError("data.validation: must be set: there is nothing to evaluate on without held-out prompts")
    # The call before a run is for the first prompt of data.train, which no evaluation reads.
    env = given.env.model_copy(update={"preflight_reward": False})
    config = run_checks(given.model_copy(update={"env": env}), CHECKED)
    policy = config.policy
    tokenizer = load_tokenizer(policy.tokenizer.name or policy.model_name, chat_template=policy.tokenizer.chat_template)
    with ExitStack() as stack:
        start = StartUp(timeout_s=config.cluster.worker_start_timeout_s, report=report)
        stop_ids = stop_token_ids(policy.model_name, tokenizer)
        sampling = sampling_params(policy.generation, stop_ids, is_validation=True)
        parts = RolloutSampling(
            RolloutSpec.of(config, now=now),
            tokenizer=tokenizer,
            stop_ids=stop_ids,
            generation=engine_scheduler(config, _engines(config, stack, start, forks)),
            log_file=config.logger.log_dir / REWARD_LOG,
        )
        stack.callback(parts.shutdown)
        sets = load_held_out(
            config.data, tokenizer, now=now, tools=parts.environment.schemas, pictures=parts.pictures.encoder
        )
        by_key = {config.data.held_out_key(name): found for name, found in sets.items()}
        by_key = drop_unreadable(config.data, parts.environment.scorer, by_key)
        sets = {name: by_key[config.data.held_out_key(name)] for name in sets}
        for line in (line for found in sets.values() for line in found.remarks):
            report(line)
        answers = AnswerCheck(parts.environment.scorer, by_key)
        while not answers.look():
            report("looking at the gold answers")
        yield Evaluator(
            config.evaluation,
            sampling=sampling,
            seed=config.grpo.seed,
            is_accuracy=config.is_accuracy,
            sampler=parts.sampler_of(sampling),
            tokenizer=tokenizer,
            sets=sets,
        )


def _engines(config: MasterConfig, stack: ExitStack, start: StartUp, forks: ForkServer | None) -> WorkerFleet:
    spec_of = partial(engine_spec, config, weight_version=0)
    if config.cluster.launcher == "local":
        engines = local_engines(config, spec_of)
        stack.callback(engines.shutdown)
        return engines
    starts = EngineStarts(config, spec_of, stack.enter_context(_cluster(config, start, forks)))
    engines = starts.fleet(timeout_s=start.timeout_s)
    stack.callback(engines.shutdown)
    starts.begin_all()
    for group in engines.members:
        assert isinstance(group, RayWorkerGroup)
        with start.waiting_for("the generation workers"):
            group.finish_start(timeout_s=start.timeout_s)
    return engines


def _cluster(config: MasterConfig, start: StartUp, forks: ForkServer | None) -> RayVirtualCluster:
    """Return a cluster for the engines alone: on GPUs they stand where they would in a run, on CPUs beside one empty
    bundle."""
    generation, cluster = config.policy.generation, config.cluster.model_copy(update={"spare_nodes": 0})
    uses_gpu = cluster.gpus_per_node > 0
    if not uses_gpu:
        cluster = cluster.model_copy(update={"num_nodes": 1, "cpu_workers_per_node": 1, "num_cpus": None})
    return RayVirtualCluster(
        cluster,
        other_cpus=0 if uses_gpu or num_engine_bundles(config) else generation.num_replicas,
        num_engine_bundles=num_engine_bundles(config),
        engine_nodes=generation.colocated.num_nodes,
        gpus_per_engine_node=generation.colocated.gpus_per_node,
        environment=run_environment(config),
        start=start,
        forks=forks,
        logs_to=config.logger.log_dir / "ray_logs",
    )


def run(config: MasterConfig, *, console: Console, forks: ForkServer | None = None) -> RunSummary:
    """Trains, writes the reward curve, and prints what was reached, how long it all took, and where it lies; of two
    stages each, one behind the other.

    Args:
        forks: as `worker_forks` opens it for this config; None: it is opened here.

    Returns:
        The summary of the last stage, or of the one that was ended early.
    """
    started = time.monotonic()
    with worker_forks(config) if forks is None else nullcontext(forks) as workers_from:
        stage = partial(_run_stage, started=started, console=console, forks=workers_from)
        if len(config.stages) == 1:
            return stage(config)
        from nemo_rl.algorithms.two_stages import run_both  # noqa: PLC0415 - a run of one stage does without

        return run_both(config, stage, report=console.print)


def _run_stage(config: MasterConfig, *, started: float, console: Console, forks: ForkServer | None) -> RunSummary:
    """
    Args:
        started: of the run, on the monotonic clock.
    """
    began = time.monotonic()
    with PeakMemory() as memory:
        summary = _trained(config, started, console=console, forks=forks)
    lines = final_lines(
        first_reward=summary.first_reward,
        last_reward=summary.last_reward,
        measure=config.measure,
        num_steps=summary.num_steps,
        seconds=time.monotonic() - began,
        peak_bytes=memory.num_bytes,
        paths=_outputs(config, summary),
    )
    for line in lines:
        console.print(line)
    return summary


def _trained(config: MasterConfig, started: float, *, console: Console, forks: ForkServer | None) -> RunSummary:
    """Train to the end, after the loss of a node on those that are left and from the last checkpoint on, as long as
    there are spare ones (`cluster.spare_nodes`).

    Args:
        started: of the run, on the monotonic clock.

    Raises:
        NodeLost: the run cannot go on; a note says why.
    """
    num_lost = 0
    while True:
        try:
            with open_parts(config, console=console, forks=forks) as parts:
                if num_lost and parts.resume_from is not None:
                    parts.logger.log_metrics({NODES_LOST_METRIC: num_lost}, step=parts.resume_from.step)
                deadline = SaveDeadline.starting_at(started, config.checkpointing.must_save_by)
                return GRPOTrainer(parts).fit(deadline=deadline)
        except NodeLost as lost:
            num_lost += lost.num_lost
            config = config_after_loss(config, lost, report=console.print)


def config_after_loss(config: MasterConfig, lost: NodeLost, *, report: Callable[[str], None]) -> MasterConfig:
    """Return the config by which a run goes on after the loss of nodes.

    Args:
        report: gets a warning in one line.

    Raises:
        NodeLost: again, where it cannot go on.
    """
    spare, saving = config.cluster.spare_nodes, config.checkpointing
    checkpoints = build_checkpoints(
        saving,
        log_dir=config.logger.log_dir,
        metric_name=config.checkpoint_metric,
        timeout_s=config.cluster.stage_timeout_s,
    )
    last = None if checkpoints is None else checkpoints.latest()
    if interrupt.received():
        raise lost
    if not spare or lost.num_spare < 0 or last is None:
        why = "no node is spare" if not spare else "no checkpoint is complete" if last is None else "too few are alive"
        lost.add_note(f"cluster.spare_nodes: the run does not go on by itself, {why}")
        raise lost
    report(f"warning: {lost}; going on after step {last.step} on the nodes that are alive")
    # Resumed by the state that this very run has saved, whatever it has begun with.
    resumed = saving.model_copy(update={"resume": True, "load_optimizer": True})
    left = min(spare - lost.num_lost, lost.num_spare)
    return config.model_copy(
        update={
            "checkpointing": resumed,
            "cluster": config.cluster.model_copy(update={"spare_nodes": max(0, left)}),
            "logger": config.logger.model_copy(update={"overwrite": False}),
        }
    )


def _outputs(config: MasterConfig, summary: RunSummary) -> dict[str, str | Path]:
    """Return the files that the run wrote, by name; a name whose file is not there is left out."""
    log_dir = config.logger.log_dir
    if config.logger.reward_curve:
        write_reward_curve(log_dir / METRICS_FILE, log_dir / CURVE_FILE)
    found: dict[str, str | Path] = {
        "metrics": log_dir / METRICS_FILE,
        "TensorBoard events": log_dir / "tensorboard",
        "resolved config": log_dir / CONFIG_FILE,
        "rollouts": log_dir / ROLLOUTS,
        "reward curve": log_dir / CURVE_FILE,
    }
    if r3_trace_enabled():
        found["route trace"] = Path(trace_folder())
    if summary.last_checkpoint is not None:
        found["last checkpoint"] = summary.last_checkpoint
    if summary.best_checkpoint is not None:
        found["best checkpoint"] = summary.best_checkpoint
    return {name: path for name, path in found.items() if isinstance(path, str) or path.exists()}


TRAINING_LABEL = "training reward"


def write_reward_curve(metrics: Path, picture: Path) -> Path | None:
    """Draw the picture; return None when the file holds no reward yet."""
    series: dict[str, dict[float, float]] = {}
    for row in read_metrics(metrics):
        for name, label in _labels(row).items():
            series.setdefault(label, {})[row["step"]] = row[name]
    if TRAINING_LABEL not in series:
        return None
    # Imported when the workers have ended: 20 MiB that the run does without.
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(7, 4), layout="constrained")
    # A canvas of its own: no global pyplot state, no display.
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for label, points in series.items():
        is_validation = label.startswith("validation")
        axes.plot(list(points), list(points.values()), label=label, linewidth=1, marker="o" if is_validation else None)
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward")
    axes.grid(alpha=0.3)
    axes.legend()
    return replace_file(picture, lambda path: figure.savefig(path, dpi=120))


def _labels(row: Mapping[str, float]) -> dict[str, str]:
    """Return the rewards in a line of metrics: name -> label of the curve."""
    measured = VAL_ACCURACY_METRIC if VAL_ACCURACY_METRIC in row else VAL_REWARD_METRIC
    labels = {REWARD_METRIC: TRAINING_LABEL, measured: f"validation {measured.removeprefix('val/')}"}
    components = (name for name in row if name.startswith(f"{REWARD_METRIC}/"))
    labels |= {name: f"training {name.removeprefix(f'{REWARD_METRIC}/')}" for name in components}
    return {name: label for name, label in labels.items() if name in row}
