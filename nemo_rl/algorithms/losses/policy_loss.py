"""`PolicyLoss`: a policy loss by name, with its mean, off-policy correction, KL penalty, entropy bonus and metrics.

    batch columns, log-probabilities
      |- PolicyInputs          what is trained, log r, A                     (terms.py)
      |- term                  a value for every token                       (terms.py)
      |- off_policy_weights    times w, bounded or masked                    (off_policy.py)
      |- kl_term, entropy      plus beta KL, minus c H
      |- distillation_term     plus c KL to a teacher, or in place of the term (distillation.py)
      |- normalize             over the counts of the whole global batch     (below)
      `- TokenMeasures         mismatch, ratios, shares                      (below)

The driver builds one and sends it to the workers, which call it per microbatch. Invariant: a loss divides by the
counts of the whole global batch (`LossScale`) and gets whole rows, so the sum over microbatches and ranks does not
depend on how rows were laid out. A row of weight w (`sample_mask`) counts as w rows in the loss, in the counts and in
every mean; smallest and largest values are those of all rows with a weight. An infinite log-probability, or one
that the sampler does not know (NaN), gives its token the ratio 1 without gradient, and is counted; NaN of the trainer
stays NaN, so that workers stop and name the row. Rows without a token that counts
add 0 and are in no divisor. Shapes: N rows, T tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from nemo_rl.algorithms.losses.distillation import distillation_term
from nemo_rl.algorithms.losses.off_policy import LOG_BOUND, Correction, off_policy_weights
from nemo_rl.algorithms.losses.terms import PolicyInputs, PolicyTerm, TermOutput
from nemo_rl.config.grpo import GRPOConfig
from nemo_rl.config.loss import LOSS_PROPERTIES, LossConfig
from nemo_rl.config.parts import LOSSES
from nemo_rl.distributed.worker_pass import WorkerPass
from nemo_rl.models.head.logprobs import js, k3
from nemo_rl.models.policy.interfaces import (
    ADVANTAGES,
    ENTROPY,
    POLICY_TOPK,
    STALENESS,
    TOPK_IDS,
    TOPK_LOGPROBS,
    UNFILTERED_LOGPROBS,
    DeferredMetrics,
    LossFunction,
    LossOutput,
    LossScale,
)
from nemo_rl.utils.metrics import Max, Mean, Min, Reduction, Sum

__all__ = [
    "DistillationLoss",
    "PolicyLoss",
    "TokenMeasures",
    "build_loss",
    "constant_length",
    "kl_term",
    "normalize",
    "token_weights",
    "weighed",
]


def valid_token_mask(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return `[N, T]` bool, True on tokens with a weight. Position 0 is never predicted and never counts."""
    mask_NT = batch["token_mask"].bool() & (batch["sample_mask"] > 0)[:, None]
    mask_NT[:, 0] = False
    return mask_NT


def token_weights(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return `[N, T]` float32: the weight of its row for tokens that count, 0 for the others."""
    return torch.where(valid_token_mask(batch), batch["sample_mask"].float()[:, None], 0.0)


def weighed(values_NT: torch.Tensor, weight_NT: torch.Tensor) -> torch.Tensor:
    """Return what each token adds to a sum, 0 where it has no weight; without gradient."""
    return torch.where(weight_NT > 0, values_NT.detach(), 0.0) * weight_NT


def normalize(
    values_NT: torch.Tensor, weight_NT: torch.Tensor, *, scale: LossScale, config: LossConfig
) -> torch.Tensor:
    """Return the mean that the recipe asks for; tokens of weight 0 have no part in it, whatever their value is."""
    weighed_NT = torch.where(weight_NT > 0, values_NT, 0.0) * weight_NT
    if config.constant_length is not None:
        return constant_length(weighed_NT, scale=scale, length=config.constant_length)
    if config.normalization == "token":
        return token_mean(weighed_NT, scale=scale)
    return sequence_mean(weighed_NT, weight_NT, scale=scale)


def token_mean(weighed_NT: torch.Tensor, *, scale: LossScale) -> torch.Tensor:
    """sum w L / sum w over the tokens (DAPO, arXiv 2503.14476)."""
    return weighed_NT.sum() / (scale.valid_tokens or 1.0)


def sequence_mean(weighed_NT: torch.Tensor, weight_NT: torch.Tensor, *, scale: LossScale) -> torch.Tensor:
    """Mean over rows of the mean over a row's T_i tokens (GRPO, arXiv 2402.03300)."""
    means_N = weighed_NT.sum(1) / (weight_NT > 0).sum(1).clamp(min=1)
    return means_N.sum() / (scale.valid_sequences or 1.0)


def constant_length(weighed_NT: torch.Tensor, *, scale: LossScale, length: int) -> torch.Tensor:
    """Mean over rows of sum L / C: no row gains by being longer or shorter (Dr.GRPO, arXiv 2503.20783)."""
    return weighed_NT.sum() / ((scale.valid_sequences or 1.0) * length)


class TokenMeasures:
    """Collects metrics by name; the last one of a name counts."""

    def __init__(self, weight_NT: torch.Tensor) -> None:
        """Args:
        weight_NT: 0 where no token is trained.
        """
        self._weight_NT = weight_NT.detach()
        self._means: dict[str, tuple[type[Reduction], torch.Tensor, torch.Tensor | None]] = {}
        self._extremes: dict[str, torch.Tensor] = {}
        self._numbers: dict[str, torch.Tensor] = {}

    def mean(self, name: str, values_NT: torch.Tensor, *, of_N: torch.Tensor | None = None) -> None:
        """Measure the weighted mean of values, whatever they are where the weight is 0.

        Args:
            of_N: bool, the rows whose tokens count; None: all.
        """
        self._means[name] = Mean, values_NT.detach(), of_N

    def total(self, name: str, values_NT: torch.Tensor, *, of_N: torch.Tensor | None = None) -> None:
        """Measure the weighted sum of values; of a condition it is the weight of the tokens that meet it."""
        self._means[name] = Sum, values_NT.detach(), of_N

    def extremes(self, name: str, values_NT: torch.Tensor) -> None:
        """Measure the smallest and the largest value under `<name>_min` and `<name>_max`."""
        self._extremes[name] = values_NT.detach()

    def number(self, name: str, value: torch.Tensor) -> None:
        """Measure a number of no dimension, such as a part of the loss."""
        self._numbers[name] = value.detach()

    def forget(self, name: str) -> None:
        """Leave a number out again."""
        del self._numbers[name]

    def deferred(self) -> DeferredMetrics:
        kinds: list[tuple[str, type[Reduction]]] = []
        parts: list[torch.Tensor] = []
        is_trained_NT = self._weight_NT > 0
        if self._means:
            values_cNT = _stacked([values for _, values, _ in self._means.values()])
            weighed_cNT = torch.where(is_trained_NT, values_cNT, 0.0).mul_(self._weight_NT)
            total_cN = weighed_cNT.sum(-1, dtype=torch.float64)
            whole_N = self._weight_NT.sum(-1, dtype=torch.float64)
            total_c, whole = total_cN.sum(-1).unbind(), whole_N.sum()
            for place, (name, (kind, _, of_N)) in enumerate(self._means.items()):
                kinds.append((name, kind))
                parts.append(total_c[place] if of_N is None else torch.where(of_N, total_cN[place], 0.0).sum())
                if kind is Mean:
                    parts.append(whole if of_N is None else torch.where(of_N, whole_N, 0.0).sum())
        for name, values_NT in self._extremes.items():
            kinds += [(f"{name}_min", Min), (f"{name}_max", Max)]
            parts.append(torch.where(is_trained_NT, values_NT, torch.inf).amin())
            parts.append(torch.where(is_trained_NT, values_NT, -torch.inf).amax())
        kinds += [(name, Sum) for name in self._numbers]
        parts += self._numbers.values()
        return DeferredMetrics(kinds, torch.stack([part.double() for part in parts]))


def _stacked(values: list[torch.Tensor]) -> torch.Tensor:
    dtype = functools.reduce(torch.promote_types, (each.dtype for each in values))
    dtype = dtype if dtype.is_floating_point else torch.float32
    return torch.stack([each.to(dtype) for each in values])


GENERATION, REFERENCE = "generation_logprobs", "reference_policy_logprobs"


@dataclass(frozen=True, kw_only=True, slots=True)
class _LossColumns:
    """Columns of a microbatch as the parts of the loss take them."""

    inputs: PolicyInputs
    weight_NT: torch.Tensor
    gen_log_ratio_NT: torch.Tensor
    """log(pi_old / pi_gen)."""
    is_bounded_NT: torch.Tensor
    """bool: log r is at its bound."""
    is_not_finite_NT: torch.Tensor
    """bool: of a trained token some log-probability is infinite, or that of the sampler NaN."""


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """The policy loss `config.name`, minimised.

    Example:
        >>> PolicyLoss(config=LossConfig(reference_policy_kl_penalty=0.0)).input_fields
        ('token_mask', 'sample_mask', 'advantages', 'prev_logprobs', 'generation_logprobs')
    """

    config: LossConfig
    prev_field: str = "prev_logprobs"
    """Column of pi_old: `prev_logprobs`, or `generation_logprobs` when the sampler's are taken instead."""
    by_staleness: bool = False
    """True where ratios and clipping are also reported for the rows of each staleness."""

    @property
    def term_name(self) -> str:
        """Word of the built-in loss; a class of the user's own that derives from this one says another."""
        return self.config.name if LOSSES.is_builtin(self.config.name) else "clipped_pg"

    @property
    def input_fields(self) -> tuple[str, ...]:
        fields = ["token_mask", "sample_mask", "advantages"]
        if not self.config.force_on_policy_ratio:
            fields.append(self.prev_field)
        fields.append(GENERATION)
        if self.config.adds_kl:
            fields += [REFERENCE, UNFILTERED_LOGPROBS]
        if self.config.entropy_coefficient > 0:
            fields.append(ENTROPY)
        if self.by_staleness:
            fields.append(STALENESS)
        return tuple(dict.fromkeys(fields))

    def __call__(
        self, token_logprobs: torch.Tensor, batch: Mapping[str, torch.Tensor], *, scale: LossScale
    ) -> LossOutput:
        config = self.config
        tokens = self._tokens(token_logprobs, batch)
        inputs, weight_NT = tokens.inputs, tokens.weight_NT
        term: PolicyTerm = LOSSES.load(self.term_name, key="loss_fn.name")
        found = term(inputs, config)
        values_NT, correction = found.values_NT, self._correction(tokens)
        if correction is not None:
            values_NT = correction.weight_NT * values_NT
        loss = normalize(values_NT, weight_NT, scale=scale, config=config)
        token_losses_NT = weighed(values_NT, weight_NT)
        measures = TokenMeasures(weight_NT)
        with torch.no_grad():
            measure_policy(measures, logprobs_NT=inputs.logprobs_NT, log_ratio_NT=inputs.log_ratio_NT)
            measures.number("valid_sequences", weight_NT.amax(1).sum(dtype=torch.float64))
            if self.prev_field != GENERATION or scale.is_first_update:
                # Later updates have moved away from the sampler, which here stands for pi_old.
                measure_mismatch(measures, tokens.gen_log_ratio_NT)
            _measure_shares(measures, tokens, found, correction)
            if self.by_staleness:
                measure_by_staleness(
                    measures,
                    batch[STALENESS],
                    gen_log_ratio_NT=tokens.gen_log_ratio_NT,
                    is_clipped_NT=found.is_clipped_NT,
                )
        measures.number("actor_loss", loss)
        if config.adds_kl:
            kl = self._kl(token_logprobs, tokens, batch)
            kl_loss = config.reference_policy_kl_penalty * normalize(kl.values, weight_NT, scale=scale, config=config)
            loss = loss + kl_loss
            token_losses_NT = token_losses_NT + config.reference_policy_kl_penalty * weighed(kl.values, weight_NT)
            measures.number("kl_penalty", kl_loss)
            measures.mean("reference_kl", kl.values)
            measures.total("kl_clamped_tokens", kl.is_clamped)
        if config.entropy_coefficient > 0:
            entropy_NT = batch[ENTROPY]
            bonus = config.entropy_coefficient * normalize(entropy_NT, weight_NT, scale=scale, config=config)
            loss = loss - bonus
            token_losses_NT = token_losses_NT - config.entropy_coefficient * weighed(entropy_NT, weight_NT)
            measures.number("entropy_bonus", bonus)
            measures.mean("entropy", entropy_NT)
        added = self._added(measures, batch, weight_NT, scale)
        if added is not None:
            loss, token_losses_NT = loss + added[0], token_losses_NT + added[1]
        measures.number("loss", loss)
        return LossOutput(loss=loss, metrics=measures.deferred(), token_losses=token_losses_NT)

    def _added(
        self, measures: TokenMeasures, batch: Mapping[str, torch.Tensor], weight_NT: torch.Tensor, scale: LossScale
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return a term beside those of the policy: its loss and `[N, T]` its token losses; or None."""
        return None

    def _tokens(self, token_logprobs: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> _LossColumns:
        weight_NT = token_weights(batch)
        mask_NT = weight_NT > 0
        now_NT = token_logprobs.detach()
        prev_NT = now_NT if self.config.force_on_policy_ratio else batch[self.prev_field]
        is_usable_NT = ~(now_NT.isinf() | prev_NT.isinf())
        # Other positions are set to equal values before any exponential, so nothing there can overflow.
        raw_NT = torch.where(mask_NT & is_usable_NT, token_logprobs - prev_NT, 0.0)
        log_ratio_NT = raw_NT.clamp(-LOG_BOUND, LOG_BOUND)
        gen_log_ratio_NT = log_ratio_NT.detach()
        is_known_NT = is_usable_NT
        if self.prev_field != GENERATION:
            # What the sampler did not say is taken as equal.
            is_known_NT = is_usable_NT & batch[GENERATION].isfinite()
            gen_log_ratio_NT = torch.where(mask_NT & is_known_NT, prev_NT - batch[GENERATION], 0.0)
        advantages = batch["advantages"]
        inputs = PolicyInputs(
            logprobs_NT=torch.where(mask_NT & is_usable_NT, token_logprobs, 0.0),
            log_ratio_NT=log_ratio_NT,
            # One number per row, or one per token.
            advantages_NT=torch.where(mask_NT, advantages[:, None] if advantages.dim() == 1 else advantages, 0.0),
            mask_NT=mask_NT,
            log_correction_NT=gen_log_ratio_NT if self._corrects else torch.zeros_like(gen_log_ratio_NT),
        )
        return _LossColumns(
            inputs=inputs,
            weight_NT=weight_NT,
            gen_log_ratio_NT=gen_log_ratio_NT,
            is_bounded_NT=raw_NT.detach() != log_ratio_NT.detach(),
            is_not_finite_NT=mask_NT & ~is_known_NT,
        )

    @property
    def _corrects(self) -> bool:
        return self.config.use_importance_sampling_correction

    def _correction(self, tokens: _LossColumns) -> Correction | None:
        """Return the correction; None where the loss has none, or has it inside."""
        properties = LOSS_PROPERTIES[self.term_name]
        if not self._corrects or properties.has_own_correction:
            return None
        mask_NT = tokens.inputs.mask_NT
        return off_policy_weights(tokens.gen_log_ratio_NT, mask_NT, self.config, is_row_level=properties.is_row_level)

    def _kl(self, token_logprobs: torch.Tensor, tokens: _LossColumns, batch: Mapping[str, torch.Tensor]) -> KlTerm:
        mask_NT = tokens.inputs.mask_NT
        # Both sides under the whole vocabulary: a set of one token has no KL on it, however far the reference is.
        whole_NT = batch.get(UNFILTERED_LOGPROBS, token_logprobs)
        is_usable_NT = mask_NT & ~(whole_NT.detach().isinf() | batch[REFERENCE].isinf())
        log_ratio_NT = torch.where(is_usable_NT, batch[REFERENCE] - whole_NT, 0.0)
        sampler_NT = token_logprobs.detach()
        if self.config.use_on_policy_kl_approximation:
            sampler_NT = batch[GENERATION]
        is_known_NT = is_usable_NT & sampler_NT.isfinite()
        log_importance_NT = torch.where(is_known_NT, token_logprobs - sampler_NT, 0.0)
        return kl_term(log_ratio_NT, log_importance_NT, self.config)


@dataclass(frozen=True, kw_only=True)
class DistillationLoss(PolicyLoss):
    """The policy loss with the distillation term, or with it in place of the policy-gradient term.

    Example:
        >>> DistillationLoss(config=LossConfig(reference_policy_kl_penalty=0.0)).input_fields[-3:]
        ('topk_ids', 'topk_logprobs', 'policy_topk_logprobs')
    """

    @property
    def input_fields(self) -> tuple[str, ...]:
        return (*super().input_fields, TOPK_IDS, TOPK_LOGPROBS, POLICY_TOPK)

    def __call__(
        self, token_logprobs: torch.Tensor, batch: Mapping[str, torch.Tensor], *, scale: LossScale
    ) -> LossOutput:
        if not self.config.has_policy_term:
            # The gradient of the policy is that of its advantages: 0, with all that is measured.
            batch = {**batch, ADVANTAGES: torch.zeros_like(batch[ADVANTAGES])}
        return super().__call__(token_logprobs, batch, scale=scale)

    def _added(
        self, measures: TokenMeasures, batch: Mapping[str, torch.Tensor], weight_NT: torch.Tensor, scale: LossScale
    ) -> tuple[torch.Tensor, torch.Tensor]:
        config, section = self.config, self.config.distillation
        found = distillation_term(batch[POLICY_TOPK], batch[TOPK_LOGPROBS], weight_NT > 0, section)
        distilled = section.coefficient * normalize(found.values_NT, weight_NT, scale=scale, config=config)
        if not config.has_policy_term:
            measures.forget("actor_loss")
        for name, values_NT in found.measured.items():
            measures.mean(f"distillation/{name}", values_NT)
        measures.number("distillation_loss", distilled)
        return distilled, section.coefficient * weighed(found.values_NT, weight_NT)


def _measure_shares(
    measures: TokenMeasures, tokens: _LossColumns, found: TermOutput, correction: Correction | None
) -> None:
    """Measure what bounds did: clipped, masked, truncated, clamped; and the weights of the correction."""
    masked_NT = torch.zeros_like(tokens.inputs.mask_NT) if found.is_masked_NT is None else found.is_masked_NT
    if correction is not None:
        masked_NT = masked_NT | correction.is_masked_NT
    measures.mean("clip_fraction", found.is_clipped_NT)
    measures.mean("masked_share", masked_NT)
    measures.total("ratio_clamped_tokens", tokens.is_bounded_NT)
    measures.total("nonfinite_tokens", tokens.is_not_finite_NT)
    if correction is not None:
        measures.mean("sampling_importance_ratio", correction.weight_NT)
        measures.extremes("sampling_importance_ratio", correction.weight_NT)
        measures.mean("truncated_share", correction.is_truncated_NT)


def build_loss(config: LossConfig, grpo: GRPOConfig) -> LossFunction:
    is_from_sampler = grpo.use_generation_logprobs_as_prev
    prev_field = "generation_logprobs" if is_from_sampler else WorkerPass.PREV_LOGPROBS.column
    if LOSSES.is_builtin(config.name):
        by_staleness = grpo.samples_ahead and grpo.async_.max_staleness > 0
        made = DistillationLoss if config.distillation.enabled else PolicyLoss
        return made(config=config, prev_field=prev_field, by_staleness=by_staleness)
    own: LossFunction = LOSSES.load(config.name, key="loss_fn.name")(config=config, prev_field=prev_field)
    return own


@dataclass(frozen=True, kw_only=True, slots=True)
class KlTerm:
    """The KL to the reference policy at each token, with the gradient that is asked for.

    With x = log(pi_ref / pi): k1 = -x, k2 = x^2 / 2, k3 = exp(x) - 1 - x (Schulman 2020). Over samples of pi the means
    of k1 and k3 are KL(pi, pi_ref); what an estimator pulls at is another matter (arXiv 2506.09477, arXiv 2512.21852):

        gradient             of log pi          in expectation
        k1                   1                  0: no regularisation at all
        k2                   -x                 that of KL(pi, pi_ref)
        k3                   1 - exp(x)         that of KL(pi_ref, pi)
        straight_through     -x                 that of KL(pi, pi_ref), whatever the value
        u k1, u k3           u (1 - x), -u x    that of KL(pi, pi_ref), with u = pi / sg(pi), or pi / pi_gen off policy
    """

    values: torch.Tensor
    is_clamped: torch.Tensor
    """bool: a clamp has cut the gradient off."""


def kl_term(log_ratio: torch.Tensor, log_importance: torch.Tensor, config: LossConfig) -> KlTerm:
    """Return the KL of a token to the reference policy that `reference_policy_kl_type` and
    `reference_policy_kl_gradient` name; tokens that a clamp changes have no gradient.

    Args:
        log_ratio: x.
        log_importance: log u with its gradient: log pi - sg(log pi), or log(pi / pi_gen).
    """
    x = log_ratio.clamp(-config.kl_input_clamp_value, config.kl_input_clamp_value)
    kind = config.reference_policy_kl_type
    estimate = -x if kind == "k1" else _k2(x) if kind == "k2" else k3(x)
    is_clamped = (log_ratio.abs() > config.kl_input_clamp_value) | (estimate > config.kl_output_clamp_value)
    values = estimate.clamp(max=config.kl_output_clamp_value)
    way = config.reference_policy_kl_gradient
    if way == "straight_through":
        pull = torch.where(is_clamped, 0.0, _k2(x))
        # The bracket is exactly zero: the value is that of the estimator.
        values = values.detach() + (pull - pull.detach())
    if way == "importance_weighted" or config.use_on_policy_kl_approximation:
        importance = log_importance.clamp(-LOG_BOUND, LOG_BOUND).exp()
        is_constant = is_clamped if way == "importance_weighted" else torch.ones_like(is_clamped)
        values = values * torch.where(is_constant, importance.detach(), importance)
    return KlTerm(values=values, is_clamped=is_clamped)


def _k2(x: torch.Tensor) -> torch.Tensor:
    return x.square() / 2


def measure_policy(measures: TokenMeasures, *, logprobs_NT: torch.Tensor, log_ratio_NT: torch.Tensor) -> None:
    """Measure the policy on the trained tokens.

    Args:
        logprobs_NT: log pi.
        log_ratio_NT: log(pi / pi_old).
    """
    ratio_NT = log_ratio_NT.exp()
    # From samples of pi_old.
    measures.mean("policy_kl", k3(log_ratio_NT))
    measures.mean("probs_ratio", ratio_NT)
    measures.extremes("probs_ratio", ratio_NT)
    measures.mean("approx_entropy", -logprobs_NT)
    measures.total("valid_tokens", torch.ones_like(logprobs_NT))


def measure_mismatch(measures: TokenMeasures, gen_log_ratio_NT: torch.Tensor) -> None:
    """Measure how far trainer and sampler are apart on what was sampled.

    Args:
        gen_log_ratio_NT: log(pi_old / pi_gen); log(pi / pi_gen) of the first update where pi_gen stands for pi_old.
    """
    # From samples of pi_gen.
    measures.mean("gen_kl_error", k3(gen_log_ratio_NT))
    measures.mean("js_divergence_error", js(gen_log_ratio_NT))
    # Its mean is 1 where both are one distribution, or cover the same tokens.
    measures.mean("gen_probs_ratio", gen_log_ratio_NT.exp())
    measures.mean("token_mult_prob_error", gen_log_ratio_NT.abs().exp())


def measure_by_staleness(
    measures: TokenMeasures, staleness_N: torch.Tensor, *, gen_log_ratio_NT: torch.Tensor, is_clipped_NT: torch.Tensor
) -> None:
    """Measure, for the rows of each staleness s, under `staleness_s/`: the mean of w = pi_old / pi_gen and of w^2, from
    which the effective sample size follows, the share of clipped tokens, and the tokens.

    Args:
        staleness_N: integers, on the CPU.
        gen_log_ratio_NT: log w, as in `measure_mismatch`.
    """
    for staleness in sorted(set(staleness_N.tolist())):
        of_N = (staleness_N == staleness).to(gen_log_ratio_NT.device, non_blocking=True)
        name = f"staleness_{int(staleness)}"
        measures.mean(f"{name}/importance_ratio", gen_log_ratio_NT.exp(), of_N=of_N)
        measures.mean(f"{name}/importance_ratio_squared", (2 * gen_log_ratio_NT).exp(), of_N=of_N)
        measures.mean(f"{name}/clip_fraction", is_clipped_NT, of_N=of_N)
        measures.total(f"{name}/tokens", torch.ones_like(gen_log_ratio_NT), of_N=of_N)
