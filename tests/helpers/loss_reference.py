"""Every policy loss by the formula of its paper, in plain Python numbers: slow, float64, row by row, no tensors.

`reference_loss` takes the log-probabilities twice: those that move, and those that the stop-gradients hold still. Its
central differences in the first are the gradient that the loss must have. `all_configs` has the configs of every loss
that tests go through, and `loss_batch` rows that reach all of their branches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log

import torch

from nemo_rl.config.loss import CORRECTIONS, LOSS_PROPERTIES, LossConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict

Numbers = Sequence[float]
KERNEL_FLOOR, KERNEL_CEILING = log(1e-8), 20.0


@dataclass(frozen=True, kw_only=True)
class Row:
    """The trained tokens of one row."""

    places: tuple[int, ...]
    now: Numbers
    """log pi, which moves."""
    held: Numbers
    """log pi, held still."""
    old: Numbers
    sampled: Numbers
    reference: Numbers
    advantages: Numbers
    weight: float

    @property
    def length(self) -> int:
        return len(self.places)

    def ratios(self) -> list[float]:
        return [exp(now - old) for now, old in zip(self.now, self.old, strict=True)]

    def held_ratios(self) -> list[float]:
        return [exp(held - old) for held, old in zip(self.held, self.old, strict=True)]

    def corrections(self) -> list[float]:
        return [exp(old - sampled) for old, sampled in zip(self.old, self.sampled, strict=True)]


def product(values: Numbers) -> float:
    result = 1.0
    for value in values:
        result *= value
    return result


def _clip(value: float, config: LossConfig) -> float:
    return min(max(value, 1 - config.ratio_clip_min), 1 + config.ratio_clip_max)


def _ppo(ratio: float, advantage: float, config: LossConfig) -> float:
    return -min(ratio * advantage, _clip(ratio, config) * advantage)


def _clipped_pg(row: Row, config: LossConfig) -> list[float]:
    values = []
    for ratio, advantage in zip(row.ratios(), row.advantages, strict=True):
        value = _ppo(ratio, advantage, config)
        if config.ratio_clip_c is not None and advantage < 0:
            value = min(value, -config.ratio_clip_c * advantage)
        values.append(value)
    return values


def _reinforce(row: Row, config: LossConfig) -> list[float]:
    return [-a * now for a, now in zip(row.advantages, row.now, strict=True)]


def _gspo(row: Row, config: LossConfig) -> list[float]:
    ratio = product(row.ratios()) ** (1 / row.length)
    return [_ppo(ratio, a, config) for a in row.advantages]


def _gspo_token(row: Row, config: LossConfig) -> list[float]:
    ratio = product(row.held_ratios()) ** (1 / row.length)
    own = [exp(now - held) for now, held in zip(row.now, row.held, strict=True)]
    return [_ppo(ratio * part, a, config) for part, a in zip(own, row.advantages, strict=True)]


def _luspo(row: Row, config: LossConfig) -> list[float]:
    return [row.length * value for value in _gspo(row, config)]


def _gmpo(row: Row, config: LossConfig) -> list[float]:
    kept = []
    for ratio, advantage in zip(row.ratios(), row.advantages, strict=True):
        z = log(ratio)
        clamped = min(max(z, -config.ratio_clip_min), config.ratio_clip_max)
        kept.append(min(z, clamped) if advantage > 0 else max(z, clamped) if advantage < 0 else 0.0)
    return [-a * exp(sum(kept) / row.length) for a in row.advantages]


def _cispo(row: Row, config: LossConfig) -> list[float]:
    return [
        -_clip(ratio, config) * a * now
        for ratio, a, now in zip(row.held_ratios(), row.advantages, row.now, strict=True)
    ]


def _sapo(row: Row, config: LossConfig) -> list[float]:
    values = []
    for ratio, advantage in zip(row.ratios(), row.advantages, strict=True):
        tau = config.sapo.tau_positive if advantage > 0 else config.sapo.tau_negative
        values.append(-4 / tau / (1 + exp(-tau * (ratio - 1))) * advantage)
    return values


def _dppo_tv(row: Row, config: LossConfig) -> list[float]:
    values = []
    for now, held, old, a in zip(row.now, row.held, row.old, row.advantages, strict=True):
        gap = exp(held) - exp(old)
        is_out = gap > config.dppo.delta_high if a > 0 else gap < -config.dppo.delta_low
        values.append(0.0 if is_out else -exp(now - old) * a)
    return values


def _dppo_kl(row: Row, config: LossConfig) -> list[float]:
    values = []
    for now, held, old, a in zip(row.now, row.held, row.old, row.advantages, strict=True):
        p, q = exp(held), exp(old)
        kl = q * log(q / p) + (1 - q) * log((1 - q + 1e-8) / (1 - p + 1e-8))
        is_out = (p > q and kl > config.dppo.delta_high) if a > 0 else (p < q and kl > config.dppo.delta_low)
        values.append(0.0 if is_out else -exp(now - old) * a)
    return values


def _vespo(row: Row, config: LossConfig) -> list[float]:
    logs = sum(log(r) for r in row.held_ratios())
    if config.use_importance_sampling_correction:
        logs += sum(log(w) for w in row.corrections())
    logs = min(max(logs, KERNEL_FLOOR), KERNEL_CEILING)
    values = []
    for a, now in zip(row.advantages, row.now, strict=True):
        v = config.vespo
        k, decay = (v.k_positive, v.lambda_positive) if a >= 0 else (v.k_negative, v.lambda_negative)
        values.append(-exp(decay + k * logs - decay * exp(logs)) * a * now)
    return values


def _dro(row: Row, config: LossConfig) -> list[float]:
    assert config.dro.beta is not None
    return [
        -(a * now - config.dro.beta / 2 * (now - old) ** 2)
        for a, now, old in zip(row.advantages, row.now, row.old, strict=True)
    ]


REFERENCES: Mapping[str, Callable[[Row, LossConfig], list[float]]] = {
    "clipped_pg": _clipped_pg,
    "reinforce": _reinforce,
    "gspo": _gspo,
    "gspo_token": _gspo_token,
    "luspo": _luspo,
    "gmpo": _gmpo,
    "cispo": _cispo,
    "sapo": _sapo,
    "dppo_tv": _dppo_tv,
    "dppo_kl": _dppo_kl,
    "vespo": _vespo,
    "dro": _dro,
}
ROW_LEVEL = ("gspo", "gspo_token", "luspo", "gmpo")


def weights(row: Row, config: LossConfig) -> list[float]:
    """Factors of the off-policy correction."""
    kind = config.truncated_importance_sampling_type
    if not config.use_importance_sampling_correction or config.name == "vespo":
        return [1.0] * row.length
    low = config.truncated_importance_sampling_ratio_min or 0.0
    high = config.truncated_importance_sampling_ratio or float("inf")
    w = row.corrections()
    whole, middle = product(w), product(w) ** (1 / row.length)
    match kind:
        case None:
            return [whole] * row.length if config.name in ROW_LEVEL else w
        case "tis":
            return [min(max(each, low), high) for each in w]
        case "icepop":
            return [each if low <= each <= high else 0.0 for each in w]
        case "seq-tis":
            return [min(max(whole, low), high)] * row.length
        case "seq-mis":
            return [whole if low <= whole <= high else 0.0] * row.length
        case "seq-mask-tis":
            return [each if low <= middle <= high else 0.0 for each in w]
        case "geo-mask":
            return [1.0 if low <= middle <= high else 0.0] * row.length
    raise AssertionError(kind)


def kl_values(row: Row, config: LossConfig) -> list[float]:
    values = []
    for now, held, sampled, reference in zip(row.now, row.held, row.sampled, row.reference, strict=True):
        values.append(_kl(reference - now, reference - held, now, held, sampled, config))
    return values


def _kl(moving: float, held_x: float, now: float, held: float, sampled: float, config: LossConfig) -> float:
    def estimate(x: float) -> float:
        return {"k1": -x, "k2": x * x / 2, "k3": exp(x) - 1 - x}[config.reference_policy_kl_type]

    far, most = config.kl_input_clamp_value, config.kl_output_clamp_value
    way = config.reference_policy_kl_gradient
    x_still = min(max(held_x, -far), far)
    still = min(estimate(x_still), most)
    is_clamped = abs(held_x) > far or estimate(x_still) > most
    if is_clamped:
        value = still
    elif way == "straight_through":
        value = still + moving * moving / 2 - held_x * held_x / 2
    else:
        value = estimate(moving)
    from_where = sampled if config.use_on_policy_kl_approximation else held
    if way == "importance_weighted" and not is_clamped:
        return value * exp(now - from_where)
    if way == "importance_weighted" or config.use_on_policy_kl_approximation:
        return value * exp(held - from_where)
    return value


def rows_of(
    batch: Mapping[str, torch.Tensor], now: torch.Tensor, held: torch.Tensor, config: LossConfig, *, prev_field: str
) -> list[Row]:
    """Rows with a trained token."""
    rows = []
    advantages = batch["advantages"]
    for i, weight in enumerate(batch["sample_mask"].double().tolist()):
        places = tuple(t for t, m in enumerate(batch["token_mask"][i].tolist()) if m and t > 0 and weight > 0)
        if not places:
            continue

        def picked(column: torch.Tensor, row: int = i, at: tuple[int, ...] = places) -> list[float]:
            numbers = column[row].tolist()
            return [numbers[t] for t in at]

        rows.append(
            Row(
                places=places,
                now=picked(now),
                held=picked(held),
                old=picked(held if config.force_on_policy_ratio else batch[prev_field]),
                sampled=picked(batch["generation_logprobs"]),
                reference=picked(batch["reference_policy_logprobs"]),
                advantages=picked(advantages if advantages.dim() == 2 else advantages[:, None].expand(now.shape)),
                weight=weight,
            )
        )
    return rows


def reference_loss(
    batch: Mapping[str, torch.Tensor],
    now: torch.Tensor,
    held: torch.Tensor,
    config: LossConfig,
    *,
    prev_field: str = "prev_logprobs",
) -> float:
    """Return the whole loss of a global batch."""
    rows = rows_of(batch, now, held, config, prev_field=prev_field)
    tokens, sequences = sum(r.weight * r.length for r in rows), sum(r.weight for r in rows)
    if not rows:
        return 0.0
    total = 0.0
    for row in rows:
        values = [w * v for w, v in zip(weights(row, config), REFERENCES[config.name](row, config), strict=True)]
        if config.reference_policy_kl_penalty > 0:
            penalties = kl_values(row, config)
            values = [v + config.reference_policy_kl_penalty * k for v, k in zip(values, penalties, strict=True)]
        if config.constant_length is not None:
            total += row.weight * sum(values) / config.constant_length / sequences
        elif config.token_level_loss:
            total += row.weight * sum(values) / tokens
        else:
            total += row.weight * sum(values) / row.length / sequences
    return total


def reference_gradient(
    batch: Mapping[str, torch.Tensor], at: torch.Tensor, config: LossConfig, *, prev_field: str, step: float = 1e-6
) -> torch.Tensor:
    """Return `[N, T]` central differences."""
    gradient = torch.zeros_like(at)
    for i, t in (batch["token_mask"].bool() & (batch["sample_mask"] > 0)[:, None]).nonzero().tolist():
        up, down = at.clone(), at.clone()
        up[i, t] += step
        down[i, t] -= step
        high, low = (reference_loss(batch, moved, at, config, prev_field=prev_field) for moved in (up, down))
        gradient[i, t] = (high - low) / (2 * step)
    return gradient


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
"""Keys that a loss needs, and bounds that some tokens of `loss_batch` cross."""
BOUNDS: dict[str, tuple[float | None, float]] = {
    "tis": (None, 1.1),
    "icepop": (0.8, 1.25),
    "seq-tis": (0.5, 1.5),
    "seq-mis": (0.5, 1.5),
    "seq-mask-tis": (0.95, 1.05),
    "geo-mask": (0.95, 1.05),
}


def loss_config(name: str, **changes: object) -> LossConfig:
    """Return a config of the loss without a KL penalty that passes the rules."""
    values = {"reference_policy_kl_penalty": 0.0, **SETTINGS.get(name, {}), **changes}
    return LossConfig.model_validate({"name": name, **values})


def corrected(kind: str | None) -> dict[str, object]:
    """Return the keys of an off-policy correction."""
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
    """Return the types of correction that the loss may have."""
    traits = LOSS_PROPERTIES[name]
    if traits.has_own_correction:
        return [None]
    return [None, *(kind for kind, of in CORRECTIONS.items() if of.is_per_row or not traits.is_row_level)]


def all_configs() -> list[LossConfig]:
    """Return every loss with every mean, correction and KL that it may have."""
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
    """Return every KL estimator with every gradient that it may have."""
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
