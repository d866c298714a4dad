"""Adaptations of megatron-core to a machine without CUDA. The only place that adapts it.

`mcore` calls `importing` around its imports; builders call `as_if_cuda` around the few calls that ask a tensor whether
it is on a GPU. With CUDA both do nothing. Invariant: torch itself stays as it is for everyone else in the process. The
name `torch` inside megatron-core's own modules is bound to a stand-in, and `Tensor.cuda` and `Tensor.type` differ only
inside an `as_if_cuda` block.

Every patch carries its reason; each can go when megatron-core runs that call on a CPU by itself.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from nemo_rl.errors import ConfigError

__all__ = ["SUPPORTED_VERSIONS", "as_if_cuda", "importing", "install"]

SUPPORTED_VERSIONS = ("0.16.1", "0.19.2")
"""The patches were verified against these releases of megatron-core: the first on Python 3.11, the last above."""
PACKAGE = "megatron.core"
FACTORIES = (
    "arange",
    "as_tensor",
    "empty",
    "empty_like",
    "eye",
    "full",
    "full_like",
    "ones",
    "ones_like",
    "rand",
    "randint",
    "randn",
    "tensor",
    "zeros",
    "zeros_like",
)


def has_cuda() -> bool:
    """Return whether megatron-core runs on the devices that it was made for."""
    return torch.cuda.is_available()


@contextmanager
def importing() -> Iterator[None]:
    """Surround the first import of megatron-core's modules.

    Raises:
        ConfigError: another release of megatron-core on a machine without CUDA.
    """
    if has_cuda():
        yield
        _repair_wheel()
        return
    # megatron-core decorates small functions with torch.compile, which needs a compiler and is slower here. Its modules
    # take the decorator when they are imported, so it is plain only meanwhile.
    with patch.object(torch, "compile", _plain):
        yield
    _check_version()
    install()


def install() -> int:
    """Rebind `torch` in every module of megatron-core that is imported by now; return how many. Idempotent."""
    if has_cuda():
        return 0
    changed = 0
    for name, module in list(sys.modules.items()):
        if name.startswith(PACKAGE) and module is not None and vars(module).get("torch") is torch:
            vars(module)["torch"] = _SHIM
            changed += 1
    _use_cpu_random_state()
    _restore_by_copy()
    _send_lists()
    _exchange_uneven_parts()
    _repair_wheel()
    return changed


@contextmanager
def as_if_cuda() -> Iterator[None]:
    """Surround building and stepping an optimizer, and building or loading a model.

    megatron-core's optimizers look for parameters of type `torch.cuda.FloatTensor`, and tied embeddings and loaded
    optimizer state are moved by `.cuda()`.
    """
    if has_cuda():
        yield
        return
    with patch.object(torch.Tensor, "type", _cuda_type), patch.object(torch.Tensor, "cuda", _same):
        yield


def _module(name: str) -> Any:
    return importlib.import_module(f"{PACKAGE}.{name}")


def _plain(function: Callable[..., Any] | None = None, **_: object) -> Callable[..., Any]:
    """Stand in for `torch.compile`, which compiles nothing, with and without arguments."""
    return function if function is not None else lambda decorated: decorated


def _same(tensor: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    return tensor


_true_type = torch.Tensor.type


def _cuda_type(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    answer = _true_type(tensor, *args, **kwargs)
    is_question = not args and not kwargs
    return answer.replace("torch.", "torch.cuda.", 1) if is_question and tensor.device.type == "cpu" else answer


def _check_version() -> None:
    # 0.19 adds the revision of whatever repository its folder lies in, which is ours when .venv lies in a checkout.
    found = _module("package_info").__version__.partition("+")[0]
    if found not in SUPPORTED_VERSIONS:
        fitting = SUPPORTED_VERSIONS[0 if sys.version_info < (3, 12) else -1]
        raise ConfigError(
            f"policy.megatron_cfg: without CUDA expected megatron-core {' or '.join(SUPPORTED_VERSIONS)}, got "
            f"{found}; install megatron-core=={fitting}"
        )


def _use_cpu_random_state() -> None:
    """Fork no random state of a GPU: recomputation and dropout fork the GPU's random state; setting it on a CPU
    would be queued for ever."""
    random = _module("tensor_parallel.random")

    def get_state(device: object = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, device: object = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    random._get_cuda_rng_state, random._set_cuda_rng_state = get_state, set_state
    # The one random state of this process changes inside a fork, which on a GPU would be an error.
    logging.getLogger(random.__name__).addFilter(_is_no_fork_warning)


def _restore_by_copy() -> None:
    """Replace the extension by which recomputed outputs share memory, which is compiled at first use (0.19). A copy
    needs no compiler; 0.16 makes one by itself and does not ask for the name."""
    vars(_module("tensor_parallel.random"))["_get_share_storage"] = lambda: _copy_storage


def _copy_storage(target: torch.Tensor, source: torch.Tensor) -> None:
    target.untyped_storage().resize_(source.untyped_storage().size())
    target.untyped_storage().copy_(source.untyped_storage())


def _is_no_fork_warning(record: logging.LogRecord) -> bool:
    return "CPU RNG state changed" not in record.getMessage()


def _send_lists() -> None:
    """Let counts be on the CPU: expert parallel exchanges take counts from the GPU to lists or arrays; counts on the
    CPU were left as tensors."""
    moe_utils, token_dispatcher = _module("transformer.moe.moe_utils"), _module("transformer.moe.token_dispatcher")

    def on_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    # The dispatcher took the function by name.
    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = on_cpu


@functools.cache
def _exchange_uneven_parts() -> None:
    """Pad unequal parts that ranks gather and scatter, where experts are split over both their axes: gloo knows
    equal parts only."""
    mappings = _module("tensor_parallel.mappings")
    even_gather, even_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather(part: torch.Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return even_gather(part, group, output_split_sizes, use_global_buffer)
        longest = max(output_split_sizes)
        parts = [part.new_empty(longest, *part.shape[1:]) for _ in output_split_sizes]
        if longest:
            dist.all_gather(parts, _lengthened(part, longest), group=group)
        return torch.cat([found[:size] for found, size in zip(parts, output_split_sizes, strict=True)])

    def scatter(whole: torch.Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return even_scatter(whole, group, input_split_sizes, use_global_buffer)
        longest = max(input_split_sizes)
        part = whole.new_empty(longest, *whole.shape[1:])
        if longest:
            parts = [_lengthened(part, longest) for part in whole.split(list(input_split_sizes))]
            dist.reduce_scatter_tensor(part, torch.cat(parts), group=group)
        return part[: input_split_sizes[group.rank()]]

    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = gather, scatter


def _lengthened(part: torch.Tensor, length: int) -> torch.Tensor:
    return torch.cat([part, part.new_zeros(length - len(part), *part.shape[1:])])


def _repair_wheel() -> None:
    """Make imports succeed that need Transformer Engine on any device: the router asks `te_general_gemm is not
    None`."""
    vars(_module("transformer.moe.moe_utils")).setdefault("te_general_gemm", None)
    random = _module("tensor_parallel.random")
    if not random.HAVE_TE:
        # Norms are recomputed with `fp8=False`, which is taken for a wish for fp8, and that for Transformer Engine.
        random.CheckpointWithoutOutput.__init__.__defaults__ = (None,)


class _CpuStream:
    """Work on a CPU is done when the call returns: nothing to wait for."""

    def __init__(self, *_: object, **__: object) -> None: ...
    def wait_stream(self, _: object) -> None: ...
    def wait_event(self, _: object) -> None: ...
    def synchronize(self) -> None: ...

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()


class _Event:
    def __init__(self, *_: object, **__: object) -> None: ...
    def record(self, *_: object) -> None: ...
    def wait(self, *_: object) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: object) -> float:
        return 0.0


def _nothing(*_: object, **__: object) -> None: ...


def _zero(*_: object, **__: object) -> int:
    return 0


class _CudaShim(types.ModuleType):
    """`torch.cuda` as megatron-core sees it: the device is the CPU, and streams are empty."""

    def __init__(self) -> None:
        super().__init__("torch.cuda")
        stream = _CpuStream()
        self.Stream, self.Event = _CpuStream, _Event
        self.current_device = lambda: "cpu"
        self.current_stream = self.default_stream = lambda *_: stream
        self.stream = lambda *_: nullcontext()
        self.synchronize = self.empty_cache = self.set_device = _nothing
        self.is_available = lambda: False
        self.device_count = _zero
        self.get_rng_state = lambda *_, **__: torch.get_rng_state()
        self.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
        self.manual_seed = torch.manual_seed
        self.memory_allocated = self.max_memory_allocated = self.memory_reserved = _zero
        self.nvtx = types.SimpleNamespace(range_push=_nothing, range_pop=_nothing)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class _TorchShim(types.ModuleType):
    """`torch` as megatron-core sees it: what it creates on a GPU is created on the CPU."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda = _CudaShim()
        for name in FACTORIES:
            setattr(self, name, _on_cpu(vars(torch)[name]))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and not isinstance(device, int) and str(device).startswith("cuda"):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return create


_SHIM = _TorchShim()
