"""Kept sets: recorded by the engine, read back by the trainer, and log-probabilities under them."""

from __future__ import annotations

import pytest
import torch

from nemo_rl.data_plane.schema import FIELDS
from nemo_rl.errors import FieldNotProduced
from nemo_rl.models import logprobs
from nemo_rl.models.logprobs import Sampling, logprobs_with_entropy
from nemo_rl.models.support import SUPPORT, KeptSets, SupportRecorder, decode_support

SETS = [[[0, 3], [5]], [[1, 2, 4]]]
"""Of two rows with two and one sampled tokens."""
IS_RESPONSE = torch.tensor([[False, True, True], [False, False, True]])


def recorded() -> torch.Tensor:
    recorder = SupportRecorder()
    for turn, live in enumerate([[0, 1], [0]]):
        kept = torch.zeros(len(live), 6, dtype=torch.bool)
        for place, row in enumerate(live):
            kept[place, SETS[row][turn]] = True
        recorder.add_turn(kept, torch.tensor(live))
    return torch.nn.utils.rnn.pad_sequence(list(recorder.rows(2)), batch_first=True)


def test_sets_are_runs_of_ids_that_need_no_lengths() -> None:
    assert recorded().tolist() == [[-1, 4, -6], [-2, 3, 5]]
    assert FIELDS[SUPPORT].pad == 0


@pytest.mark.parametrize("scored", [[(0, 1), (0, 2), (1, 2)], [(1, 2), (0, 2)], []])
def test_every_scored_token_gets_its_own_set(scored: list[tuple[int, int]]) -> None:
    rows, columns = torch.tensor(scored, dtype=torch.int64).reshape(-1, 2).unbind(1)
    wide = torch.nn.functional.pad(recorded(), (0, 2))
    kept = decode_support(wide, IS_RESPONSE, rows, columns)
    expected = [SETS[row][column - (2 if row else 1)] for row, column in scored]
    found = [kept.token_E[kept.place_E == number].tolist() for number in range(len(scored))]
    assert found == expected
    assert kept.place_E.tolist() == sorted(kept.place_E.tolist())


@pytest.mark.parametrize("fault", ["a set too few", "a prompt's token"])
def test_sets_of_other_tokens_are_refused(fault: str) -> None:
    support = recorded()
    if fault == "a set too few":
        support[0, 2] = 0
    column = 0 if fault == "a prompt's token" else 1
    with pytest.raises(FieldNotProduced, match="one kept set for every sampled token"):
        decode_support(support, IS_RESPONSE, torch.tensor([0]), torch.tensor([column]))


@pytest.mark.parametrize("sampling", [Sampling(top_p=0.8), Sampling(temperature=1.3, top_k=3)])
def test_values_and_gradients_under_the_sets_equal_a_float64_reference(
    sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 3 * 40)
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(11, 40, generator=generator) * 2).requires_grad_()
    # Sets of 1 to 11 tokens, chosen without regard to the logits: the trainer's own set would be another one.
    sets = [torch.randperm(40, generator=generator)[: size + 1].sort().values for size in range(11)]
    targets = torch.stack([tokens[-1] for tokens in sets])
    kept = KeptSets(
        place_E=torch.arange(11).repeat_interleave(torch.arange(1, 12)),
        token_E=torch.cat(sets),
    )
    weights = torch.randn(2, 11, generator=generator)
    reference = logits.detach().double().requires_grad_()

    found = logprobs_with_entropy(logits, targets, sampling=sampling, kept=kept)
    rows = [(reference[row][tokens] / sampling.temperature).log_softmax(0) for row, tokens in enumerate(sets)]
    expected = torch.stack([torch.stack([row[-1] for row in rows]), torch.stack([-(r.exp() * r).sum() for r in rows])])
    (found * weights).sum().backward()
    (expected * weights.double()).sum().backward()

    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad.double(), reference.grad, rtol=1e-4, atol=1e-6)
    outside = torch.ones(11, 40, dtype=torch.bool)
    outside[kept.place_E, kept.token_E] = False
    assert not logits.grad[outside].any()
