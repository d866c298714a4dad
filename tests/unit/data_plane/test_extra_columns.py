"""Columns that a recipe declares: their specs, their values as columns of a put, and what does not fit them."""

from __future__ import annotations

import pytest
import torch

from nemo_rl.config.data import ExtraColumn
from nemo_rl.data_plane.column_io import extra_names, extra_specs, extra_values, is_listed, rows_as_list
from nemo_rl.data_plane.schema import FieldSpec
from nemo_rl.errors import ConfigError
from tests.helpers.extra_columns import DECLARED

SPECS = {
    spec.name: spec
    for spec in extra_specs({name: ExtraColumn.model_validate(column) for name, column in DECLARED.items()})
}


def spec_of(dtype: str, *dims: int | str) -> FieldSpec:
    return extra_specs({"own": ExtraColumn.model_validate({"dtype": dtype, "dims": dims})})[0]


def test_a_pass_fetches_the_columns_that_name_it() -> None:
    specs = list(SPECS.values())
    assert extra_names(specs, "prev_logprobs") == ("image",)
    assert extra_names(specs, "train") == ("image", "grid", "weight", "spots")
    assert extra_names(specs, "log") == ("weight", "note") and extra_names(specs, "reference_logprobs") == ()


def test_columns_without_a_token_axis_are_lists_in_a_batch() -> None:
    assert [name for name, spec in SPECS.items() if is_listed(spec)] == ["image", "grid", "spots"]
    assert not is_listed(spec_of("float32", "T")) and is_listed(spec_of("float32", "patches", 3))


def test_the_name_of_a_field_of_the_library_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.extra_columns\.advantages: a field of the library has this name"):
        extra_specs({"advantages": ExtraColumn(dtype="float32")})


def test_values_come_back_row_by_row() -> None:
    rows = [[[1.0, 2.0, 3.0]], [], [[4.0, 5.0, 6.0], [7.0, 8.0, 9.0]]]
    column = extra_values(SPECS["image"], rows, lengths=[5, 6, 7], where="data")
    found = [row.tolist() for row in rows_as_list(column) if isinstance(row, torch.Tensor)]
    assert found == rows
    grid = extra_values(SPECS["grid"], [[[1, 2], [3, 4]]] * 2, lengths=[5, 6], where="data")
    assert isinstance(grid, torch.Tensor) and grid.dtype is torch.int16 and grid.shape == (2, 2, 2)
    tokens = extra_values(spec_of("bool", "T"), [[True, False], [True]], lengths=[2, 1], where="data")
    assert [row.tolist() for row in rows_as_list(tokens) if isinstance(row, torch.Tensor)] == [[True, False], [True]]
    note: list[object] = [{"a": 1}, None]
    assert extra_values(SPECS["note"], note, lengths=[1, 1], where="data") == note


@pytest.mark.parametrize(
    ("spec", "values", "message"),
    [
        (spec_of("uint8"), [1, 256], r"data, row 1: expected numbers that uint8 can hold, got \[256\]"),
        (spec_of("int64"), [1, 1.5], r"data, row 1: expected whole numbers \(int64\), got torch.float64"),
        (spec_of("float32", 2), [[1.0, 2.0], [1.0]], r"data, row 1: expected dims \[2\], got shape \[1\]"),
        (spec_of("float32", "T"), [[1.0, 2.0], [1.0]], "data, row 1: expected a value for each of 2 tokens, got 1"),
        (spec_of("float32", "n", "width"), [[[1.0]], [[1.0, 2.0]]], "data: expected rows of one shape"),
        (spec_of("float32"), [1.0, None], "data, row 1: expected a value of dtype float32"),
        (spec_of("float32"), [1.0, "high"], "data, row 1: expected numbers of dims"),
    ],
)
def test_a_value_that_does_not_fit_is_named_with_its_row(spec: FieldSpec, values: list[object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        extra_values(spec, values, lengths=[2, 2], where="data")
