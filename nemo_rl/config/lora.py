"""Settings of low-rank adapters (`policy.lora` section), and the rules over them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from nemo_rl.config.base import Section, Text

if TYPE_CHECKING:
    from nemo_rl.config.schema import MasterConfig

__all__ = ["ALL_LINEAR", "LoraConfig", "adapter_warnings"]

ALL_LINEAR = "all-linear"
LEAST_RATE = 5e-6
"""Five times the default learning rate of full training: below it a recipe has most likely kept that of all weights."""


class LoraConfig(Section):
    """Low-rank adapters: the model's weights stay as they are, and two small matrices A and B beside each adapted one
    are trained, y = x W^T + s (x A^T) B^T."""

    enabled: bool = False
    """Train adapters instead of the weights."""
    rank: PositiveInt = 16
    """Rows of A, columns of B."""
    alpha: PositiveFloat = 32.0
    """The scale s is alpha / rank, or alpha / sqrt(rank) with `rslora`."""
    targets: Literal["all-linear"] | Annotated[list[Text], Field(min_length=1)] = "all-linear"
    """`all-linear`: every linear layer but the head and routers; or ends of names of modules such as `q_proj`, of which
    each must match one. `experts.gate_up_proj` and `experts.down_proj` adapt each expert of a mixture."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the adapters' inputs that training drops. The sampler drops none, so that above 0 the ratios of a first
    update are not 1."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank)."""
    init: Literal["kaiming", "gaussian"] = "kaiming"
    """Start of A: uniform as in a linear layer, or normal with deviation 1 / rank. B starts at 0."""
    adapter: Text | None = None
    """Folder with an adapter in peft's format to start from; its rank, alpha and targets must be those given here."""
    reference: Literal["base", "start"] = "base"
    """Reference policy: the model without an adapter, or with the one of `adapter`."""
    serve: Literal["native", "merged"] = "native"
    """`native`: engines hold base and adapters, and a refit sends the adapters alone. `merged`: a refit sends
    W + s B A of every weight; an engine in 16 bit loses a part of each update, which is measured and logged."""

    @property
    def scale(self) -> float:
        """Return the factor s of the product of B and A."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    @property
    def is_native(self) -> bool:
        """Return whether engines serve adapters beside the base."""
        return self.enabled and self.serve == "native"


def adapter_warnings(config: MasterConfig) -> list[str]:
    """Return what of a recipe with adapters is allowed and seldom meant, a line each."""
    policy, lora = config.policy, config.policy.lora
    if not lora.enabled:
        return []
    lines = []
    key, rate = "policy.optimizer.kwargs.lr", policy.optimizer.kwargs.get("lr")
    if policy.megatron_cfg.enabled:
        key, rate = "policy.megatron_cfg.optimizer.lr", policy.megatron_cfg.optimizer.lr
    if isinstance(rate, float | int) and rate < LEAST_RATE:
        lines.append(
            f"{key}: {rate:g} is a rate for all weights; adapters learn at about ten times of it, and below "
            f"{LEAST_RATE:g} hardly at all"
        )
    engines = policy.generation.precision or policy.precision
    if lora.serve == "merged" and engines != "float32":
        lines.append(
            f"policy.lora.serve: merged weights in {engines} lose a part of each update, most of a small one "
            "(refit/lora_merge_loss); native loses nothing"
        )
    if lora.dropout:
        lines.append(
            f"policy.lora.dropout: {lora.dropout:g} in training alone: the ratios of a first update are noise around 1"
        )
    return lines


def rule_lora_reference_needs_an_adapter(config: MasterConfig) -> Iterator[str]:
    lora = config.policy.lora
    if not lora.enabled or lora.reference == "base" or lora.adapter is not None:
        return
    yield "policy.lora.reference: 'start' needs an adapter to start from; set policy.lora.adapter, or reference=base"


def rule_finish_needs_adapters(config: MasterConfig) -> Iterator[str]:
    if config.policy.generation.in_flight != "finish" or config.policy.lora.is_native:
        return
    yield (
        "policy.generation.in_flight: 'finish' lets rows of two versions run side by side, for which engines must hold "
        "adapters; set policy.lora.enabled=true with policy.lora.serve=native, or in_flight=recompute or drain"
    )


def rule_vllm_rows_keep_their_adapter(config: MasterConfig) -> Iterator[str]:
    generation = config.policy.generation
    is_changed = generation.in_flight in ("recompute", "keep") and config.grpo.samples_ahead
    if not config.policy.lora.is_native or generation.backend != "vllm" or not is_changed:
        return
    yield (
        f"policy.generation.in_flight: {generation.in_flight!r} changes the adapter of running rows, and a row of vLLM "
        "has one adapter to its end; set it to finish or drain, policy.lora.serve=merged, or "
        "policy.generation.backend=torch"
    )


def rule_adapters_are_sent_whole(config: MasterConfig) -> Iterator[str]:
    if config.policy.lora.is_native and config.policy.generation.refit_delta.enabled:
        yield (
            "policy.generation.refit_delta.enabled: true, but policy.lora.serve is native, so that a refit sends an "
            "adapter, of which every element changes; set it to false, or policy.lora.serve=merged"
        )
