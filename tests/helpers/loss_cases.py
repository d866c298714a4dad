"""Configs of every policy loss that tests go through, and batches that reach all of their branches."""

from __future__ import annotations

import torch

from nemo_rl.config.loss import CORRECTIONS, LOSS_PROPERTIES, LossConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict

SETTINGS: dict[str, dict[str, object]] = {
    "gspo": {"token_level_loss": False, "ratio_clip_min": 0.05, "ratio_clip_max": 0.08},
    "gspo_token": {"token_level_loss": False, "ratio_clip_min": 0.05, "ratio_clip_max": 0.08},
    "luspo": {"token_level_loss": False, "ratio_clip_min": 0.05, "ratio_clip_max": 0.08},
    "gmpo": {"token_level_loss": False, "ratio_clip_min": 0.3, "ratio_clip_max": 0.25},
    "cispo": {"ratio_clip_min": 0.3, "ratio_clip_max": 0.25},
    "dppo_tv": {"dppo": {"delta_low": 0.03, "delta_high": 0.02}},
    "dppo_kl": {"dppo": {"delta_low": 0.004, "delta_high": 0.003}},
    "dro": {"dro": {"beta": 0.7}},
}
"""What a loss must have, and bounds that some tokens of `loss_batch` cross."""
BOUNDS: dict[str, tuple[float | None, float]] = {
    "tis": (None, 1.1),
    "icepop": (0.8, 1.25),
    "seq-tis": (0.5, 1.5),
    "seq-mis": (0.5, 1.5),
    "seq-mask-tis": (0.95, 1.05),
    "geo-mask": (0.95, 1.05),
}


def loss_config(name: str, **changes: object) -> LossConfig:
    """A config of the loss without a KL penalty, as it passes the rules."""
    values = {"reference_policy_kl_penalty": 0.0, **SETTINGS.get(name, {}), **changes}
    return LossConfig.model_validate({"name": name, **values})


def corrected(kind: str | None) -> dict[str, object]:
    """Keys of an off-policy correction."""
    if kind is None:
        return {"use_importance_sampling_correction": True}
    low, high = BOUNDS[kind]
    return {
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": kind,
        "truncated_importance_sampling_ratio_min": low,
        "truncated_importance_sampling_ratio": high,
    }


def corrections_of(name: str) -> list[str | None]:
    """Types that the loss may have."""
    traits = LOSS_PROPERTIES[name]
    if traits.has_own_correction:
        return [None]
    return [None, *(kind for kind, of in CORRECTIONS.items() if of.is_per_row or not traits.is_row_level)]


def all_configs() -> list[LossConfig]:
    """Every loss with every mean, correction and KL that it may have."""
    found = []
    for name, traits in LOSS_PROPERTIES.items():
        found.append(loss_config(name))
        if not traits.is_row_level:
            found += [loss_config(name, token_level_loss=False), loss_config(name, constant_length=7)]
        found += [loss_config(name, **corrected(kind)) for kind in corrections_of(name)]
    found += [loss_config("clipped_pg", ratio_clip_c=1.3, ratio_clip_min=0.2), loss_config("clipped_pg", **CLIP_HIGHER)]
    for name, traits in LOSS_PROPERTIES.items():
        if "force_on_policy_ratio" in traits.keys:
            found.append(loss_config(name, force_on_policy_ratio=True, **corrected("seq-tis")))
    return found + kl_configs()


CLIP_HIGHER: dict[str, object] = {"ratio_clip_max": 0.28}


def kl_configs() -> list[LossConfig]:
    """Every estimator with every gradient that it may have."""
    pairs = [("k2", "estimator"), ("k3", "estimator"), ("k1", "straight_through"), ("k3", "straight_through")]
    pairs += [("k1", "importance_weighted"), ("k3", "importance_weighted")]
    found = []
    for kind, gradient in pairs:
        keys = {"reference_policy_kl_type": kind, "reference_policy_kl_gradient": gradient}
        for more in ({}, {"use_on_policy_kl_approximation": True}, {"kl_input_clamp_value": 0.3}):
            found.append(loss_config("clipped_pg", reference_policy_kl_penalty=0.3, **keys, **more))
        found.append(loss_config("clipped_pg", reference_policy_kl_penalty=0.3, kl_output_clamp_value=0.05, **keys))
    return found


def loss_batch(*, rows: int = 6, width: int = 9, seed: int = 0, per_row: bool = False) -> BatchedDataDict:
    """float64 rows of unequal lengths: one without weight, one of half a weight, one without trained tokens, one with
    a single one."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, width + 1, (rows,), generator=draw)
    lengths[0] = width
    columns = torch.arange(width)
    mask = (columns < lengths[:, None]) & (columns >= 1)
    weight = torch.ones(rows)
    if rows >= 5:
        weight[2], weight[3] = 0.5, 0.0
        mask[4], mask[1, 2:] = False, False

    def around(base: torch.Tensor, spread: float) -> torch.Tensor:
        return base + spread * torch.randn(rows, width, generator=draw, dtype=torch.float64)

    now = -0.5 - torch.rand(rows, width, generator=draw, dtype=torch.float64)
    old = around(now, 0.3)
    advantages = torch.randn(rows, 1 if per_row else width, generator=draw, dtype=torch.float64)
    return BatchedDataDict(
        {
            "input_ids": torch.randint(3, 90, (rows, width), generator=draw),
            "input_lengths": lengths,
            "token_mask": mask,
            "sample_mask": weight,
            "advantages": advantages[:, 0] if per_row else advantages,
            "now": now,
            "prev_logprobs": old,
            "generation_logprobs": around(old, 0.2),
            "reference_policy_logprobs": around(now, 0.3),
        }
    )
