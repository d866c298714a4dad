"""Two ranks on one shard: each gets the routes of its layers and tokens, and what ranks record is one column."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nemo_rl.models.hf_modules import HFRouters
from nemo_rl.models.loading import load_causal_lm
from tests.helpers.experts import shape_of, write_experts
from tests.helpers.gloo import run_ranks
from tests.helpers.replica_groups import rows
from tests.helpers.route_cases import LAYOUTS, NUM_JOBS, PLANTS, RankReport, everything

pytestmark = pytest.mark.slow

LIMIT_S, SLACK = 5.0, 6
"""The contract of the abort, and the time that a busy machine may take."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_experts(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reports(folder: Path) -> list[RankReport]:
    return run_ranks(2, everything, str(folder), further_jobs=NUM_JOBS, timeout_s=280)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_routes_from_the_store_give_the_bits_of_whole_rows(reports: list[RankReport], layout: str) -> None:
    for report in (rank.layouts[layout] for rank in reports):
        assert report.logprobs["store"] == report.logprobs["whole"]
        assert report.losses["store"] == report.losses["whole"]
    last = reports[1].layouts[layout]
    assert last.logprobs["free"] != last.logprobs["store"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_rank_gets_its_layers_and_tokens_alone(reports: list[RankReport], folder: Path, layout: str) -> None:
    num_tokens, shape = int(rows().tensor("input_lengths").sum()), shape_of(str(folder))
    parts = [rank.layouts[layout] for rank in reports]
    for part in parts:
        count, layers, top_k = part.received["ids"][0]
        assert (layers, top_k) == (len(part.layers), shape.top_k)
        assert part.received == {
            "ids": ((count, layers, top_k), "torch.uint8"),
            "is_missing": ((count,), "torch.bool"),
            "digests": ((count, layers), "torch.int64"),
        }
    entries = [part.received["ids"][0][0] * len(part.layers) for part in parts]
    assert sum(entries) == num_tokens * len(shape.layers), "every token and layer is on one rank"
    assert min(entries) > 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_metrics_tell_of_missing_routes_and_of_the_models_own(reports: list[RankReport], layout: str) -> None:
    metrics = [rank.layouts[layout].metrics for rank in reports]
    assert 0 < max(found["prev_logprobs_missing_share"] for found in metrics) < 0.1
    for found in metrics:
        # Two random experts of eight: almost never the two that the router wants.
        assert 0.7 < found["prev_logprobs_live_routes_differ"] <= 1
    assert sum("k3_r3" in found for found in metrics) == 1, "one rank has all log-probabilities"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_the_ranks_record_is_what_the_model_chooses(
    reports: list[RankReport], own_routes: list[torch.Tensor], layout: str
) -> None:
    written = reports[0].layouts[layout].written
    assert written is not None
    for row, expected in zip(written, own_routes, strict=True):
        assert torch.equal(torch.tensor(row).sort(-1).values, expected.sort(-1).values)


@pytest.fixture(scope="module")
def own_routes(folder: Path) -> list[torch.Tensor]:
    """Of a plain Hugging Face model, row by row: `[tokens, L, K]`."""
    model, batch = load_causal_lm(str(folder)), rows()
    routers, found = HFRouters(model), []
    for ids, length in zip(batch.tensor("input_ids").long(), batch.tensor("input_lengths").tolist(), strict=True):
        seen: dict[int, torch.Tensor] = {}
        with routers.choosing(lambda layer, own: seen.update({layer: own})), torch.no_grad():  # noqa: B023
            model(input_ids=ids[None, :length], use_cache=False)
        found.append(torch.stack([seen[layer] for layer in routers.layers], dim=1))
    return found


TEXTS = {
    "no_routes": (0, "FieldNotProduced", ("stage 'prev_logprobs'", "u0_g0", "policy.router_replay.enabled=false")),
    "other_routes": (1, "WorkerError", ("replay_forward of microbatch 0", "layer 2", "prev_logprobs")),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_wrong_routes_end_the_step_on_both_ranks(reports: list[RankReport], plant: str) -> None:
    origin, kind, texts = TEXTS[plant]
    for rank, report in enumerate(reports):
        got_kind, got_text, seconds = report.failures[plant]
        assert all(text in got_text for text in texts), got_text
        assert seconds < LIMIT_S * SLACK
        if rank == origin:
            assert got_kind == kind
