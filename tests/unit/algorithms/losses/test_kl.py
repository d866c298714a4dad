"""Gradients of the KL term against exact sums over a distribution of two tokens."""

from __future__ import annotations

import pytest
import torch

from nemo_rl.algorithms.losses.policy_loss import kl_term
from nemo_rl.config.loss import LossConfig

POLICY, REFERENCE, SAMPLER = (0.7, 0.3), (0.5, 0.5), (0.4, 0.6)
KL = 0.0822829
TRUE = 0.1779326
"""Derivative of KL(pi, pi_ref) by the first logit."""
FORWARD = 0.2
"""That of KL(pi_ref, pi)."""


def expected_term(kind: str, gradient: str, *, sampler: tuple[float, float] | None = None) -> tuple[float, float]:
    """Mean and gradient of the term over tokens of the sampler (pi itself where there is none)."""
    logits = torch.tensor(POLICY, dtype=torch.float64).log().requires_grad_()
    logprobs = logits.log_softmax(0)
    config = LossConfig.model_validate(
        {
            "reference_policy_kl_type": kind,
            "reference_policy_kl_gradient": gradient,
            "use_on_policy_kl_approximation": sampler is not None,
        }
    )
    chances = torch.tensor(sampler or POLICY, dtype=torch.float64)
    from_where = chances.log() if sampler is not None else logprobs.detach()
    term = kl_term(torch.tensor(REFERENCE, dtype=torch.float64).log() - logprobs, logprobs - from_where, config)
    mean = (chances * term.values).sum()
    mean.backward()
    return mean.item(), logits.grad[0].item()


@pytest.mark.parametrize(
    ("kind", "gradient", "value", "pull"),
    [
        ("k1", "estimator", KL, 0.0),
        ("k2", "estimator", 0.0787662, TRUE),
        ("k3", "estimator", KL, FORWARD),
        ("k1", "straight_through", KL, TRUE),
        ("k3", "straight_through", KL, TRUE),
        ("k1", "importance_weighted", KL, TRUE),
        ("k3", "importance_weighted", KL, TRUE),
        # Refused in recipes: no gradient of the KL.
        ("k2", "importance_weighted", 0.0787662, 0.1624210),
    ],
)
def test_each_estimator_has_its_value_and_gradient(kind: str, gradient: str, value: float, pull: float) -> None:
    found = expected_term(kind, gradient)
    assert found == (pytest.approx(value, abs=5e-8), pytest.approx(pull, abs=5e-8))


@pytest.mark.parametrize(
    ("kind", "gradient", "pull"),
    [
        ("k2", "estimator", TRUE),
        ("k3", "estimator", FORWARD),
        ("k1", "straight_through", TRUE),
        ("k3", "straight_through", TRUE),
        ("k1", "importance_weighted", TRUE),
        ("k3", "importance_weighted", TRUE),
    ],
)
def test_tokens_of_another_sampler_are_weighted_back(kind: str, gradient: str, pull: float) -> None:
    value, found = expected_term(kind, gradient, sampler=SAMPLER)
    assert found == pytest.approx(pull, abs=5e-8)
    assert value == pytest.approx(0.0787662 if kind == "k2" else KL, abs=5e-8)


@pytest.mark.parametrize(("x", "expected"), [(0.5, 0.1487213), (-0.5, 0.1065307)])
def test_k3_of_one_token(x: float, expected: float) -> None:
    found = kl_term(torch.tensor([x], dtype=torch.float64), torch.zeros(1), LossConfig()).values
    assert found.item() == pytest.approx(expected, abs=5e-8)


@pytest.mark.parametrize("gradient", ["estimator", "straight_through", "importance_weighted"])
def test_clamped_tokens_are_named_and_have_no_gradient(gradient: str) -> None:
    logprobs = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.5, 1.5, -3.0, 2.7], dtype=torch.float64)
    config = LossConfig.model_validate(
        {"reference_policy_kl_gradient": gradient, "kl_input_clamp_value": 2.9, "kl_output_clamp_value": 2.5}
    )
    term = kl_term(reference - logprobs, logprobs - logprobs.detach(), config)
    term.values.sum().backward()
    # The third is beyond the clamp of x, the fourth beyond that of the estimate.
    assert term.is_clamped.tolist() == [False, False, True, True]
    assert (logprobs.grad != 0).tolist() == [True, True, False, False]
