"""Limits of a comparison: files, precedence, defaults, and proposals out of repeated recordings."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch

from nemo_rl.errors import ConfigError, UserError
from nemo_rl.records.sites import Direction, SiteKind
from nemo_rl_tools.compare import folders
from nemo_rl_tools.compare.folders import compare_folders, propose_limits
from nemo_rl_tools.compare.limits import DEFAULT, STAGES, ToleranceRules, coarsest, limits_text, read_limits
from nemo_rl_tools.compare.measurement import ULP_BUCKETS, Metric, measure, ulp_counts
from nemo_rl_tools.compare.side import ComparedSite
from nemo_rl_tools.verdict import Verdict
from tests.helpers.probe_recordings import BACKWARD, FORWARD, one_site, whole_truth, write_recording


def limits_of(path: Path, text: str) -> ToleranceRules:
    path.write_text(text)
    return read_limits(path)


def test_the_first_rule_for_a_site_and_metric_counts(tmp_path: Path) -> None:
    limits = limits_of(
        tmp_path / "limits.yaml",
        """\
- {sites: "layer.*", layers: "0..3", direction: forward, metric: token_rel, max: 1e-2}
- {sites: "layer.*, logits", metric: token_rel, max: 0.5}
- {sites: "layer.out", metric: max_abs, max: 3}
- {sites: "moe.*", metric: token_rel, max: 1}
- {sites: "grad & name=model.layers.0.*", metric: rms_rel, max: 0}
""",
    )

    def of(
        kind: SiteKind, layer: int | None = None, *, way: Direction = FORWARD, name: str | None = None
    ) -> dict[str, float]:
        site = ComparedSite(phase="train", kind=kind, layer=layer, direction=way, name=name)
        is_integer = kind is SiteKind.ROUTER_IDS
        return {m.value: v for m, v in limits.of(site, precision="float32", is_integer=is_integer).items()}

    assert of(SiteKind.LAYER_OUT, 3) == {"token_rel": 1e-2, "max_abs": 3}
    assert of(SiteKind.LAYER_OUT, 4) == of(SiteKind.LAYER_OUT, 3, way=BACKWARD) == {"token_rel": 0.5, "max_abs": 3}
    assert of(SiteKind.LOGITS) == {"token_rel": 0.5}
    assert of(SiteKind.ROUTER_IDS, 0) == {"differing_fraction": 0}
    assert of(SiteKind.ROUTER_LOGITS, 0) == {"token_rel": 1}
    assert of(SiteKind.GRAD, name="model.layers.0.w") == {"rms_rel": 0}
    assert of(SiteKind.GRAD, name="model.layers.1.w") == {"token_rel": 1e-3}
    assert of(SiteKind.LOGPROB) == {"max_abs": 1e-4}


BAD_FILES = {
    "": "expected a list of rules",
    "sites: logprob": "expected a list of rules",
    "- 3": "rule 1: expected {sites: ..., metric: ..., max: ...}, got 3",
    "- {sites: logprob, metrc: max_abs, max: 1}": "unknown key 'metrc'; did you mean 'metric'?; known are sites,",
    "- {sites: logprob, max: 1}": "rule 1: metric is missing",
    "- {sites: logprob, metric: max_abz, max: 1}": "unknown 'max_abz'; did you mean 'max_abs'?; known are token_rel,",
    "- {sites: logprob, metric: [a], max: 1}": "metric: unknown ['a']",
    "- {sites: logprobs, metric: max_abs, max: 1}": "no site is called 'logprobs'; known are tokens, embed, layer.in,",
    "- {sites: layer.out, layers: x, metric: max_abs, max: 1}": "expected layer numbers such as '0..3'",
    "- {sites: layer.out, direction: up, metric: max_abs, max: 1}": "'forward' or 'backward' after '&', got 'up'",
    "- {sites: embed; logits, metric: max_abs, max: 1}": "expected one selection",
    "- {sites: logprob, metric: max_abs, max: -1}": "max: expected a number that is not negative, got -1",
    "- {sites: logprob, metric: max_abs, max: .inf}": "got inf",
    "- {sites: logprob, metric: max_abs, max: .nan}": "got nan",
    "- {sites: logprob, metric: max_abs, max: true}": "got True",
    "- {sites: logprob": "not valid YAML: ",
    "- !!python/object/apply:os.system [true]": "not valid YAML: ",
}


@pytest.mark.parametrize("text", BAD_FILES)
def test_a_wrong_file_is_named_with_what_is_known(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        limits_of(tmp_path / "my limits.yaml", text)
    assert BAD_FILES[text] in str(caught.value) and str(caught.value).startswith(f"{tmp_path}/my limits.yaml: ")


def test_all_problems_of_a_file_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        limits_of(tmp_path / "f", "- {sites: x, metric: y, max: z}\n- {}\n")
    assert len(caught.value.problems) == 6
    (tmp_path / "latin").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "absent", tmp_path, tmp_path / "latin"):
        with pytest.raises(ConfigError, match=str(path)):
            read_limits(path)


def test_the_coarsest_precision_of_both_sides_counts() -> None:
    assert coarsest("float32", "float32", "bfloat16", "float32") == "bfloat16"
    assert coarsest("float32", "float16", "bf16") == "bfloat16"
    assert coarsest("float64", "float32", "") == "float32"
    assert coarsest("int64", "") == "float32"
    site = ComparedSite(phase="train", kind=SiteKind.LAYER_OUT, layer=0)
    found = [DEFAULT.of(site, precision=p, is_integer=False)[Metric.TOKEN_REL] for p in ("float64", "float32")]
    found += [DEFAULT.of(site, precision=p, is_integer=False)[Metric.TOKEN_REL] for p in ("float16", "bfloat16")]
    assert found == sorted(found)


def test_the_stages_of_a_replayed_step_have_limits_of_the_same_files(tmp_path: Path) -> None:
    rules = """\
- {sites: "loss", metric: token_rel, max: 7}
- {sites: "loss, logprob", metric: max_abs, max: 1e-2}
- {sites: "param", metric: rms_rel, max: 0}
"""
    limits = limits_of(tmp_path / "limits.yaml", rules)
    found = {kind: limits.of_stage(kind, phase="train") for kind in STAGES}
    assert found == {SiteKind.LOGPROB: 1e-2, SiteKind.LOSS: 1e-2, SiteKind.GRAD: 1e-5, SiteKind.PARAM: 0}


def test_limits_of_a_file_decide(tmp_path: Path) -> None:
    a = write_recording(tmp_path / "a", one_site(torch.ones(3)))
    b = write_recording(tmp_path / "b", one_site(torch.tensor([1, 1.5, 1])))
    assert compare_folders(a, b).verdict is Verdict.MISMATCH
    for limit, verdict in ((0.5, Verdict.PASS), (0.49, Verdict.MISMATCH)):
        text = limits_text([{"sites": "logprob", "metric": "max_abs", "max": limit}])
        assert compare_folders(a, b, limits=limits_of(tmp_path / "f", text)).verdict is verdict


def test_proposed_limits_are_three_times_the_largest_difference(tmp_path: Path) -> None:
    truth = whole_truth()
    folders = [write_recording(tmp_path / "r0", truth)]
    for number, factor in ((1, 1.25), (2, 1.5)):
        noisy = deepcopy(truth)
        where = (SiteKind.LAYER_OUT, 0, FORWARD)
        noisy.values[where] = {key: value * factor for key, value in noisy.values[where].items()}
        folders.append(write_recording(tmp_path / f"r{number}", noisy))
    proposal = propose_limits(folders)
    assert proposal.startswith("# 3 times the largest difference of 3 pairs of recordings.\n")
    limits = limits_of(tmp_path / "proposed", proposal)
    limit_of = {
        label: limits.of(
            ComparedSite(phase="forward", kind=kind, layer=layer), precision="float32", is_integer=is_integer
        )
        for label, kind, layer, is_integer in (
            ("noisy", SiteKind.LAYER_OUT, 0, False),
            ("equal", SiteKind.LAYER_OUT, 1, False),
            ("experts", SiteKind.ROUTER_IDS, 1, True),
        )
    }
    # Rounded up to two digits.
    assert 1.5 <= limit_of["noisy"][Metric.TOKEN_REL] <= 1.6
    assert limit_of["equal"] == {Metric.TOKEN_REL: 1e-7}
    assert limit_of["experts"] == {Metric.DIFFERING_FRACTION: 0}
    assert compare_folders(folders[0], folders[2], limits=limits).verdict is Verdict.PASS


def test_what_is_no_noise_proposes_nothing(tmp_path: Path) -> None:
    truth = whole_truth()
    a = write_recording(tmp_path / "a", truth)
    with pytest.raises(UserError, match="expected two recordings or more"):
        propose_limits([a])
    truth.values[(SiteKind.EMBED, None, FORWARD)]["s0"][0] = torch.nan
    b = write_recording(tmp_path / "b", truth)
    truth = whole_truth()
    truth.tokens["s0"] += 1
    c = write_recording(tmp_path / "c", truth)
    for other in (a, b, c):
        with pytest.raises(UserError, match="are not recordings of the same run"):
            propose_limits([a, other])


def test_many_layers_fit_a_file_of_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = {"sites": "moe.topk_weights", "layers": "999", "direction": "forward"}
    rule = {**longest, "metric": "differing_fraction", "max": 1.2e-10}
    assert len(limits_of(tmp_path / "long", limits_text([rule] * folders.MAX_RULES)).rules) == folders.MAX_RULES
    monkeypatch.setattr(folders, "MAX_RULES", 3)
    truth, other = one_site(torch.ones(2)), one_site(torch.ones(2) * 1.0001)
    for each in (truth, other):
        own = next(iter(each.values.values()))
        each.values = {(SiteKind.MLP_OUT, layer, FORWARD): own for layer in range(4)}
    proposal = propose_limits([write_recording(tmp_path / name, each) for name, each in (("a", truth), ("b", other))])
    assert len(limits_of(tmp_path / "f", proposal).rules) == 1


def test_metrics_against_a_slow_reference() -> None:
    random = torch.Generator().manual_seed(3)
    a = torch.randn(40, 6, generator=random)
    b = a + 1e-3 * torch.randn(40, 6, generator=random)
    found, x, y = measure(a, b), a.double().tolist(), b.double().tolist()
    diff = [[abs(p - q) for p, q in zip(r, s, strict=True)] for r, s in zip(x, y, strict=True)]
    flat = [d for row in diff for d in row]

    def norm(row: list[float]) -> float:
        return sum(value * value for value in row) ** 0.5

    floor = (sum(norm(row) ** 2 for row in x) / 40) ** 0.5
    dot = sum(p * q for r, s in zip(x, y, strict=True) for p, q in zip(r, s, strict=True))
    expected = {
        Metric.TOKEN_REL: max(norm(d) / max(norm(r), floor) for d, r in zip(diff, x, strict=True)),
        Metric.MAX_ABS: max(flat),
        Metric.MEAN_ABS: sum(flat) / len(flat),
        Metric.RMS_REL: norm(flat) / norm([p for r in x for p in r]),
        Metric.COSINE_DISTANCE: 1 - dot / (norm([p for r in x for p in r]) * norm([q for s in y for q in s])),
        Metric.MAX_REL: max(
            d / max(abs(p), abs(q)) for r, s, t in zip(x, y, diff, strict=True) for p, q, d in zip(r, s, t, strict=True)
        ),
        Metric.DIFFERING_FRACTION: 1.0,
    }
    # Sums in another order, in float64.
    assert {m: pytest.approx(v, rel=1e-9, abs=1e-14) for m, v in expected.items()} == dict(found.metrics)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_units_in_the_last_place_are_counted_over_zero_and_powers_of_two(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    one, tiny = torch.tensor(1.0, dtype=dtype), torch.tensor(info.smallest_normal, dtype=dtype)
    a = torch.stack((one, one, one - info.eps / 2, -tiny, one * 0, one, one * torch.inf))
    b = torch.stack((one, one + info.eps, one + info.eps, -tiny, -one * 0, one + 40 * info.eps, one))
    assert dict(zip(ULP_BUCKETS, ulp_counts(a, b) or (), strict=True)) == {
        **dict.fromkeys(ULP_BUCKETS, 0),
        **{"0": 3, "1": 1, "2": 1, "33-64": 1},
    }
    assert ulp_counts(-one.reshape(1), one.reshape(1))[-1] == 1  # type: ignore[index]
    assert ulp_counts(a.float(), b.float().double()) is not None
    assert ulp_counts(a.int(), b.int()) is None
