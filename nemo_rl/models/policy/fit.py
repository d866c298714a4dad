"""Whether the model of the policy can run as configured, asked by the driver before it starts anything."""

from __future__ import annotations

from nemo_rl.config.policy import PolicyConfig
from nemo_rl.models.dtensor import fit
from nemo_rl.models.megatron import architecture

__all__ = ["check_policy_fits"]


def check_policy_fits(config: PolicyConfig) -> None:
    """Reads the config of the model folder only; imports no training engine.

    Raises:
        ModelFolderError: the folder is missing, unreadable or of another kind of model.
        ConfigError: the model cannot run as configured.
    """
    if config.megatron_cfg.enabled:
        architecture.check_folder_fits(config)
    else:
        fit.check_folder_fits(config)
