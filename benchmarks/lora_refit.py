"""What adapters save against training all weights: a refit's time and bytes, and the trainer's memory.

    python benchmarks/lora_refit.py --json FILE [--quick] [--switched-off]

One worker trains a model of 135M parameters with random weights, and one bfloat16 engine follows: the very `sync` of a
run is timed after each step. Each kind runs in its own process, so that its peak of resident memory is its own.

- `lora_refit_vs_full`: median time of a refit of the adapter over that of all weights.
- `lora_refit_bytes_vs_adapter`: bytes that were sent over those of A and B in the engine's dtype.
- `lora_refit_bytes_vs_full`: the same over the bytes of all weights.
- `lora_train_bytes_vs_full`: peak of the resident memory that a trainer adds to its process, against full training.
- `lora_tensor_bytes_vs_full`: bytes of weights, gradients and optimizer state, likewise.
- `reference_copy_bytes`: bytes of weights that are kept aside for the reference policy.

Exit code 1 when a bound is missed. `--switched-off` trains all weights in place of the adapter, which must miss them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

# A script's own folder is on the path, its package is not.
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.common import ROOT, Hold, check_figures, environment, figures_table, load_average, write_json
from nemo_rl.algorithms.losses.nll import NLLLoss
from nemo_rl.config.backends import LoraConfig, OptimizerConfig
from nemo_rl.config.generation import GenerationConfig
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.data.generated import problems
from nemo_rl.data.tokenizer import build_tokenizer
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.collectives import RankSpec
from nemo_rl.distributed.packing import plan_padded
from nemo_rl.distributed.worker_groups import LocalWorkerGroup, WorkerFleet
from nemo_rl.models.generation.interfaces import EngineSpec
from nemo_rl.models.generation.torch_engine.worker import build_engine_worker
from nemo_rl.models.hf.files import local_shard
from nemo_rl.models.policy.tq_policy import Policy
from nemo_rl.models.policy.workers.base import optimizer_tensors
from nemo_rl.models.policy.workers.launch import WorkerSpec, build_policy_worker
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker
from nemo_rl.models.weight_sync.base import RefitParties
from nemo_rl.models.weight_sync.factory import build_weight_sync
from nemo_rl.utils.memory import peak_resident_bytes, reset_peak_resident, resident_bytes

__all__ = ["HOLDS", "KindResult", "Setting", "figures_of", "main"]

HOLDS: Mapping[str, Hold] = {
    "lora_refit_vs_full": Hold(most=0.1),
    "lora_refit_bytes_vs_adapter": Hold(most=1.1),
    "lora_train_bytes_vs_full": Hold(most=0.55),
    "reference_copy_bytes": Hold(most=0),
}
KINDS = ("full", "lora")
TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The model, and what is done with it."""

    hidden: int = 576
    layers: int = 30
    heads: int = 9
    mlp: int = 1536
    vocab: int = 49152
    rank: int = 16
    rows: int = 2
    row_tokens: int = 64
    steps: int = 5
    """Steps and refits after the first ones, which are not timed."""


QUICK = Setting(hidden=64, layers=2, heads=4, mlp=128, vocab=512, rank=4, steps=2)


@dataclass(frozen=True, kw_only=True, slots=True)
class KindResult:
    """What one kind of training took."""

    refit_ms: list[float]
    bytes_sent: list[int]
    train_peak_bytes: int
    """Resident bytes that building and training the worker added, at their peak."""
    tensor_bytes: int
    """Bytes of weights, gradients and optimizer state on the worker."""
    adapter_bytes: int
    """Bytes of A and B in the engine's dtype; 0 without an adapter."""
    reference_bytes: int


def write_model(folder: Path, setting: Setting) -> Path:
    """Write a Llama of the shape of SmolLM2-135M with random weights in bfloat16, and a tokenizer."""
    tokenizer = build_tokenizer(f"{problem.prompt}{problem.answer}" for problem in problems(50, seed=1))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=setting.vocab,
        hidden_size=setting.hidden,
        num_hidden_layers=setting.layers,
        num_attention_heads=setting.heads,
        num_key_value_heads=max(1, setting.heads // 3),
        intermediate_size=setting.mlp,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    return folder


def measure(kind: str, model: Path, setting: Setting) -> KindResult:
    """Train and refit in this process."""
    torch.set_num_threads(1)
    config = PolicyConfig(
        model_name=str(model),
        precision="float32",
        max_total_sequence_length=setting.row_tokens,
        train_global_batch_size=setting.rows,
        lora=LoraConfig(enabled=True, rank=setting.rank) if kind == "lora" else LoraConfig(),
        optimizer=OptimizerConfig(kwargs={"lr": 1e-4, "weight_decay": 0.0}),
        generation=GenerationConfig(precision="bfloat16", max_new_tokens=8),
    )
    # Full training is spared the copy of its reference, which adapters do without where it is asked for.
    spec = WorkerSpec(
        policy=config,
        rank=RankSpec(rank=0, world_size=1),
        num_steps=99,
        keep_reference=kind == "lora",
        seed=0,
    )
    made = list[PolicyWorker]()

    def build() -> PolicyWorker:
        made.append(build_policy_worker(spec))
        return made[0]

    before = resident_bytes()
    reset_peak_resident()
    group = LocalWorkerGroup(build)
    policy, batch = Policy(group, timeout_s=TIMEOUT_S), _batch(setting)
    plan = plan_padded([setting.row_tokens] * setting.rows, capacity=setting.row_tokens * setting.rows, dp_world=1)
    policy.prepare_for_training()
    policy.train(batch, NLLLoss(), plan=plan)
    tensors = _tensor_bytes(made[0])
    peak = peak_resident_bytes() - before
    engines = WorkerFleet([LocalWorkerGroup(lambda: build_engine_worker(EngineSpec(policy=config)))])
    parties = RefitParties(policy=group, engines=engines, timeout_s=TIMEOUT_S, sends_adapters=config.lora.is_native)
    sync, times, sent = build_weight_sync("payload", parties, address="127.0.0.1"), list[float](), list[int]()
    for version in range(setting.steps + 1):
        sync.sync(version)
        assert sync.report is not None
        if version:
            times.append(sync.report.ms)
            sent.append(sync.report.bytes_sent)
        policy.prepare_for_training()
        policy.train(batch, NLLLoss(), plan=plan)
    infos = made[0].engine.adapter_infos()
    reference = made[0].reference
    found = KindResult(
        refit_ms=times,
        bytes_sent=sent,
        train_peak_bytes=peak,
        tensor_bytes=tensors,
        adapter_bytes=sum(2 * torch.Size(info.shape).numel() for info in infos.values()),
        reference_bytes=sum(each.nbytes for each in reference or ()),
    )
    engines.shutdown()
    group.shutdown()
    return found


def _batch(setting: Setting) -> BatchedDataDict:
    generator = torch.Generator().manual_seed(7)
    shape = (setting.rows, setting.row_tokens)
    lengths = torch.full((setting.rows,), setting.row_tokens)
    mask = torch.ones(shape, dtype=torch.bool)
    mask[:, 0] = False
    return BatchedDataDict(
        {
            "input_ids": torch.randint(3, 60, shape, generator=generator, dtype=torch.int32),
            "input_lengths": lengths,
            "token_mask": mask,
            "sample_mask": torch.ones(setting.rows),
        }
    )


def _tensor_bytes(worker: PolicyWorker) -> int:
    """Return the bytes of this rank's weights, of the gradients of trained ones, and of the optimizer's state."""
    weights = {id(weight): local_shard(weight) for weight in worker.engine.model.parameters()}  # type: ignore[attr-defined]
    trained = [p for p in worker.engine.model.parameters() if p.requires_grad]  # type: ignore[attr-defined]
    state = optimizer_tensors(worker.engine.optimizer)  # type: ignore[attr-defined]
    return (
        sum(weight.nbytes for weight in weights.values())
        + sum(local_shard(weight).nbytes for weight in trained)
        + sum(local_shard(value).nbytes for _, value in state)
    )


def figures_of(full: KindResult, lora: KindResult) -> dict[str, float]:
    """Return the figures by name."""
    sent = max(lora.bytes_sent)
    return {
        "lora_refit_vs_full": statistics.median(lora.refit_ms) / statistics.median(full.refit_ms),
        "lora_refit_bytes_vs_adapter": sent / lora.adapter_bytes if lora.adapter_bytes else float(sent),
        "lora_refit_bytes_vs_full": sent / max(full.bytes_sent),
        "lora_train_bytes_vs_full": lora.train_peak_bytes / full.train_peak_bytes,
        "lora_tensor_bytes_vs_full": lora.tensor_bytes / full.tensor_bytes,
        "reference_copy_bytes": float(lora.reference_bytes),
    }


def _apart(kind: str, model: Path, setting: Setting) -> KindResult:
    """Measure in its own process."""
    command = [
        sys.executable,
        __file__,
        "--kind",
        kind,
        "--model",
        str(model),
        "--setting",
        json.dumps(asdict(setting)),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, env=environment, cwd=ROOT
    )
    return KindResult(**json.loads(done.stdout.splitlines()[-1]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", type=Path, help="file for raw samples and figures")
    parser.add_argument("--quick", action="store_true", help="a tiny model; the bounds are not checked")
    parser.add_argument("--switched-off", action="store_true", help="plant a fault: all weights are trained and sent")
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--setting", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.kind is not None:
        print(json.dumps(asdict(measure(given.kind, given.model, Setting(**given.setting)))))
        return 0
    if given.json is None:
        parser.error("--json: expected a file")
    load_before, setting = load_average(), QUICK if given.quick else Setting()
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder), setting)
        full, lora = (_apart("full" if given.switched_off else kind, model, setting) for kind in KINDS)
    figures = figures_of(full, lora)
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
        "full": asdict(full),
        "lora": asdict(lora),
    }
    console.print(f"written to {write_json(given.json, report)}")
    for line in missed:
        console.print(line)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
