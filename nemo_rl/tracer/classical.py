"""Six classical switches: names for places of a model that older tensor tracers use, as sites of the catalogue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["BY_FLAG", "BY_SWITCH", "CLASSICAL", "Classical"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Classical:
    """One switch."""

    switch: str
    """Its name in a recipe."""
    flag: str
    """Its public name, in messages of the compatibility endpoint."""
    update_type: int
    """Its public number."""
    sites: str
    """What a `Watch` takes."""


CLASSICAL = (
    Classical(switch="qkv_mat_mul", flag="QKV_mat_mul", update_type=1, sites="attn.q, attn.k, attn.v"),
    Classical(switch="context_layer_mat_mul", flag="ContextLayer_mat_mul", update_type=3, sites="attn.context"),
    Classical(switch="mlp1_mat_mul", flag="MLP1_mat_mul", update_type=4, sites="mlp.gate, mlp.up"),
    Classical(switch="mlp2_mat_mul", flag="MLP2_mat_mul", update_type=5, sites="mlp.out"),
    Classical(switch="attention_output_mat_mul", flag="AttentionOutput_mat_mul", update_type=6, sites="attn.out"),
    Classical(switch="hidden_states", flag="HiddenStates", update_type=7, sites="layer.out"),
)

BY_SWITCH: Mapping[str, Classical] = {each.switch: each for each in CLASSICAL}
BY_FLAG: Mapping[str, Classical] = {each.flag: each for each in CLASSICAL}
