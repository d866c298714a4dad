"""Curricula: which prompts are drawn for what was solved before, the same after a kill, and what is refused."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Mapping

import pytest

from nemo_rl.config.data import AgainConfig, CurriculumConfig, GateConfig, VarianceConfig, WindowConfig
from nemo_rl.data.curriculum import CurriculumRule, CurriculumStream, SeenPrompt
from nemo_rl.data.mixture import MixedSource, Phase, PromptMixture
from nemo_rl.data.sampler import PromptSampler, PromptStream, SampledPrompt
from nemo_rl.errors import CheckpointError, ConfigError

SIZE = 60
KINDS = {"easy": 20, "medium": 20, "hard": 20}
WINDOW = WindowConfig(least=0.2, most=0.8, hard=0.25, easy=0.0)
CONFIGS = {
    "window": CurriculumConfig(window=WINDOW),
    "variance": CurriculumConfig(variance=VarianceConfig(least=0.05)),
    "again": CurriculumConfig(again=AgainConfig(share=0.25, below=0.5)),
    "all": CurriculumConfig(window=WINDOW, variance=VarianceConfig(), again=AgainConfig(share=0.4), smoothing=0.0),
}


class Twice(CurriculumRule):
    """Draws no prompt more than so many times."""

    def __init__(self, *, most: int = 2) -> None:
        self._most = most

    def chance(self, prompt: SeenPrompt, source_rates: Mapping[str, float]) -> float:
        return float(prompt.num_groups < self._most)


class Doubled(CurriculumRule):
    def chance(self, prompt: SeenPrompt, source_rates: Mapping[str, float]) -> float:
        return 2.0


def of_one(config: CurriculumConfig, seed: int = 3) -> CurriculumStream:
    return CurriculumStream(PromptSampler(SIZE, seed=seed), config, {"": SIZE}, seed=seed)


def of_three(config: CurriculumConfig) -> CurriculumStream:
    sources = [MixedSource(name=name, first=20 * place, num_prompts=20) for place, name in enumerate(KINDS)]
    mixture = PromptMixture(sources, [Phase(first=0, shares=(1 / 3, 1 / 3, 1 / 3))], seed=3)
    return CurriculumStream(mixture, config, KINDS, seed=3)


def rewards_of(draw: SampledPrompt, *, skill: float = 0.0) -> list[float]:
    """Eight rewards of a prompt: the larger its number the more rarely is it solved; a function of the draw alone."""
    rate = min(1.0, max(0.0, 1.15 - draw.prompt / 40 + skill))
    luck = random.Random(draw.ordinal)
    return [float(luck.random() < rate) for _ in range(8)]


def drawn_by(stream: PromptStream, steps: int, *, size: int = 8) -> list[SampledPrompt]:
    """Draws of some steps, each told before the next one."""
    found = []
    for _ in range(steps):
        drawn = stream.next(size)
        for draw in drawn:
            stream.note(draw, rewards_of(draw))
        found += drawn
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_a_stream_that_was_killed_goes_on_with_the_very_prompts(name):
    whole = drawn_by(of_one(CONFIGS[name]), 40)
    assert [draw.ordinal for draw in whole] == list(range(320))
    for step in random.Random(5).sample(range(40), 12):
        before = of_one(CONFIGS[name])
        drawn_by(before, step)
        after = of_one(CONFIGS[name])
        after.load_state_dict(json.loads(json.dumps(before.state_dict())))
        assert drawn_by(after, 40 - step) == whole[8 * step :]
        assert [after.at(draw.ordinal) for draw in whole] == whole


def test_prompts_that_are_drawn_ahead_are_drawn_again_after_a_kill():
    """As an asynchronous run does it: the next draw of the checkpoint lies before those that are under way."""
    stream = of_one(CONFIGS["all"])
    drawn_by(stream, 10)
    ahead = stream.next(24)
    state = {**stream.state_dict(), **stream.position_of(86)}
    after = of_one(CONFIGS["all"])
    after.load_state_dict(json.loads(json.dumps(state)))
    assert after.next(18) == ahead[6:]
    assert after.next(8) == stream.next(8)


def test_a_window_leaves_out_what_is_too_easy_and_draws_less_of_what_is_too_hard():
    drawn = drawn_by(of_one(CONFIGS["window"]), 100)
    late = Counter(draw.prompt for draw in drawn[400:])
    # Prompts below 6 always pass, those from 46 on never do; the turns of all others come equally often.
    assert not any(late[prompt] for prompt in range(6))
    within, hard = (
        sum(late[prompt] for prompt in range(20, 30)) / 10,
        sum(late[prompt] for prompt in range(46, 60)) / 14,
    )
    assert 0.1 < hard / within < 0.45


def test_the_variance_of_rewards_gives_chances():
    drawn = Counter(draw.prompt for draw in drawn_by(of_one(CONFIGS["variance"]), 150)[480:])
    shares = [sum(drawn[prompt] for prompt in each) / len(each) for each in (range(6), range(20, 32), range(46, 60))]
    assert shares[1] > 4 * shares[0] and shares[1] > 4 * shares[2] and shares[0] and shares[2]


def test_a_share_of_the_draws_comes_from_what_failed():
    stream = of_one(CONFIGS["again"])
    drawn_by(stream, 5)
    stream.metrics()
    drawn = drawn_by(stream, 32)
    assert stream.metrics()["curriculum/again_share"].value == 0.25
    counts = Counter(draw.prompt for draw in drawn)
    hard, easy = (sum(counts[prompt] for prompt in each) / len(each) for each in (range(46, 60), range(6)))
    assert hard > 1.4 * easy


def test_a_gate_opens_when_another_source_is_solved_and_stays_open():
    gates = {"medium": GateConfig(after="easy", rate=0.7), "hard": GateConfig(after="medium", rate=0.5)}
    stream = of_three(CurriculumConfig(gates=gates, recent_groups=8))
    seen: list[str] = []
    for step in range(60):
        skill = -1.0 if step == 20 else 0.02 * step
        for draw in stream.next(6):
            stream.note(draw, rewards_of(draw, skill=skill))
            seen.append(draw.source)
    first = {name: seen.index(name) for name in KINDS}
    assert first["easy"] == 0 and first["easy"] + 8 <= first["medium"] and first["medium"] + 8 <= first["hard"]
    # In turns, once all are open, whatever failed meanwhile.
    assert set(Counter(seen[-90:]).values()) == {30}
    found = stream.metrics()
    assert found["curriculum/open/hard"].value == 1.0 and "curriculum/open/easy" not in found


@pytest.mark.parametrize(
    "rule", [{"window": WINDOW}, {"variance": VarianceConfig(least=0.0)}], ids=lambda rule: next(iter(rule))
)
def test_a_prompt_that_was_never_sampled_counts_as_its_source_does(rule):
    stream = of_three(CurriculumConfig(recent_groups=4, **rule))
    rates = {"easy": 1.0, "medium": 0.5, "hard": 0.0}
    seen: list[SampledPrompt] = []
    while len(seen) < 36:
        drawn = stream.next(3)
        for draw in drawn:
            stream.note(draw, [float(row < 8 * rates[draw.source]) for row in range(8)])
        seen += drawn
    # In turns until each source has had its four groups; no prompt was drawn twice so far.
    counts = Counter(draw.source for draw in seen[18:])
    assert [draw.source for draw in seen[:12]].count("easy") == 4
    assert counts["medium"] > 12 and counts["easy"] == 0
    # One source says nothing about its prompts.
    alone = of_one(CurriculumConfig(recent_groups=4, **rule))
    for draw in alone.next(8):
        alone.note(draw, [1.0] * 8)
    assert [draw.ordinal for draw in alone.next(20)] == list(range(8, 28))
    assert len({alone.draw(ordinal).prompt for ordinal in range(28)}) == 28


def test_where_no_rule_lets_a_prompt_through_the_likeliest_is_drawn_and_counted():
    stream = of_one(CurriculumConfig(rule=f"{__name__}:Twice", options={"most": 1}, window=WINDOW))
    assert len({draw.prompt for draw in drawn_by(stream, 15, size=4)}) == SIZE
    assert stream.metrics()["curriculum/forced_share"].value == 0.0
    assert len(stream.next(4)) == 4
    assert stream.metrics()["curriculum/forced_share"].value == 1.0


def test_rules_of_the_users_own_are_refused_with_the_reason():
    with pytest.raises(ConfigError, match=r"options {'least': 1} raised TypeError: .*least"):
        of_one(CurriculumConfig(rule=f"{__name__}:Twice", options={"least": 1}))
    with pytest.raises(ConfigError, match="to make a CurriculumRule, got list"):
        of_one(CurriculumConfig(rule="builtins:list"))
    with pytest.raises(ConfigError, match=r"a chance from 0 to 1, got 2.0 for SeenPrompt\(number="):
        of_one(CurriculumConfig(rule=f"{__name__}:Doubled")).next(1)


def test_a_group_that_was_not_scored_says_nothing():
    stream = of_one(CONFIGS["window"])
    stream.note(stream.next(1)[0], [])
    assert stream.metrics()["curriculum/pool/unseen"].value == 1.0


def test_a_curriculum_begins_where_a_run_without_one_has_come_to_and_not_the_other_way_round():
    plain = PromptSampler(SIZE, seed=3)
    before = plain.next(70)
    stream = of_one(CONFIGS["window"])
    stream.load_state_dict(plain.state_dict())
    assert stream.next(1) == plain.next(1) and stream.at(69) == before[69]
    drawn_by(stream, 3)
    again = of_one(CONFIGS["window"])
    again.load_state_dict(stream.state_dict())
    assert again.next(8) == stream.next(8) and again.at(3) == before[3]
    with pytest.raises(CheckpointError, match="is of a run with data.curriculum"):
        PromptSampler(SIZE, seed=3).load_state_dict(stream.state_dict())
    with pytest.raises(CheckpointError, match="expected the state of a curriculum"):
        of_one(CONFIGS["window"]).load_state_dict({**stream.state_dict(), "seen": None})
