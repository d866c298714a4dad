"""Turns of conversations through engines: their bits, their engine, and engines that are lost, late or replaced."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from benchmarks.sleep_engine import SleepEngine
from nemo_rl.distributed.own_ray import OwnRay
from nemo_rl.distributed.ray_worker_groups import RayPlacement, RayWorkerGroup
from nemo_rl.distributed.worker_groups import Call, LocalWorkerGroup, WorkerFleet, ask
from nemo_rl.errors import NonFiniteError, WorkerError, WorkerLost
from nemo_rl.experience.scheduler import EngineScheduler
from nemo_rl.experience.turn_sampler import TurnRequest, TurnSample, TurnSampler
from nemo_rl.models.generation.interfaces import (
    EngineSpec,
    GenerationInterface,
    GenerationOutput,
    GenerationRequest,
    GroupSamples,
    SamplingParams,
)
from nemo_rl.models.generation.torch_engine.worker import EngineWorker
from nemo_rl.models.generation.turn_batch import ContinuousSpec
from nemo_rl.models.hf.loading import named_weights
from nemo_rl.utils.metrics import values as reduced
from tests.helpers.tiny_model import tiny_model, tiny_policy, write_tiny_folder
from tests.unit.benchmarks.test_sleep_engine import engine_spec
from tests.unit.models.test_continuous import STOPS, engine_of, in_request_mode

LIMIT_S = 60.0
_T = TypeVar("_T")


def turn_of(seed: int, *, most: int = 20, **changes: Any) -> TurnRequest:
    rng = random.Random(seed)
    return TurnRequest(
        prompt_ids=tuple(rng.randrange(7, 300) for _ in range(rng.randint(2, 9))),
        seed=seed,
        sampling=SamplingParams(temperature=1.0, max_new_tokens=most, stop_token_ids=STOPS),
        **changes,
    )


def alone(turn: TurnRequest) -> GenerationOutput:
    request = GenerationRequest(prompt_ids=(turn.prompt_ids,), seeds=(turn.seed,), sampling=turn.sampling)
    return in_request_mode(request)


def assert_as_alone(turns: Sequence[TurnRequest], samples: Sequence[TurnSample]) -> None:
    for turn, sample in zip(turns, samples, strict=True):
        expected = alone(turn)
        assert list(sample.token_ids) == expected.token_ids.tolist()
        torch.testing.assert_close(sample.logprobs, expected.logprobs, rtol=0, atol=1e-5)
        assert sample.truncated == bool(expected.truncated[0])


def run(work: Coroutine[Any, Any, _T]) -> _T:
    async def limited() -> _T:
        async with asyncio.timeout(LIMIT_S):
            return await work

    return asyncio.run(limited())


async def all_of(sampler: TurnSampler, turns: Sequence[TurnRequest]) -> list[TurnSample]:
    return await asyncio.gather(*(sampler.sample(turn) for turn in turns))


def _same(engine: GenerationInterface) -> GenerationInterface:
    return engine


def scheduler_of(*engines: GenerationInterface, timeout_s: float = LIMIT_S) -> EngineScheduler:
    fleet = WorkerFleet([LocalWorkerGroup(partial(_same, engine)) for engine in engines])
    return EngineScheduler(fleet, batch_rows=64, timeout_s=timeout_s, is_continuous=True)


@contextmanager
def sampler_of(generation: GenerationInterface, **settings: Any) -> Iterator[TurnSampler]:
    sampler = TurnSampler(generation, **{"with_routes": False, "with_support": False, **settings})
    try:
        yield sampler
        assert sampler.num_open == 0
    finally:
        sampler.close()
        sampler.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("turns of engine")]


class Told:
    """An engine that counts what it is told, and loses itself, or fails, behind a number of turns."""

    def __init__(self, engine: GenerationInterface, *, ends_after: int | None = None, error: Exception | None = None):
        self.engine, self.ends_after = engine, ends_after
        self.error = error or WorkerLost("process died", rank=0, stage="generation")
        self.added: list[GenerationRequest] = []
        self.aborted: list[int] = []
        self.closed = 0

    def feed(self, name: str) -> Iterator[GroupSamples]:
        num = 0
        for samples in self.engine.feed(name):
            num += len(samples.groups)
            if self.ends_after is not None and num > self.ends_after:
                raise self.error
            yield samples

    def add_to_feed(self, name: str, request: GenerationRequest, first: int) -> None:
        self.added.append(request)
        self.engine.add_to_feed(name, request, first)

    def abort_in_feed(self, name: str, numbers: Sequence[int]) -> None:
        self.aborted += numbers
        self.engine.abort_in_feed(name, numbers)

    def close_feed(self, name: str) -> None:
        self.closed += 1
        self.engine.close_feed(name)

    def shutdown(self) -> None:
        self.engine.shutdown()


def told(engine: GenerationInterface, **settings: Any) -> Any:
    return Told(engine, **settings)


@pytest.mark.parametrize("names", [True, False])
def test_turns_are_what_they_are_alone_whatever_engine_takes_them(names: bool) -> None:
    turns = [turn_of(seed, most=3 + seed % 20, name=f"{seed}.0/0.0" if names else "") for seed in range(60)]
    with sampler_of(scheduler_of(engine_of(places=7), engine_of(places=64))) as sampler:
        samples = run(all_of(sampler, turns))
        schedule = sampler.take_schedule()
        metrics = reduced(sampler.take_metrics())
    assert_as_alone(turns, samples)
    assert {sample.engine for sample in samples} == {0, 1}
    assert all(sample.version_spans == ((0, 0),) and sample.cached_tokens is None for sample in samples)
    assert max(sample.waited_s for sample in samples) > 0 and all(sample.sampled_s > 0 for sample in samples)
    joined = sorted(name for entry in schedule if entry.kind == "join" for name in entry.groups)
    assert joined == sorted(turn.name for turn in turns if names)
    assert metrics["turns"] == 60 and metrics["turns_sampled_again"] == 0
    by_engine = [metrics[f"engine_{number}/turn_tokens"] for number in (0, 1)]
    assert sum(by_engine) == sum(len(sample.token_ids) for sample in samples) and min(by_engine) > 0


def test_hundreds_of_turns_at_once_are_the_rows_of_one_request() -> None:
    turns = [turn_of(seed, most=4 + seed % 9) for seed in range(500)]
    request = GenerationRequest(
        prompt_ids=tuple(turn.prompt_ids for turn in turns),
        seeds=tuple(turn.seed for turn in turns),
        sampling=turns[8].sampling,
        limits=tuple(turn.sampling.max_new_tokens for turn in turns),
    )
    expected = in_request_mode(request)
    with sampler_of(engine_of(places=1024)) as sampler:
        samples = run(all_of(sampler, turns))
    assert [token for sample in samples for token in sample.token_ids] == expected.token_ids.tolist()
    assert torch.equal(torch.cat([sample.logprobs for sample in samples]), expected.logprobs)


def test_turns_that_are_ready_at_one_moment_go_in_one_request() -> None:
    engine = told(engine_of())
    with sampler_of(engine) as sampler:
        turns = [turn_of(seed, most=3 + seed % 5) for seed in range(40)]

        async def slowly(turn: TurnRequest) -> TurnSample:
            # So that the thread that sends has the time to send them one by one.
            time.sleep(0.002)
            return await sampler.sample(turn)

        async def at_one_moment() -> None:
            await asyncio.gather(*map(slowly, turns))

        run(at_one_moment())
        assert [len(request.prompt_ids) for request in engine.added] == [40]
        others = [
            replace(turn, sampling=replace(turn.sampling, stop_token_ids=(seed % 2,)))
            for seed, turn in enumerate(turns)
        ]
        run(all_of(sampler, others))
        assert [len(request.prompt_ids) for request in engine.added[1:]] == [20, 20]
    assert engine.closed == 1


def test_a_conversation_stays_at_its_engine_and_validation_at_the_one_that_is_named() -> None:
    with sampler_of(scheduler_of(engine_of(), engine_of(), engine_of())) as sampler:
        turns = [turn_of(seed, engine=seed % 2) for seed in range(20)]
        assert [sample.engine for sample in run(all_of(sampler, turns))] == [0, 1] * 10
        only = [turn_of(seed, engine=0, only_engine=2) for seed in range(5)]
        assert {sample.engine for sample in run(all_of(sampler, only))} == {2}
        # Without a wish a turn goes where the fewest tokens are.
        free = [turn_of(seed, engine=0, most=40) for seed in range(3)] + [turn_of(3)] + [turn_of(4)] + [turn_of(5)]
        assert [sample.engine for sample in run(all_of(sampler, free))][3:5] == [1, 2]
        with pytest.raises(WorkerError, match="rank 7.*the engine has been lost"):
            run(sampler.sample(turn_of(0, only_engine=7)))


def test_turns_of_a_lost_engine_are_sampled_by_another_with_the_same_seed() -> None:
    engines = [told(engine_of(), ends_after=4), told(engine_of())]
    turns = [turn_of(seed) for seed in range(30)]
    with sampler_of(scheduler_of(*engines)) as sampler:
        samples = run(all_of(sampler, turns))
        metrics = reduced(sampler.take_metrics())
        assert_as_alone(turns, samples)
        assert metrics["turns"] >= 30 and metrics["turns_sampled_again"] > 5 and metrics["engines_lost"] == 1
        with pytest.raises(WorkerLost):
            run(sampler.sample(turn_of(0, only_engine=0)))
        # A wish for an engine that is gone is a wish alone.
        assert run(sampler.sample(turn_of(99, engine=0))).engine == 1


def test_without_any_engine_left_the_first_loss_is_raised() -> None:
    engines = [told(engine_of(), ends_after=0), told(engine_of(), ends_after=0)]
    with sampler_of(scheduler_of(*engines)) as sampler:
        with pytest.raises(WorkerError, match="process died"):
            run(all_of(sampler, [turn_of(seed) for seed in range(6)]))
        with pytest.raises(WorkerError, match="process died"):
            run(sampler.sample(turn_of(0)))


def test_an_error_of_an_engine_is_raised_by_its_turns_and_a_new_feed_follows() -> None:
    engine = told(engine_of(), ends_after=0, error=NonFiniteError("NaN in row 3"))
    with sampler_of(scheduler_of(engine)) as sampler:

        async def failing() -> list[TurnSample | BaseException]:
            turns = [sampler.sample(turn_of(seed)) for seed in range(3)]
            return await asyncio.gather(*turns, return_exceptions=True)

        assert [str(error) for error in run(failing())] == ["NaN in row 3"] * 3
        engine.ends_after = None
        assert_as_alone([turn_of(5)], [run(sampler.sample(turn_of(5)))])


def test_a_turn_that_the_engine_refuses_fails_alone() -> None:
    with sampler_of(engine_of()) as sampler:
        long = replace(turn_of(0), prompt_ids=(7,) * 64, name="a")

        async def both() -> tuple[TurnSample | BaseException, TurnSample | BaseException]:
            return await asyncio.gather(sampler.sample(long), sampler.sample(turn_of(1)), return_exceptions=True)

        refused, good = run(both())
        assert isinstance(refused, ValueError) and "prompt 0: expected 1 to 63 tokens" in str(refused)
        assert isinstance(good, TurnSample)


def test_an_engine_that_is_late_is_lost() -> None:
    endless = SleepEngine(engine_spec(endless_share=1.0, tokens_per_s=1000.0, real_time=True))
    with sampler_of(scheduler_of(endless, engine_of(), timeout_s=5.0)) as sampler:
        turns = [turn_of(seed, engine=0) for seed in range(5)]
        samples = run(all_of(sampler, turns))
        assert_as_alone(turns, samples)
        assert {sample.engine for sample in samples} == {1}
        assert reduced(sampler.take_metrics())["turns_sampled_again"] == 5


def test_a_replaced_engine_is_used_again() -> None:
    started: list[GenerationInterface] = []

    def start(number: int) -> LocalWorkerGroup:
        return LocalWorkerGroup(lambda: told(engine_of()))

    fleet = WorkerFleet(
        [LocalWorkerGroup(lambda: told(engine_of(), ends_after=0)), LocalWorkerGroup(engine_of)], start=start
    )
    scheduler = EngineScheduler(fleet.copy(), batch_rows=64, timeout_s=LIMIT_S, is_continuous=True)
    with sampler_of(scheduler) as sampler:
        assert run(sampler.sample(turn_of(1, engine=0))).engine == 1
        lost = WorkerLost("process died", rank=0, stage="generation")
        fleet.lose(0, lost)
        assert fleet.restart_failed() == (0,)
        sampler.use(fleet.copy())
        sample = run(sampler.sample(turn_of(2, engine=0)))
        assert sample.engine == 0 and not started
        assert_as_alone([turn_of(2)], [sample])


def test_cancelled_turns_leave_the_engine() -> None:
    endless = told(SleepEngine(engine_spec(endless_share=1.0, tokens_per_s=1000.0, real_time=True)))
    with sampler_of(endless) as sampler:

        async def cancelled() -> None:
            early = asyncio.create_task(sampler.sample(turn_of(0)))
            await asyncio.sleep(0)
            early.cancel()
            tasks = [asyncio.create_task(sampler.sample(turn_of(seed))) for seed in range(1, 4)]
            while len(endless.added) < 1:
                await asyncio.sleep(0.01)
            for task in tasks:
                task.cancel()
            found = await asyncio.gather(early, *tasks, return_exceptions=True)
            assert all(isinstance(each, asyncio.CancelledError) for each in found)
            while len(endless.aborted) < 3 or endless.engine._decoding._live:
                await asyncio.sleep(0.01)

        run(cancelled())
        assert sum(len(request.prompt_ids) for request in endless.added) == 3
        assert sampler.num_open == 0


def test_closing_ends_turns_on_their_way() -> None:
    endless = SleepEngine(engine_spec(endless_share=1.0, tokens_per_s=1000.0, real_time=True))
    with sampler_of(endless) as sampler:

        async def closed() -> None:
            task = asyncio.create_task(sampler.sample(turn_of(0)))
            await asyncio.sleep(0.05)
            await asyncio.to_thread(sampler.close)
            with pytest.raises(WorkerError, match="the sampler of turns was closed"):
                await task

        run(closed())
        with pytest.raises(WorkerError, match="make a new one"):
            run(sampler.sample(turn_of(1)))
    assert not endless._decoding._num_live[False] or endless._decoding._gone


class Slow(Told):
    """Takes long to accept turns."""

    def add_to_feed(self, name: str, request: GenerationRequest, first: int) -> None:
        time.sleep(1.5)
        super().add_to_feed(name, request, first)


def test_the_event_loop_is_never_blocked() -> None:
    slow: Any = Slow(engine_of())
    with sampler_of(slow) as sampler:

        async def gaps() -> float:
            task = asyncio.create_task(sampler.sample(turn_of(0)))
            last, largest = time.monotonic(), 0.0
            while not task.done():
                await asyncio.sleep(0.005)
                now = time.monotonic()
                last, largest = now, max(largest, now - last)
            return largest

        assert run(gaps()) < 1.0


def test_conversations_overlap_with_their_tools() -> None:
    # 4 turns of 20 tokens at 100 tokens/s, and 3 replies of .1 s: 1.1 s one after the other, whatever their number.
    engine = SleepEngine(engine_spec(places=256, tail_ratio=1.0, median_tokens=20.0, tokens_per_s=100, real_time=True))

    async def conversation(sampler: TurnSampler, number: int) -> int:
        tokens, prompt = 0, tuple(range(5, 8))
        for turn in range(4):
            sample = await sampler.sample(replace(turn_of(100 * number + turn, most=30), prompt_ids=prompt))
            prompt, tokens = (*prompt, *sample.token_ids), tokens + len(sample.token_ids)
            if turn < 3:
                await asyncio.sleep(0.1)
        return tokens

    with sampler_of(engine) as sampler:

        async def all_conversations() -> list[int]:
            return await asyncio.gather(*(conversation(sampler, number) for number in range(100)))

        began = time.monotonic()
        assert run(all_conversations()) == [80] * 100
        assert time.monotonic() - began < 1.1 * 3


def test_a_refit_goes_through_while_turns_come() -> None:
    engine = engine_of(places=8)
    with sampler_of(engine) as sampler:

        async def conversation(number: int) -> list[TurnSample]:
            return [await sampler.sample(turn_of(10 * number + turn)) for turn in range(6)]

        async def with_refits() -> list[list[TurnSample]]:
            work = asyncio.gather(*(conversation(number) for number in range(20)))
            for version in (1, 2, 3):
                await asyncio.sleep(0.03)
                weights = named_weights(tiny_model(seed=version))
                await asyncio.to_thread(engine.update_weights, weights, version=version)
            return await work

        found = run(with_refits())
    spans = [sample.version_spans for samples in found for sample in samples]
    assert all(len(each) == 1 for each in spans) and {each[0][1] for each in spans} >= {0, 3}


class ProcessEngine(EngineWorker):
    """An engine that tells its process."""

    def process(self) -> int:
        return os.getpid()


def build_process_engine(spec: EngineSpec) -> ProcessEngine:
    engine = ProcessEngine.from_config(spec.policy, number=spec.number, weight_version=0)
    assert isinstance(engine, ProcessEngine)
    engine.decode_continuously(ContinuousSpec.of(spec, places=8))
    return engine


def started(folder: Path, number: int) -> RayWorkerGroup:
    group = RayWorkerGroup(
        "generation", world_size=1, placement=RayPlacement(num_cpus=0.5), first=number, num_streams=4
    )
    group.begin_start(build_process_engine, [{"spec": EngineSpec(policy=tiny_policy(folder), number=number)}])
    group.finish_start(timeout_s=600.0)
    return group


@pytest.mark.slow
def test_processes_that_die_or_hang_lose_no_turn(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "model")
    with OwnRay(num_cpus=2):
        fleet = WorkerFleet([started(folder, number) for number in range(3)])
        processes = fleet.run(ask(ProcessEngine.process), stage="asking", timeout_s=60)
        scheduler = EngineScheduler(fleet, batch_rows=8, timeout_s=6.0, is_continuous=True)
        turns = [turn_of(seed, most=40) for seed in range(120)]
        with sampler_of(scheduler) as sampler:

            async def with_faults() -> list[TurnSample]:
                work = asyncio.gather(*(sampler.sample(turn) for turn in turns))
                await asyncio.sleep(0.1)
                os.kill(processes[0], signal.SIGKILL)
                os.kill(processes[1], signal.SIGSTOP)
                return await work

            samples = run(with_faults())
            metrics = reduced(sampler.take_metrics())
        assert fleet.numbers == (2,)
        assert fleet.run_one(2, Call(request=ask(ProcessEngine.process), stage="asking", timeout_s=60)) == processes[2]
        fleet.shutdown()
    assert_as_alone(turns, samples)
    assert metrics["engines_lost"] == 2 and metrics["turns_sampled_again"] > 20
