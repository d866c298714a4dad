"""`FirstNonFinite`: the first producer of NaN, whatever the order in which frames come."""

import itertools
import json

import numpy as np

from nemo_rl.records.sites import Direction, SiteKind
from nemo_rl.tracer.frame import Frame, FrameSite, Where
from nemo_rl.tracer.reducer import Stats
from nemo_rl_tools.tracer.summary import FirstNonFinite

MLP = FrameSite(SiteKind.MLP_OUT, layer=2)


def frame(site=MLP, *, step=5, phase="train", update=0, num=4096, run="a"):
    where = Where(run, step, phase, site, Stats(), update)
    return Frame(where=where, payload=np.zeros(10), num_not_finite=num)


def first_of(frames):
    first = FirstNonFinite()
    for each in frames:
        first.add(each)
    return first.of("a")


def in_any_order(*frames):
    found = {first_of(order).text for order in itertools.permutations(frames)}
    assert len(found) == 1, found
    return found.pop()


def test_text_names_step_phase_site_and_how_many_values():
    assert first_of([frame()]).text == "step 5, train, mlp.out[2]: 4096 values are NaN or infinite; first seen there"
    assert first_of([frame(num=1, update=1)]).text.startswith("step 5, train, update 1, mlp.out[2]: 1 value is NaN")


def test_finite_frames_name_nobody():
    assert first_of([frame(num=0), frame(num=0, step=1)]) is None


def test_earliest_step_then_phase_then_update_then_site_whatever_the_order():
    later = frame(FrameSite(SiteKind.LAYER_OUT, layer=2))
    assert in_any_order(frame(step=6), frame(step=5), frame(step=7)).startswith("step 5,")
    assert "prev_logprobs" in in_any_order(frame(), frame(phase="prev_logprobs"), frame(phase="reference_logprobs"))
    assert "update" not in in_any_order(frame(update=1), frame(), frame(update=2))
    assert "mlp.out[2]:" in in_any_order(later, frame(), frame(FrameSite(SiteKind.EMBED, direction=Direction.BACKWARD)))
    assert "generation" in in_any_order(frame(phase="prev_logprobs"), frame(phase="generation"))


def test_forward_comes_before_recomputed_before_backward_before_gradients():
    grad = FrameSite(SiteKind.GRAD, name="lm_head.weight")
    backward = FrameSite(SiteKind.MLP_OUT, layer=2, direction=Direction.BACKWARD)
    recomputed = FrameSite(SiteKind.MLP_OUT, layer=2, is_recomputed=True)
    after = FrameSite(SiteKind.LAYER_OUT, layer=2, direction=Direction.BACKWARD)
    assert "mlp.out[2]:" in in_any_order(frame(grad), frame(backward), frame(recomputed), frame())
    assert "recomputed" in in_any_order(frame(grad), frame(backward), frame(recomputed))
    assert "layer.out[2] backward" in in_any_order(frame(grad), frame(backward), frame(after))


def test_parameters_come_before_the_passes_that_used_them():
    param = FrameSite(SiteKind.PARAM, name="norm.weight")
    text = in_any_order(frame(phase="prev_logprobs"), frame(param, num=3), frame())
    assert "param[norm.weight]: 3 values are NaN or infinite in the parameter itself" in text
    assert "prev_logprobs" in in_any_order(frame(phase="prev_logprobs"), frame(param, update=1))


def test_runs_are_apart():
    first = FirstNonFinite()
    assert first.add(frame(run="a"))
    assert first.add(frame(run="b", step=2))
    assert not first.add(frame(run="a", step=6))
    assert (first.of("a").where.step, first.of("b").where.step, first.of("c")) == (5, 2, None)


def test_record_is_json():
    record = json.loads(json.dumps(first_of([frame()]).as_record()))
    assert record["site"] == {"kind": "mlp.out", "layer": 2, "direction": "forward"}
    assert (record["step"], record["phase"], record["num"]) == (5, "train", 4096)
