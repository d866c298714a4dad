"""One process and other layouts on the same rows: routes recorded in one are replayed in the other, on both workers.

Every site of both is compared, forward and backward; and what a tracer's hub puts together of their ranks' parts.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nemo_rl.algorithms.run_folder import TRACER
from nemo_rl.config.load import load_config
from nemo_rl.records.sites import SiteKind
from nemo_rl_tools.compare.comparison import RecordingComparison
from nemo_rl_tools.compare.folders import compare_folders, propose_limits
from nemo_rl_tools.compare.measurement import Metric
from nemo_rl_tools.runner.layout_text import LayoutText
from nemo_rl_tools.runner.prompts import PromptSpec
from nemo_rl_tools.runner.run import RECORDS, ProbeSpec, run_ab, run_probe
from nemo_rl_tools.verdict import Verdict
from tests.helpers.case_selection import params
from tests.helpers.model_families import write_family
from tests.helpers.runs import ROOT
from tests.helpers.tracer_recordings import differences, frames_of, tokens_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LOGITS, LOGITS_ABSOLUTE = 2e-6, 5e-6
"""Relative to the logits of a token, and of each of them, which are up to 4: rounding depends on the processor."""
TRACED = 2e-6
"""Relative to the largest value of a site: what the hub makes of the ranks' parts, gradients included."""
WATCHES = (
    "* | stats",
    "layer.out, attn.q, attn.context, moe.logits | tiles(3, rms); tiles(5, mean)",
    "moe.topk_ids | counts",
    "logits | topk(4)",
    "tokens, logprob, moe.topk_weights, attn.k | full",
    "layer.in | sample(7)",
)
ONE = {"megatron": LayoutText.parse("worker=megatron"), "dtensor": LayoutText.parse("worker=dtensor")}
LAYOUTS = [
    "worker=megatron tp=2 sp",
    "worker=megatron cp=2",
    "worker=megatron pp=2 mbs=1 recompute",
    "worker=megatron pp=2 mbs=1",
    "worker=megatron ep=2",
    "worker=megatron tp=2 pp=2 ep=2 etp=1 sp mbs=1",
    "worker=megatron tp=2 cp=2 sp recompute mbs=2",
    "worker=megatron recompute packed",
    "worker=dtensor tp=2 sp",
    "worker=dtensor cp=2 recompute",
    "worker=dtensor cp=2 packed",
    "worker=dtensor tp=2 recompute",
]


FULL_BACK = LAYOUTS[:2] + LAYOUTS[3:5] + LAYOUTS[6:7] + LAYOUTS[8:10] + LAYOUTS[11:]
"""Whose routes are replayed in one process by `make test-full` alone."""
FULL_AXES = [LAYOUTS[0], LAYOUTS[1], LAYOUTS[3], LAYOUTS[11]]
"""Layouts of which another has every axis as well, and more."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> ProbeSpec:
    folder = write_family(tmp_path_factory.mktemp("moe"), "qwen3_moe")
    config = load_config(
        ROOT / "configs" / "grpo_sort_cpu.yaml",
        [f"policy.model_name={folder}", "policy.max_total_sequence_length=100", "policy.generation.max_new_tokens=8"],
    )
    prompt = PromptSpec(num_rows=4, is_unequal=True, length=61)
    return ProbeSpec(
        policy=config.policy,
        cluster=config.cluster,
        seed=config.grpo.seed,
        prompt=prompt,
        has_backward=True,
        dump="*",
        watches=WATCHES,
    )


@pytest.fixture(scope="module")
def one(base: ProbeSpec, tmp_path_factory: pytest.TempPathFactory) -> dict[str, ProbeSpec]:
    """Each worker in one process: its records, and the routes that it chose."""
    specs = {}
    for worker, layout in ONE.items():
        out = tmp_path_factory.mktemp(worker)
        specs[worker] = replace(base, layout=layout, out=out, routes_to=out / "routes.safetensors")
        run_probe(specs[worker])
    return specs


@pytest.mark.parametrize("text", params(LAYOUTS, [text for text in LAYOUTS if text not in FULL_AXES]))
def test_routes_of_one_process_give_its_logits_in_another_layout(text, base, one, tmp_path):
    layout = LayoutText.parse(text)
    alone = one[layout.worker or ""]
    run_probe(replace(base, layout=layout, out=tmp_path, routes_from=alone.routes_to))
    assert alone.out is not None
    _assert_same(compare_folders(alone.out / RECORDS, tmp_path / RECORDS))
    _assert_same_pictures(alone.out / TRACER, tmp_path / TRACER)


@pytest.mark.parametrize("text", params(LAYOUTS, [text for text in LAYOUTS if text not in FULL_BACK]))
def test_routes_of_another_layout_give_its_logits_in_one_process(text: str, base: ProbeSpec, tmp_path: Path) -> None:
    layout, routes = LayoutText.parse(text), tmp_path / "routes.safetensors"
    run_probe(replace(base, layout=layout, out=tmp_path / "many", routes_to=routes))
    alone = replace(base, layout=ONE[layout.worker or ""], out=tmp_path / "one", routes_from=routes)
    run_probe(alone)
    _assert_same(compare_folders(tmp_path / "many" / RECORDS, tmp_path / "one" / RECORDS))
    _assert_same_pictures(tmp_path / "many" / TRACER, tmp_path / "one" / TRACER)


def test_both_workers_agree_at_every_site(base: ProbeSpec, one: dict[str, ProbeSpec]) -> None:
    megatron, dtensor = (one[name].out for name in ("megatron", "dtensor"))
    assert megatron is not None and dtensor is not None
    found = compare_folders(megatron / RECORDS, dtensor / RECORDS)
    _assert_same(found)
    kinds = {result.site.kind for result in found.sites}
    assert kinds == set(SiteKind), sorted(set(SiteKind) - kinds)
    _assert_same_pictures(megatron / TRACER, dtensor / TRACER)


def test_a_forward_pass_alone_is_a_complete_recording(base: ProbeSpec, tmp_path: Path) -> None:
    runs = run_ab(
        replace(base, has_backward=False, out=tmp_path),
        ONE["megatron"],
        ONE["dtensor"],
        pins_routes=True,
        num_noise_runs=1,
    )
    _assert_same(compare_folders(*runs.records))
    # A run again gives the same numbers: the floor of noise is nothing, and the proposal says so.
    assert "max" in propose_limits([runs.records[0], *runs.noise])


def test_other_weights_differ_from_the_embedding_on(base: ProbeSpec, one: dict[str, ProbeSpec], tmp_path: Path) -> None:
    other = replace(base, layout=LayoutText.parse("worker=dtensor weights=random:5"), out=tmp_path)
    run_probe(other)
    alone = one["dtensor"].out
    assert alone is not None
    found = compare_folders(alone / RECORDS, tmp_path / RECORDS)
    assert found.verdict is Verdict.MISMATCH
    assert found.divergence is not None and found.divergence.result.site.kind is SiteKind.EMBED


def _assert_same_pictures(one: Path, other: Path) -> None:
    """The same frames of the same tokens, with the same numbers."""
    (ours, our_tables), (theirs, their_tables) = frames_of(one), frames_of(other)
    apart = differences(ours, theirs)
    assert not {name: found for name, found in apart.items() if found > TRACED}
    of_tokens = {name for name, frame in ours.items() if frame.table is not None}
    assert {name[2] for name in of_tokens} == {"tiles(3, rms)", "tiles(5, mean)", "topk(4)", "full", "sample(7)"}
    for name in of_tokens:
        assert tokens_of(ours[name], our_tables) == tokens_of(theirs[name], their_tables), name


def _assert_same(found: RecordingComparison) -> None:
    assert found.verdict is Verdict.PASS, "\n".join(found.lines())
    logits = [result for result in found.sites if result.site.kind is SiteKind.LOGITS]
    assert logits
    for result in logits:
        assert result.measurement is not None
        assert result.measurement.metrics[Metric.TOKEN_REL] <= LOGITS, result.site
        assert result.measurement.metrics[Metric.MAX_ABS] <= LOGITS_ABSOLUTE, result.site


def test_recording_a_pipeline_that_recomputes_and_replays_changes_no_bit(base, one, tmp_path):
    layout = LayoutText.parse("worker=megatron pp=2 mbs=1 recompute")
    routes = one["megatron"].routes_to
    recorded, plain = (
        run_probe(replace(base, layout=layout, out=tmp_path / str(dump), dump=dump, routes_from=routes)).found
        for dump in ("*", None)
    )
    assert recorded == plain
