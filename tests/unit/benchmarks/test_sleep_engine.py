"""The engine that only waits: what rows depend on, its times on a virtual clock, refits in mid-row, its options."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest
import torch

from benchmarks.sleep_engine import SleepEngine, SleepOptions, VirtualClock, build_sleep_engine
from nemo_rl.config.load import load_config
from nemo_rl.errors import ConfigError
from nemo_rl.models.generation.interfaces import EngineSpec, GenerationOutput, GenerationRequest, SamplingParams
from nemo_rl.models.weight_sync.buckets import RefitPlan
from tests.helpers.runs import ROOT

STOP = 2
RECIPE = ROOT / "configs" / "grpo_sort_cpu.yaml"


def engine_spec(*, places: int = 64, **options: str | float) -> EngineSpec:
    policy = load_config(RECIPE, [f"policy.generation.max_batch_size={places}"]).policy
    generation = policy.generation.model_copy(update={"options": {"real_time": False, **options}})
    policy = policy.model_copy(update={"generation": generation, "max_total_sequence_length": 2000})
    return EngineSpec(policy=policy, weight_version=0)


def engine_of(*, places: int = 64, **options: str | float) -> SleepEngine:
    engine = build_sleep_engine(engine_spec(places=places, **options))
    engine.prepare_for_generation()
    return engine


def request_of(*seeds: int, groups: int = 1, named: bool = True, limit: int = 1000) -> GenerationRequest:
    return GenerationRequest(
        prompt_ids=tuple((5, 6, 7 + group) for group in range(groups)),
        seeds=seeds,
        sampling=SamplingParams(temperature=1.0, max_new_tokens=limit, stop_token_ids=(STOP,)),
        names=tuple(f"{group}.0" for group in range(groups)) if named else (),
    )


def rows(output: GenerationOutput) -> list[list[int]]:
    return [part.tolist() for part in output.token_ids.split(output.lengths.tolist())]


def now(engine: SleepEngine) -> float:
    assert isinstance(engine.clock, VirtualClock)
    return engine.clock.now()


def test_a_row_depends_on_its_seed_and_prompt_alone() -> None:
    alone = rows(engine_of().generate(request_of(11)))
    among = rows(engine_of(places=2).generate(request_of(10, 11, 12, named=False)))
    assert among[1] == alone[0] and among[0] != among[2]
    assert alone[0][-1] == STOP and set(alone[0][:-1]) <= {5, 6, 7}


def test_time_passes_as_on_a_gpu_that_decodes_all_rows_at_once() -> None:
    engine = engine_of(lengths="3 10", tokens_per_s=5)
    output = engine.generate(request_of(0, 1))
    assert output.lengths.tolist() == [3, 10] and now(engine) == pytest.approx(2.0)


class BusyMachine(VirtualClock):
    """Sleeps take three seconds longer now and then, as on a machine that does much else."""

    num_sleeps = 0

    def sleep(self, seconds: float) -> None:
        self.num_sleeps += 1
        super().sleep(seconds + 3.0 * (self.num_sleeps % 5 == 0))


def test_a_busy_machine_does_not_slow_the_engine_down() -> None:
    spec = engine_spec(lengths="14 14", tokens_per_s=1)
    engine = SleepEngine(spec, clock=BusyMachine())
    engine.generate(request_of(0))
    assert now(engine) == pytest.approx(14.0)
    engine.clock.sleep(100.0)
    engine.generate(request_of(0))
    assert now(engine) == pytest.approx(14.0 + 100.0 + 14.0 + 3.0), "time without rows is not made up for"


def test_groups_that_find_no_place_wait_for_one() -> None:
    engine = engine_of(places=2, lengths="4 6", tokens_per_s=1)
    times = [(samples.groups, now(engine)) for samples in engine.stream(request_of(0, 1, 0, 1, groups=2))]
    assert times == [((0,), pytest.approx(6.0)), ((1,), pytest.approx(12.0))]


def test_a_row_is_cut_at_the_limit_of_new_tokens() -> None:
    output = engine_of(lengths="4 6").generate(request_of(0, 1, limit=5))
    assert output.lengths.tolist() == [4, 5] and output.truncated.tolist() == [False, True]
    assert STOP not in rows(output)[1]


def test_lengths_have_the_median_and_the_tail_that_the_options_name() -> None:
    options = SleepOptions(median_tokens=100.0, tail_ratio=30.0)
    lengths = sorted(options.length_of(seed) for seed in range(20_000))
    assert statistics.median(lengths) == pytest.approx(100, rel=0.05)
    assert lengths[int(0.999 * len(lengths))] == pytest.approx(3000, rel=0.25)


def test_a_row_without_an_end_lets_other_groups_end() -> None:
    engine = engine_of(lengths="4", endless_share=0.3)
    endless = [seed for seed in range(20) if math.isinf(engine.options.length_of(seed))]
    others = [seed for seed in range(20) if seed not in endless]
    stream = engine.stream(request_of(others[0], endless[0], others[1], others[2], groups=2))
    assert next(stream).groups == (1,)
    del stream  # Closes it.
    assert engine.generate(request_of(others[0])).lengths.tolist() == [4]


def test_rows_go_on_after_a_refit_as_rows_of_two_versions() -> None:
    engine = engine_of(lengths="2 6", tokens_per_s=1, refit_s=10)
    stream = engine.stream(request_of(0, 1, groups=2))
    assert next(stream).output.version_spans is None
    engine.finish_generation()
    weights = engine.match_refit({"w": (4,)})
    engine.begin_refit(RefitPlan(slots=weights, bucket_bytes=8))
    assert engine.weight_version == -1
    engine.load_bucket()
    with pytest.raises(AssertionError, match="1 buckets have not come"):
        engine.finish_refit(version=1)
    engine.load_bucket()
    assert engine.finish_refit(version=1) == 1 and now(engine) == pytest.approx(12.0)
    engine.prepare_for_generation()
    output = next(stream).output
    assert output.version_spans == (((0, 0), (2, 1)),) and output.row_versions == (0,)
    assert now(engine) == pytest.approx(16.0)


def test_weights_by_name_are_taken_for_their_version() -> None:
    engine = engine_of()
    engine.finish_generation()
    assert engine.update_weights([("w", torch.zeros(2))], version=3) == 3 == engine.weight_version


def test_forced_rows_take_the_time_of_their_tokens() -> None:
    engine = engine_of(tokens_per_s=1)
    output = engine.generate(replace(request_of(0, named=False), forced=((7, 5, STOP),)))
    assert rows(output) == [[7, 5, STOP]] and now(engine) == pytest.approx(3.0)


def test_routes_are_refused() -> None:
    with pytest.raises(ConfigError, match="neither routes nor sampling masks"):
        engine_of().generate(replace(request_of(0), with_routes=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token_rate": 3}, r"options.token_rate: unknown; SleepEngine knows median_tokens, tail_ratio"),
        ({"lengths": 3}, r"options.lengths: expected a value of type str, got 3"),
        ({"refit_s": True}, r"options.refit_s: expected a value of type float, got True"),
        ({"tokens_per_s": 0}, r"options.tokens_per_s: expected a number above 0, got 0"),
        ({"tail_ratio": 0.5}, r"options.tail_ratio: expected a number .* got 0.5"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SleepOptions.of(options)
