"""Rows of conversations: sampled tokens where they were sampled, everything else between them."""

from __future__ import annotations

import random

import pytest
import torch

from nemo_rl.errors import WorkerError
from nemo_rl.experience.payload import build_columns, columns_of_rows, version_span_column
from nemo_rl.experience.token_row import Inserted, TokenRow
from nemo_rl.jagged import lengths_of
from nemo_rl.models.generation.interfaces import GenerationOutput

VERSION = ((0, 3),)


def two_turns() -> TokenRow:
    row = TokenRow((1, 2))
    row.add_turn((7, 8), torch.tensor([-0.5, -0.25]), version_spans=VERSION, cached_tokens=0)
    row.insert((4, 5, 6), num_seam=1)
    row.add_turn((9,), torch.tensor([-1.0]), version_spans=((0, 4),), cached_tokens=6, truncated=True)
    row.set_reward(1, 0.5)
    return row


def test_a_row_keeps_every_token_with_its_place_and_kind() -> None:
    row = two_turns()
    row.check()
    assert row.ids == (1, 2, 7, 8, 4, 5, 6, 9) and len(row) == 8
    assert row.mask.int().tolist() == [0, 0, 1, 1, 0, 0, 0, 1]
    assert row.logprobs.tolist() == [0, 0, -0.5, -0.25, 0, 0, 0, -1.0]
    assert row.sampled_tokens == (7, 8, 9) and row.num_sampled == 3 and row.context_tokens == (1, 2, 4, 5, 6)
    assert [(span.start, span.length, span.kind) for span in row.inserted] == [
        (0, 2, Inserted.PROMPT),
        (4, 1, Inserted.SEAM),
        (5, 2, Inserted.REPLY),
    ]
    assert [(turn.start, turn.length, turn.cached_tokens, turn.truncated) for turn in row.turns] == [
        (2, 2, 0, False),
        (7, 1, 6, True),
    ]
    assert row.rewards == (0.0, 0.5) and list(row.before_turns()) == [(1, 2), (4, 5, 6)]
    assert row.version_spans == ((0, 3), (2, 4))


def test_equal_versions_of_turns_are_one_span() -> None:
    row = TokenRow((1,))
    row.add_turn((2, 3), torch.zeros(2), version_spans=((0, 1), (1, 2)))
    row.insert((4,), num_seam=0)
    row.add_turn((5, 6), torch.zeros(2), version_spans=((0, 2), (1, 5)))
    assert row.version_spans == ((0, 1), (1, 2), (3, 5))


def test_a_reply_that_no_turn_follows_is_dropped() -> None:
    row = two_turns()
    row.insert((3, 3), num_seam=2)
    row.drop_open_reply()
    row.check()
    assert row.ids == two_turns().ids and row.inserted == two_turns().inserted


@pytest.mark.parametrize(
    ("ids", "logprobs", "spans", "message"),
    [
        ((), 0, VERSION, "at least one token"),
        ((1, 2), 1, VERSION, r"2 log-probabilities, got a tensor \[1\]"),
        ((1, 2), 2, (), "version spans from token 0"),
        ((1, 2), 2, ((1, 3),), "version spans from token 0"),
        ((1, 2), 2, ((0, 3), (2, 4)), "within 2 tokens"),
    ],
)
def test_turns_that_are_not_aligned_are_refused(
    ids: tuple[int, ...], logprobs: int, spans: tuple[tuple[int, int], ...], message: str
) -> None:
    row = TokenRow((1,))
    with pytest.raises(WorkerError, match=f"turn 0 of a row: expected .*{message}"):
        row.add_turn(ids, torch.zeros(logprobs), version_spans=spans)


def test_turns_and_replies_take_turns() -> None:
    with pytest.raises(WorkerError, match="expected a prompt"):
        TokenRow(())
    with pytest.raises(WorkerError, match="got 0 turns"):
        TokenRow((1,)).insert((1,), num_seam=0)
    row = two_turns()
    with pytest.raises(WorkerError, match="turn 2 of a row: expected a reply since the turn before"):
        row.add_turn((1,), torch.zeros(1), version_spans=VERSION)
    with pytest.raises(WorkerError, match="a seam of 2"):
        row.insert((1,), num_seam=2)


def test_columns_of_conversations_have_holes_in_their_mask() -> None:
    short = TokenRow((5,))
    short.add_turn((6, 7), torch.tensor([-2.0, -3.0]), version_spans=VERSION, reward=1.0)
    batch = columns_of_rows([two_turns(), short, TokenRow((1, 1, 1))], pad_token_id=99, with_versions=True)
    assert batch.tensor("input_ids").tolist() == [
        [1, 2, 7, 8, 4, 5, 6, 9],
        [5, 6, 7, 99, 99, 99, 99, 99],
        [1, 1, 1, 99, 99, 99, 99, 99],
    ]
    assert batch.tensor("input_lengths").tolist() == [8, 3, 3]
    assert batch.tensor("token_mask").int().tolist() == [
        [0, 0, 1, 1, 0, 0, 0, 1],
        [0, 1, 1, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 0],
    ]
    assert batch.tensor("generation_logprobs")[0].tolist() == [0, 0, -0.5, -0.25, 0, 0, 0, -1.0]
    turns, rewards, spans = (batch.tensor(name) for name in ("turns", "turn_rewards", "version_spans"))
    assert [row.tolist() for row in turns.unbind()] == [[[2, 2, 0], [7, 1, 1]], [[1, 2, 0]], []]
    assert [row.tolist() for row in rewards.unbind()] == [[0.0, 0.5], [1.0], []]
    assert [row.tolist() for row in spans.unbind()] == [[[0, 3], [2, 4]], [[0, 3]], []]
    assert turns.dtype == spans.dtype == torch.int32 and rewards.dtype == torch.float32


def test_sampling_masks_of_turns_are_laid_end_to_end() -> None:
    rows = [TokenRow((1,)), TokenRow((1,))]
    for row, parts in zip(rows, ([[1], [2, 1]], [[9, 1]]), strict=True):
        for number, part in enumerate(parts):
            if number:
                row.insert((3,), num_seam=0)
            row.add_turn((2,), torch.zeros(1), version_spans=VERSION, support=torch.tensor(part, dtype=torch.uint8))
    support = columns_of_rows(rows, pad_token_id=0).tensor("sampling_support")
    assert [row.tolist() for row in support.unbind()] == [[1, 2, 1], [9, 1]]
    rows[1].insert((3,), num_seam=0)
    rows[1].add_turn((2,), torch.zeros(1), version_spans=VERSION)
    with pytest.raises(WorkerError, match="of all 2 turns"):
        columns_of_rows(rows, pad_token_id=0)


@pytest.mark.parametrize("seed", range(20))
def test_rows_of_one_turn_have_the_columns_of_a_single_response_bit_for_bit(seed: int) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    size = rng.randint(1, 4)
    prompts = [[rng.randint(0, 99) for _ in range(rng.randint(1, 9))] for _ in range(rng.randint(1, 5))]
    lengths = torch.tensor([rng.randint(1, 12) for _ in range(len(prompts) * size)])
    total = int(lengths.sum())
    output = GenerationOutput(
        token_ids=torch.randint(0, 99, (total,), generator=generator, dtype=torch.int32),
        logprobs=-torch.rand(total, generator=generator),
        lengths=lengths,
        truncated=torch.zeros(len(lengths), dtype=torch.bool),
        weight_version=3,
        support=tuple(torch.ones(length, dtype=torch.uint8) for length in lengths.tolist()),
    )
    rows = []
    parts = zip(
        output.token_ids.split(lengths.tolist()),
        output.logprobs.split(lengths.tolist()),
        output.support or (),
        output.row_spans,
        strict=True,
    )
    for number, (ids, logprobs, support, spans) in enumerate(parts):
        row = TokenRow(prompts[number // size])
        row.add_turn(ids.tolist(), logprobs, version_spans=spans, support=support)
        rows.append(row)
    expected = build_columns(prompts, output, group_size=size, pad_token_id=7)
    expected["version_spans"] = version_span_column(output)
    found = columns_of_rows(rows, pad_token_id=7, with_versions=True)
    assert {*found} - {*expected} == {"turns", "turn_rewards"}
    for name in expected:
        ours, theirs = found.tensor(name), expected.tensor(name)
        assert ours.dtype == theirs.dtype, name
        if theirs.is_nested:
            assert torch.equal(ours.values(), theirs.values()) and torch.equal(lengths_of(ours), lengths_of(theirs))
        else:
            assert torch.equal(ours, theirs), name
