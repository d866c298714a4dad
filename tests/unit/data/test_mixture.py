"""Several sources of prompts: each has its share of every prefix, and the stream goes on exactly where it stopped."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest

from nemo_rl.data.mixture import MixedSource, Phase, PromptMixture
from nemo_rl.data.sampler import SampledPrompt
from nemo_rl.errors import CheckpointError, DatasetError

SIZES = {"math": 7, "code": 3, "chat": 11}
SHARES = (0.5, 0.3, 0.2)


def mixture(
    shares: Sequence[float] = SHARES, *later: tuple[int, Sequence[float]], sizes: dict[str, int] = SIZES, **more: object
) -> PromptMixture:
    starts = dict(zip(sizes, [0, *[sum([*sizes.values()][: n + 1]) for n in range(len(sizes))]], strict=False))
    ends = more.pop("ends", {})
    sources = [
        MixedSource(name=name, first=starts[name], num_prompts=size, max_num_epochs=ends.get(name))  # type: ignore[attr-defined]
        for name, size in sizes.items()
    ]
    phases = [Phase(first=first, shares=tuple(each)) for first, each in ((0, shares), *later)]
    return PromptMixture(sources, phases, **{"seed": 5, **more})  # type: ignore[arg-type]


def _random_phases(rng: random.Random, count: int) -> list[Phase]:
    phases, first = [], 0
    for number in range(rng.choice([1, 1, 2, 4])):
        weights = [rng.choice([rng.random(), rng.random() ** 6 + 1e-6]) for _ in range(count)]
        if number and rng.random() < 0.3:
            weights[rng.randrange(count)] = 0.0
        phases.append(Phase(first=first, shares=tuple(weight / sum(weights) for weight in weights)))
        first += rng.randint(1, 400)
    return phases


@pytest.mark.parametrize("seed", range(60))
def test_every_source_has_its_share_of_every_prefix(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(2, 9)
    phases = _random_phases(rng, count)
    sources = [MixedSource(name=str(n), first=10 * n, num_prompts=10) for n in range(count)]
    targets, counts = [0.0] * count, [0] * count
    for place, draw in enumerate(PromptMixture(sources, phases, seed=0).next(1200)):
        shares = next(each.shares for each in reversed(phases) if each.first <= place)
        targets = [target + share for target, share in zip(targets, shares, strict=True)]
        counts[int(draw.source)] += 1
        gaps = [abs(target - found) for target, found in zip(targets, counts, strict=True)]
        assert max(gaps) <= 1 - 1 / (2 * count - 2) + 1e-6, place


def test_each_source_is_drawn_whole_before_it_begins_anew_in_another_order() -> None:
    draws = mixture().next(200)
    assert [draw.ordinal for draw in draws] == list(range(200))
    code = [draw.prompt for draw in draws if draw.source == "code"]
    passes = [tuple(code[at : at + 3]) for at in range(0, 60, 3)]
    assert all(set(each) == {7, 8, 9} for each in passes) and any(a != b for a, b in pairwise(passes))
    assert mixture().next(200) == draws != mixture(seed=6).next(200)
    in_order = [draw.prompt for draw in mixture(shuffle=False).next(200) if draw.source == "math"]
    assert in_order == [place % 7 for place in range(len(in_order))]


def test_one_source_does_not_move_the_order_of_another() -> None:
    alone = [draw.prompt for draw in mixture((0.9, 0.05, 0.05)).next(300) if draw.source == "code"]
    often = [draw.prompt for draw in mixture((0.1, 0.8, 0.1)).next(300) if draw.source == "code"]
    assert often[: len(alone)] == alone


@pytest.mark.parametrize("position", [0, 1, 17, 100, 140, 399])
def test_a_resumed_stream_draws_the_same_prompts(position: int) -> None:
    later = (140, (0.1, 0.1, 0.8))
    whole = mixture(SHARES, later).next(600)
    first = mixture(SHARES, later)
    assert first.next(position) == whole[:position]
    resumed = mixture(SHARES, later)
    resumed.load_state_dict(first.state_dict())
    assert resumed.ordinal == position and resumed.next(600 - position) == whole[position:]
    if position:
        assert resumed.at(position - 1) == whole[position - 1]
    again = mixture(SHARES, later)
    again.load_state_dict({**resumed.state_dict(), **resumed.position_of(position)})
    assert again.next(3) == whole[position : position + 3]


def test_weights_may_change_later_on_and_not_before() -> None:
    stopped = mixture(SHARES, (500, (0.1, 0.1, 0.8)))
    stopped.next(100)
    changed = mixture(SHARES, (300, (0.2, 0.2, 0.6)))
    changed.load_state_dict(stopped.state_dict())
    assert Counter(draw.source for draw in changed.next(200)) == {"math": 100, "code": 60, "chat": 40}
    with pytest.raises(CheckpointError, match=r"shares of the sources up to prompt 100: .*data.train.NAME.schedule"):
        mixture((0.4, 0.4, 0.2)).load_state_dict(stopped.state_dict())
    with pytest.raises(CheckpointError, match="shares of the sources up to prompt 100"):
        mixture(SHARES, (99, (0.2, 0.2, 0.6))).load_state_dict(stopped.state_dict())


OTHERS = {
    "renamed": ({"maths": 7, "code": 3, "chat": 11}, "sources: the checkpoint has .*'math': 7.*, this run .*'maths'"),
    "grown": ({"math": 8, "code": 3, "chat": 11}, "'math': 7.*, this run .*'math': 8"),
    "removed": ({"math": 7, "code": 3}, "this run {'math': 7, 'code': 3}"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_position_in_other_sources_is_refused(name: str) -> None:
    sizes, said = OTHERS[name]
    other = mixture(SHARES if len(sizes) == 3 else (0.6, 0.4), sizes=sizes)
    with pytest.raises(CheckpointError, match=f"{said}.*same data.train"):
        other.load_state_dict(mixture().state_dict())


def test_a_position_of_one_source_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"a run with one source .*data.train has math, code, chat"):
        mixture().load_state_dict({"epoch": 0, "position": 3, "batch_size": 1, "num_prompts": 21})


def test_a_source_that_ends_ends_the_stream() -> None:
    ending = mixture(ends={"code": 2})
    draws = ending.next(5)
    assert not ending.is_exhausted
    while ending.has(1):
        draws += ending.next(1)
    assert sum(draw.source == "code" for draw in draws) == 6 and ending.is_exhausted
    with pytest.raises(DatasetError, match=r"data.train.code ends before 5 more prompts .*max_num_epochs"):
        ending.next(5)


def test_a_source_without_prompts_is_refused() -> None:
    with pytest.raises(DatasetError, match="no prompt in code"):
        mixture(sizes={"math": 7, "code": 0, "chat": 1})


def _step(stream: PromptMixture, number: int, rng: random.Random, carried: list[SampledPrompt]) -> list[SampledPrompt]:
    """Draw rounds until a step of 16 has what it wants of each source, mostly without those of chat; return it."""
    wanted = stream.wanted((number - 1) * 16, 16)
    while missing := {
        name: count - found for name, count in wanted.items() if (found := _count(carried, name)) < count
    }:
        carried += [draw for draw in stream.next_for(missing, 16) if rng.random() > 0.7 * (draw.source == "chat")]
    step = [
        draw for name, count in wanted.items() for draw in [each for each in carried if each.source == name][:count]
    ]
    carried[:] = [draw for draw in carried if draw not in step]
    return step


def _count(draws: Sequence[SampledPrompt], name: str) -> int:
    return sum(draw.source == name for draw in draws)


def test_shares_are_those_of_what_is_trained_where_groups_are_dropped() -> None:
    stream, rng, carried, counts = mixture(), random.Random(3), list[SampledPrompt](), Counter[str]()
    for number in range(1, 200):
        counts.update(draw.source for draw in _step(stream, number, rng, carried))
        gaps = [abs(counts[name] - share * 16 * number) for name, share in zip(SIZES, SHARES, strict=True)]
        assert max(gaps) < 1 and len(carried) <= 16, number
    drawn = [stream.at(ordinal) for ordinal in range(stream.ordinal)]
    assert _count(drawn, "chat") > 2 * counts["chat"], "more were drawn than were trained"
    chat = [draw.prompt for draw in drawn if draw.source == "chat"]
    assert all(set(chat[at : at + 11]) == set(range(10, 21)) for at in range(0, 440, 11))


def test_a_stream_of_rounds_is_resumed() -> None:
    stream, rng, carried = mixture(), random.Random(1), list[SampledPrompt]()
    for number in range(1, 8):
        _step(stream, number, rng, carried)
    resumed = mixture()
    resumed.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    other, also = random.Random(), list(carried)
    other.setstate(rng.getstate())
    for number in range(8, 20):
        assert _step(resumed, number, other, also) == _step(stream, number, rng, carried)
    assert resumed.at(40) == stream.at(40)


def test_shares_of_tokens_are_steered_by_what_was_trained() -> None:
    stream, rng, later = mixture(by_tokens=True), random.Random(2), mixture(by_tokens=True)
    lengths = {"math": 900.0, "code": 300.0, "chat": 40.0}
    tokens = Counter[str]()
    for step in range(1, 201):
        drawn = stream.next(32)
        lengths["math"] *= 0.995
        trained = Counter[str]()
        for draw in drawn:
            trained[draw.source] += round(lengths[draw.source] * rng.uniform(0.2, 1.8)) if rng.random() < 0.8 else 0
        stream.trained(trained, Counter(draw.source for draw in drawn))
        tokens.update(trained)
        if step == 120:
            later.load_state_dict(json.loads(json.dumps(stream.state_dict())))
            ahead = later.next(32)
        if step == 121:
            assert drawn == ahead
    total = sum(tokens.values())
    assert {name: pytest.approx(tokens[name] / total, abs=0.02) for name in SIZES} == dict(
        zip(SIZES, SHARES, strict=True)
    )


def test_a_stream_by_tokens_is_not_one_by_prompts() -> None:
    with pytest.raises(CheckpointError, match="by_tokens: .*same data.mixture.unit"):
        mixture().load_state_dict(mixture(by_tokens=True).state_dict())
