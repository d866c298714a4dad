"""Every policy loss by the formula of its paper, in plain Python numbers: slow, float64, row by row, no tensors.

`reference_loss` takes the log-probabilities twice: those that move, and those that the stop-gradients hold still. Its
central differences in the first are the gradient that the loss must have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log

import torch

from nemo_rl.config.loss import LossConfig

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
    """The whole loss of a global batch."""
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
    """`[N, T]` central differences."""
    gradient = torch.zeros_like(at)
    for i, t in (batch["token_mask"].bool() & (batch["sample_mask"] > 0)[:, None]).nonzero().tolist():
        up, down = at.clone(), at.clone()
        up[i, t] += step
        down[i, t] -= step
        high, low = (reference_loss(batch, moved, at, config, prev_field=prev_field) for moved in (up, down))
        gradient[i, t] = (high - low) / (2 * step)
    return gradient
