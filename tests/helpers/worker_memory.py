"""What one rank of a policy really allocates: weights, gradients and optimizer state at rest, and its passes.

At rest the unique storages of the tensors are added up. Of a pass every allocation and every free of torch's CPU
allocator is counted, as its profiler reports them: tensors kept for the backward pass, gradients, gathered weights, and
what kernels take for themselves. Of a few repetitions the least counts: a thread of gloo frees what a collective needed
whenever it gets to it. The first pass of each kind is not measured: it frees what the one before it has left in the
model's layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from nemo_rl.algorithms.grpo import plan_logprobs, plan_train
from nemo_rl.algorithms.losses.nll import NLLLoss
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.layout import ParallelLayout
from nemo_rl.models.policy.interfaces import LossOutput, LossScale
from nemo_rl.models.policy.microbatch import Microbatch
from nemo_rl.models.policy.observer import OnBackward, nothing_follows
from nemo_rl.models.policy.routes.worker_replay import OWN_ROUTES
from nemo_rl.models.policy.steps import loss_scales
from nemo_rl.models.policy.workers.base import optimizer_tensors
from nemo_rl.models.policy.workers.dtensor_engine import DTensorEngine
from nemo_rl.models.policy.workers.engine import Engine
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker
from nemo_rl.models.shards import local_shard
from nemo_rl.models.support import SUPPORT
from tests.helpers.tiny_model import tiny_worker

GRADIENTS = "the gradients are whole"
REPEATS = 3
MEMORY = "[memory]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Bytes of one rank."""

    weights: int
    gradients: int
    """At the end of the backward pass, before the optimizer's step."""
    optimizer: int
    """After a step."""
    train_peak: int
    """Most that a train step adds to what was there before it, up to the gradients' end."""
    logprob_peak: int


@dataclass(frozen=True, kw_only=True)
class AskingLoss(NLLLoss):
    """With columns that workers compute, each with a gradient of its own."""

    asks: tuple[str, ...] = ()
    """Of `COMPUTED_FIELDS`."""

    @property
    def input_fields(self) -> tuple[str, ...]:
        return (*NLLLoss.input_fields.fget(self), *self.asks)  # type: ignore[attr-defined]

    def __call__(
        self, token_logprobs: torch.Tensor, batch: Mapping[str, torch.Tensor], *, scale: LossScale
    ) -> LossOutput:
        output = NLLLoss.__call__(self, token_logprobs, batch, scale=scale)
        more = sum(batch[name].square().sum() for name in self.asks)
        return replace(output, loss=output.loss + more / scale.valid_tokens)


def equal_rows(num_rows: int, width: int, prompt: int) -> BatchedDataDict:
    """Rows of one length, whose responses follow prompts of one length; recorded sets hold one token each."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(7, 300, (num_rows, width), generator=draw, dtype=torch.int32)
    return BatchedDataDict(
        {
            "input_ids": ids,
            "input_lengths": torch.full((num_rows,), width),
            "token_mask": (torch.arange(width) >= prompt).expand(num_rows, width).contiguous(),
            "sample_mask": torch.ones(num_rows),
            SUPPORT: torch.ones(num_rows, width - prompt, dtype=torch.uint8),
        }
    )


def measure(
    rank: int, world_size: int, policy: PolicyConfig, rows: tuple[int, int, int], asks: tuple[str, ...] = ()
) -> Measured:
    """(collective) One rank of the policy on `equal_rows(*rows)`, with a loss that asks for these columns."""
    worker = tiny_worker(policy, rank=rank, world_size=world_size)
    try:
        batch = equal_rows(*rows)
        if not policy.generation.record_support:
            del batch[SUPPORT]
        layout = ParallelLayout.of_policy(policy, world_size=world_size)
        return _measure(worker, layout, policy, batch, AskingLoss(asks=asks))
    finally:
        worker.shutdown()


def measure_table(
    rank: int, world_size: int, cases: list[tuple[PolicyConfig, tuple[int, int, int], tuple[str, ...]]]
) -> list[Measured]:
    """(collective) One after the other."""
    return [measure(rank, world_size, *case) for case in cases]


class _Marks:
    """A `PassObserver` that writes into the profile how far a step has come, and counts gradients."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.gradient_bytes = 0

    def parameters(self) -> None:
        pass

    def update(self, number: int) -> None:
        pass

    def pass_of(self, micro: Microbatch, *, backward_follows: bool = False) -> AbstractContextManager[OnBackward]:
        return nullcontext(nothing_follows)

    def logprobs(self, micro: Microbatch, logprobs_nt: torch.Tensor) -> None:
        pass

    def loss(self, micro: Microbatch, output: LossOutput) -> None:
        pass

    def gradients(self) -> None:
        with record_function(GRADIENTS):
            self.gradient_bytes = storage_bytes(_gradients(self._engine))


def _measure(
    worker: PolicyWorker, layout: ParallelLayout, policy: PolicyConfig, batch: BatchedDataDict, loss_fn: AskingLoss
) -> Measured:
    engine, marks = worker.engine, _Marks(worker.engine)
    lengths = batch.tensor("input_lengths").tolist()
    plan = plan_train(lengths, [len(lengths)], policy, layout=layout)
    dp = layout.coordinates(worker.rank).dp
    part, own = batch.select_indices(list(plan.rows_of_rank(dp))), plan.for_rank(dp)
    own_lp = plan_logprobs(plan, lengths, policy, layout=layout).for_rank(dp)
    # The first step makes the optimizer's state.
    worker.train(part, loss_fn, plan=own)
    runner = engine.runner(worker.passes.batch_layout(own), OWN_ROUTES, marks)
    [scale] = loss_scales(part, [own.microbatches[0]], is_writer=layout.is_writer(worker.rank), device=worker.device)

    def step() -> object:
        return runner.run(part, own.microbatches[0], loss_fn, scale, is_training=True)

    train = [_profiled(step) for _ in range(REPEATS)]
    worker.get_logprobs(part, plan=own_lp)
    logprobs = [_profiled(lambda: worker.get_logprobs(part, plan=own_lp)) for _ in range(REPEATS)]
    return Measured(
        weights=storage_bytes(weight for _, weight in engine.weights()),
        gradients=marks.gradient_bytes,
        optimizer=storage_bytes(tensor for _, tensor in _state(engine)),
        train_peak=min(_peak(events, until=GRADIENTS) for events in train),
        logprob_peak=min(map(_peak, logprobs)),
    )


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of the unique storages."""
    storages = [local_shard(tensor.detach()).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _gradients(engine: Engine) -> list[torch.Tensor]:
    if isinstance(engine, DTensorEngine):
        return [weight.grad for weight in engine.model.parameters() if weight.grad is not None]
    return [vars(weight)["main_grad"] for weight in engine.model.module.parameters()]


def _state(engine: Engine) -> Iterable[tuple[str, torch.Tensor]]:
    if isinstance(engine, DTensorEngine):
        return optimizer_tensors(engine.optimizer)
    return engine.optimizer.state_tensors()


Events = list[tuple[str, int]]
"""In the order of time: name of a mark and 0, or `MEMORY` and bytes, negative when they are freed."""


def _profiled(call: Callable[[], object]) -> Events:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    found = []
    for event in seen.profiler.kineto_results.events():
        if event.name() == MEMORY:
            found.append((event.start_ns(), MEMORY, event.nbytes()))
        elif event.name() == GRADIENTS:
            found.append((event.start_ns(), event.name(), 0))
    return [(name, size) for _, name, size in sorted(found, key=lambda event: event[0])]


def _peak(events: Events, until: str | None = None) -> int:
    held = most = 0
    for name, size in events:
        if name == until:
            break
        held += size
        most = max(most, held)
    return most
