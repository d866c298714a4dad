"""The section `loss_fn`, and what a recipe must know about each built-in loss without importing torch.

Formulas are in `nemo_rl.algorithms.losses`, one file each; docs/algorithms.md says when to take which.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from nemo_rl.config.base import Options, Section
from nemo_rl.config.distillation import DistillationConfig
from nemo_rl.config.parts import LOSSES
from nemo_rl.config.rule import SET_FOR_A_PASS, would_be_ignored

if TYPE_CHECKING:
    from nemo_rl.config.schema import MasterConfig

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
    """False where the loss has no ratio pi / pi_old, so that it takes stale rows for rows of its own policy."""
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


_NAME = "loss_fn.name"
_SWITCH = "loss_fn.use_importance_sampling_correction"
_TYPE = "loss_fn.truncated_importance_sampling_type"
_LOW, _HIGH = "truncated_importance_sampling_ratio_min", "truncated_importance_sampling_ratio"
_FORCED_RATIO = "loss_fn.force_on_policy_ratio"
_SAMPLED = "grpo.use_generation_logprobs_as_prev"


def _properties(config: MasterConfig) -> LossProperties | None:
    return LOSS_PROPERTIES[config.loss_fn.name] if LOSSES.is_builtin(config.loss_fn.name) else None


# ---- the loss itself


def rule_loss_keys_fit_the_loss(config: MasterConfig) -> Iterator[str]:
    properties = _properties(config)
    if properties is None:
        return
    every = {name for other in LOSS_PROPERTIES.values() for name in other.keys}
    names, because = sorted(every - set(properties.keys)), f"{_NAME} is {config.loss_fn.name!r}"
    yield from would_be_ignored(config.loss_fn, "loss_fn", names, switch=_NAME, because=because)


def rule_dro_needs_beta(config: MasterConfig) -> Iterator[str]:
    if config.loss_fn.name == "dro" and config.loss_fn.dro.beta is None:
        yield "loss_fn.dro.beta: must be set to a number > 0 when loss_fn.name is 'dro'"


def rule_row_loss_needs_row_mean(config: MasterConfig) -> Iterator[str]:
    loss, properties = config.loss_fn, _properties(config)
    if properties is None or not properties.is_row_level:
        return
    what = f"{loss.name} has one ratio per row and is a mean over rows"
    yield from would_be_ignored(loss, "loss_fn", ["constant_length"], switch=_NAME, because=what)
    if loss.token_level_loss:
        yield f"loss_fn.token_level_loss: {what}; set it to false"


def rule_loss_normalization_named_once(config: MasterConfig) -> Iterator[str]:
    loss, switch = config.loss_fn, "loss_fn.constant_length"
    if loss.constant_length is None or loss.token_level_loss:
        return
    yield (
        f"loss_fn.token_level_loss: false would be ignored, because {switch} is {loss.constant_length}; leave it out, "
        f"or set {switch}=null"
    )


# ---- the ratio


def rule_forced_ratio_needs_one_update(config: MasterConfig) -> Iterator[str]:
    grpo, loss, policy, properties = config.grpo, config.loss_fn, config.policy, _properties(config)
    if not loss.force_on_policy_ratio or (properties is not None and "force_on_policy_ratio" not in properties.keys):
        return
    samples = grpo.num_prompts_per_step * grpo.num_generations_per_prompt
    yield from would_be_ignored(
        loss,
        "loss_fn",
        ["ratio_clip_min", "ratio_clip_max", "ratio_clip_c"],
        switch=_FORCED_RATIO,
        because=f"{_FORCED_RATIO} is true: the ratio is 1",
    )
    if policy.train_global_batch_size != samples:
        yield (
            f"{_FORCED_RATIO}: the policy is its own pi_old in the first optimizer step of a rollout only; set "
            f"policy.train_global_batch_size to grpo.num_prompts_per_step x num_generations_per_prompt = {samples}, "
            f"got {policy.train_global_batch_size}"
        )
    if grpo.use_generation_logprobs_as_prev:
        yield f"{_SAMPLED}: true would be ignored, because {_FORCED_RATIO} takes the policy's own; set it to false"


# ---- distillation


def rule_distillation_needs_a_loss_that_has_it(config: MasterConfig) -> Iterator[str]:
    loss = config.loss_fn
    if not loss.distillation.enabled:
        return
    if not LOSSES.is_builtin(loss.name):
        yield f"loss_fn.distillation.enabled: it is a term of the built-in losses, got {_NAME} {loss.name!r}"
        return
    if loss.distillation.mode == "added":
        return
    switch = "loss_fn.distillation.mode"
    names = {"name", "use_importance_sampling_correction", *(key for of in LOSS_PROPERTIES.values() for key in of.keys)}
    names -= {"force_on_policy_ratio"}
    because = f"{switch} is 'alone': the loss has no policy-gradient term"
    yield from would_be_ignored(loss, "loss_fn", sorted(names), switch=switch, because=because)
    if loss.use_kl_in_reward:
        yield f"loss_fn.use_kl_in_reward: true would be ignored, because {switch} is 'alone'; set it to false"


# ---- off-policy correction


def rule_correction_keys_need_a_correction(config: MasterConfig) -> Iterator[str]:
    loss = config.loss_fn
    if not loss.use_importance_sampling_correction:
        names = (_TYPE.rpartition(".")[2], _LOW, _HIGH)
        yield from would_be_ignored(loss, "loss_fn", names, switch=_SWITCH, because=f"{_SWITCH} is false")
    elif loss.truncated_importance_sampling_type is None:
        because = f"{_TYPE} is null: no weight is bounded"
        yield from would_be_ignored(loss, "loss_fn", (_LOW, _HIGH), switch=_TYPE, because=because)


def rule_correction_bounds_are_an_interval(config: MasterConfig) -> Iterator[str]:
    loss = config.loss_fn
    kind, low, high = (
        loss.truncated_importance_sampling_type,
        loss.truncated_importance_sampling_ratio_min,
        loss.truncated_importance_sampling_ratio,
    )
    if kind is None or not loss.use_importance_sampling_correction:
        return
    if high is None:
        yield f"loss_fn.{_HIGH}: must be set: {kind} has an upper bound"
    if low is None and CORRECTIONS[kind].needs_low:
        yield f"loss_fn.{_LOW}: must be set: {kind} has a lower bound"
    if low is not None and high is not None and low >= high:
        yield f"loss_fn.{_LOW}: {low} is not below loss_fn.{_HIGH} {high}"


def rule_correction_fits_the_loss(config: MasterConfig) -> Iterator[str]:
    loss, properties = config.loss_fn, _properties(config)
    kind = loss.truncated_importance_sampling_type
    if properties is None or not loss.use_importance_sampling_correction or kind is None:
        return
    if properties.has_own_correction:
        yield f"{_TYPE}: {loss.name} has the weights in its own kernel, which bounds them; set it to null"
    elif properties.is_row_level and not CORRECTIONS[kind].is_per_row:
        per_row = ", ".join(name for name, of in CORRECTIONS.items() if of.is_per_row)
        yield f"{_TYPE}: {loss.name} has one ratio per row, and {kind!r} weighs tokens; set one of {per_row}, or null"


def rule_correction_needs_two_policies(config: MasterConfig) -> Iterator[str]:
    if config.loss_fn.use_importance_sampling_correction and config.grpo.use_generation_logprobs_as_prev:
        yield (
            f"{_SWITCH}: true would be ignored, because {_SAMPLED} is true: pi_old is pi_gen, and every weight 1; set "
            f"{_SAMPLED}=false"
        )


# ---- KL to the reference


def rule_kl_keys_need_a_penalty(config: MasterConfig) -> Iterator[str]:
    if config.loss_fn.reference_policy_kl_penalty > 0:
        return
    names = (
        *("reference_policy_kl_type", "reference_policy_kl_gradient", "use_on_policy_kl_approximation"),
        *("kl_input_clamp_value", "kl_output_clamp_value", "use_kl_in_reward"),
    )
    switch = "loss_fn.reference_policy_kl_penalty"
    yield from would_be_ignored(config.loss_fn, "loss_fn", names, switch=switch, because=f"{switch} is 0")


def rule_kl_gradient_fits_the_estimator(config: MasterConfig) -> Iterator[str]:
    loss, key = config.loss_fn, "loss_fn.reference_policy_kl_gradient"
    pair = (loss.reference_policy_kl_type, loss.reference_policy_kl_gradient)
    if not loss.adds_kl:
        return
    if pair == ("k1", "estimator"):
        yield f"{key}: that of k1 is 0 in expectation, it regularises nothing; set straight_through"
    elif pair == ("k2", "importance_weighted"):
        yield f"{key}: weighted k2 has the gradient of the mean of x^2 / 2, not of the KL; set straight_through"
    elif pair == ("k2", "straight_through"):
        yield f"{key}: 'straight_through' would be ignored, it is the gradient of k2 itself; leave it out"


def rule_kl_in_reward_excludes_kl_in_loss(config: MasterConfig) -> Iterator[str]:
    grpo, loss, switch = config.grpo, config.loss_fn, "loss_fn.use_kl_in_reward"
    if not loss.use_kl_in_reward or loss.reference_policy_kl_penalty == 0:
        return
    of_the_term = (
        *("reference_policy_kl_type", "reference_policy_kl_gradient", "use_on_policy_kl_approximation"),
        "kl_output_clamp_value",
    )
    because = f"{switch} is true: the reward loses log(pi_old / pi_ref), and the loss has no KL"
    yield from would_be_ignored(loss, "loss_fn", of_the_term, switch=switch, because=because)
    if not config.has_prev_logprobs_pass:
        yield f"{switch}: needs the trainer's log-probabilities before the update; {SET_FOR_A_PASS}"
    generation = config.policy.generation
    if generation.top_p < 1 or generation.top_k is not None:
        yield (
            f"{switch}: with policy.generation.top_p or top_k pi_old is a distribution on the sampling mask, and "
            "pi_ref one on the whole vocabulary; set top_p=1 and top_k=null, or take the KL in the loss, which "
            "compares whole ones"
        )
    name, estimator = grpo.adv_estimator.name, "grpo.adv_estimator.name"
    if name == "gdpo":
        yield f"{estimator}: 'gdpo' reads the components of the reward, from which no KL is taken; set grpo"
    if name == "maxrl":
        yield f"{estimator}: 'maxrl' is for rewards that are not negative, which a KL makes them; set grpo"
