"""The machine itself: cores, memory, shared memory, limits, disk, devices."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from nemo_rl.cluster.doctor.finding import Finding, green, red, yellow
from nemo_rl.utils.console import bytes_text
from nemo_rl.utils.memory import available_bytes

__all__ = ["look_at_devices", "look_at_machine"]

GIB = 1 << 30
FEW_FILES, FEW_PROCESSES = 4096, 2048
"""Ray alone keeps some hundred of each for a node."""
LITTLE_MEMORY, LITTLE_SHARED, LITTLE_DISK = 4 * GIB, GIB, 2 * GIB
ASK_S = 10.0


def look_at_machine(*, shared: Path = Path("/dev/shm"), folder: Path = Path()) -> Iterator[Finding]:
    """What every run needs, with GPUs or without.

    Args:
        shared: the node's shared memory.
        folder: where a run would write.
    """
    cores = len(os.sched_getaffinity(0))
    yield green("cores", f"{cores} for this process, {os.cpu_count()} in the machine")
    yield _memory()
    yield _shared_memory(shared)
    yield _limit("open files", resource.RLIMIT_NOFILE, FEW_FILES, "ulimit -n 65536")
    yield _limit("processes", resource.RLIMIT_NPROC, FEW_PROCESSES, "ulimit -u 65536")
    yield _disk(folder)


def look_at_devices() -> Iterator[Finding]:
    """GPUs, their driver, and NCCL."""
    import torch  # noqa: PLC0415 - takes seconds, and may be what is broken

    driver = _driver()
    if not torch.cuda.is_available():
        if driver:
            built = torch.version.cuda or "none: a CPU build"
            advice = "install a CUDA build of torch that this driver can run"
            yield yellow("GPUs", f"{driver}, but torch ({torch.__version__}, CUDA {built}) sees none", advice)
        else:
            yield green("GPUs", "none, and no driver: runs on CPUs (cluster.gpus_per_node=0)")
        return
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    memory = torch.cuda.get_device_properties(0).total_memory
    yield green("GPUs", f"{len(names)} x {names[0]}, {bytes_text(memory)} each; {driver}; CUDA {torch.version.cuda}")
    if torch.distributed.is_nccl_available():
        yield green("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    else:
        yield red("NCCL", "not in this build of torch", "install a build of torch with NCCL")


def _memory() -> Finding:
    free = available_bytes()
    text = f"{bytes_text(free)} available"
    if free < LITTLE_MEMORY:
        return yellow("memory", text, "a run of the demo takes about 3 GiB; end other programs")
    return green("memory", text)


def _shared_memory(folder: Path) -> Finding:
    name = f"shared memory ({folder})"
    if not folder.is_dir():
        advice = "mount a tmpfs there; Ray and data_plane.impl=shm keep tensors in it"
        return red(name, "not there", advice)
    if not os.access(folder, os.W_OK):
        return red(name, "cannot be written by this user", f"chmod 1777 {folder}, as usual")
    free = shutil.disk_usage(folder).free
    if free < LITTLE_SHARED:
        advice = "in a container give it more (docker run --shm-size=16g); Ray falls back to the disk, which is slow"
        return yellow(name, f"{bytes_text(free)} free", advice)
    return green(name, f"{bytes_text(free)} free")


def _limit(name: str, which: int, few: int, advice: str) -> Finding:
    soft, hard = resource.getrlimit(which)
    text = "no limit" if soft == resource.RLIM_INFINITY else f"at most {soft}"
    if soft != resource.RLIM_INFINITY and soft < few:
        most = "no limit" if hard == resource.RLIM_INFINITY else str(hard)
        return yellow(name, text, f"{advice} before a run (this user may set up to: {most})")
    return green(name, text)


def _disk(folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free
    text = f"{bytes_text(free)} free in {folder.resolve()}"
    if free < LITTLE_DISK:
        return yellow("disk", text, "checkpoints go to logger.log_dir; choose a larger disk")
    return green("disk", text)


def _driver() -> str:
    """Empty without one."""
    if shutil.which("nvidia-smi") is None:
        return ""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=ASK_S)
    except (OSError, subprocess.TimeoutExpired):
        return "an nvidia-smi that does not answer"
    lines = done.stdout.split()
    return f"driver {lines[0]}" if done.returncode == 0 and lines else "an nvidia-smi that fails"
