"""What a checkpoint costs: the seconds for which it blocks a step, and the bandwidth at which all ranks write it.

    python benchmarks/checkpoint.py --json FILE [--quick] [--switched-off]

Four gloo ranks of the policy worker save beside the training (`PolicyWorker.begin_save`), of which the beginning blocks
a step; compared with one copy of the same tensors. What they write is compared with four plain writers of as many bytes
into the same folder. Each is repeated by turns; ratios are medians of pairs. `--switched-off` plants the fault that one
rank writes all of the weights, as the driver of a notebook would.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest.mock import patch

# A script's own folder is on the path, its package is not.
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from rich.console import Console
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.common import Hold, check_figures, environment, figures_table, load_average, paired_ratio, write_json
from benchmarks.tiny_model import write_random_model
from nemo_rl.algorithms.losses.nll import NLLLoss
from nemo_rl.config.backends import DTensorConfig, MegatronConfig
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.collectives import RankSpec
from nemo_rl.distributed.local_job import run_job
from nemo_rl.models.hf import writing
from nemo_rl.models.hf.files import local_shard, own_copy
from nemo_rl.models.policy.microbatch import fixed_plan
from nemo_rl.models.policy.workers.compose import worker_of_job
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker

ROWS, WIDTH = 2, 16
TIMEOUT_S = 600.0
HOLDS = {
    "dtensor: blocks / one copy": Hold(most=1.5),
    "megatron: blocks / one copy": Hold(most=1.5),
    "dtensor: bandwidth / plain writers": Hold(least=0.8),
    "megatron: bandwidth / plain writers": Hold(least=0.8),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Sizes of the model, and repetitions."""

    hidden: int = 1024
    layers: int = 8
    vocab: int = 16_384
    ranks: int = 4
    repeats: int = 5


QUICK = Setting(hidden=64, layers=2, vocab=512, ranks=2, repeats=2)
WORKERS = ("dtensor", "megatron")


@dataclass(kw_only=True, slots=True)
class Samples:
    """Seconds of one worker kind, of the slowest rank."""

    copy: list[float]
    blocks: list[float]
    written: list[float]
    plain: list[float]
    bytes_written: int


def write_model(folder: Path, setting: Setting) -> Path:
    """Write a random model and its tokenizer."""
    write_random_model(folder)
    torch.manual_seed(0)
    config = Qwen3Config.from_pretrained(folder)
    config.update(
        {
            "hidden_size": setting.hidden,
            "num_hidden_layers": setting.layers,
            "layer_types": ["full_attention"] * setting.layers,
            "vocab_size": setting.vocab,
            "intermediate_size": 3 * setting.hidden,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": setting.hidden // 8,
        }
    )
    Qwen3ForCausalLM(config).save_pretrained(str(folder))
    return folder


def _policy(folder: Path, worker: str, setting: Setting) -> PolicyConfig:
    is_megatron = worker == "megatron"
    tensor = {"tensor_model_parallel_size": 2} if is_megatron else {}
    return PolicyConfig(
        model_name=str(folder),
        precision="float32",
        max_total_sequence_length=WIDTH,
        train_global_batch_size=ROWS * setting.ranks,
        train_micro_batch_size=ROWS,
        dtensor_cfg=DTensorConfig(enabled=not is_megatron),
        megatron_cfg=MegatronConfig(enabled=is_megatron, **tensor),
    )


def _rank(spec: RankSpec, policy: PolicyConfig, repeats: int, out: Path, is_switched_off: bool) -> Samples:
    with (
        worker_of_job(spec, policy, uses_gpu=False, num_threads=1, timeout_s=TIMEOUT_S, num_steps=1, seed=0) as worker,
        patch.object(writing, "_writer_of", (lambda *_: 0) if is_switched_off else writing._writer_of),
    ):
        _train(worker)
        found = Samples(copy=[], blocks=[], written=[], plain=[], bytes_written=0)
        for number in range(repeats + 1):
            if spec.rank == 0:
                shutil.rmtree(out, ignore_errors=True)
                out.mkdir()
            _measure(worker, out, found, is_warm=number > 0)
    return found


def _train(worker: PolicyWorker) -> None:
    """(collective) An update, so that the optimizer has state."""
    batch = BatchedDataDict(
        {
            "input_ids": torch.randint(7, 300, (ROWS, WIDTH), dtype=torch.int32),
            "input_lengths": torch.full((ROWS,), WIDTH),
            "token_mask": torch.ones(ROWS, WIDTH, dtype=torch.bool),
            "sample_mask": torch.ones(ROWS),
        }
    )
    plan = fixed_plan(ROWS, rows_per_step=ROWS, rows_per_microbatch=ROWS, pad_to=WIDTH)
    worker.train(batch, NLLLoss(), plan=plan)


def _measure(worker: PolicyWorker, out: Path, found: Samples, *, is_warm: bool) -> None:
    """(collective) One repetition; the first, which makes buffers and plans, is not counted."""
    engine = worker.engine
    held = [*(tensor for _, tensor in engine.weights()), *engine.moments()]
    copy = _timed(lambda: [own_copy(local_shard(tensor)) for tensor in held])
    blocks = _timed(lambda: worker.begin_save(weights=out / "weights", optimizer=out / "optimizer", tokenizer=None))
    written = worker.finish_save(timeout_s=TIMEOUT_S)
    total = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    share = torch.ones(total // worker.world_size, dtype=torch.uint8)
    plain = _timed(lambda: _write_plainly(out / f"plain_{worker.rank}", share))
    slowest = torch.tensor([copy, blocks, written, plain], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    if is_warm:
        for name, seconds in zip(("copy", "blocks", "written", "plain"), slowest.tolist(), strict=True):
            getattr(found, name).append(seconds)
        found.bytes_written = total


def _timed(action: object) -> float:
    """(collective) Return the seconds of an action that all ranks begin together."""
    assert callable(action)
    dist.barrier()
    started = time.monotonic()
    done = action()
    seconds = time.monotonic() - started
    del done
    return seconds


def _write_plainly(path: Path, content: torch.Tensor) -> None:
    with path.open("wb") as file:
        file.write(content.numpy().data)
        os.fsync(file.fileno())


def figures_of(kinds: dict[str, Samples]) -> dict[str, float]:
    """Return ratios of medians of pairs, and the seconds themselves."""
    figures = {}
    for name, samples in kinds.items():
        figures[f"{name}: blocks / one copy"] = paired_ratio(samples.blocks, samples.copy)
        figures[f"{name}: bandwidth / plain writers"] = paired_ratio(samples.plain, samples.written)
        figures[f"{name}: MB/s"] = samples.bytes_written / 1e6 / sorted(samples.written)[len(samples.written) // 2]
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="file for raw samples and figures")
    parser.add_argument("--folder", type=Path, help="where checkpoints are written; default: a temporary folder")
    parser.add_argument("--quick", action="store_true", help="a tiny model; the bounds are not checked")
    parser.add_argument("--switched-off", action="store_true", help="plant a fault: one rank writes all weights")
    given = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    load_before, setting = load_average(), QUICK if given.quick else Setting()
    kinds: dict[str, Samples] = {}
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        model = write_model(Path(folder) / "model", setting)
        for worker in WORKERS:
            ranks = run_job(
                setting.ranks,
                _rank,
                _policy(model, worker, setting),
                setting.repeats,
                Path(folder) / "saved",
                given.switched_off,
                timeout_s=TIMEOUT_S,
            )
            first = ranks[0]
            assert isinstance(first, Samples)
            kinds[worker] = first
    figures = figures_of(kinds)
    holds = {} if given.quick and not given.switched_off else HOLDS
    console = Console()
    console.print(figures_table(figures, holds))
    missed = check_figures(figures, holds)
    report = {
        **environment(),
        "load_before": load_before,
        "load_after": load_average(),
        "setting": asdict(setting),
        "figures": figures,
        "problems": missed,
        **{name: asdict(samples) for name, samples in kinds.items()},
    }
    console.print(f"written to {write_json(given.json, report)}")
    for line in missed:
        console.print(line)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
