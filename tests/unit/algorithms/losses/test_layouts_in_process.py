"""Loss and gradient do not depend on how workers lay rows out: ranks, microbatches, packing, context ranks, padding.

Microbatches are built as workers build them; log-probabilities come from one leaf instead of a model.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from nemo_rl.algorithms.losses.policy_loss import PolicyLoss
from nemo_rl.config.loss import CORRECTIONS, LOSS_PROPERTIES, LossConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.packing import PackPlan, plan_fixed, plan_packs, plan_padded
from nemo_rl.models.policy.interfaces import ENTROPY, UNFILTERED_LOGPROBS, LossFunction
from nemo_rl.models.policy.microbatch import PassShape, build_microbatch, steps_of
from nemo_rl.models.policy.steps import loss_columns, stored_fields, trained_tokens
from nemo_rl.utils.metrics import Reduction, merge_metrics, values
from tests.helpers.hf_reference import global_scale
from tests.helpers.loss_reference import corrected, corrections_of, kl_configs, loss_batch, loss_config

ROWS = 8


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Ranks, and a way to form microbatches."""

    dp: int = 1
    cp: int = 1
    batching: str = "fixed"
    capacity: int = 1
    reverse: bool = False
    padding: int = 0
    """Columns of rubbish on the right of the whole batch."""

    @property
    def is_packed(self) -> bool:
        return self.batching == "packed"

    @property
    def multiple(self) -> int:
        return 2 * self.cp if self.cp > 1 else 1

    def plan(self, lengths: list[int]) -> PackPlan:
        common = {"dp_world": self.dp, "pad_multiple": self.multiple}
        if self.batching == "fixed":
            return plan_fixed(lengths, rows_per_microbatch=self.capacity, **common)
        return (plan_packs if self.is_packed else plan_padded)(lengths, capacity=self.capacity, **common)

    def shape(self, rank: int) -> PassShape:
        return PassShape(
            divisible_by=self.multiple, sequence_multiple=self.multiple, cp_size=self.cp, cp_rank=rank, context=None
        )


LAYOUTS = [
    Layout(capacity=ROWS),
    Layout(capacity=1),
    Layout(dp=4, capacity=1, reverse=True),
    Layout(batching="packed", capacity=24, padding=5),
    Layout(dp=2, batching="packed", capacity=40),
    Layout(batching="padded", capacity=30, reverse=True, padding=3),
    Layout(cp=2, batching="packed", capacity=36),
    Layout(dp=2, cp=2, batching="fixed", capacity=2, padding=4),
]


@dataclass(frozen=True)
class Found:
    loss: float
    gradient: torch.Tensor
    """Of log-probabilities, entropies and unfiltered log-probabilities, `[3, N, T]`."""
    metrics: dict[str, float]


def laid_out(batch: BatchedDataDict, layout: Layout) -> tuple[BatchedDataDict, torch.Tensor]:
    """The batch in another order and with other padding, and the place of each of its rows in the original one."""
    order = torch.arange(batch.size)
    if layout.reverse:
        order = order.flip(0)
    found = batch.select_indices(order.tolist())
    width = found.tensor("input_ids").shape[1]
    is_padding = ~found.tensor("token_mask")
    for name, column in found.items():
        if name in ("input_lengths", "sample_mask") or column.dim() == 1:
            continue
        dirty = column.masked_fill(is_padding, float("nan")) if column.is_floating_point() else column
        rubbish = torch.zeros_like(column[:, :1]) if name == "token_mask" else torch.full_like(column[:, :1], 77)
        found[name] = torch.cat([dirty, rubbish.expand(-1, layout.padding)], 1)
    assert found.tensor("input_ids").shape[1] == width + layout.padding
    return found, order


def run(batch: BatchedDataDict, loss_fn: LossFunction, layout: Layout) -> Found:
    laid, order = laid_out(batch, layout)
    source = torch.stack([batch.tensor(name) for name in ("now", ENTROPY, UNFILTERED_LOGPROBS)])
    gradient, total, metrics = torch.zeros_like(source), 0.0, list[dict[str, Reduction]]()
    plan, scale = layout.plan(laid.tensor("input_lengths").tolist()), global_scale(batch)
    for dp in range(layout.dp):
        rows = plan.rows_of_rank(dp)
        shard = laid.select_indices(rows)
        for step in steps_of(plan.for_rank(dp), num_rows=len(rows)):
            for microbatch in step:
                if not microbatch:
                    continue
                losses = []
                for rank in range(layout.cp):
                    leaf = source.clone().requires_grad_()
                    micro = build_microbatch(
                        shard,
                        microbatch,
                        select_NT=trained_tokens(shard),
                        fields=stored_fields(loss_fn),
                        is_packed=layout.is_packed,
                        shape=layout.shape(rank),
                    )
                    original = order[torch.tensor(rows)[torch.tensor(micro.rows)]][micro.out_row_M]
                    every_cM = leaf[:, original, micro.out_column_M]
                    # A context rank has the numbers of all tokens, and gradients of its own.
                    is_own_M = torch.zeros(every_cM.shape[1], dtype=torch.bool)
                    is_own_M[micro.inputs.selected_m] = True
                    found = [micro.to_rows(part) for part in torch.where(is_own_M, every_cM, every_cM.detach())]
                    output = loss_fn(found[0], loss_columns(micro, found, (ENTROPY, UNFILTERED_LOGPROBS)), scale=scale)
                    output.loss.backward()
                    gradient += leaf.grad
                    losses.append(output.loss.item())
                assert len(set(losses)) == 1
                total += losses[0]
                metrics.append(output.metrics)
    return Found(total, gradient, values(merge_metrics(metrics)))


def configs() -> list[LossConfig]:
    """Every loss; means and corrections in turn, and each correction at least once."""
    means: list[dict[str, object]] = [{}, {"token_level_loss": False}, {"constant_length": 9}]
    found = []
    for i, (name, traits) in enumerate(LOSS_PROPERTIES.items()):
        kinds = corrections_of(name)
        mean = {} if traits.is_row_level else means[i % len(means)]
        kl = {"reference_policy_kl_penalty": 0.1, "entropy_coefficient": 0.2}
        found.append(loss_config(name, **mean, **kl, **corrected(kinds[(i + 1) % len(kinds)])))
    used = {config.truncated_importance_sampling_type for config in found}
    assert used == {None, *CORRECTIONS}, used
    return [*found, loss_config("clipped_pg", token_level_loss=False), *kl_configs()[3::7]]


@pytest.mark.parametrize("config", configs(), ids=lambda config: config.name)
def test_every_layout_gives_the_same_loss_and_gradient(config: LossConfig) -> None:
    exact = loss_batch(rows=ROWS, width=13, seed=3)
    exact[ENTROPY] = exact.tensor("now").abs().sqrt()
    exact[UNFILTERED_LOGPROBS] = 1.2 * exact.tensor("now")
    loss_fn = PolicyLoss(config=config)
    assert (ENTROPY in loss_fn.input_fields) == (config.entropy_coefficient > 0)
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        floats = {name: column.to(dtype) for name, column in exact.items() if column.is_floating_point()}
        batch = BatchedDataDict({**exact, **floats})
        whole = run(batch, loss_fn, LAYOUTS[0])
        size = float(whole.gradient.abs().max())
        assert size > 0
        for layout in LAYOUTS[1:] if dtype == torch.float64 else LAYOUTS[-2:]:
            found = run(batch, loss_fn, layout)
            assert found.loss == pytest.approx(whole.loss, rel=bound, abs=bound), layout
            assert float((found.gradient - whole.gradient).abs().max()) <= bound * size, layout
            assert found.metrics == pytest.approx(whole.metrics, rel=max(bound, 1e-6), abs=1e-9), layout
