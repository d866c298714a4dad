"""Feeds of a continuous engine: rows of many requests that come over time, and refits while a feed is open."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from nemo_rl.errors import WorkerError
from nemo_rl.models.generation.interfaces import GenerationInterface, GenerationOutput
from nemo_rl.models.generation.schedule import ScheduleEntry
from nemo_rl.models.generation.torch_engine import TorchEngine
from nemo_rl.models.hf.loading import named_weights
from tests.helpers.tiny_model import tiny_model
from tests.unit.models.test_continuous import Slow, asked, assert_near, engine_of, equal_bits, in_request_mode

LIMIT_S = 30.0


class FeedReader:
    """A thread that consumes a feed."""

    def __init__(self, engine: GenerationInterface, name: str = "turns") -> None:
        self.engine, self.name = engine, name
        self.found: dict[int, GenerationOutput] = {}
        self.schedule: list[ScheduleEntry] = []
        self.errors: list[Exception] = []
        self._thread = threading.Thread(target=self._read)

    def start(self) -> FeedReader:
        self._thread.start()
        return self

    def _read(self) -> None:
        try:
            for samples in self.engine.feed(self.name):
                self.schedule += samples.schedule
                assert len(samples.seconds) == len(samples.groups) and min(samples.seconds) >= 0
                for place, number in enumerate(samples.groups):
                    assert number not in self.found
                    self.found[number] = samples.output.select([place])
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.errors.append(error)

    def wait_for(self, count: int) -> None:
        wait_until(lambda: len(self.found) >= count or bool(self.errors))
        assert not self.errors, self.errors

    def join(self) -> None:
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()


def wait_until(is_true: Callable[[], bool]) -> None:
    give_up = time.monotonic() + LIMIT_S
    while not is_true():
        assert time.monotonic() < give_up
        time.sleep(0.002)


@contextmanager
def feed_of(engine: GenerationInterface, name: str = "turns") -> Iterator[FeedReader]:
    """Consume a feed until the end of the block."""
    reader = FeedReader(engine, name).start()
    try:
        yield reader
    finally:
        engine.close_feed(name)
        reader.join()


@pytest.mark.parametrize("named", [True, False])
def test_rows_that_come_over_time_are_what_they_are_alone(named: bool) -> None:
    engine, rng = engine_of(places=5), random.Random(3)
    # Calls in any order, the first ones before anybody reads.
    parts = [(first, rng.randint(1, 4)) for first in range(0, 40, 4)]
    rng.shuffle(parts)
    for first, num in parts[:3]:
        engine.add_to_feed("turns", asked(first, num, 1, named=named), first)
    with feed_of(engine) as reader:
        for first, num in parts[3:]:
            time.sleep(rng.random() * 0.02)
            engine.add_to_feed("turns", asked(first, num, 1, named=named), first)
        reader.wait_for(sum(num for _, num in parts))
    for number, output in reader.found.items():
        assert_near(output, in_request_mode(asked(number, 1, 1)))
    assert sorted(reader.found) == sorted(first + at for first, num in parts for at in range(num))
    joins = [name for entry in reader.schedule if entry.kind == "join" for name in entry.groups]
    assert sorted(joins) == sorted(f"{number}.0" for number in reader.found if named)


def test_rows_of_a_request_may_have_limits_of_their_own() -> None:
    request = replace(asked(0, 3, 1, stop_token_ids=()), limits=(2, 30, 5))
    engine = engine_of()
    for output in (in_request_mode(request), engine.generate(request)):
        assert output.lengths.tolist() == [2, 24, 5] and output.truncated.tolist() == [True] * 3
    assert engine.generate(request.of_groups([2])).lengths.tolist() == [5]
    with pytest.raises(ValueError, match="expected a limit for each of 3 prompts, got 2"):
        engine.generate(replace(request, limits=(1, 2)))


def test_an_idle_feed_waits_for_longer_than_the_deadline_and_holds_no_freeze() -> None:
    engine = engine_of(deadline_s=0.2)
    with feed_of(engine) as reader:
        time.sleep(0.6)
        for version in (1, 2):
            engine.finish_generation()
            engine.update_weights(named_weights(tiny_model(seed=version)), version=version)
            engine.prepare_for_generation()
            engine.add_to_feed("turns", asked(version, 1, 1, named=False), version)
            reader.wait_for(version)
        time.sleep(0.3)
        assert not reader.errors
    assert [reader.found[version].weight_version for version in (1, 2)] == [1, 2]


def test_a_feed_whose_rows_stand_still_is_told_at_the_deadline() -> None:
    engine = engine_of(deadline_s=0.3)
    engine.finish_generation()
    reader = FeedReader(engine).start()
    time.sleep(0.5)
    assert not reader.errors
    engine.add_to_feed("turns", asked(0, 1, 1, named=False), 0)
    reader.join()
    [error] = reader.errors
    assert isinstance(error, WorkerError) and "rows stand still for a refit that has not ended" in str(error)


def test_an_idle_feed_does_not_hide_that_another_stream_is_stuck() -> None:
    engine = engine_of(deadline_s=0.3)
    with feed_of(engine):
        engine.finish_generation()
        with pytest.raises(WorkerError, match="has waited 0 s for groups of 1 prompts"):
            list(engine.stream(asked(0, 1)))


def test_rows_without_names_have_one_version_and_wait_for_a_refit() -> None:
    model = tiny_model()
    slow = Slow(model)
    slow.stop_after = 4
    engine = engine_of(model, places=3)
    with feed_of(engine) as reader:
        engine.add_to_feed("turns", asked(0, 5, 1, named=False, stop_token_ids=()), 0)
        assert slow.reached.wait(LIMIT_S)
        refit = threading.Thread(target=engine.finish_generation)
        refit.start()
        time.sleep(0.05)
        slow.stop_after = None
        slow.gate.set()
        refit.join(LIMIT_S)
        # Three had joined and end with the old weights; the others have not begun.
        reader.wait_for(3)
        engine.add_to_feed("turns", asked(5, 1, 1, named=False), 5)
        engine.update_weights(named_weights(tiny_model(seed=9)), version=1)
        time.sleep(0.05)
        assert len(reader.found) == 3
        engine.prepare_for_generation()
        reader.wait_for(6)
    versions = sorted(output.weight_version for output in reader.found.values())
    assert versions == [0, 0, 0, 1, 1, 1]
    for number, output in reader.found.items():
        old = asked(number, 1, 1, stop_token_ids=()) if number < 5 else asked(number, 1, 1)
        assert_near(output, in_request_mode(old, tiny_model(seed=9 if output.weight_version else 0)))


def test_named_rows_go_on_with_new_weights_and_a_script_repeats_them() -> None:
    def sampled(script: tuple[ScheduleEntry, ...] = ()) -> FeedReader:
        model = tiny_model()
        slow = Slow(model)
        slow.stop_after = None if script else 9
        engine = engine_of(model, places=9, script=script)
        with feed_of(engine) as reader:
            engine.add_to_feed("turns", asked(0, 4, 1, stop_token_ids=()), 0)
            if not script:
                assert slow.reached.wait(LIMIT_S)
            refit = threading.Thread(target=engine.finish_generation)
            refit.start()
            time.sleep(0.05)
            slow.stop_after = None
            slow.gate.set()
            refit.join(LIMIT_S)
            engine.update_weights(named_weights(tiny_model(seed=9)), version=1)
            engine.prepare_for_generation()
            engine.add_to_feed("turns", asked(4, 2, 1), 4)
            reader.wait_for(6)
        return reader

    first = sampled()
    assert first.found[0].version_spans == (((0, 0), (9, 1)),)
    assert {entry.kind for entry in first.schedule} == {"join", "swap"}
    again = sampled(tuple(first.schedule))
    assert again.schedule == first.schedule
    assert all(equal_bits(again.found[number], output) for number, output in first.found.items())


def test_closed_feeds_take_their_rows_out_and_are_not_opened_again() -> None:
    engine = engine_of(places=3)
    with feed_of(engine, "other") as other:
        engine.add_to_feed("turns", asked(0, 6, 1, stop_token_ids=(), max_new_tokens=50), 0)
        wait_until(lambda: bool(engine._decoding._live))  # type: ignore[union-attr]
        engine.close_feed("turns")
        engine.close_feed("turns")
        engine.add_to_feed("turns", asked(9, 1, 1), 9)
        assert not any(engine._decoding._lines.values())  # type: ignore[union-attr]
        assert list(engine.feed("turns")) == []
        engine.add_to_feed("other", asked(7, 3, 1, named=False), 7)
        other.wait_for(3)
        wait_until(lambda: engine._decoding._num_live == {True: 0, False: 0})  # type: ignore[union-attr]
    for number, output in other.found.items():
        assert_near(output, in_request_mode(asked(number, 1, 1)))


@pytest.mark.parametrize("named", [True, False])
def test_rows_are_aborted_by_their_numbers(named: bool) -> None:
    model = tiny_model()
    slow = Slow(model)
    slow.stop_after = 3
    engine = engine_of(model, places=3)
    with feed_of(engine) as reader:
        engine.add_to_feed("turns", asked(0, 6, 1, named=named, stop_token_ids=()), 0)
        assert slow.reached.wait(LIMIT_S)
        # One runs, one waits, and one does not exist.
        engine.abort_in_feed("turns", (0, 1, 2, 5, 77))
        slow.stop_after = None
        slow.gate.set()
        reader.wait_for(2)
        time.sleep(0.05)
    assert sorted(reader.found) == [3, 4]
    assert engine.take_load().thrown_tokens > 0


def test_groups_of_several_rows_and_engines_of_whole_requests_are_refused() -> None:
    with pytest.raises(ValueError, match=r"feed 'turns': expected one seed for each of 2 prompts, got 6"):
        engine_of().add_to_feed("turns", asked(0, 2, 3), 0)
    plain = TorchEngine(tiny_model(), tokenizer=None, max_total_length=64, weight_version=0)
    for call in (
        lambda: list(plain.feed("turns")),
        lambda: plain.add_to_feed("turns", asked(0, 1, 1), 0),
        lambda: plain.abort_in_feed("turns", (0,)),
        lambda: plain.close_feed("turns"),
    ):
        with pytest.raises(NotImplementedError, match="TorchEngine has no continuous mode"):
            call()


def test_an_error_in_a_turn_fails_the_feed() -> None:
    model = tiny_model()
    engine = engine_of(model)

    def spoil(module: torch.nn.Module, args: object, logits: torch.Tensor) -> torch.Tensor:
        return torch.full_like(logits, float("nan"))

    hook = model.get_output_embeddings().register_forward_hook(spoil)
    reader = FeedReader(engine).start()
    engine.add_to_feed("turns", asked(0, 2, 1, named=False), 0)
    reader.join()
    assert "NaN or inf in the logits for response token 1" in str(reader.errors[0])
    hook.remove()
    with feed_of(engine, "next") as after:
        engine.add_to_feed("next", asked(0, 2, 1, named=False), 0)
        after.wait_for(2)
