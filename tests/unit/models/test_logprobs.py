"""Token log-probabilities against a float64 reference."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_rl.models.head import logits as head_logits
from nemo_rl.models.head.logprobs import Sampling, WantedLines, filter_logits, token_lines, token_logprobs


def _slow(logits: torch.Tensor, targets: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """One position at a time, in float64, by sorting in plain Python."""
    result = []
    for row, target in zip(logits.double() / sampling.temperature, targets.tolist(), strict=True):
        order = sorted(range(len(row)), key=lambda i: -float(row.detach()[i]))
        kept = order[: sampling.top_k or len(order)]
        mass, inside = 0.0, []
        for i, p in zip(kept, row.detach()[kept].softmax(0).tolist(), strict=True):
            if mass >= sampling.top_p:
                break
            inside.append(i)
            mass += p
        result.append(row[target] - row[sorted({*inside, target})].logsumexp(0))
    return torch.stack(result)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.7),
        Sampling(temperature=1.3, top_k=5),
        Sampling(top_p=0.8),
        Sampling(temperature=0.9, top_k=20, top_p=0.6),
    ],
)
def test_values_and_gradients_equal_a_float64_reference_across_chunk_borders(sampling, monkeypatch):
    monkeypatch.setitem(head_logits.CHUNK_ELEMENTS, "cpu", 3 * 40)
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(11, 40, generator=generator) * 2).requires_grad_()
    targets = torch.randint(0, 40, (11,), generator=generator)
    weights = torch.randn(11, generator=generator)
    reference_logits = logits.detach().double().requires_grad_()

    values = token_logprobs(logits, targets, sampling=sampling)
    expected = _slow(reference_logits, targets, sampling)
    (values * weights).sum().backward()
    (expected * weights.double()).sum().backward()

    torch.testing.assert_close(values.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits.grad.double(), reference_logits.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7), Sampling(top_k=5, top_p=0.8)])
def test_entropies_and_their_gradients_equal_a_float64_reference(sampling, monkeypatch):
    monkeypatch.setitem(head_logits.CHUNK_ELEMENTS, "cpu", 3 * 40)
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(11, 40, generator=generator) * 2).requires_grad_()
    targets = torch.randint(0, 40, (11,), generator=generator)
    weights = torch.randn(2, 11, generator=generator)
    exact = logits.detach().double().requires_grad_()
    kept = filter_logits(
        exact / sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p, keep_M=targets
    ).log_softmax(-1)
    entropy = -torch.where(kept.isfinite(), kept.exp() * kept.masked_fill(kept.isneginf(), 0.0), 0.0).sum(-1)
    expected = torch.stack([kept.gather(-1, targets[:, None])[:, 0], entropy])

    found = token_lines(logits, targets, sampling=sampling, lines=WantedLines(entropy=True))
    (found * weights).sum().backward()
    (expected * weights.double()).sum().backward()

    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=1e-4, atol=1e-6)
    assert torch.equal(found[0], token_logprobs(logits, targets, sampling=sampling))


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7), Sampling(top_k=5, top_p=0.8)])
def test_sums_of_squares_equal_a_float64_reference_and_have_no_gradient(sampling, monkeypatch):
    monkeypatch.setitem(head_logits.CHUNK_ELEMENTS, "cpu", 3 * 40)
    generator = torch.Generator().manual_seed(2)
    logits = (torch.randn(11, 40, generator=generator) * 4).requires_grad_()
    targets = torch.randint(0, 40, (11,), generator=generator)
    kept = filter_logits(
        logits.detach().double() / sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p, keep_M=targets
    )
    found = token_lines(logits, targets, sampling=sampling, lines=WantedLines(squares=True))
    torch.testing.assert_close(found[1].double(), kept.softmax(-1).square().sum(-1), rtol=1e-5, atol=1e-7)
    assert torch.equal(found[0], token_logprobs(logits, targets, sampling=sampling))
    found.sum().backward()
    of_both, logits.grad = logits.grad, None
    token_logprobs(logits, targets, sampling=sampling).sum().backward()
    assert torch.equal(of_both, logits.grad)


def test_the_entropy_of_four_tokens() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    found = token_lines(logits, torch.tensor([0]), sampling=Sampling(), lines=WantedLines(entropy=True))
    assert found[1].item() == pytest.approx(1.1421200, abs=1e-6)


def test_no_selected_token_gives_no_values_and_zero_gradients() -> None:
    logits = torch.randn(4, 9, requires_grad=True)
    token_logprobs(logits[:0], torch.zeros(0, dtype=torch.int64), sampling=Sampling()).sum().backward()
    assert torch.equal(logits.grad, torch.zeros(4, 9))


def test_top_p_keeps_the_token_that_crosses_the_threshold() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    kept = filter_logits(logits, top_k=None, top_p=0.6).isfinite()
    assert kept.tolist() == [[True, True, False, False]]


def test_half_precision_logits_are_evaluated_in_float32() -> None:
    logits = (torch.randn(6, 50) * 4).bfloat16()
    targets = torch.arange(6)
    values = token_logprobs(logits, targets, sampling=Sampling())
    expected = logits.double().log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    assert values.dtype == torch.float32
    torch.testing.assert_close(values.double(), expected, rtol=1e-5, atol=1e-5)


def test_temperature_zero_has_no_distribution() -> None:
    with pytest.raises(ValueError, match="temperature"):
        Sampling(temperature=0.0)


class LargestFloat32(TorchDispatchMode):
    """Elements of the largest float32 tensor that any operation makes."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
                self.largest = max(self.largest, tensor.numel())
        return made


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.7), Sampling(top_k=5)])
def test_half_precision_logits_are_never_whole_in_float32(sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(head_logits.CHUNK_ELEMENTS, "cpu", 256)
    logits = torch.randn(100, 64, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    targets = torch.arange(100) % 64
    with LargestFloat32() as seen:
        token_logprobs(logits, targets, sampling=sampling).sum().backward()
    # Besides a tile the five sums of each position.
    assert 0 < seen.largest <= 500, f"{seen.largest} of {logits.numel()} elements at once"
