"""How a request is split for several engines, and how its groups come back, also from engines that are lost."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from nemo_rl.distributed.worker_groups import LocalWorkerGroup, WorkerFleet
from nemo_rl.errors import NonFiniteError, WorkerLost
from nemo_rl.experience.scheduler import EngineScheduler, _cuts, at_once, expected_work, split_request
from nemo_rl.models.generation.interfaces import GenerationOutput, GenerationRequest, GroupSamples, SamplingParams
from nemo_rl.utils.metrics import Sum, merge_metrics
from nemo_rl.utils.metrics import values as reduced


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


class CountedList(list):
    """Counts how often an item is looked at."""

    looks = 0

    def __getitem__(self, place):
        self.looks += 1
        return super().__getitem__(place)


def test_cutting_a_request_looks_at_few_prompts_however_many_there_are():
    looks = {}
    for size in (1_000, 16_000):
        ends = CountedList(float(number + 1) for number in range(size))
        cuts = _cuts(ends, [size / 64] * 64)
        assert len(cuts) == 65
        looks[size] = ends.looks
    assert looks[16_000] <= 2 * looks[1_000], "a search for each block, and no walk over the prompts"


class Engine:
    """Answers group by group with the number of its prompt; may be lost, or fail, behind a number of groups."""

    def __init__(self, number: int, *, lost_after: int | None = None, error: Exception | None = None) -> None:
        self.number, self.lost_after, self.error = number, lost_after, error
        self.blocks: list[GenerationRequest] = []

    def stream(self, request: GenerationRequest) -> Iterator[GroupSamples]:
        self.blocks.append(request)
        for at, (prompt, part) in enumerate(zip(request.prompt_ids, group_seeds(request), strict=True)):
            if at == self.lost_after:
                raise self.error or WorkerLost("process died", rank=self.number, stage="generation")
            yield GroupSamples(groups=(at,), output=answer(len(prompt), part))

    def generate(self, request: GenerationRequest) -> GenerationOutput:
        return GenerationOutput.empty(weight_version=4)

    def shutdown(self) -> None:
        """Nothing to end."""


def group_seeds(request: GenerationRequest) -> list[tuple[int, ...]]:
    size = request.group_size
    return [request.seeds[row : row + size] for row in range(0, len(request.seeds), size)]


def answer(length: int, seeds: tuple[int, ...]) -> GenerationOutput:
    """One row of as many tokens as the prompt has for each seed, which all are that seed."""
    return GenerationOutput(
        token_ids=torch.tensor([seed for seed in seeds for _ in range(length)], dtype=torch.int32),
        logprobs=torch.zeros(len(seeds) * length),
        lengths=torch.full((len(seeds),), length),
        truncated=torch.zeros(len(seeds), dtype=torch.bool),
        weight_version=4,
        metrics={"rows": Sum(float(len(seeds)))},
    )


def scheduler_of(*engines: Engine) -> EngineScheduler:
    fleet = WorkerFleet([LocalWorkerGroup(lambda engine=engine: engine) for engine in engines])
    return EngineScheduler(fleet, batch_rows=4, timeout_s=30)


def seen(found: list[GroupSamples]) -> dict[int, list[int]]:
    """The tokens of each group; a group comes once."""
    groups = [group for samples in found for group in samples.groups]
    assert len(set(groups)) == len(groups)
    return {samples.groups[0]: samples.output.token_ids.tolist() for samples in found}


@pytest.mark.parametrize("num_engines", [1, 3])
def test_every_group_comes_once_with_its_own_rows_and_the_last_one_has_the_engines_metrics(num_engines):
    asked = request_of([3 + row % 5 for row in range(20)])
    found = list(scheduler_of(*(Engine(number) for number in range(num_engines))).stream(asked))
    expected = {
        group: answer(len(prompt), part).token_ids.tolist()
        for group, (prompt, part) in enumerate(zip(asked.prompt_ids, group_seeds(asked), strict=True))
    }
    assert seen(found) == expected
    assert [("engines" in samples.output.metrics) for samples in found] == [*[False] * 19, True]
    metrics = reduced(merge_metrics(samples.output.metrics for samples in found))
    assert metrics["engines"] == num_engines and metrics["engines_lost"] == 0 and metrics["rows"] == 40


@pytest.mark.parametrize("num_callers", [1, 2, 3, 9])
def test_callers_share_a_request_and_its_batches_are_the_same_whatever_their_number(num_callers):
    asked = request_of([3 + row % 5 for row in range(40)])
    whole = Engine(0), Engine(1)
    expected = seen(list(scheduler_of(*whole).stream(asked)))
    engines = Engine(0), Engine(1)
    shares = [
        seen(list(scheduler_of(*engines).stream(asked, share=(caller, num_callers)))) for caller in range(num_callers)
    ]
    assert sum(map(len, shares)) == 40 and {group: row for each in shares for group, row in each.items()} == expected
    blocks = [block.prompt_ids for engine in engines for block in engine.blocks]
    assert sorted(blocks) == sorted(block.prompt_ids for engine in whole for block in engine.blocks)


def test_generate_gives_the_rows_in_the_order_of_the_request():
    asked = request_of([3 + row % 5 for row in range(20)])
    output = scheduler_of(Engine(0), Engine(1)).generate(asked)
    assert output.lengths.tolist() == [len(prompt) for prompt in asked.prompt_ids for _ in range(2)]
    assert [int(row[0]) for row in output.token_ids.split(output.lengths.tolist())] == list(asked.seeds)
    assert len(scheduler_of(Engine(0)).generate(request_of([])).lengths) == 0


@pytest.mark.parametrize("lost_after", [0, 1, 3])
def test_another_engine_samples_the_whole_block_of_a_lost_one_and_no_group_comes_twice(lost_after):
    asked, dying, living = request_of([4] * 20), Engine(0, lost_after=lost_after), Engine(1)
    found = list(scheduler_of(dying, living).stream(asked))
    assert set(seen(found)) == set(range(20))
    assert dying.blocks[0] in living.blocks, "in the same batch, so to the same bits"
    metrics = reduced(found[-1].output.metrics)
    assert metrics["engines_lost"] == 1 and metrics["rows_sampled_again"] == len(dying.blocks[0].seeds)


def test_an_error_of_an_engine_and_the_loss_of_all_end_the_request():
    asked = request_of([4] * 20)
    with pytest.raises(NonFiniteError, match="NaN in row 3"):
        list(scheduler_of(Engine(0, lost_after=1, error=NonFiniteError("NaN in row 3")), Engine(1)).stream(asked))
    for engines in ([Engine(0, lost_after=1)], [Engine(0, lost_after=1), Engine(1, lost_after=0)]):
        with pytest.raises(WorkerLost, match="process died"):
            list(scheduler_of(*engines).stream(asked))


def test_samples_can_be_taken_apart_and_put_together():
    whole = GenerationOutput.joined([answer(2, (5, 6)), answer(3, (7, 8))])
    assert whole.row_versions == (4, 4, 4, 4)
    part = whole.select([3, 0])
    assert part.lengths.tolist() == [3, 2] and part.token_ids.tolist() == [8, 8, 8, 5, 5]
    samples = GroupSamples(groups=(6, 9), output=whole)
    assert samples.without(()) is samples and samples.without((6, 9)) is None
    rest = samples.without((6,))
    assert rest is not None and rest.groups == (9,) and rest.output.token_ids.tolist() == [7, 7, 7, 8, 8, 8]


def test_streams_run_at_once_and_an_error_waits_for_the_others() -> None:
    gate = threading.Event()

    def failing() -> Iterator[int]:
        yield 1
        gate.set()
        raise ValueError("the first")

    def waiting() -> Iterator[int]:
        assert gate.wait(20), "the other stream does not run meanwhile"
        yield from (2, 3)

    assert list(at_once([iter([4]), iter([])])) == [4]
    found = at_once([waiting(), failing()])
    assert sorted([next(found), next(found), next(found)]) == [1, 2, 3]
    with pytest.raises(ValueError, match="the first"):
        next(found)


def test_a_prompt_of_shorter_responses_is_less_work() -> None:
    asked = replace(request_of([1] * 8, most=100), limits=(100, 100, 10, 10, 10, 10, 10, 10))
    first, *_ = split_request(asked, num_engines=2, batch_rows=1)
    assert len(first.prompt_ids) == 1 and first.limits == (100,)
