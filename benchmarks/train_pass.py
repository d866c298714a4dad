"""What a training pass costs besides its arithmetic, counted on a CPU: operations, synchronisations, bytes.

    python benchmarks/train_pass.py --json FILE [--quick] [--switched-off]

The very `train` and `get_logprobs` of a policy worker run, on one rank, with chunks of logits as large as on a GPU. An
operation is what torch dispatches and is no view: on a GPU about one launch. Operations of the optimizer, which is one
fused operation there, are left out. The baseline is a plain loop around the same transformers model
(`pass_workload.PlainLoop`), over one row of as many tokens.

- `train_ops_vs_plain_*`, `logprob_ops_vs_plain_*`: operations over those of the plain loop, for each worker.
- `train_ops_growth_*`, `logprob_ops_growth_*`: operations at four times the rows over those at one.
- `syncs_per_step`: most calls of this project that wait for the device in a step of four microbatches, of all losses.
- `gradient_share_N`: bytes of gradients of a rank between microbatches, over an equal share in float32, N ranks.
- `saved_bytes_by_vocabulary`: bytes that head and loss keep for backward per trained token, at 152k over 8k entries.
- `peak_vs_states`: peak bytes of tensors in a pass over those of weights, gradients and optimizer, the optimizer's
  own step left out; `_tied` with one matrix for embedding and head, whose two gradients autograd adds out of place.
- `attention_ops_by_lengths`: operations of attention without the operation of this project, 16 lengths over one.
- `moved_bytes`: bytes that log-probabilities move to the host and back where engines have devices of their own.
- `refit_calls`, `refit_calls_by_buckets`: calls of the driver to one rank and one engine in a refit of one bucket, and
  how many more there are in a refit of many.
- `decode_growth`: seconds of a turn of the embedded engine at 2,000 over those at 200 cached tokens, of one row, and
  `_padded` of two rows of different lengths.

Exit code 1 when a bound is missed. `--switched-off` gives attention a call per length, chunks of a CPU's size, whole
gradients and moves of the optimizer, which must miss them.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

# A script's own folder is on the path, its package is not.
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from rich.console import Console
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.common import Hold, check_figures, environment, figures_table, load_average, write_json
from benchmarks.dispatched_ops import DispatchedOps, is_in_optimizer
from benchmarks.gradient_bytes import FLOAT32_BYTES, gradient_shares
from benchmarks.pass_surroundings import around_the_pass
from benchmarks.pass_workload import (
    PROMPT_TOKENS,
    SHAPES,
    ModelShape,
    PlainLoop,
    Work,
    loss_of_recipe,
    make_worker,
    write_model,
)
from nemo_rl.algorithms.losses.nll import NLLLoss
from nemo_rl.algorithms.losses.policy_loss import DistillationLoss, PolicyLoss
from nemo_rl.config.distillation import DistillationConfig
from nemo_rl.config.loss import LossConfig
from nemo_rl.config.parts import LOSSES
from nemo_rl.distributed.collectives import destroy_process_group
from nemo_rl.models.attention import varlen
from nemo_rl.models.head import logits as head_logits
from nemo_rl.models.policy.interfaces import STALENESS, TOPK_IDS, TOPK_LOGPROBS, LossFunction
from nemo_rl.models.policy.steps import StepNumbers
from nemo_rl.models.policy.workers.dtensor_engine import DTensorEngine
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker
from nemo_rl.utils.metrics import Reduction

__all__ = ["HOLDS", "Setting", "losses", "main"]

HOLDS: Mapping[str, Hold] = {
    "train_ops_vs_plain_dtensor": Hold(most=1.15),
    "train_ops_vs_plain_megatron": Hold(most=1.0),
    "logprob_ops_vs_plain_dtensor": Hold(most=1.15),
    "logprob_ops_vs_plain_megatron": Hold(most=1.0),
    "train_ops_growth_dtensor": Hold(most=1.1),
    "train_ops_growth_megatron": Hold(most=1.1),
    "logprob_ops_growth_dtensor": Hold(most=1.1),
    "logprob_ops_growth_megatron": Hold(most=1.1),
    "syncs_per_step": Hold(most=2),
    "gradient_share_2": Hold(most=1.05),
    "gradient_share_4": Hold(most=1.05),
    "saved_bytes_by_vocabulary": Hold(most=1.1),
    "peak_vs_states": Hold(most=1.5),
    "attention_ops_by_lengths": Hold(most=4),
    "moved_bytes": Hold(most=0),
    "refit_calls_by_buckets": Hold(most=0),
    "refit_calls": Hold(most=12),
    "decode_growth": Hold(most=1.3),
    "decode_growth_padded": Hold(most=1.3),
}
ENGINES = ("dtensor", "megatron")
TOP_K = 4
"""Tokens of a teacher."""
LENGTHS = [225, 195, 172, 145, 122, 95, 65]
"""1,019 tokens in rows of different lengths."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The sizes of the benchmark."""

    shape: ModelShape = SHAPES["narrow"]
    small_vocab: int = 8192
    peak_hidden: int = 256
    peak_tokens: int = 512
    gradient_ranks: tuple[int, ...] = (2, 4)


QUICK = Setting(
    shape=replace(SHAPES["narrow"], layers=2, vocab=2048),
    small_vocab=256,
    peak_hidden=64,
    peak_tokens=128,
    gradient_ranks=(2,),
)


def losses() -> dict[str, LossFunction]:
    """Return every loss of this project by a name; the policy losses add a KL."""
    made: dict[str, LossFunction] = {"nll": NLLLoss()}
    for name in LOSSES.builtin:
        made[name] = PolicyLoss(config=LossConfig(name=name), by_staleness=True)
    made["entropy"] = PolicyLoss(config=LossConfig(entropy_coefficient=0.01))
    made["corrected"] = PolicyLoss(
        config=LossConfig(
            use_importance_sampling_correction=True,
            truncated_importance_sampling_type="tis",
            truncated_importance_sampling_ratio=2.0,
        )
    )
    made["distillation"] = DistillationLoss(
        config=LossConfig(distillation=DistillationConfig(enabled=True, top_k=TOP_K))
    )
    return made


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Cut logits into chunks of a GPU's size meanwhile."""
    own = head_logits.CHUNK_ELEMENTS["cpu"]
    head_logits.CHUNK_ELEMENTS["cpu"] = head_logits.CHUNK_ELEMENTS["cuda"]
    try:
        yield
    finally:
        head_logits.CHUNK_ELEMENTS["cpu"] = own


def count_ops(call: Callable[[], object]) -> int:
    """Return the operations of the second call: the first makes what is kept."""
    call()
    with DispatchedOps() as counter:
        call()
    return counter.total


def ops_of_worker(folder: Path, engine: str, work: Work) -> dict[str, int]:
    """Return operations of a training step and of log-probabilities."""
    worker, loss = make_worker(folder, tokens=work.tokens, engine=engine), loss_of_recipe()
    batch, plan = work.batch, work.plan
    assert len(plan.microbatches[0]) == 1, "one microbatch is compared with one step of the plain loop"
    try:
        return {
            "train": count_ops(lambda: worker.train(batch, loss, gbs=len(work.lengths), plan=plan)),
            "logprob": count_ops(lambda: worker.get_logprobs(batch, plan=plan)),
        }
    finally:
        worker.shutdown()
        destroy_process_group()


def ops_figures(work_dir: Path, setting: Setting) -> dict[str, float]:
    """Count operations beside those of the plain loop, and at four times the tokens."""
    folder = write_model(work_dir / "ops", setting.shape, device="cpu")
    once, more = (Work(lengths=LENGTHS * times, vocab=setting.shape.vocab, tokens=1024 * times) for times in (1, 4))
    loop = PlainLoop(setting.shape, once, device="cpu")
    plain = {"train": count_ops(loop.step), "logprob": count_ops(loop.score)}
    loop.close()
    figures: dict[str, float] = {f"{name}_ops_plain": count for name, count in plain.items()}
    for engine in ENGINES:
        with as_on_a_gpu():
            found, grown = ops_of_worker(folder, engine, once), ops_of_worker(folder, engine, more)
        for name, count in found.items():
            figures[f"{name}_ops_{engine}"] = count
            figures[f"{name}_ops_vs_plain_{engine}"] = count / plain[name]
            figures[f"{name}_ops_growth_{engine}"] = grown[name] / count
    return figures


def syncs_of_losses(folder: Path, vocab: int) -> dict[str, dict[str, int]]:
    """Return for each loss and worker the calls that wait for the device in one step of four microbatches."""
    work = Work(lengths=[20, 14, 17, 12, 9, 20, 13, 16], vocab=vocab, tokens=40)
    batch = work.batch
    count, width = batch.tensor("input_ids").shape
    batch[STALENESS] = torch.arange(count, dtype=torch.int32) % 3
    batch[TOPK_IDS] = torch.arange(TOP_K, dtype=torch.int32).expand(count, width, TOP_K).contiguous()
    batch[TOPK_LOGPROBS] = torch.full((count, width, TOP_K + 1), -3.0)
    found: dict[str, dict[str, int]] = {}
    for engine in ENGINES:
        worker = make_worker(folder, tokens=work.tokens, engine=engine)
        assert len(work.plan.microbatches[0]) == 4, work.plan
        try:
            for name, loss in losses().items():
                # The first step makes what is kept, such as the moments of the optimizer.
                worker.train(batch, loss, gbs=count, plan=work.plan)
                with DispatchedOps() as counter, _reads_counted() as reads:
                    worker.train(batch, loss, gbs=count, plan=work.plan)
                own = {at: n for at, n in counter.syncs.items() if not at.endswith("elsewhere")}
                found[f"{name} {engine}"] = {**own, "numbers of the step": len(reads)}
        finally:
            worker.shutdown()
            destroy_process_group()
    return found


@contextmanager
def _reads_counted() -> Iterator[list[None]]:
    """Count reads of a step's numbers meanwhile: on a CPU torch shows no wait for them."""
    own, reads = StepNumbers.read, list[None]()

    def read(numbers: StepNumbers) -> tuple[float, tuple[dict[str, Reduction], ...], list[int]]:
        reads.append(None)
        return own(numbers)

    StepNumbers.read = read  # type: ignore[method-assign, assignment]
    try:
        yield reads
    finally:
        StepNumbers.read = own  # type: ignore[method-assign]


def saved_bytes_per_token(work_dir: Path, setting: Setting, vocab: int) -> float:
    """Return the bytes that head and loss keep for backward for one more trained token."""
    shape = replace(SHAPES["tiny"], vocab=vocab)
    folder = write_model(work_dir / f"saved_{vocab}", shape, device="cpu")
    work = Work(lengths=[setting.peak_tokens // 2] * 2, vocab=vocab, tokens=setting.peak_tokens)
    worker, found = make_worker(folder, tokens=work.tokens, precision="float32"), list[int]()
    try:
        for trained in (1, 2):
            batch = work.batch
            batch["sample_mask"] = torch.tensor([1.0, float(trained - 1)])
            with _SavedOutsideLayers(worker) as saved:
                worker.train(batch, loss_of_recipe(), gbs=2, plan=work.plan)
            found.append(saved.num_bytes)
    finally:
        worker.shutdown()
        destroy_process_group()
    return (found[1] - found[0]) / (work.lengths[0] - PROMPT_TOKENS)


class _SavedOutsideLayers:
    """Counts the bytes of tensors that autograd keeps while no decoder layer runs."""

    def __init__(self, worker: PolicyWorker) -> None:
        self.num_bytes, self._is_inside = 0, False
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept)
        engine = worker.engine
        assert isinstance(engine, DTensorEngine)
        decoder = engine.model.hf.get_decoder()
        self._handles = [
            decoder.register_forward_pre_hook(lambda *_: self._enter(True)),
            decoder.register_forward_hook(lambda *_: self._enter(False)),
        ]

    def __enter__(self) -> _SavedOutsideLayers:
        self._hooks.__enter__()
        return self

    def __exit__(self, *reason: object) -> None:
        self._hooks.__exit__(*reason)
        for handle in self._handles:
            handle.remove()

    def _enter(self, is_inside: bool) -> None:
        self._is_inside = is_inside

    def _pack(self, kept: torch.Tensor) -> torch.Tensor:
        self.num_bytes += 0 if self._is_inside else kept.numel() * kept.element_size()
        return kept


class _PeakBytes(TorchDispatchMode):
    """Follows the bytes of all storages that operations make, and their most at one time before the optimizer steps:
    on a GPU it is one operation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.most = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if is_in_optimizer(sys._getframe(1)):
            return found
        for each in found if isinstance(found, list | tuple) else (found,):
            if isinstance(each, torch.Tensor):
                self._follow(each.untyped_storage())
        return found

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._seen:
            return
        self._seen.add(key)
        self.live += storage.nbytes()
        self.most = max(self.most, self.live)
        weakref.finalize(storage, self._free, key, storage.nbytes())

    def _free(self, key: int, num_bytes: int) -> None:
        self._seen.discard(key)
        self.live -= num_bytes


def peak_vs_states(work_dir: Path, setting: Setting, *, tied: bool) -> float:
    """Return the peak of a training pass over the bytes of weights, gradients and optimizer in float32."""
    shape = replace(SHAPES["tiny"], hidden=setting.peak_hidden, vocab=setting.shape.vocab, tied=tied)
    folder = write_model(work_dir / f"peak_{tied}", shape, device="cpu")
    work = Work(lengths=[setting.peak_tokens + PROMPT_TOKENS], vocab=shape.vocab, tokens=setting.peak_tokens + 8)
    worker = make_worker(folder, tokens=work.tokens, precision="float32")
    engine = worker.engine
    assert isinstance(engine, DTensorEngine)
    try:
        worker.train(work.batch, loss_of_recipe(), gbs=1, plan=work.plan)
        weights = sum(weight.numel() for weight in engine.model.parameters())
        gc.collect()
        with _PeakBytes() as peak:
            worker.train(work.batch, loss_of_recipe(), gbs=1, plan=work.plan)
    finally:
        worker.shutdown()
        destroy_process_group()
    # Weights and the two moments were there before.
    return (peak.most + 3 * FLOAT32_BYTES * weights) / (4 * FLOAT32_BYTES * weights)


def attention_ops_by_lengths() -> float:
    """Return operations of packed attention as calls of the fused kernel, for 16 lengths over those for one."""
    counts = []
    for lengths in (tuple(range(3, 19)), (10,) * 16):
        segments = varlen.Segments(lengths=lengths)
        query, key, value = (torch.randn(1, heads, sum(lengths), 8) for heads in (4, 2, 2))
        assert len(segments.local_order) == sum(lengths) and segments.runs
        module = torch.nn.Module()
        # A cap on the scores is what the operation of this project does not have.
        call = partial(varlen.varlen_attention, module, query, key, value, None, segments=segments)
        counts.append(count_ops(partial(call, softcap=50.0)))
    return counts[0] / counts[1]


@contextmanager
def switched_off() -> Iterator[None]:
    """Take the ways that this benchmark is about away meanwhile."""
    plain, most = varlen._Options.is_plain, varlen.MOST_GROUPS
    varlen._Options.is_plain = property(lambda _: False)  # type: ignore[assignment, method-assign]
    varlen.MOST_GROUPS = 16
    varlen._grouped.cache_clear()
    own, head_logits.CHUNK_ELEMENTS["cuda"] = head_logits.CHUNK_ELEMENTS["cuda"], head_logits.CHUNK_ELEMENTS["cpu"]
    try:
        yield
    finally:
        varlen._Options.is_plain = plain  # type: ignore[method-assign]
        varlen.MOST_GROUPS = most
        varlen._grouped.cache_clear()
        head_logits.CHUNK_ELEMENTS["cuda"] = own


def measure(work_dir: Path, setting: Setting, *, is_on: bool) -> tuple[dict[str, float], dict[str, dict[str, int]]]:
    """Return the figures, and where each loss waits for the device."""
    figures = ops_figures(work_dir, setting)
    syncs = syncs_of_losses(write_model(work_dir / "syncs", SHAPES["tiny"], device="cpu"), SHAPES["tiny"].vocab)
    figures["syncs_per_step"] = max(sum(found.values()) for found in syncs.values())
    for ranks in setting.gradient_ranks:
        accumulation = "sharded" if is_on else "whole"
        shares = gradient_shares(work_dir / "gradients", ranks, accumulation=accumulation)
        figures[f"gradient_share_{ranks}"] = max(shares)
    large, small = (
        saved_bytes_per_token(work_dir, setting, size) for size in (setting.shape.vocab, setting.small_vocab)
    )
    figures |= {"saved_bytes_per_token": large, "saved_bytes_by_vocabulary": large / small}
    figures["peak_vs_states"] = peak_vs_states(work_dir, setting, tied=False)
    figures["peak_vs_states_tied"] = peak_vs_states(work_dir, setting, tied=True)
    figures["attention_ops_by_lengths"] = attention_ops_by_lengths()
    return figures | around_the_pass(work_dir / "syncs", is_on=is_on), syncs


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the report")
    parser.add_argument(
        "--quick", action="store_true", help="a small model, whose operations are not compared with the plain loop"
    )
    parser.add_argument("--switched-off", action="store_true", help="without the ways that this is about")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    setting, before = QUICK if options.quick else Setting(), load_average()
    with tempfile.TemporaryDirectory() as work_dir, switched_off() if options.switched_off else nullcontext():
        figures, syncs = measure(Path(work_dir), setting, is_on=not options.switched_off)
    report = {
        **environment(),
        "load_before": before,
        "load_after": load_average(),
        "setting": asdict(setting),
        "figures": figures,
        "syncs": syncs,
    }
    if options.json is not None:
        write_json(options.json, report)
    # A small model does not outweigh what a step costs once, and a test asserts no seconds.
    by_size = [name for name in HOLDS if "_vs_plain_" in name or name.startswith(("peak", "decode"))]
    left_out = [*by_size, *(name for name in HOLDS if name not in figures)] if options.quick else []
    holds = {name: hold for name, hold in HOLDS.items() if name not in left_out}
    Console().print(figures_table(figures, holds))
    problems = check_figures(figures, holds)
    for line in problems:
        Console(stderr=True).print(line)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
