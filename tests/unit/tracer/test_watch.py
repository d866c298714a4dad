"""Watches: read as they are written, never evaluated; a plan's digest says whether two are the same."""

import pytest

from nemo_rl.errors import UserError
from nemo_rl.records.sites import Direction, SiteKind
from nemo_rl.tracer.watch import CLASSICAL, PHASES, SiteWatch, WatchPlan

FORWARD = Direction.FORWARD


def takes(watch, kind=SiteKind.LAYER_OUT, layer=0, *, phase="train", step=10):
    return watch.takes(kind, layer, FORWARD, phase=phase, step=step)


def test_watch_takes_its_sites_in_its_phases_every_so_many_steps():
    watch = SiteWatch.parse("layer.out & layer in 0..3 | tiles(8, rms); histogram | train; every 10")
    assert [str(reducer) for reducer in watch.reducers] == ["tiles(8, rms)", "histogram"]
    assert takes(watch) and takes(watch, layer=3) and takes(watch, step=0)
    assert not takes(watch, layer=4) and not takes(watch, SiteKind.MLP_OUT)
    assert not takes(watch, step=11) and not takes(watch, phase="prev_logprobs")


def test_generation_is_looked_at_only_where_it_is_named():
    assert [phase for phase in PHASES if takes(SiteWatch.parse("layer.out | stats"), phase=phase)] == [
        phase for phase in PHASES if phase != "generation"
    ]
    assert takes(SiteWatch.parse("layer.out | stats | generation"), phase="generation")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("layer.out", "'SITES | REDUCERS'"),
        ("layer.out |", "'SITES | REDUCERS'"),
        ("layer.out | stats | train | more", "'SITES | REDUCERS'"),
        ("nowhere | stats", "nowhere"),
        ("layer.out | median", "median"),
        ("layer.out | stats | never", "never"),
        ("layer.out | stats | every 0", "every 0"),
        ("layer.out | stats | every -1", "every -1"),
        ("", "'SITES | REDUCERS'"),
    ],
)
def test_what_is_no_watch_is_refused(text, says):
    with pytest.raises(UserError) as error:
        SiteWatch.parse(text)
    assert says in str(error.value)


def test_plan_names_what_is_kept_of_a_site_each_once_and_what_is_recomputed_on_request():
    plan = WatchPlan.parse(["layer.out | stats", "layer.* | stats; norm | train", "mlp.out | norm | recomputed"])

    def of(kind, **more):
        found = plan.reducers_of(kind, 0, FORWARD, **{"phase": "train", "step": 1, **more})
        return [str(reducer) for reducer in found]

    assert of(SiteKind.LAYER_OUT) == ["stats", "norm"]
    assert of(SiteKind.LAYER_OUT, phase="prev_logprobs") == ["stats"]
    assert of(SiteKind.LAYER_OUT, recomputed=True) == []
    assert of(SiteKind.MLP_OUT, recomputed=True) == ["norm"] == of(SiteKind.MLP_OUT)
    assert of(SiteKind.ATTN_Q) == []


def test_digest_is_equal_for_equal_plans_alone():
    texts = ["layer.out | stats", "mlp.out | norm"]
    assert WatchPlan.parse(texts).digest == WatchPlan.parse(["layer.out  |  stats", "mlp.out | norm"]).digest
    others = ([], texts[:1], texts[::-1], ["layer.out | stats", "mlp.out | stats"])
    assert len({WatchPlan.parse(each).digest for each in (texts, *others)}) == 5


def test_plans_are_bounded():
    WatchPlan.parse(["layer.out | stats"] * 64)
    with pytest.raises(UserError, match="at most 64"):
        WatchPlan.parse(["layer.out | stats"] * 65)


def test_classical_switches_are_sites_that_can_be_watched():
    for each in CLASSICAL:
        assert SiteWatch.parse(f"{each.sites} & forward | tiles(96, mean) | train").sites.kinds()
    assert [each.update_type for each in CLASSICAL] == [1, 3, 4, 5, 6, 7]
