"""The order of prompts: from the seed alone, each once per epoch, resumable anywhere."""

from __future__ import annotations

import json

import pytest

from nemo_rl.data.sampler import PromptSampler
from nemo_rl.errors import CheckpointError, DatasetError


def prompts(sampler: PromptSampler, count: int) -> list[int]:
    return [draw.prompt for draw in sampler.next(count)]


def test_every_prompt_comes_once_per_epoch_in_a_new_order() -> None:
    sampler = PromptSampler(10, seed=3)
    first, second = prompts(sampler, 10), prompts(sampler, 10)
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert first != list(range(10))
    assert prompts(PromptSampler(10, seed=4), 10) != first


def test_without_shuffling_the_order_is_the_datasets_and_draws_cross_epochs() -> None:
    sampler = PromptSampler(3, seed=0, shuffle=False)
    assert [prompts(sampler, 2) for _ in range(3)] == [[0, 1], [2, 0], [1, 2]]
    assert prompts(sampler, 7) == [0, 1, 2, 0, 1, 2, 0]


def test_an_ordinal_is_the_place_in_the_stream_and_names_its_prompt_again() -> None:
    sampler = PromptSampler(5, seed=2)
    drawn = sampler.next(3) + sampler.next(6)
    assert [draw.ordinal for draw in drawn] == list(range(9))
    assert [sampler.at(ordinal) for ordinal in range(9)] == drawn
    for ordinal in (-1, 9):
        with pytest.raises(CheckpointError, match=f"expected an ordinal that was drawn before, got {ordinal}"):
            sampler.at(ordinal)


@pytest.mark.parametrize("draws_before", range(8))
def test_a_resumed_sampler_draws_what_an_uninterrupted_one_draws(draws_before: int) -> None:
    whole = PromptSampler(7, seed=5)
    expected = [whole.next(3) for _ in range(12)]
    interrupted = PromptSampler(7, seed=5)
    for _ in range(draws_before):
        interrupted.next(3)
    state = json.loads(json.dumps(interrupted.state_dict()))
    resumed = PromptSampler(7, seed=5)
    resumed.load_state_dict(state)
    assert [resumed.next(3) for _ in range(12 - draws_before)] == expected[draws_before:]


def test_epochs_end_when_a_whole_draw_is_no_longer_left() -> None:
    sampler = PromptSampler(5, seed=0, max_num_epochs=2)
    drawn = []
    while not sampler.is_exhausted:
        drawn.append(sampler.next(4))
    assert len(drawn) == 2
    resumed = PromptSampler(5, seed=0, max_num_epochs=2)
    resumed.load_state_dict(sampler.state_dict())
    assert resumed.is_exhausted
    with pytest.raises(DatasetError, match=r"expected 4 more, got 2 of 5 prompts x grpo.max_num_epochs 2"):
        sampler.next(4)


@pytest.mark.parametrize(
    ("other", "name"),
    [
        (PromptSampler(6, seed=5), "num_prompts"),
        (PromptSampler(7, seed=6), "seed"),
        (PromptSampler(7, seed=5, shuffle=False), "shuffle"),
    ],
)
def test_a_position_in_other_data_is_refused(other: PromptSampler, name: str) -> None:
    with pytest.raises(CheckpointError, match=f"data position: {name}"):
        other.load_state_dict(PromptSampler(7, seed=5).state_dict())


def test_no_prompts_is_an_error() -> None:
    with pytest.raises(DatasetError, match="at least one"):
        PromptSampler(0, seed=0)
