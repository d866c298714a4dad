"""What each rule about `loss_fn` refuses: overrides of the sort demo, and a part of the line that it must get.

The demo takes the sampler's log-probabilities as pi_old, has no KL penalty and two updates per rollout.
"""

from __future__ import annotations

__all__ = ["ACCEPTED_LOSSES", "REFUSED_BY_LOSS"]

Refused = dict[str, list[tuple[tuple[str, ...], str]]]
OWN_PREV = ("grpo.use_generation_logprobs_as_prev=false",)
ROWS = ("loss_fn.token_level_loss=false",)
GSPO = ("loss_fn.name=gspo", *ROWS)
CORRECTED = (*OWN_PREV, "loss_fn.use_importance_sampling_correction=true")
PENALTY = ("loss_fn.reference_policy_kl_penalty=0.1",)
IN_REWARD = (*PENALTY, "loss_fn.use_kl_in_reward=true")
FORCED = (*OWN_PREV, "loss_fn.force_on_policy_ratio=true", "~loss_fn.ratio_clip_max")
ONE_UPDATE = ("policy.train_global_batch_size=1024",)


def corrected(kind: str, low: float | None, high: float | None) -> tuple[str, ...]:
    bounds = {"_ratio_min": low, "_ratio": high}
    prefix = "loss_fn.truncated_importance_sampling"
    given = tuple(f"{prefix}{name}={value}" for name, value in bounds.items() if value is not None)
    return (*CORRECTED, f"{prefix}_type={kind}", *given)


def key_of(name: str) -> str:
    return f"loss_fn.truncated_importance_sampling_{name}"


REFUSED_BY_LOSS: Refused = {
    "rule_loss_keys_fit_the_loss": [
        (
            ("loss_fn.name=cispo", "loss_fn.ratio_clip_c=3"),
            "loss_fn.ratio_clip_c: 3.0 would be ignored, because loss_fn.name is 'cispo'",
        ),
        (("loss_fn.name=sapo", "loss_fn.ratio_clip_max=0.3"), "loss_fn.ratio_clip_max: 0.3 would be ignored"),
        (("loss_fn.name=reinforce", "loss_fn.ratio_clip_min=0.3"), "loss_fn.ratio_clip_min: 0.3 would be ignored"),
        (("loss_fn.sapo.tau_positive=2",), "loss_fn.sapo.tau_positive: 2.0 would be ignored"),
        ((*GSPO, "loss_fn.dppo.delta_low=0.1"), "loss_fn.dppo.delta_low: 0.1 would be ignored"),
        (("loss_fn.dro.beta=1",), "loss_fn.dro.beta: 1.0 would be ignored"),
        (("loss_fn.name=dppo_tv", *FORCED), "loss_fn.force_on_policy_ratio: True would be ignored"),
    ],
    "rule_dro_needs_beta": [(("loss_fn.name=dro",), "loss_fn.dro.beta: must be set to a number > 0")],
    "rule_row_loss_needs_row_mean": [
        (("loss_fn.name=gspo",), "loss_fn.token_level_loss: gspo has one ratio per row and is a mean over rows; set"),
        ((*GSPO, "loss_fn.constant_length=8"), "loss_fn.constant_length: 8 would be ignored"),
    ],
    "rule_loss_normalization_named_once": [
        ((*ROWS, "loss_fn.constant_length=8"), "loss_fn.token_level_loss: false would be ignored"),
    ],
    "rule_forced_ratio_needs_one_update": [
        (FORCED, "loss_fn.force_on_policy_ratio: the policy is its own pi_old in the first optimizer step"),
        ((*FORCED[1:], *ONE_UPDATE), "grpo.use_generation_logprobs_as_prev: true would be ignored"),
        ((*FORCED[:2], *ONE_UPDATE, "loss_fn.ratio_clip_min=0.1"), "loss_fn.ratio_clip_min: 0.1 would be ignored"),
    ],
    "rule_correction_keys_need_a_correction": [
        ((f"{key_of('type')}=tis",), f"{key_of('type')}: 'tis' would be ignored"),
        ((*CORRECTED, f"{key_of('ratio')}=2"), f"{key_of('ratio')}: 2.0 would be ignored"),
        ((f"{key_of('ratio_min')}=0.5",), f"{key_of('ratio_min')}: 0.5 would be ignored"),
    ],
    "rule_correction_bounds_are_an_interval": [
        (corrected("tis", None, None), f"{key_of('ratio')}: must be set: tis has an upper bound"),
        (corrected("icepop", None, 2), f"{key_of('ratio_min')}: must be set: icepop has a lower bound"),
        (corrected("seq-mask-tis", 2, 2), f"{key_of('ratio_min')}: 2.0 is not below"),
    ],
    "rule_correction_fits_the_loss": [
        ((*GSPO, *corrected("tis", None, 2)), f"{key_of('type')}: gspo has one ratio per row, and 'tis' weighs tokens"),
        (("loss_fn.name=vespo", *corrected("tis", None, 2)), f"{key_of('type')}: vespo has the weights in its own"),
    ],
    "rule_correction_needs_two_policies": [
        (CORRECTED[1:], "loss_fn.use_importance_sampling_correction: true would be ignored"),
    ],
    "rule_kl_keys_need_a_penalty": [
        (("loss_fn.reference_policy_kl_type=k2",), "loss_fn.reference_policy_kl_type: 'k2' would be ignored"),
        (("loss_fn.use_kl_in_reward=true",), "loss_fn.use_kl_in_reward: True would be ignored"),
        (
            ("loss_fn.use_on_policy_kl_approximation=true",),
            "loss_fn.use_on_policy_kl_approximation: True would be ignored",
        ),
    ],
    "rule_kl_in_reward_excludes_kl_in_loss": [
        (
            (*OWN_PREV, *IN_REWARD, "loss_fn.reference_policy_kl_type=k2"),
            "loss_fn.reference_policy_kl_type: 'k2' would be ignored, because loss_fn.use_kl_in_reward is true",
        ),
        (
            (*OWN_PREV, *IN_REWARD, "loss_fn.kl_output_clamp_value=5"),
            "loss_fn.kl_output_clamp_value: 5.0 would be ignored, because loss_fn.use_kl_in_reward is true",
        ),
        (
            (*IN_REWARD, "policy.generation.top_p=0.9"),
            "loss_fn.use_kl_in_reward: with policy.generation.top_p or top_k pi_old is a distribution on the sampling",
        ),
        (IN_REWARD, "loss_fn.use_kl_in_reward: needs the trainer's log-probabilities before the update"),
        (
            (*OWN_PREV, *IN_REWARD, "grpo.adv_estimator.name=maxrl"),
            "grpo.adv_estimator.name: 'maxrl' is for rewards that are not negative",
        ),
        (
            (*OWN_PREV, *IN_REWARD, "grpo.adv_estimator.name=gdpo"),
            "grpo.adv_estimator.name: 'gdpo' reads the components of the reward",
        ),
    ],
    "rule_kl_gradient_fits_the_estimator": [
        (
            (*PENALTY, "loss_fn.reference_policy_kl_type=k1"),
            "loss_fn.reference_policy_kl_gradient: that of k1 is 0 in expectation",
        ),
        (
            (
                *PENALTY,
                "loss_fn.reference_policy_kl_type=k2",
                "loss_fn.reference_policy_kl_gradient=importance_weighted",
            ),
            "loss_fn.reference_policy_kl_gradient: weighted k2 has the gradient of the mean of x^2 / 2",
        ),
        (
            (*PENALTY, "loss_fn.reference_policy_kl_type=k2", "loss_fn.reference_policy_kl_gradient=straight_through"),
            "loss_fn.reference_policy_kl_gradient: 'straight_through' would be ignored",
        ),
    ],
}

ACCEPTED_LOSSES: list[tuple[str, ...]] = [
    *((f"loss_fn.name={name}",) for name in ("reinforce", "cispo", "sapo", "dppo_tv", "dppo_kl", "vespo")),
    *((f"loss_fn.name={name}", *ROWS) for name in ("gspo", "gspo_token", "luspo", "gmpo")),
    ("loss_fn.name=dro", "loss_fn.dro.beta=0.5"),
    ("loss_fn.ratio_clip_c=10",),
    ("loss_fn.constant_length=10",),
    (*FORCED, *ONE_UPDATE),
    (*GSPO, *FORCED, *ONE_UPDATE),
    CORRECTED,
    (*GSPO, *CORRECTED),
    corrected("tis", None, 2),
    corrected("icepop", 0.5, 5),
    (*GSPO, *corrected("geo-mask", 0.99, 1.01)),
    ("loss_fn.name=vespo", *CORRECTED),
    (*PENALTY, "loss_fn.reference_policy_kl_type=k1", "loss_fn.reference_policy_kl_gradient=straight_through"),
    ("loss_fn.entropy_coefficient=0.01",),
    # What a loss of one's own reads is not known.
    ("loss_fn.name=mine:Loss", "loss_fn.dro.beta=0.5", "loss_fn.ratio_clip_c=3", "loss_fn.options={a: 1}"),
]
"""Combinations that work."""
