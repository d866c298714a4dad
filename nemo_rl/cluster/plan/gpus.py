"""`GPU`: what a plan knows of an accelerator, by the names that `--gpu` takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nemo_rl.errors import ConfigError
from nemo_rl.utils.flops import theoretical_tflops

__all__ = ["GPU", "GPUS", "gpu_named"]

GB = 10**9
MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class GPU:
    """One accelerator and how it is connected; rates of the vendors' data sheets, in bytes per second."""

    name: str
    device_name: str
    """As CUDA calls it, by which `utils.flops` knows its peak."""
    memory_bytes: int
    """What the driver gives to processes."""
    memory_rate: float
    link_rate: float
    """To another GPU of the node, in one direction."""
    network_rate: float
    """To another node, in one direction, of the usual network card per GPU."""

    def tflops(self, precision: str) -> float:
        """Dense peak in this precision, in 1e12 operations per second."""
        return theoretical_tflops(self.device_name, dtype=precision)


def _gpu(name: str, device: str, *, mib: int, memory: float, link: float, network: float) -> GPU:
    rates = {"memory_rate": memory * GB, "link_rate": link * GB, "network_rate": network * GB}
    return GPU(name=name, device_name=device, memory_bytes=mib * MIB, **rates)


GPUS: Mapping[str, GPU] = {
    gpu.name: gpu
    for gpu in (
        _gpu("A10-24G", "NVIDIA A10", mib=23028, memory=600, link=32, network=12.5),
        _gpu("L4-24G", "NVIDIA L4", mib=23034, memory=300, link=32, network=12.5),
        _gpu("L40S-48G", "NVIDIA L40S", mib=46068, memory=864, link=32, network=25),
        _gpu("A100-40G", "NVIDIA A100-SXM4-40GB", mib=40960, memory=1555, link=300, network=25),
        _gpu("A100-80G", "NVIDIA A100-SXM4-80GB", mib=81920, memory=2039, link=300, network=25),
        _gpu("H100-80G", "NVIDIA H100 80GB HBM3", mib=81559, memory=3350, link=450, network=50),
        _gpu("H100-PCIE-80G", "NVIDIA H100 PCIe", mib=81559, memory=2000, link=64, network=25),
        _gpu("H200-141G", "NVIDIA H200", mib=143771, memory=4800, link=450, network=50),
        _gpu("B200-180G", "NVIDIA B200", mib=183359, memory=7700, link=900, network=50),
        _gpu("GB200-186G", "NVIDIA GB200", mib=189471, memory=8000, link=900, network=50),
    )
}
"""By the name of the product and its memory."""


def gpu_named(name: str) -> GPU:
    """Whatever the case of the letters.

    Raises:
        ConfigError: the name is not known.
    """
    found = {known.lower(): gpu for known, gpu in GPUS.items()}.get(name.lower())
    if found is None:
        raise ConfigError(f"--gpu: expected one of {', '.join(GPUS)}, got {name!r}")
    return found
