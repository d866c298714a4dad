"""`open_evaluator`: engines on the weights of a folder, and an `Evaluator` over them, without a policy or a data plane.

Called by `nemo-rl eval`. Invariant: a checkpoint of step N is sampled with the seeds of the validation after step N.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from functools import partial

from nemo_rl.algorithms.cpu_needs import num_engine_bundles
from nemo_rl.algorithms.engines import EngineStarts, engine_scheduler, engine_spec, local_engines
from nemo_rl.algorithms.preflight.checks import run_checks
from nemo_rl.algorithms.processes import run_environment
from nemo_rl.config.schema import MasterConfig
from nemo_rl.data.datasets import load_held_out
from nemo_rl.data.tokenizer import load_tokenizer, stop_token_ids
from nemo_rl.distributed.fork_server import ForkServer
from nemo_rl.distributed.ray_worker_groups import RayWorkerGroup
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.worker_fleet import WorkerFleet
from nemo_rl.environments.answers import AnswerCheck, drop_unreadable
from nemo_rl.errors import ConfigError
from nemo_rl.experience.conversation_setup import RolloutSampling
from nemo_rl.experience.evaluation.evaluator import Evaluator
from nemo_rl.experience.rollout_worker import REWARD_LOG
from nemo_rl.experience.rollouts import RolloutSpec, sampling_params
from nemo_rl.utils.deadlines import StartUp

__all__ = ["CHECKED", "open_evaluator"]

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
            is_accuracy=config.env.is_accuracy,
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
    generation, cluster = config.policy.generation, config.cluster
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
