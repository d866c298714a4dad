"""Runs of two stages: supervised training, then GRPO from its weights.

    run_both
      |- stage_configs   which stages have not ended, and their recipes         (first_stage)
      |- preflight       of the second one; the first one checks itself when it starts
      |- stage           the first one, in `warm_start` of the log folder
      `- stage           the second one, with the newest weights of the first one as its model

Called by `run` where `stages` has two names. Invariant: each stage is a run as it would be by itself, with its own
folder, checkpoints and `config.yaml`; nothing but the weights' folder is handed on.
"""

from __future__ import annotations

from collections.abc import Callable

from nemo_rl.algorithms.grpo_sync import RunSummary
from nemo_rl.algorithms.preflight.checks import decide_resume, preflight
from nemo_rl.algorithms.run_folder import open_run_folders, saved_steps
from nemo_rl.config.base import AUTO
from nemo_rl.config.load import first_stage
from nemo_rl.config.schema import MasterConfig
from nemo_rl.errors import CheckpointError
from nemo_rl.utils.checkpoint import WEIGHTS
from nemo_rl.utils.remote_checkpoints import open_checkpoints
from nemo_rl.utils.run_lock import is_done

__all__ = ["run_both", "stage_configs"]


def run_both(
    config: MasterConfig, stage: Callable[[MasterConfig], RunSummary], *, report: Callable[[str], None]
) -> RunSummary:
    """Run the stages that have not ended; return the summary of the last one, or of the one that was ended early.

    Args:
        stage: runs one of them.
        report: gets lines for the person at the terminal.

    Raises:
        UserError: what the checks of either stage find, before one starts.
    """
    *first, last = stage_configs(config)
    for warm in first:
        preflight(last)
        if last.logger.overwrite:
            # What an earlier run has left must not be taken for the second stage of this one.
            with open_run_folders(last.logger, last.checkpointing, durable=last.data_plane.durable.path):
                pass
        report(f"stage 1 of 2: sft, in {warm.logger.log_dir}")
        summary = stage(warm)
        if summary.is_interrupted or summary.is_out_of_time:
            return summary
        last = _going_on(last, warm)
    report(f"stage 2 of 2: grpo, in {last.logger.log_dir}")
    return stage(last)


def stage_configs(config: MasterConfig) -> tuple[MasterConfig, ...]:
    """Return the recipes of the stages that have not ended: both, of which the second one has the model that the first
    one starts from, or with `checkpointing.resume` the second one alone. Of a recipe of one stage return itself.

    Raises:
        RunFolderError: the first stage has ended with another recipe. CheckpointError: its weights are damaged.
    """
    first = first_stage(config)
    if first is None:
        return (config,)
    alone = {"stages": ("grpo",), "sft": config.sft.model_copy(update={"settings": {}, "min_reward": None})}
    first, last = _begun(first), _begun(config.model_copy(update=alone))
    if not config.checkpointing.resume or not is_done(first.logger.log_dir):
        return first, last
    decide_resume(first)
    return (_going_on(last, first),)


def _begun(config: MasterConfig) -> MasterConfig:
    """Return the recipe of a stage that resumes where it has come to a checkpoint, and starts where it has not."""
    saving = config.checkpointing
    if not saving.resume or saved_steps(saving, config.logger.log_dir):
        return config
    return config.model_copy(update={"checkpointing": saving.model_copy(update={"resume": AUTO})})


def _going_on(config: MasterConfig, first: MasterConfig) -> MasterConfig:
    """Return the recipe of the second stage, which starts from the newest weights of the first one."""
    found = open_checkpoints(first.checkpointing, first.logger.log_dir).latest()
    if found is None:
        raise CheckpointError(f"{first.logger.log_dir}: the first stage has ended and left no checkpoint; remove it")
    damage = found.manifest.only(f"{WEIGHTS}/").damage(found.path)
    if damage is not None:
        raise CheckpointError(f"{found.path}: {damage}; remove {first.logger.log_dir} to train the first stage again")
    policy = config.policy.model_copy(update={"model_name": str(found.weights)})
    return config.model_copy(update={"policy": policy})
