"""What workers measure of rows: references in plain Python, edges, and that nothing but a row's tokens matters."""

from __future__ import annotations

import math

import pytest
import torch

from nemo_rl.algorithms.row_measures import LOGPROB_ERROR, MeasuredRows, RowMeasures, logprob_errors, row_sums

ERRORS = RowMeasures(error_threshold=2.0)


def batch_of(rows: int = 5, width: int = 9, *, seed: int = 0, padding: int = 0) -> dict[str, torch.Tensor]:
    """Rows of unequal lengths, the last without a response; rubbish in the padding."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([width, *(3 + row % 5 for row in range(rows - 2)), 2])
    columns = torch.arange(width + padding)
    mask = (columns >= 2) & (columns < lengths[:, None])

    def column() -> torch.Tensor:
        values = torch.full((rows, width + padding), float("nan"))
        values[:, :width] = -torch.rand(rows, width, generator=draw)
        return torch.where(columns < lengths[:, None], values, float("nan"))

    return {
        "token_mask": mask,
        "prev_logprobs": column(),
        "generation_logprobs": column(),
        "reference_policy_logprobs": column(),
    }


def tokens(batch: dict[str, torch.Tensor], row: int) -> list[int]:
    return [at for at, kept in enumerate(batch["token_mask"][row].tolist()) if kept]


def test_an_error_is_the_mean_of_the_tokens_ratios_the_larger_way_round() -> None:
    batch = batch_of()
    for row, found in enumerate(ERRORS(batch).numbers[LOGPROB_ERROR].tolist()):
        prev, sampled = batch["prev_logprobs"][row].tolist(), batch["generation_logprobs"][row].tolist()
        ratios = [math.exp(abs(prev[at] - sampled[at])) for at in tokens(batch, row)]
        assert found == pytest.approx(sum(ratios) / len(ratios) if ratios else 1.0, rel=1e-12)
        assert found > 1.0 or not ratios


def test_a_number_depends_on_its_rows_tokens_alone_to_the_last_bit() -> None:
    narrow, wide = batch_of(rows=40, width=60), batch_of(rows=40, width=60, padding=37)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    for work, name in ((ERRORS, LOGPROB_ERROR),):
        whole = work(narrow).numbers[name]
        assert whole.dtype == torch.float64 and torch.equal(work(wide).numbers[name], whole)
        shuffled = {column: values[order] for column, values in wide.items()}
        assert torch.equal(work(shuffled).numbers[name], whole[order])
        alone = [work({c: v[[row]] for c, v in narrow.items()}).numbers[name] for row in range(40)]
        assert torch.equal(torch.cat(alone), whole)


@pytest.mark.parametrize(
    ("prev", "sampled", "expected"),
    [
        (-1.0, math.nan, 1.0),
        (-math.inf, -math.inf, 1.0),
        (-1.0, -math.inf, math.exp(20)),
        (-math.inf, -1.0, math.exp(20)),
        (-500.0, -1.0, math.exp(20)),
    ],
)
def test_what_is_not_known_is_equal_and_what_is_infinite_is_bounded(
    prev: float, sampled: float, expected: float
) -> None:
    mask = torch.tensor([[False, True]])
    found = logprob_errors(torch.tensor([[0.0, prev]]), torch.tensor([[0.0, sampled]]), mask)
    assert found.tolist() == pytest.approx([expected])


def test_rows_above_the_threshold_lose_their_weight_and_others_are_not_counted() -> None:
    errors, weights = torch.tensor([1.0, 2.0, 2.5, 9.0]), torch.tensor([1.0, 0.5, 1.0, 0.0])
    measured = MeasuredRows.of(weights, errors, threshold=2.0)
    assert measured.is_masked.tolist() == [False, False, True, False]
    assert measured.metrics() == {
        "seq_logprob_error_max": 2.5,
        "seq_logprob_error_mean": pytest.approx(5.5 / 3),
        "seq_logprob_error_masked_rows": 1.0,
        "seq_logprob_error_masked_share": pytest.approx(1 / 3),
    }
    nothing = MeasuredRows.of(weights, None, threshold=None)
    assert not nothing.is_masked.any() and nothing.metrics() == {}


def test_sums_leave_out_what_is_not_in_the_mask() -> None:
    values = torch.tensor([[math.nan, 1.0, 2.0], [4.0, math.inf, 0.5]])
    mask = torch.tensor([[False, True, True], [True, False, True]])
    assert row_sums(values, mask).tolist() == [3.0, 4.5]
    assert row_sums(values, torch.zeros_like(mask)).tolist() == [0.0, 0.0]
