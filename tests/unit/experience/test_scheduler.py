"""How a request is cut for several engines: all of it, groups whole, by expected work, the same every time."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from nemo_rl.experience.scheduler import expected_work, split_request
from nemo_rl.models.generation.interfaces import GenerationRequest, SamplingParams


def request_of(lengths: list[int], *, group: int = 2, most: int = 10) -> GenerationRequest:
    return GenerationRequest(
        prompt_ids=tuple(tuple(range(length)) for length in lengths),
        seeds=tuple(range(100, 100 + group * len(lengths))),
        sampling=SamplingParams(temperature=1.0, max_new_tokens=most, stop_token_ids=(2,)),
    )


@pytest.mark.parametrize("seed", range(20))
def test_blocks_are_the_request_in_order_and_groups_are_whole(seed):
    draw = random.Random(seed)
    asked = request_of([draw.randrange(1, 400) for _ in range(draw.randrange(1, 60))], group=draw.randrange(1, 5))
    blocks = split_request(asked, num_engines=draw.randrange(1, 6), batch_rows=draw.choice([1, 8, 1024]))
    assert tuple(prompt for block in blocks for prompt in block.prompt_ids) == asked.prompt_ids
    assert tuple(seed for block in blocks for seed in block.seeds) == asked.seeds
    assert all(block.prompt_ids and block.group_size == asked.group_size for block in blocks)


def test_blocks_keep_the_responses_of_their_rows():
    asked = request_of([10] * 64, group=2)
    asked = replace(asked, forced=tuple((seed,) for seed in asked.seeds))
    blocks = split_request(asked, num_engines=2, batch_rows=4)
    assert len(blocks) > 1 and all(block.forced == tuple((seed,) for seed in block.seeds) for block in blocks)


def test_one_engine_gets_everything_and_an_empty_request_stays_one():
    asked = request_of([3, 4, 5])
    assert split_request(asked, num_engines=1, batch_rows=1) == [asked]
    empty = request_of([])
    assert split_request(empty, num_engines=3, batch_rows=8) == [empty]


def test_engines_share_work_and_not_prompts():
    # Four long prompts are as much work as twenty short ones.
    asked = request_of([190] * 4 + [30] * 20, group=1, most=20)
    first, second = split_request(asked, num_engines=2, batch_rows=1024)
    assert [len(first.prompt_ids), len(second.prompt_ids)] == [4, 20]
    work = [sum(expected_work(prompt, part) for prompt in part.prompt_ids) for part in (first, second)]
    assert work == [800.0, 800.0]


def test_blocks_shrink_to_a_batch():
    blocks = split_request(request_of([10] * 64, group=1), num_engines=2, batch_rows=4)
    assert [len(block.prompt_ids) for block in blocks] == [16, 16, 8, 8, 4, 4, 4, 4]
