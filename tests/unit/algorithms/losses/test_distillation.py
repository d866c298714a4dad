"""The distillation term against its definition, token by token in float64, and as a part of the policy loss."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from nemo_rl.algorithms.losses.distillation import distillation_term
from nemo_rl.algorithms.losses.policy_loss import DistillationLoss, PolicyLoss
from nemo_rl.config.distillation import DistillationConfig
from nemo_rl.config.loss import LossConfig
from nemo_rl.errors import SchemaMismatch
from nemo_rl.models.head.logprobs import Sampling, WantedLines, token_lines
from nemo_rl.models.policy.interfaces import POLICY_TOPK, TOPK_IDS, TOPK_LOGPROBS
from nemo_rl.utils.metrics import values
from tests.helpers.distillation_reference import slow_kl, teacher_columns, with_teacher
from tests.helpers.hf_reference import global_scale
from tests.helpers.tiny_model import tiny_batch

VOCAB, TOKENS = 12, 6
KINDS = [(kl, tail) for kl in ("forward", "reverse", "mixed") for tail in ("bucket", "renormalize")]


def section(**given: object) -> DistillationConfig:
    return DistillationConfig.model_validate({"enabled": True, **given})


def policy_columns(logits_MV: torch.Tensor, ids_MK: torch.Tensor) -> torch.Tensor:
    """Return `[1, M, K + 1]` in the dtype of the logits, as the workers compute them in float32."""
    every = logits_MV.log_softmax(-1)
    rest = every.scatter(-1, ids_MK, float("-inf")).logsumexp(-1)
    return torch.cat([every.gather(-1, ids_MK), rest[:, None]], -1)[None]


def lines_at(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return `[K + 1, M]`: log-probabilities of these tokens, and of all others together."""
    return token_lines(logits, ids[:, 0], sampling=Sampling(), lines=WantedLines(ids_MK=ids))[1:]


def draw(seed: int, deviation: float = 2.0) -> torch.Tensor:
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(TOKENS, VOCAB, generator=draws, dtype=torch.float64) * deviation


@pytest.mark.parametrize("k", [1, 4, VOCAB])
@pytest.mark.parametrize("deviation", [2.0, 12.0])
@pytest.mark.parametrize(("kl", "tail"), KINDS)
def test_value_and_gradient_equal_the_definition(kl: str, tail: str, k: int, deviation: float) -> None:
    config = section(kl=kl, tail=tail, mixed_weight=0.3)
    ids, teacher = teacher_columns(draw(1, deviation).log_softmax(-1), k)
    # What runs, in float32 through the chunked kernel.
    logits = draw(2).float().requires_grad_()
    columns = lines_at(logits, ids).T[None]
    mask = torch.ones(1, TOKENS, dtype=torch.bool)
    found = distillation_term(columns, teacher.float()[None], mask, config).values_NT[0]
    # The definition.
    exact = draw(2).requires_grad_()
    taught = teacher.float().double()
    expected = torch.stack(
        [
            slow_kl(every, tokens, log_q, config)
            for every, tokens, log_q in zip(exact.log_softmax(-1), ids.tolist(), taught.tolist(), strict=True)
        ]
    )
    torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=1e-6 * max(2.0, deviation))
    if k == 1 and tail == "renormalize":
        assert not bool(found.any()), "two distributions on one token are the same"
        return
    found.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=2e-5, atol=1e-6 * max(2.0, deviation))


@pytest.mark.parametrize(("kl", "tail"), KINDS)
def test_the_whole_vocabulary_as_top_k_is_the_full_kl(kl: str, tail: str) -> None:
    log_q, log_p = draw(1).log_softmax(-1), draw(2).log_softmax(-1)
    (ids, taught), mask = teacher_columns(log_q, VOCAB), torch.ones(1, TOKENS, dtype=torch.bool)
    config = section(kl=kl, tail=tail, mixed_weight=0.3, top_k=VOCAB)
    found = distillation_term(policy_columns(draw(2), ids), taught[None], mask, config)
    forward, reverse = (log_q.exp() * (log_q - log_p)).sum(-1), (log_p.exp() * (log_p - log_q)).sum(-1)
    expected = {"forward": forward, "reverse": reverse, "mixed": 0.3 * forward + 0.7 * reverse}[kl]
    torch.testing.assert_close(found.values_NT[0], expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.measured["teacher_top_k_mass"], torch.ones(1, TOKENS, dtype=torch.float64))
    torch.testing.assert_close(found.measured["policy_entropy"][0], -(log_p.exp() * log_p).sum(-1))


@pytest.mark.parametrize("kl", ["forward", "reverse"])
def test_with_a_bucket_more_tokens_only_raise_the_kl(kl: str) -> None:
    log_q, mask = draw(1).log_softmax(-1), torch.ones(1, TOKENS, dtype=torch.bool)
    found = []
    for k in range(1, VOCAB + 1):
        ids, taught = teacher_columns(log_q, k)
        columns = policy_columns(draw(2), ids)
        found.append(distillation_term(columns, taught[None], mask, section(kl=kl)).values_NT[0])
    assert bool((torch.stack(found).diff(dim=0) >= -1e-9).all())


def test_columns_without_the_rest_are_refused() -> None:
    ids, taught = teacher_columns(draw(1).log_softmax(-1), 1)
    mask = torch.ones(1, TOKENS, dtype=torch.bool)
    with pytest.raises(SchemaMismatch, match="expected the log-probabilities of 1 tokens and of all others, got 1"):
        distillation_term(policy_columns(draw(2), ids), taught[None, :, :1], mask, section())


def loss_of(config: LossConfig, *, k: int = 4) -> tuple[dict[str, float], torch.Tensor]:
    """Return metrics, and the gradient of the logits of every token."""
    batch = with_teacher(tiny_batch(4), vocab=VOCAB, k=k)
    ids = batch.tensor("input_ids").long() % VOCAB
    logits = torch.randn(*ids.shape, VOCAB, generator=torch.Generator().manual_seed(5)).requires_grad_()
    logprobs = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    columns = lines_at(logits.flatten(0, 1), batch.tensor(TOPK_IDS).flatten(0, 1).long())
    given: Mapping[str, torch.Tensor] = {**batch, POLICY_TOPK: columns.T.view(*ids.shape, -1)}
    made = DistillationLoss if config.distillation.enabled else PolicyLoss
    output = made(config=config)(logprobs, given, scale=global_scale(batch))
    output.loss.backward()
    assert output.token_losses is not None and logits.grad is not None
    assert float(output.token_losses.sum()) / global_scale(batch).valid_tokens == pytest.approx(output.loss.item())
    return values(output.metrics), logits.grad


def test_alone_only_the_teacher_pulls_and_added_both_do() -> None:
    policy = LossConfig(reference_policy_kl_penalty=0.0)
    added = policy.model_copy(update={"distillation": section(mode="added", coefficient=0.5)})
    alone = policy.model_copy(update={"distillation": section(mode="alone", coefficient=0.5)})
    (without, pull), (both, pull_of_both), (only, pull_of_one) = map(loss_of, (policy, added, alone))
    assert both["loss"] == pytest.approx(without["loss"] + only["loss"], rel=1e-5)
    torch.testing.assert_close(pull_of_both, pull + pull_of_one, rtol=1e-5, atol=1e-7)
    assert only["loss"] == only["distillation_loss"] == pytest.approx(0.5 * only["distillation/kl"], rel=1e-5)
    assert "actor_loss" in both and "actor_loss" not in only
    assert 0 < only["distillation/teacher_top_k_mass"] < 1 and 0 < only["distillation/policy_top_k_mass"] < 1


def test_a_loss_without_distillation_reads_no_top_k() -> None:
    assert not {TOPK_IDS, TOPK_LOGPROBS, POLICY_TOPK} & set(PolicyLoss(config=LossConfig()).input_fields)
    with_it = DistillationLoss(config=LossConfig(distillation=section()))
    assert {TOPK_IDS, TOPK_LOGPROBS, POLICY_TOPK} <= set(with_it.input_fields)
