"""Engines with planted faults of refits of adapters, behind what was sent; a receipt must find each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from nemo_rl.models.generation.interfaces import EngineSpec
from nemo_rl.models.generation.torch_engine.worker import EngineWorker
from nemo_rl.models.generation.vllm.worker import build_vllm_worker
from tests.helpers.faulty_engines import NORM
from tests.helpers.model_families import VLLM_SIZES, write_with_tokenizer

SCALE = 2.0
"""Scale of the adapters: alpha / rank of the tests."""
Q, K, OUT = (f"model.layers.0.self_attn.{name}_proj" for name in ("q", "k", "o"))
OTHER_OUT = OUT.replace("layers.0", "layers.1")
CONTENT = {
    "not sent": "weights are not what was sent",
    "previous version": "is that of the version before",
    "layers exchanged": f"{OUT}.lora_A.weight has the values of {OTHER_OUT}.lora_A.weight",
    "scale forgotten": "lora_B.weight has other values",
    "scaled twice": "lora_B.weight has other values",
    "unknown names dropped": f"{OUT}.lora_A.weight has other values",
    "q and k exchanged": f"{Q}.lora_A.weight has the values of {K}.lora_A.weight",
    "bucket lost": "has other values",
}
"""What the receipt says of an adapter that did not come as it was sent."""
BEHAVIOUR = ("rows routed to base", "mixed batch from one slot")
"""Faults that show in what an engine computes alone."""
BASE_CHANGED = "base changed"

Adapter = dict[str, torch.Tensor]


def write_adapter_model(folder: Path) -> Path:
    """Write a model with as many keys as queries, and a tied head."""
    torch.manual_seed(0)
    sizes = {**VLLM_SIZES, "num_key_value_heads": 2, "num_hidden_layers": 2, "tie_word_embeddings": True}
    return write_with_tokenizer(folder, Qwen3ForCausalLM(Qwen3Config(**sizes)).eval())


def changed(fault: str | None, now: Mapping[str, torch.Tensor], old: Mapping[str, torch.Tensor]) -> Adapter:
    """Return the adapter that an engine holds in place of the one that came."""
    scales = {"scale forgotten": 1 / SCALE, "scaled twice": SCALE}
    exchanged = {"layers exchanged": (OUT, OTHER_OUT), "q and k exchanged": (Q, K)}
    found = dict(now)
    if fault == "not sent":
        found = {name: torch.zeros_like(tensor) for name, tensor in now.items()}
    if fault == "previous version":
        found = dict(old)
    if fault in scales:
        found = {name: value * scales[fault] if "lora_B" in name else value for name, value in now.items()}
    if fault in exchanged:
        one, other = exchanged[fault]
        names = {name: name.replace(one, "*").replace(other, one).replace("*", other) for name in now}
        found = {name: now[names[name]] for name in now}
    if fault == "unknown names dropped":
        found |= {name: torch.zeros_like(value) for name, value in now.items() if name.startswith(OUT)}
    return found


class FaultyAdapterWorker(EngineWorker):
    """The embedded engine; `plant` names the fault of the refits that follow."""

    fault: str | None = None
    num_loaded = 0

    def plant(self, fault: str | None) -> None:
        self.fault, self.num_loaded = fault, 0
        weight = self._loaded_model().get_parameter(NORM)
        with torch.no_grad():
            if fault == BASE_CHANGED:
                weight.mul_(1.01)
            elif self.kept is not None:
                weight.copy_(self.kept)
        self.kept = weight.detach().clone() if fault is None else self.kept

    kept: torch.Tensor | None = None
    old: Mapping[str, torch.Tensor] = {}

    def load_bucket(self, bucket: np.ndarray | None = None) -> None:
        self.num_loaded += 1
        if self.fault == "bucket lost" and self.num_loaded == 2 and bucket is not None:
            bucket = np.zeros_like(bucket)
        super().load_bucket(bucket)

    def hold_adapter(self, adapter: Iterable[tuple[str, torch.Tensor]], *, version: int) -> None:
        given = dict(adapter)
        super().hold_adapter(changed(self.fault, given, self.old).items(), version=version)
        self.old = given

    def use_adapter(self, version: int) -> int:
        held = super().use_adapter(version)
        slots = self.adapter_slots
        serving = type(slots).serving

        def faulty(versions: Sequence[int]) -> Any:
            if self.fault == "rows routed to base":
                versions = [-1] * len(versions)
            elif self.fault == "mixed batch from one slot":
                versions = [max(versions)] * len(versions)
            return serving(slots, versions)

        slots.serving = faulty  # type: ignore[method-assign]
        return held


class FaultyAdapterVllm:
    """A vLLM worker of this process, in which `plant` plants a fault; anything else goes to the worker."""

    def __init__(self, spec: EngineSpec) -> None:
        self._worker: Any = build_vllm_worker(spec)
        self._adapters = self._worker._adapters
        self._rpc: Callable[..., list[Any]] = self._adapters._rpc
        self._request_of = self._adapters.request_of
        self._load_bucket = self._worker.load_bucket
        # The worker reads its buckets by itself.
        self._worker.load_bucket = self.load_bucket
        self._adapters._rpc = self._call
        self.fault: str | None = None
        self._old: Adapter = {}
        self._num_loaded = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._worker, name)

    def plant(self, fault: str | None) -> None:
        self.fault, self._num_loaded = fault, 0
        routed = {"rows routed to base": lambda _: -1, "mixed batch from one slot": self._current}
        to = routed.get(str(fault))
        self._adapters.request_of = self._request_of if to is None else lambda version: self._request_of(to(version))
        if fault == BASE_CHANGED or self._is_changed:
            factor = 1.01 if fault == BASE_CHANGED else 1 / 1.01
            self._worker._engine().collective_rpc(_scale_norm, args=(factor,))
            self._is_changed = fault == BASE_CHANGED

    _is_changed = False

    def _current(self, version: int) -> int:
        return max(self._adapters.versions.held)

    def load_bucket(self, bucket: np.ndarray | None = None) -> None:
        self._num_loaded += 1
        if self.fault == "bucket lost" and self._num_loaded == 2 and bucket is not None:
            bucket = np.zeros_like(bucket)
        self._load_bucket(bucket)

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        if method == "take_adapter":
            number, given, *rest = arguments
            arguments = (number, changed(self.fault, given, self._old), *rest)
            self._old = given
        return self._rpc(method, *arguments)


@torch.no_grad()
def _scale_norm(worker: Any, factor: float) -> None:
    worker.model_runner.get_model().get_parameter(NORM).mul_(factor)
