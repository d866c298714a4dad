"""`build_loss`: the loss of a recipe; it needs no process, so whoever only plans a run has it too."""

from __future__ import annotations

from nemo_rl.algorithms.losses.policy_loss import PolicyLoss
from nemo_rl.config.parts import LOSSES
from nemo_rl.config.schema import MasterConfig
from nemo_rl.distributed.worker_pass import WorkerPass
from nemo_rl.models.policy.interfaces import LossFunction

__all__ = ["build_loss"]


def build_loss(config: MasterConfig) -> LossFunction:
    """The loss that the recipe names."""
    is_from_sampler = config.grpo.use_generation_logprobs_as_prev
    prev_field = "generation_logprobs" if is_from_sampler else WorkerPass.PREV_LOGPROBS.column
    name = config.loss_fn.name
    if LOSSES.is_builtin(name):
        return PolicyLoss(config=config.loss_fn, prev_field=prev_field)
    own: LossFunction = LOSSES.load(name, key="loss_fn.name")(config=config.loss_fn, prev_field=prev_field)
    return own
