"""Settings of vision-language models (`policy.vision` section), and the rules over them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from nemo_rl.config.base import Section

if TYPE_CHECKING:
    from nemo_rl.config.schema import MasterConfig

__all__ = ["VisionConfig"]


class VisionConfig(Section):
    """Settings of the vision tower of a model; models of text have none."""

    freeze_tower: bool = False
    """Leave the vision tower and its projection to the language model as they are, and train the rest."""


def rule_adapters_leave_the_tower(config: MasterConfig) -> Iterator[str]:
    if not config.policy.vision.freeze_tower or not config.policy.lora.enabled:
        return
    yield (
        "policy.vision.freeze_tower: true would be ignored: policy.lora.enabled is true, and adapters leave the vision "
        "tower as it is; leave the key out"
    )


def rule_megatron_has_no_vision_tower(config: MasterConfig) -> Iterator[str]:
    if config.policy.vision.freeze_tower and config.policy.megatron_cfg.enabled:
        yield (
            "policy.vision.freeze_tower: true, but the Megatron worker trains models of text alone; set "
            "policy.dtensor_cfg.enabled=true and policy.megatron_cfg.enabled=false"
        )
