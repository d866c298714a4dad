"""What the project does on one GPU beside a plain loop around the same transformers model, in the minutes of one loan.

    python benchmarks/gpu_report.py --out DIR [--part NAME ...] [--resume] [--total SECONDS] [--device cpu --tiny]

Parts run one after the other in one process, most valuable first, each under its own limit; a part that passes it, or
breaks the GPU, ends the process, and the next one gets a new one. Each appends what it finds to DIR/results.jsonl at
once; `--resume` leaves out the parts that are there. The table for docs/gpu.md is written to DIR/table.md, also after a
part that failed. `--device cpu --tiny` runs all that has a form on a CPU and says of the
rest that it needs CUDA. Needs torch, transformers and what `make gpu-wheels` carries; no Ray, no vLLM, no network.

Share of peak: `ModelShape.flops` over seconds over 989 TFLOP/s. Ours and the plain loop run in the same process.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import IO, Any

# A script's own folder is on the path, its package is not.
sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "4")
# cuBLAS reads it with the first product; deterministic passes need it, and on Hopper it is the default size.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import transformers
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import ROOT, commit
from benchmarks.pass_workload import (
    PEAK_FLOPS,
    SHAPES,
    PlainLoop,
    Work,
    loss_of_recipe,
    make_worker,
    varied_lengths,
    write_model,
)
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.distributed.collectives import destroy_process_group
from nemo_rl.models.attention.varlen import Segments, varlen_attention
from nemo_rl.models.generation.interfaces import GenerationRequest, SamplingParams
from nemo_rl.models.generation.torch_engine import TorchEngine
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker

__all__ = ["PARTS", "main", "table"]

MARK = "@result "
"""Begins a line with the result of a part."""
CPU_SLACK = 10.0
"""Times longer that a part may take on a CPU, which may be busy."""
START_S = 45.0
"""Seconds that a process may take to import what it needs, and for the card to start."""
TESTS = (
    "test_engine_records_on_gpu.py",
    "test_worker_on_gpu.py",
    "test_refit_on_gpu.py",
    "test_router_replay_on_gpu.py",
    "test_lora_on_gpu.py",
)
"""Files of tests/gpu, those that never ran first."""
Found = Mapping[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a part runs."""

    device: str
    models: Path
    is_tiny: bool

    @property
    def is_cuda(self) -> bool:
        return self.device == "cuda"

    def shape(self, name: str) -> str:
        """Return the name of the shape that stands for this one here."""
        return "tiny" if self.is_tiny else name

    def tokens(self, count: int) -> int:
        return 256 if self.is_tiny else count

    def folder(self, shape: str) -> Path:
        return write_model(self.models / shape, SHAPES[shape], device=self.device)

    def wait(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def timed(self, call: Callable[[], object], *, warm: int = 2, times: int = 4) -> dict[str, object]:
        """Return the median of the seconds, all of them, and the peak of allocated memory."""
        for _ in range(warm):
            call()
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        samples = []
        for _ in range(times):
            self.wait()
            start = time.perf_counter()
            call()
            self.wait()
            samples.append(time.perf_counter() - start)
        peak = torch.cuda.max_memory_allocated() / 1e9 if self.is_cuda else 0.0
        return {"s": median(samples), "samples": samples, "peak_gb": round(peak, 2)}

    def profiled(self, call: Callable[[], object]) -> dict[str, object]:
        """Return launches, copies and synchronisations of one call, and the seconds in which kernels ran."""
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.is_cuda else [])]
        with profile(activities=kinds) as profiler:
            call()
            self.wait()
        events = profiler.key_averages()
        counts = {event.key: event.count for event in events}

        def total(*starts: str) -> int:
            return sum(count for name, count in counts.items() if name.startswith(starts))

        on_device = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
        return {
            "kernel_s": sum(event.self_device_time_total for event in on_device) / 1e6,
            "launches": total("cudaLaunchKernel", "cuLaunchKernel"),
            "copies": total("cudaMemcpy"),
            "syncs": total("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"),
            "operations": total("aten::", "nrl::", "torch_attn::"),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One measurement."""

    run: Callable[[Place], Found]
    limit_s: float
    needs_cuda: bool = False


def ceilings(place: Place) -> Found:
    """Measure what the card can do at most."""
    size = 8192 if place.is_cuda else 256
    left, right = (torch.randn(size, size, device=place.device, dtype=torch.bfloat16) for _ in range(2))
    product_s: Any = place.timed(lambda: left @ right, warm=3, times=10)["s"]
    source = torch.randn(2**30 if place.is_cuda else 2**16, device=place.device)
    target = torch.empty_like(source)
    copy_s: Any = place.timed(lambda: target.copy_(source), times=5)["s"]
    found: dict[str, object] = {
        "card": torch.cuda.get_device_name() if place.is_cuda else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tflops": 2 * size**3 / product_s / 1e12,
        "copy_gb_s": 2 * source.nbytes / copy_s / 1e9,
    }
    if place.is_cuda:
        pinned, part = torch.empty(2**28).pin_memory(), source[: 2**28]
        pinned_s: Any = place.timed(lambda: pinned.copy_(part, non_blocking=True), times=3)["s"]
        found["to_host_pinned_gb_s"] = part.nbytes / pinned_s / 1e9
    return found


def gpu_tests(place: Place) -> Found:
    """Run files of tests/gpu, each under its own limit."""
    found: dict[str, object] = {}
    for name in TESTS:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "-q",
            "--timeout",
            "60",
            f"tests/gpu/{name}",
        ]
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
            found[name] = done.stdout.strip().splitlines()[-1:] + ([done.stdout[-1500:]] if done.returncode else [])
        except subprocess.TimeoutExpired:
            found[name] = "ran longer than 60 s"
    return found


def deterministic(place: Place) -> Found:
    """Train two workers that are made anew and compare them to the bit, without and with the key."""
    shape = place.shape("0.5B")
    work = Work(lengths=varied_lengths(place.tokens(4096)), vocab=SHAPES[shape].vocab, tokens=place.tokens(4096))
    found: dict[str, object] = {}
    for is_strict in (False, True):
        ends = []
        for _ in range(2):
            worker = make_worker(place.folder(shape), tokens=work.tokens, device=place.device, deterministic=is_strict)
            steps = [
                worker.train(work.batch, loss_of_recipe(), gbs=len(work.lengths), plan=work.plan) for _ in range(2)
            ]
            weights = {name: weight.clone().cpu() for name, weight in worker.engine.export_weights()}
            ends.append((steps[-1].loss, steps[-1].grad_norm, weights, worker.get_logprobs(work.batch, plan=work.plan)))
            _end(worker)
        differing = [name for name, weight in ends[0][2].items() if not torch.equal(weight, ends[1][2][name])]
        found["strict" if is_strict else "default"] = {
            "losses_equal": ends[0][0] == ends[1][0],
            "norms_equal": ends[0][1] == ends[1][1],
            "differing_weights": len(differing),
            "logprobs_equal": bool(torch.equal(ends[0][3], ends[1][3])),
        }
    return found


def attention(place: Place) -> Found:
    """Compare packed attention with float64, forward and backward, with a window and fewer key heads."""
    found: dict[str, object] = {}
    lengths, dtype = (300, 20, 700, 64), torch.bfloat16 if place.is_cuda else torch.float32
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(1, heads, sum(lengths), 64, generator=generator) for heads in (8, 2, 2)]
    pull = torch.randn(1, sum(lengths), 8, 64, generator=generator)

    def run(device: str, kind: torch.dtype) -> list[torch.Tensor]:
        segments = Segments(lengths=lengths, device=torch.device(device))
        q, k, v = (each.to(device, kind).requires_grad_() for each in given)
        out, _ = varlen_attention(torch.nn.Module(), q, k, v, None, segments=segments)
        grads = torch.autograd.grad(out, [q, k, v], pull.to(device, kind))
        return [part.detach().cpu().double() for part in (out, *grads)]

    for name, here, exact in zip("oqkv", run(place.device, dtype), run("cpu", torch.float64), strict=True):
        found[f"error_{name}"] = float((here - exact).norm() / exact.norm())
    return found


def train_of(
    shape: str,
    *,
    tokens: int,
    is_checkpointed: bool = False,
    microbatches: int = 1,
    engine: str = "dtensor",
    is_packed: bool = True,
    is_compiled: bool = False,
) -> Callable[[Place], Found]:
    """Return the part that times a training step and log-probabilities, and counts one of each."""

    def run(place: Place) -> Found:
        name, width = place.shape(shape), place.tokens(tokens)
        lengths = varied_lengths(width) * microbatches
        model, work = SHAPES[name], Work(lengths=lengths, vocab=SHAPES[name].vocab, tokens=width)
        worker = make_worker(
            place.folder(name),
            tokens=width,
            engine=engine,
            device=place.device,
            is_checkpointed=is_checkpointed,
            is_packed=is_packed,
            is_compiled=is_compiled,
        )
        batch, loss, plan = work.batch, loss_of_recipe(), work.plan if is_packed else None
        trained = int(batch.tensor("token_mask").sum())

        def step() -> None:
            worker.train(batch, loss, gbs=len(lengths), plan=plan)

        first_s = _seconds(step, place)
        flops = model.flops(lengths, trained)
        train = _with_rates(place.timed(step), flops, sum(lengths))
        score = _with_rates(
            place.timed(lambda: worker.get_logprobs(batch, plan=plan), times=3), flops / 3, sum(lengths)
        )
        found = {"first_s": first_s, "train": train, "logprobs": score, "counts": place.profiled(step)}
        if place.is_cuda and engine == "dtensor" and microbatches == 1 and not is_checkpointed:
            found["syncs_in_pass"] = _synchronising_line(step)
        _end(worker)
        return found

    return run


def plain_of(
    shape: str, *, tokens: int, is_checkpointed: bool = False, is_compiled: bool = False
) -> Callable[[Place], Found]:
    """Return the part that times the plain loop."""

    def run(place: Place) -> Found:
        name, width = place.shape(shape), place.tokens(tokens)
        work = Work(lengths=varied_lengths(width), vocab=SHAPES[name].vocab, tokens=width)
        loop = PlainLoop(
            SHAPES[name],
            work,
            device=place.device,
            attention="varlen" if place.is_cuda else "sdpa",
            is_compiled=is_compiled,
            is_checkpointed=is_checkpointed,
        )
        flops, tokens_ = SHAPES[name].flops(work.lengths, sum(work.lengths)), sum(work.lengths)
        found: dict[str, object] = {"first_s": _seconds(loop.step, place)}
        found["train"] = _with_rates(place.timed(loop.step), flops, tokens_)
        found["logprobs"] = _with_rates(place.timed(loop.score, times=3), flops / 3, tokens_)
        found["counts"] = place.profiled(loop.step)
        loop.close()
        return found

    return run


def decode(place: Place) -> Found:
    """Sample 64 rows with the embedded engine and with transformers' `generate`."""
    shape, (rows, prompt, new) = place.shape("0.5B"), (4, 8, 8) if place.is_tiny else (64, 128, 128)
    vocab, folder = SHAPES[shape].vocab, place.folder(shape)
    prompts = torch.randint(7, vocab - 10, (rows, prompt), generator=torch.Generator().manual_seed(3))
    found: dict[str, object] = {"ours": _sampled(place, folder, prompts, new)}
    model = transformers.Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(place.device)
    ids = prompts.to(place.device)
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": new, "min_new_tokens": new, "pad_token_id": 0}

    def generate() -> None:
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)

    found["generate"] = _tokens_per_s(place.timed(generate, warm=1, times=2), rows * new)
    return found


def _sampled(place: Place, folder: Path, prompts: torch.Tensor, new: int) -> dict[str, Any]:
    policy = PolicyConfig(
        model_name=str(folder), precision="bfloat16", max_total_sequence_length=prompts.shape[1] + new
    )
    engine = TorchEngine.from_config(policy, device=place.device, weight_version=0)
    request = GenerationRequest(
        prompt_ids=tuple(tuple(row) for row in prompts.tolist()),
        seeds=tuple(range(len(prompts))),
        sampling=SamplingParams(temperature=1.0, max_new_tokens=new, stop_token_ids=()),
    )
    found = place.timed(lambda: engine.generate(request), warm=1, times=2)
    return _tokens_per_s(found, len(prompts) * new)


def moves(place: Place) -> Found:
    """Move a worker through the states of a step whose engine shares the GPU."""
    shape = place.shape("1.5B")
    work = Work(lengths=varied_lengths(place.tokens(8192)), vocab=SHAPES[shape].vocab, tokens=place.tokens(8192))
    worker, found = make_worker(place.folder(shape), tokens=work.tokens, device=place.device), dict[str, object]()
    worker.train(work.batch, loss_of_recipe(), gbs=len(work.lengths), plan=work.plan)
    for turn in ("first", "again"):
        for name in ("prepare_for_lp_inference", "offload_before_refit", "offload_after_refit", "prepare_for_training"):
            found[f"{name} {turn}"] = _seconds(getattr(worker, name), place)
    _end(worker)
    return found


PARTS: Mapping[str, Part] = {
    "ceilings": Part(run=ceilings, limit_s=30),
    "train 1.5B": Part(run=train_of("1.5B", tokens=8192), limit_s=70),
    "plain 1.5B": Part(run=plain_of("1.5B", tokens=8192), limit_s=45),
    "plain 1.5B compiled": Part(run=plain_of("1.5B", tokens=8192, is_compiled=True), limit_s=75, needs_cuda=True),
    "train 1.5B compiled": Part(run=train_of("1.5B", tokens=8192, is_compiled=True), limit_s=110, needs_cuda=True),
    "tests": Part(run=gpu_tests, limit_s=200, needs_cuda=True),
    "attention": Part(run=attention, limit_s=30),
    "train 7Bx8 recomputed": Part(run=train_of("7Bx8", tokens=8192, is_checkpointed=True), limit_s=70),
    "plain 7Bx8 recomputed": Part(run=plain_of("7Bx8", tokens=8192, is_checkpointed=True), limit_s=45),
    "train 0.5B": Part(run=train_of("0.5B", tokens=16_384), limit_s=60),
    "plain 0.5B": Part(run=plain_of("0.5B", tokens=16_384), limit_s=45),
    "moves": Part(run=moves, limit_s=60),
    "decode": Part(run=decode, limit_s=60),
    "deterministic": Part(run=deterministic, limit_s=60),
    "train 1.5B megatron": Part(run=train_of("1.5B", tokens=8192, engine="megatron"), limit_s=70),
    "train 7Bx8": Part(run=train_of("7Bx8", tokens=8192), limit_s=60),
    "train 1.5B 4 microbatches": Part(run=train_of("1.5B", tokens=8192, microbatches=4), limit_s=70),
    "train 1.5B padded": Part(run=train_of("1.5B", tokens=8192, is_packed=False), limit_s=70),
}
"""Name -> part, most valuable first."""
BASELINES = {
    "train 1.5B": "plain 1.5B",
    "train 7Bx8 recomputed": "plain 7Bx8 recomputed",
    "train 1.5B compiled": "plain 1.5B compiled",
    "train 0.5B": "plain 0.5B",
    "train 1.5B megatron": "plain 1.5B",
    "train 7Bx8": "plain 7Bx8 recomputed",
    "train 1.5B 4 microbatches": "plain 1.5B",
    "train 1.5B padded": "plain 1.5B",
}
"""Part -> the plain loop that it is compared with, in tokens per second."""


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the results as a page of Markdown; parts without one say so."""
    head: Any = results.get("ceilings", {}).get("found", {})
    lines = [
        f"Card: {head.get('card', 'not measured')}; torch {head.get('torch', '?')}, transformers "
        f"{head.get('transformers', '?')}; commit {next((each['commit'] for each in results.values()), '?')}.",
        "",
        "| part | train: tokens/s | share of peak | peak GB | log-probabilities: tokens/s | launches | syncs | train, "
        "log-probabilities vs plain |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in PARTS:
        found = results.get(name, {}).get("found", {})
        if "train" not in found:
            continue
        train, score, counts = found["train"], found["logprobs"], found["counts"]
        base = results.get(BASELINES.get(name, ""), {}).get("found", {})
        ratios = [
            f"{mine['tokens_per_s'] / base[kind]['tokens_per_s']:.2f}"
            for kind, mine in (("train", train), ("logprobs", score))
            if kind in base
        ]
        lines.append(
            f"| {name} | {train['tokens_per_s']:.0f} | {train['share_of_peak']:.1%} | {train['peak_gb']} | "
            f"{score['tokens_per_s']:.0f} | {counts['launches']} | {counts['syncs']} | {', '.join(ratios) or '-'} |"
        )
    lines += ["", "| part | found |", "| --- | --- |"]
    for name in PARTS:
        result = results.get(name)
        if result is None or "train" not in result.get("found", {}):
            told = "not measured" if result is None else json.dumps(result.get("found") or result["problem"])
            lines.append(f"| {name} | {told.replace('|', '/')[:600]} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for results.jsonl and table.md")
    parser.add_argument("--part", action="append", choices=list(PARTS), help="only this part; may be repeated")
    parser.add_argument("--resume", action="store_true", help="leave out parts that have a result")
    parser.add_argument("--total", type=float, help="seconds for all parts; 290 on a GPU, 3000 on a CPU")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of two layers in place of each")
    parser.add_argument(
        "--models", type=Path, default=Path("/dev/shm/nemo_rl_gpu_report"), help="folder for the models"
    )
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.here:
        _run_here(options)
        return 0
    results, deadline = (
        _results(options.out) if options.resume else {},
        time.monotonic() + (options.total or (290.0 if options.device == "cuda" else 3000.0)),
    )
    waiting = [name for name in options.part or PARTS if name not in results]
    while waiting:
        for name, result in _run_parts(waiting, options, deadline):
            waiting.remove(name)
            results[name] = {"commit": commit().revision, **result}
            with (options.out / "results.jsonl").open("a") as file:
                file.write(json.dumps({"part": name, **results[name]}) + "\n")
    text = table(results)
    (options.out / "table.md").write_text(text)
    print(text)
    return 1 if any(result.get("is_error") for result in results.values()) else 0


# Private parts.


def _run_here(options: argparse.Namespace) -> None:
    """Run the parts in this process and print a line for each."""
    place = Place(device=options.device, models=options.models, is_tiny=options.tiny)
    for name in options.part:
        start, is_broken = time.monotonic(), False
        try:
            result: dict[str, Any] = {"found": PARTS[name].run(place)}
        except Exception as error:  # noqa: BLE001 - one part that fails must not cost the others
            is_broken = place.is_cuda and "CUDA error" in str(error)
            result = {"problem": traceback.format_exc()[-1500:], "is_error": True}
        destroy_process_group()
        gc.collect()
        print(MARK + json.dumps({"part": name, "part_s": round(time.monotonic() - start, 1), **result}), flush=True)
        if is_broken:
            os._exit(1)
        if place.is_cuda:
            torch.cuda.empty_cache()


def _run_parts(
    names: Sequence[str], options: argparse.Namespace, deadline: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the results of parts that one process ran; it ends at the first one that fails to answer."""
    needing = [name for name in names if PARTS[name].needs_cuda and options.device != "cuda"]
    yield from ((name, {"problem": "needs CUDA"}) for name in needing)
    names = [name for name in names if name not in needing]
    if not names:
        return
    command = [sys.executable, str(Path(__file__).resolve()), "--here", "--out", str(options.out)]
    command += ["--device", options.device, "--models", str(options.models), *(["--tiny"] if options.tiny else [])]
    command += [word for name in names for word in ("--part", name)]
    errors = (options.out / "errors.txt").open("a")
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=errors, text=True, bufsize=1, start_new_session=True
    )
    lines: queue.Queue[str | None] = queue.Queue()
    assert child.stdout is not None
    reader = threading.Thread(target=_read_lines, args=(child.stdout, lines), daemon=True)
    reader.start()
    try:
        start_s = START_S * (1.0 if options.device == "cuda" else CPU_SLACK)
        for name in names:
            limit = PARTS[name].limit_s * (1.0 if options.device == "cuda" else CPU_SLACK)
            left = min(limit + start_s, deadline - time.monotonic())
            try:
                line = lines.get(timeout=left) if left > 0 else None
            except queue.Empty:
                yield name, {"problem": f"ran longer than {left:.0f} s", "is_error": True}
                return
            if line is None:
                is_late = left <= 0
                yield name, {"problem": "no time was left" if is_late else "the process died", "is_error": not is_late}
                return
            result, start_s = json.loads(line), 0.0
            result.pop("part")
            yield name, result
    finally:
        # With the processes that compile for it.
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        reader.join()
        child.stdout.close()
        errors.close()


def _read_lines(output: IO[str], lines: queue.Queue[str | None]) -> None:
    for line in output:
        if line.startswith(MARK):
            lines.put(line.removeprefix(MARK))
    lines.put(None)


def _results(folder: Path) -> dict[str, dict[str, Any]]:
    path = folder / "results.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines]
    return {record.pop("part"): record for record in records if "found" in record}


def _end(worker: PolicyWorker) -> None:
    worker.shutdown()
    destroy_process_group()


def _seconds(call: Callable[[], object], place: Place) -> float:
    place.wait()
    start = time.perf_counter()
    call()
    place.wait()
    return time.perf_counter() - start


def _with_rates(found: dict[str, Any], flops: float, tokens: int) -> dict[str, Any]:
    rates = {"tokens_per_s": tokens / found["s"], "share_of_peak": flops / found["s"] / PEAK_FLOPS}
    return {**found, **rates, "tokens": tokens}


def _tokens_per_s(found: dict[str, Any], tokens: int) -> dict[str, Any]:
    return {**found, "tokens_per_s": tokens / found["s"]}


def _synchronising_line(step: Callable[[], object]) -> str:
    """Return how often a step waits for the device, and the lines that do."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [f"{each.filename}:{each.lineno}" for each in caught if "synchroniz" in str(each.message)]
    return f"{len(waits)}: {', '.join(waits[:12])}"


if __name__ == "__main__":
    sys.exit(main())
