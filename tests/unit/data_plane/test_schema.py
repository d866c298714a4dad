"""The FieldSpec table and the lists that follow from it."""

from __future__ import annotations

import pytest

from nemo_rl.data_plane.schema import (
    DP_TRAIN_FIELDS,
    FIELDS,
    LP_SEED_FIELDS,
    ROUTE_FIELDS,
    TOKEN_ALIGNED_FIELDS,
    FieldSpec,
    docs_table,
    extra_field,
    reads_of,
    resolve_fields,
    route_fields,
    spec_from_record,
    spec_to_record,
    writes_of,
    writes_that_end_claims,
)
from nemo_rl.distributed.worker_pass import RowPass
from nemo_rl.errors import SchemaMismatch


def test_the_fetch_lists_follow_from_the_table() -> None:
    assert set(DP_TRAIN_FIELDS) == {
        "input_ids",
        "input_lengths",
        "generation_logprobs",
        "prev_logprobs",
        "reference_policy_logprobs",
        "advantages",
        "token_mask",
        "sample_mask",
    }
    assert set(LP_SEED_FIELDS) == {"input_ids", "input_lengths", "token_mask", "sample_mask"}
    assert reads_of("reference_logprobs") == LP_SEED_FIELDS
    assert "reference_policy_logprobs" not in reads_of("train", conditions=())
    assert set(TOKEN_ALIGNED_FIELDS) == {
        "input_ids",
        "token_mask",
        "generation_logprobs",
        "prev_logprobs",
        "reference_policy_logprobs",
        "squared_probs",
        "token_advantages",
        "routed_experts",
        "routed_experts_bits",
        "routed_experts_digests",
        "topk_ids",
        "topk_logprobs",
    }


def test_routes_exist_under_their_conditions_and_are_not_fetched_with_the_rest() -> None:
    assert not {*ROUTE_FIELDS} & {*DP_TRAIN_FIELDS, *LP_SEED_FIELDS, *reads_of("train", conditions=())}
    assert route_fields(()) == ()
    assert route_fields(("routes", "routes_whole")) == ("routed_experts", "routed_experts_missing")
    packed = ("routes", "routes_bit_packed", "route_digests")
    assert route_fields(packed) == ("routed_experts_bits", "routed_experts_missing", "routed_experts_digests")
    assert {spec.family for spec in resolve_fields(ROUTE_FIELDS)} == {"routed_experts", "routed_experts_digests"}
    assert set(route_fields(packed)) <= {*writes_of("rollout", conditions=packed)} & {
        *reads_of("prev_logprobs", conditions=packed)
    }


def test_every_field_that_is_read_is_produced_by_another_stage() -> None:
    stages = {spec.produced_by for spec in FIELDS.values()} | {"train", "log", *RowPass}
    for spec in FIELDS.values():
        assert {*spec.read_by, *spec.rewritten_by} <= stages
        assert spec.name in writes_of(spec.produced_by)
        assert spec.produced_by not in spec.read_by
    assert writes_of("advantages", conditions=["row_advantages"]) == ("advantages", "sample_mask")
    assert writes_of("advantages", rewrites=False) == ("advantages", "staleness")


def test_a_column_that_is_rewritten_is_a_family_of_its_own() -> None:
    for spec in FIELDS.values():
        if spec.rewritten_by:
            assert [other for other in FIELDS.values() if other.family == spec.family] == [spec]
    assert [spec.family for spec in resolve_fields(["token_mask", "input_ids"])] == ["tokens"] * 2


def test_declarations_take_table_names_and_extra_columns() -> None:
    extra = extra_field("image", dtypes=["float32"], dims=("P", 16, 16))
    specs = resolve_fields(["input_ids", extra])
    assert [spec.name for spec in specs] == ["input_ids", "image"] and extra.family == "extras"
    assert extra.is_ragged and not extra.is_token_aligned
    assert [spec_from_record(spec_to_record(spec)) for spec in specs] == list(specs)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (["input_idz"], "unknown field 'input_idz'"),
        (["input_ids", "input_ids"], "declared twice"),
        ([extra_field("input_ids", dtypes=["int32"])], "belongs to the table"),
        ([extra_field("x")], "at least one dtype"),
        ([extra_field("x", dtypes=["int8"], is_object=True)], "neither dtypes nor dims"),
        ([extra_field("x", dtypes=["int8"], dims=(2, "T"))], "'T' must be the first dim"),
        ([FieldSpec(name="x", dtypes=("int8",), family="tokens", produced_by="rollout")], "expected family 'extras'"),
    ],
)
def test_bad_declarations_are_refused(fields: list, message: str) -> None:
    with pytest.raises(SchemaMismatch, match=message):
        resolve_fields(fields)


def test_the_docs_table_has_a_line_per_field() -> None:
    lines = docs_table().splitlines()
    assert len(lines) == 2 + len(FIELDS)
    assert "| `input_ids` | int32 | `[T]` | pad token | tokens | rollout |" in docs_table()


def test_a_column_of_some_runs_keeps_no_claim_alive() -> None:
    assert writes_that_end_claims("prev_logprobs") == ("prev_logprobs",)
    assert writes_that_end_claims("reference_logprobs") == ("reference_policy_logprobs",)
    assert writes_that_end_claims("train") == ()
