"""The most likely tokens, and log-probabilities of sets of tokens, against float64."""

from __future__ import annotations

import pytest
import torch

from nemo_rl.models.head import logits as head_logits
from nemo_rl.models.head.logits import LazyLogits
from nemo_rl.models.head.logprobs import Sampling, TopTokens, WantedLines, token_lines, top_k_logprobs
from tests.helpers.distillation_reference import teacher_columns

ROWS, VOCAB = 11, 40


@pytest.fixture(autouse=True)
def _several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(head_logits.CHUNK_ELEMENTS, "cpu", 3 * VOCAB)


def draw_logits() -> torch.Tensor:
    return torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(1)) * 2


def test_the_most_likely_tokens_are_those_of_a_plain_top_k() -> None:
    values, ids = top_k_logprobs(LazyLogits.given(draw_logits()), TopTokens(k=7), temperature=0.7, shard=None)
    expected_ids, expected = teacher_columns((draw_logits().double() / 0.7).log_softmax(-1), 7)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(values.double(), expected, rtol=1e-5, atol=1e-5)


def test_the_rest_of_a_sure_teacher_is_exact() -> None:
    logits = 12 * torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(1))
    values, _ = top_k_logprobs(LazyLogits.given(logits), TopTokens(k=7), temperature=1.0, shard=None)
    expected = teacher_columns(logits.double().log_softmax(-1), 7)[1]
    assert float(expected[:, -1].min()) < -14, "1 minus the sum of the others is 0 in float32"
    torch.testing.assert_close(values.double(), expected, rtol=1e-5, atol=1e-5)


def test_tokens_that_the_student_has_no_logits_for_have_no_probability() -> None:
    values, ids = top_k_logprobs(
        LazyLogits.given(draw_logits()), TopTokens(k=30, vocab_size=30), temperature=1.0, shard=None
    )
    expected_ids, expected = teacher_columns(draw_logits()[:, :30].double().log_softmax(-1), 30)
    assert torch.equal(ids, expected_ids) and bool(values[:, -1].isneginf().all())
    torch.testing.assert_close(values.double(), expected, rtol=1e-5, atol=1e-5)


def test_more_tokens_than_the_vocabulary_has_are_refused() -> None:
    with pytest.raises(ValueError, match="k of at most the vocabulary, got 41 of 40"):
        top_k_logprobs(LazyLogits.given(draw_logits()), TopTokens(k=VOCAB + 1), temperature=1.0, shard=None)


@pytest.mark.parametrize("k", [1, 6, VOCAB])
def test_values_and_gradients_of_a_set_equal_float64(k: int) -> None:
    draw = torch.Generator().manual_seed(2)
    logits = draw_logits().requires_grad_()
    exact = draw_logits().double().requires_grad_()
    ids = torch.rand(ROWS, VOCAB, generator=draw).argsort(-1)[:, :k]
    weights = torch.randn(k + 1, ROWS, generator=draw)
    if k == VOCAB:
        weights[-1] = 0.0

    found = token_lines(logits, ids[:, 0], sampling=Sampling(temperature=1.3), lines=WantedLines(ids_MK=ids))[1:]
    every = (exact / 1.3).log_softmax(-1)
    rest = every.scatter(-1, ids, float("-inf")).logsumexp(-1)
    expected = torch.cat([every.gather(-1, ids).T, rest[None]])
    part = slice(None) if k < VOCAB else slice(-1)
    (found[part] * weights[part]).sum().backward()
    (expected[part] * weights[part].double()).sum().backward()

    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=1e-5, atol=1e-5)
    if k == VOCAB:
        assert bool(found[-1].isneginf().all())
