"""The section `loss_fn`, and what a recipe must know about each built-in loss without importing torch.

Formulas are in `nemo_rl.algorithms.losses`, one file each; docs/algorithms.md says when to take which.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from nemo_rl.config.base import Options, Section
from nemo_rl.config.distillation import DistillationConfig
from nemo_rl.config.parts import LOSSES

__all__ = [
    "CORRECTIONS",
    "LOSS_PROPERTIES",
    "CorrectionProperties",
    "DppoConfig",
    "DroConfig",
    "KlGradient",
    "KlType",
    "LossConfig",
    "LossProperties",
    "Normalization",
    "SapoConfig",
    "VespoConfig",
    "row_loss_problems",
]

KlType = Literal["k1", "k2", "k3"]

KlGradient = Literal["estimator", "straight_through", "importance_weighted"]

Normalization = Literal["token", "sequence", "constant"]

CorrectionType = Literal["tis", "seq-tis", "icepop", "seq-mis", "seq-mask-tis", "geo-mask"]


class SapoConfig(Section):
    """The soft gate of `sapo`: the larger tau, the faster gradients fade as the ratio leaves 1."""

    tau_positive: PositiveFloat = 1.0
    """Temperature of tokens with an advantage above 0."""
    tau_negative: PositiveFloat = 1.05
    """Temperature of all other tokens."""


class DppoConfig(Section):
    """Bounds of `dppo_tv` and `dppo_kl`: how far a token's probability may move before it is left out."""

    delta_low: PositiveFloat = 0.2
    """Downwards: bound of the gap for dppo_tv, of the binary KL for dppo_kl."""
    delta_high: PositiveFloat = 0.2
    """Upwards."""


class VespoConfig(Section):
    """The kernel W^k exp(lambda (1 - W)) of `vespo`, by the sign of the advantage."""

    k_positive: PositiveFloat = 2.0
    """Exponent for advantages of 0 and above."""
    lambda_positive: PositiveFloat = 3.0
    """Decay for advantages of 0 and above."""
    k_negative: PositiveFloat = 3.0
    """Exponent for advantages below 0."""
    lambda_negative: PositiveFloat = 2.0
    """Decay for advantages below 0."""


class DroConfig(Section):
    """The square of `dro`."""

    beta: PositiveFloat | None = None
    """Weight of the squared log-ratio; must be set for dro."""


class LossConfig(Section):
    """The policy loss, its average, its off-policy correction, KL penalty and entropy bonus."""

    name: Annotated[str, LOSSES] = "clipped_pg"
    """A word of docs/algorithms.md, or `module:Class` of your own; see docs/extending.md."""
    options: Options = Field(default_factory=dict)
    """Settings of your own loss."""
    ratio_clip_min: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Lower clip: ratios below 1 - this give no gradient for negative advantages. gmpo: of the log-ratio."""
    ratio_clip_max: PositiveFloat = 0.2
    """Upper clip: 0.28 is DAPO's clip-higher. gmpo: of the log-ratio."""
    ratio_clip_c: Annotated[float, Field(gt=1)] | None = None
    """Dual clip of `clipped_pg`: for negative advantages the loss of a token is at most this times |A|; null: off."""
    force_on_policy_ratio: bool = False
    """Take the policy itself as pi_old: the ratio is 1 with its gradient, and no pass computes previous
    log-probabilities. Right for one optimizer step per rollout, and refused for more."""
    sapo: SapoConfig = Field(default_factory=SapoConfig)
    dppo: DppoConfig = Field(default_factory=DppoConfig)
    vespo: VespoConfig = Field(default_factory=VespoConfig)
    dro: DroConfig = Field(default_factory=DroConfig)
    token_level_loss: bool = True
    """Mean over the tokens of the global batch; false: mean of per-sequence means."""
    constant_length: PositiveInt | None = None
    """Dr.GRPO: divide each sequence's sum by this number instead of its own length; null: by `token_level_loss`."""
    use_importance_sampling_correction: bool = False
    """Weigh the policy loss by w = pi_old / pi_gen, the trainer's old policy over the rollout's sampler."""
    truncated_importance_sampling_type: CorrectionType | None = None
    """The treatment of the weight w: tis truncates it, icepop drops tokens outside the bounds, seq-tis and seq-mis do
    the same with the product over the row, seq-mask-tis and geo-mask drop rows whose geometric mean is outside (the
    first keeps the w of tokens, the second weighs by 1). Null: w as it is, of losses with one ratio per row the
    product."""
    truncated_importance_sampling_ratio: PositiveFloat | None = None
    """Upper bound."""
    truncated_importance_sampling_ratio_min: PositiveFloat | None = None
    """Lower bound; null, where the type allows it: none."""
    reference_policy_kl_penalty: NonNegativeFloat = 0.01
    """Weight of the KL term; 0 skips the reference pass altogether."""
    use_kl_in_reward: bool = False
    """Take the KL from the rewards instead of adding it to the loss: R - `reference_policy_kl_penalty` times the row's
    sum of log(pi_old / pi_ref), before rewards become advantages."""
    reference_policy_kl_type: KlType = "k3"
    """Estimator of the KL of one token, with x = log(pi_ref / pi): k1 is -x, k2 is x^2 / 2, k3 is exp(x) - 1 - x."""
    reference_policy_kl_gradient: KlGradient = "estimator"
    """estimator: of the formula itself (k2: KL(pi, pi_ref), k3: KL(pi_ref, pi), k1: none, refused). straight_through:
    that of KL(pi, pi_ref), with the value of the type. importance_weighted: the same in expectation, by a factor pi /
    stop_gradient(pi), as NeMo-RL does for k1 and k3."""
    use_on_policy_kl_approximation: bool = False
    """Weigh the KL of a token by pi / pi_gen, so that its mean is that of samples of pi, not of the rollout."""
    kl_input_clamp_value: PositiveFloat = 20.0
    """Clamp of log(pi_ref / pi) before the exponential; clamped tokens are counted in the metrics. With
    `use_kl_in_reward` of log(pi_old / pi_ref)."""
    kl_output_clamp_value: PositiveFloat = 10.0
    """Clamp of the KL estimate of one token."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Weight of the entropy bonus: this times the mean entropy of the tokens' distributions is subtracted from the
    loss; 0 does not compute it."""
    distillation: DistillationConfig = Field(default_factory=DistillationConfig)

    @property
    def adds_kl(self) -> bool:
        """Return whether the loss has a KL term."""
        return self.reference_policy_kl_penalty > 0 and not self.use_kl_in_reward

    @property
    def has_policy_term(self) -> bool:
        """Return whether the loss has a policy-gradient term, which distillation may replace."""
        return not (self.distillation.enabled and self.distillation.mode == "alone")

    @property
    def normalization(self) -> Normalization:
        """Return the kind of divisor of sums over tokens."""
        if self.constant_length is not None:
            return "constant"
        return "token" if self.token_level_loss else "sequence"


@dataclass(frozen=True, kw_only=True, slots=True)
class LossProperties:
    """Facts about a built-in loss that a recipe must know."""

    keys: tuple[str, ...] = ()
    """Keys of `loss_fn` that this loss reads and others do not."""
    is_row_level: bool = False
    """True where the loss has one ratio per row: then it is a mean over rows, and a correction has one weight per row.
    """
    has_row_advantages: bool = False
    """True where the loss is defined for one advantage per row alone, which it puts together with the row's ratio."""
    has_ratio: bool = True
    """False where the loss has no ratio pi / pi_old, so that it takes stale rows for its own rows policy."""
    has_own_correction: bool = False
    """True where the weight w enters the ratio of the loss, so that it is neither bounded nor multiplied again."""


_CLIPS = ("ratio_clip_min", "ratio_clip_max")

_FORCED = (*_CLIPS, "force_on_policy_ratio")

_ROW = LossProperties(keys=_FORCED, is_row_level=True, has_row_advantages=True)

LOSS_PROPERTIES: Mapping[str, LossProperties] = {
    "clipped_pg": LossProperties(keys=(*_FORCED, "ratio_clip_c")),
    "reinforce": LossProperties(has_ratio=False),
    "gspo": _ROW,
    "gspo_token": LossProperties(keys=_FORCED, is_row_level=True),
    "luspo": _ROW,
    "gmpo": _ROW,
    "cispo": LossProperties(keys=_CLIPS),
    "sapo": LossProperties(keys=("sapo",)),
    "dppo_tv": LossProperties(keys=("dppo",)),
    "dppo_kl": LossProperties(keys=("dppo",)),
    "vespo": LossProperties(keys=("vespo",), has_own_correction=True, has_row_advantages=True),
    "dro": LossProperties(keys=("dro",)),
}
"""Properties of each built-in loss, by its name in `LOSSES`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CorrectionProperties:
    """The needs of a type of off-policy correction."""

    is_per_row: bool
    """True where a row has one weight."""
    needs_low: bool
    """True where the correction is meaningless without a lower bound."""


CORRECTIONS: Mapping[str, CorrectionProperties] = {
    "tis": CorrectionProperties(is_per_row=False, needs_low=False),
    "icepop": CorrectionProperties(is_per_row=False, needs_low=True),
    "seq-mask-tis": CorrectionProperties(is_per_row=False, needs_low=True),
    "seq-tis": CorrectionProperties(is_per_row=True, needs_low=False),
    "seq-mis": CorrectionProperties(is_per_row=True, needs_low=True),
    "geo-mask": CorrectionProperties(is_per_row=True, needs_low=True),
}
"""Properties of each correction, by `truncated_importance_sampling_type`."""


def row_loss_problems(config: LossConfig, *, estimator: str) -> list[str]:
    """Return the reasons why the loss cannot take the advantage that an estimator gives to each token."""
    name = config.name
    if not LOSSES.is_builtin(name) or not LOSS_PROPERTIES[name].has_row_advantages:
        return []
    takers = ", ".join(word for word, capabilities in LOSS_PROPERTIES.items() if not capabilities.has_row_advantages)
    return [
        f"loss_fn.name: {name!r} has one advantage per row, and grpo.adv_estimator.name {estimator!r} gives each token "
        f"its own here; set one of {takers}"
    ]
