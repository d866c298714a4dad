"""Kept sets: recorded by the engine, read back by the trainer, and log-probabilities under them."""

from __future__ import annotations

import pytest
import torch

from nemo_rl.data_plane.schema import FIELDS
from nemo_rl.errors import FieldNotProduced
from nemo_rl.models.head import logits as head_logits
from nemo_rl.models.head.logits import SUPPORT, KeptSets, SupportRecorder, decode_support
from nemo_rl.models.head.logprobs import Sampling, WantedLines, token_lines

VOCAB = 300
SETS = [[[3, 5, 200], [5]], [[0, 1, 299]]]
"""Of two rows with two and one sampled tokens."""
IDS = torch.tensor([[9, 5, 5], [9, 9, 0]])
IS_RESPONSE = torch.tensor([[False, True, True], [False, False, True]])


def recorded(sets: list[list[list[int]]] = SETS) -> torch.Tensor:
    recorder = SupportRecorder()
    for turn, live in enumerate([[0, 1], [0]]):
        kept = torch.zeros(len(live), VOCAB, dtype=torch.bool)
        for place, row in enumerate(live):
            kept[place, sets[row][turn]] = True
        token = torch.stack([IDS[row][IS_RESPONSE[row]][turn] for row in live])
        recorder.add_turn(kept, token, torch.tensor(live))
    return torch.nn.utils.rnn.pad_sequence(list(recorder.rows(2)), batch_first=True)


def sets_of(kept: KeptSets) -> list[list[int]]:
    """Of every scored token, by what it does to scores."""
    count = len(kept.is_dropped_m)
    filled = kept.fill(torch.zeros(count, VOCAB), slice(0, count), first=0)
    return [(row == 0).nonzero()[:, 0].tolist() for row in filled]


def test_sets_are_runs_of_bytes_that_need_no_lengths() -> None:
    # 3 is 4 after -1, 200 is 197 after 3, and 199 takes two bytes; 5 is the token itself.
    assert recorded().tolist() == [[6, 199, 1, 1, 1], [4, 128 + 44, 2, 1, 0]]
    assert FIELDS[SUPPORT].pad == 0 and FIELDS[SUPPORT].dtypes == ("uint8",)


@pytest.mark.parametrize("scored", [[(0, 1), (0, 2), (1, 2)], [(1, 2), (0, 2)], []])
def test_every_scored_token_gets_its_own_set(scored: list[tuple[int, int]]) -> None:
    rows, columns = torch.tensor(scored, dtype=torch.int64).reshape(-1, 2).unbind(1)
    wide = torch.nn.functional.pad(recorded(), (0, 2))
    kept = decode_support(wide, IDS, IS_RESPONSE, rows, columns)
    assert sets_of(kept) == [SETS[row][column - (2 if row else 1)] for row, column in scored]
    assert kept.place_E.tolist() == sorted(kept.place_E.tolist())


def test_sets_belong_to_sampled_tokens_with_replies_between_them() -> None:
    ids = torch.tensor([[9, 5, 7, 7, 5, 7], [9, 7, 7, 0, 7, 7]])
    is_response = torch.tensor([[0, 1, 0, 0, 1, 0], [0, 0, 0, 1, 0, 0]], dtype=torch.bool)
    rows, columns = is_response.nonzero(as_tuple=True)
    kept = decode_support(recorded(), ids, is_response, rows, columns)
    assert sets_of(kept) == [*SETS[0], *SETS[1]]


def test_a_whole_vocabulary_is_a_byte_and_most_of_it_is_what_was_dropped() -> None:
    whole, most = list(range(VOCAB)), [token for token in range(VOCAB) if token not in (7, 299)]
    support = recorded([[whole, [5]], [most]])
    assert support.tolist() == [[2, 1, 0, 0], [10, 128 + 38, 2, 2]]
    rows, columns = IS_RESPONSE.nonzero(as_tuple=True)
    assert sets_of(decode_support(support, IDS, IS_RESPONSE, rows, columns)) == [whole, [5], most]


@pytest.mark.parametrize("vocab", [2, 128, 130, 40_000, 3_000_000])
def test_random_sets_come_back_whatever_their_sizes(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    rows, turns = 3, 4
    tokens = torch.randint(0, vocab, (rows, turns), generator=generator)
    recorder, expected = SupportRecorder(), {}
    for turn in range(turns):
        live = torch.arange(rows - turn // 2)
        share = torch.rand(len(live), 1, generator=generator) ** 4
        kept = torch.rand(len(live), vocab, generator=generator) < (share if turn else 1 - share)
        kept.scatter_(1, tokens[live, turn, None], True)
        recorder.add_turn(kept, tokens[live, turn], live)
        expected |= {(row, turn): kept[row] for row in live.tolist()}
    support = torch.nn.utils.rnn.pad_sequence(list(recorder.rows(rows)), batch_first=True)
    is_response = torch.tensor([[(row, turn) in expected for turn in range(turns)] for row in range(rows)])
    row_m, column_m = is_response.nonzero(as_tuple=True)
    found = decode_support(support, tokens, is_response, row_m, column_m)
    filled = found.fill(torch.zeros(len(row_m), vocab), slice(0, len(row_m)), first=0) == 0
    for number, place in enumerate(zip(row_m.tolist(), column_m.tolist(), strict=True)):
        assert torch.equal(filled[number], expected[place])


@pytest.mark.parametrize("fault", ["a set too few", "cut off", "a prompt's token"])
def test_sets_of_other_tokens_are_refused(fault: str) -> None:
    support = recorded()
    if fault == "a set too few":
        support[0, 4] = 0
    if fault == "cut off":
        support = support[:, :2]
    column = 0 if fault == "a prompt's token" else 1
    with pytest.raises(FieldNotProduced, match="one sampling mask for every sampled token"):
        decode_support(support, IDS, IS_RESPONSE, torch.tensor([0]), torch.tensor([column]))


@pytest.mark.parametrize("sampling", [Sampling(top_p=0.8), Sampling(temperature=1.3, top_k=3)])
def test_values_and_gradients_under_the_sets_equal_a_float64_reference(sampling, monkeypatch):
    monkeypatch.setitem(head_logits.CHUNK_ELEMENTS, "cpu", 3 * 40)
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(11, 40, generator=generator) * 2).requires_grad_()
    # Sets of 1 to 11 tokens, chosen without regard to the logits: the trainer's own set would be another one.
    sets = [torch.randperm(40, generator=generator)[: size + 1].sort().values for size in range(11)]
    targets = torch.stack([tokens[-1] for tokens in sets])
    kept = KeptSets(
        place_E=torch.arange(11).repeat_interleave(torch.arange(1, 12)),
        token_E=torch.cat(sets),
        is_dropped_m=torch.zeros(11, dtype=torch.bool),
    )
    weights = torch.randn(2, 11, generator=generator)
    reference = logits.detach().double().requires_grad_()

    found = token_lines(logits, targets, sampling=sampling, kept=kept, lines=WantedLines(entropy=True))
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
