"""Records of continuous decoding: schedules as JSON, names and version spans through cuts and joins."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from nemo_rl.models.generation.interfaces import GenerationOutput, GenerationRequest, GroupSamples, SamplingParams
from nemo_rl.models.generation.schedule import ScheduleEntry

SPANS = (((0, 3),), ((0, 3), (2, 4)))


def _output(**changes: object) -> GenerationOutput:
    empty = GenerationOutput.empty(weight_version=3)
    whole = replace(
        empty,
        token_ids=torch.arange(5, dtype=torch.int32),
        logprobs=torch.zeros(5),
        lengths=torch.tensor([2, 3]),
        truncated=torch.tensor([True, False]),
    )
    return replace(whole, **changes)


@pytest.mark.parametrize(
    "entry",
    [
        ScheduleEntry(engine=1, number=0, turn=0, kind="join", groups=("0.0", "1.2")),
        ScheduleEntry(engine=0, number=5, turn=9, kind="swap", version=4),
        ScheduleEntry(engine=0, number=6, turn=9, kind="leave", groups=("7.0",)),
    ],
)
def test_an_entry_comes_back_from_json(entry: ScheduleEntry) -> None:
    assert ScheduleEntry.from_json(json.loads(json.dumps(entry.to_json()))) == entry


@pytest.mark.parametrize("changes", [{"kind": "jump"}, {"turn": None}, {"groups": [3]}, {"version": "4"}])
def test_what_is_no_entry_is_refused(changes: dict[str, object]) -> None:
    entry = ScheduleEntry(engine=1, number=0, turn=0, kind="join", groups=("0.0",)).to_json()
    with pytest.raises(ValueError, match="expected an event of an engine's schedule"):
        ScheduleEntry.from_json({**entry, **changes})


def test_names_follow_their_groups() -> None:
    sampling = SamplingParams(temperature=1.0, max_new_tokens=4, stop_token_ids=())
    request = GenerationRequest(prompt_ids=((1,), (2,), (3,)), seeds=(1, 2, 3), sampling=sampling)
    assert request.of_groups([2, 0]).names == ()
    assert replace(request, names=("0.0", "1.0", "2.1")).of_groups([2, 0]).names == ("2.1", "0.0")


def test_spans_follow_their_rows() -> None:
    mixed = _output(weight_version=(3, 3), version_spans=SPANS)
    assert mixed.select([1]).version_spans == SPANS[1:]
    assert _output().select([1]).version_spans is None
    assert GenerationOutput.joined([_output(), _output()]).version_spans is None
    joined = GenerationOutput.joined([_output(weight_version=5), mixed])
    assert joined.version_spans == (((0, 5),), ((0, 5),), *SPANS)
    assert joined.row_versions == (5, 5, 3, 3)


def test_samples_of_some_groups_keep_the_schedule() -> None:
    entry = ScheduleEntry(engine=1, number=0, turn=0, kind="join", groups=("0.0", "1.0"))
    samples = GroupSamples(
        groups=(0, 1), output=_output(weight_version=(3, 3), version_spans=SPANS), schedule=(entry,)
    ).without([0])
    assert samples is not None and samples.schedule == (entry,) and samples.output.version_spans == SPANS[1:]
