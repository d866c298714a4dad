"""Settings of low-rank adapters (`policy.lora` section)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from nemo_rl.config.base import Section, Text

__all__ = ["ALL_LINEAR", "LoraConfig"]

ALL_LINEAR = "all-linear"


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
