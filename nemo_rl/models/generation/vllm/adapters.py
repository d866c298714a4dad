"""Adapters in vLLM: `VllmAdapters`, an engine's side of their versions, and `WorkerAdapters`, that of vLLM's worker.

vLLM reads adapters from folders; here they come from memory, under a number and their own name for each version,
so that no block of the prefix cache is found by rows of another version. That way skips vLLM's check of names, which
`WorkerAdapters` makes, tensor by tensor. Invariants: vLLM is handed copies, for it folds the scale into B in place; the
scale is 1, since s B comes; on CPUs the last slot stays zero for ever, because vLLM's kernels give it to rows without
an adapter that share a batch with others. Imports no vLLM but in the worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from nemo_rl.config.backends import LoraConfig
from nemo_rl.errors import ConfigError, name_some
from nemo_rl.models.adapters.lora import A_SUFFIX, AdaptedLayer, adapted_layers
from nemo_rl.models.generation.adapter_versions import HeldAdapters
from nemo_rl.models.generation.interfaces import BASE
from nemo_rl.models.hf.loading import is_experts
from nemo_rl.models.weight_sync.receipt.fingerprint import fingerprints

__all__ = ["GUARD_SLOTS", "RANKS", "VllmAdapters", "WorkerAdapters", "served_layers"]

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM makes slots."""
GUARD_SLOTS = 1
"""Slots that no version ever has."""
PLACE = "memory"
"""Folder of an adapter, which vLLM wants to be told and never opens: the adapter is registered before."""

Rpc = Callable[..., list[Any]]
"""(method of `RefitExtension`, its arguments) -> what it returns in every worker."""


def served_layers(model: PreTrainedModel, config: LoraConfig, *, use_gpu: bool) -> list[AdaptedLayer]:
    """Return the layers whose adapters vLLM is to serve.

    Raises:
        ConfigError: it cannot serve one of them, or none for this model.
    """
    if not use_gpu and any(is_experts(name, weight) for name, weight in model.named_parameters()):
        raise ConfigError(
            "policy.lora.serve: native, but with adapters vLLM computes experts, which "
            f"{model.config.model_type!r} has, by a kernel that CPUs do not run; set it to merged, or "
            "policy.generation.backend=torch"
        )
    layers = adapted_layers(model, config)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    refused = {
        "experts": [layer.name for layer in layers if layer.num_experts],
        "the head or the embedding": [
            layer.name
            for layer in layers
            if not layer.num_experts and model.get_submodule(layer.name) in (head, embedding)
        ],
    }
    for what, names in refused.items():
        if names:
            raise ConfigError(
                f"policy.lora.targets: vLLM serves no adapters of {what} that are right in every batch "
                f"({name_some(names)}); leave them out, set policy.lora.serve=merged, or "
                "policy.generation.backend=torch"
            )
    return layers


class VllmAdapters(HeldAdapters):
    """Versions of an adapter in one vLLM engine.

    Args:
        rpc: calls vLLM's workers.
    """

    def __init__(self, model: PreTrainedModel, config: LoraConfig, rpc: Rpc, *, most: int) -> None:
        super().__init__(most=most)
        self._rpc, self._rank = rpc, config.rank
        self._numbers, self._num_taken = dict[int, int](), 0
        for layer in adapted_layers(model, config):
            weight = model.get_submodule(layer.name).weight
            assert isinstance(weight, torch.Tensor), f"{layer.name} is a linear layer"
            self._expect(layer, weight, rank=config.rank)

    def prepare(self) -> None:
        """Let the workers find the place of every tensor, and clear the slot that no version has.

        Raises:
            ConfigError: vLLM's own model has no such layer, or one of another shape.
        """
        shapes = {name: slot.shape for name, slot in self.known.items()}
        for problems in self._rpc("prepare_adapters", shapes):
            if problems:
                raise ConfigError(
                    f"policy.lora.targets: vLLM's model serves no adapter of {name_some(problems)}; leave these layers "
                    "out, set policy.lora.serve=merged, or policy.generation.backend=torch"
                )

    def _take(self, version: int, given: Mapping[str, torch.Tensor], gone: Sequence[int]) -> None:
        self._rpc("take_adapter", _number(version), given, self._rank, [_number(old) for old in gone])
        self._num_taken += 1
        self._numbers[version] = self._num_taken

    def salt_of(self, version: int) -> str:
        """Return a text that no other adapter has had, also where a version came again with other values."""
        return f"v{version}.{self._numbers.get(version, 0)}"

    def fingerprints(self, version: int) -> Mapping[str, str]:
        self.versions.check(version)
        [found] = self._rpc("adapter_fingerprints", _number(version), self._rank)
        assert isinstance(found, dict), "the worker answers by name"
        return found

    def request_of(self, version: int) -> Any:
        """Return vLLM's request for the adapter of a row; None for `BASE`."""
        from vllm.lora.request import LoRARequest  # noqa: PLC0415 - this module is read without vLLM

        if version == BASE:
            return None
        return LoRARequest(lora_name=f"nemo_rl-v{version}", lora_int_id=_number(version), lora_path=PLACE)


def _number(version: int) -> int:
    """Return vLLM's own number of a version, which is at least 1."""
    return version + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    module: str
    part: int
    """Number of its layer among those that vLLM has fused."""
    is_a: bool
    shape: tuple[int, ...]


class WorkerAdapters:
    """Adapters in one worker of vLLM.

    Args:
        manager: vLLM's `LRUCacheLoRAModelManager`.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        # Models whose modules are named otherwise than the files say bring a mapper.
        has_mapper = "hf_to_vllm_mapper" in dir(manager.model)
        self._mapper = manager.model.hf_to_vllm_mapper.get_rename_mapper() if has_mapper else None
        self._places: dict[str, _Place] = {}

    def prepare(self, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Find the place of every tensor; return the names of those that have none, and clear the guard slot."""
        problems = []
        owners = {
            layer: (module, part)
            for module, layers in self._manager.packed_modules.items()
            for part, layer in enumerate(layers)
            if module in self._manager.modules
        }
        for name, shape in shapes.items():
            layer = self._layer_of(name)
            module, part = owners.get(layer, (layer, 0))
            place = _Place(module=module, part=part, is_a=name.endswith(A_SUFFIX), shape=shape)
            wrapped = self._manager.modules.get(module)
            count = len(self._manager.packed_modules.get(module, [layer]))
            if wrapped is None or len(wrapped.lora_a_stacked) != count:
                problems.append(name)
                continue
            whole = self._stacked(place).shape[2:]
            # Slots have room for a larger rank.
            features = 1 if place.is_a else 0
            if whole[features] != shape[features] or whole[1 - features] < shape[1 - features]:
                problems.append(f"{name} (expected shape {tuple(whole)}, got {shape})")
            self._places[name] = place
        for wrapped in self._manager.modules.values():
            wrapped.reset_lora(self._manager.lora_slots - GUARD_SLOTS)
        return problems

    def take(self, number: int, tensors: Mapping[str, torch.Tensor], rank: int, gone: Iterable[int]) -> None:
        """Register an adapter and put it into a slot.

        Args:
            gone: numbers of those that make room.
        """
        from vllm.lora.lora_model import LoRAModel  # noqa: PLC0415 - this module is read without vLLM
        from vllm.lora.peft_helper import PEFTHelper  # noqa: PLC0415 - the same

        unknown = tensors.keys() - self._places.keys()
        if unknown:
            raise ValueError(f"vLLM's model has no place for {name_some(sorted(unknown))}")
        for old in (number, *gone):
            self._manager.remove_adapter(old)
        helper = PEFTHelper(r=rank, lora_alpha=rank, target_modules=sorted({_end(name) for name in tensors}))
        copies = {f"base_model.model.{name}": tensor.detach().clone() for name, tensor in tensors.items()}
        model = LoRAModel.from_lora_tensors(
            number,
            copies,
            helper,
            device="cpu",
            dtype=self._manager.lora_config.lora_dtype,
            weights_mapper=self._mapper,
        )
        self._manager.add_adapter(model)
        self._manager.activate_adapter(number)
        if self._manager.lora_index_to_id[-GUARD_SLOTS] is not None:
            raise RuntimeError(f"vLLM gave adapter {number} the slot that is to stay empty")

    def fingerprints(self, number: int, rank: int) -> dict[str, str]:
        """Return name -> fingerprint of each tensor in the slot of an adapter, without what fills the slot up."""
        slot = self._manager.lora_index_to_id.index(number)
        found = []
        for name, place in self._places.items():
            whole = self._stacked(place)[slot, 0]
            found.append((name, whole[: place.shape[0], : place.shape[1]].contiguous()))
            rest = whole[rank:] if place.is_a else whole[:, rank:]
            if bool(rest.any()):
                found[-1] = name, whole
        return fingerprints(found)

    def _stacked(self, place: _Place) -> torch.Tensor:
        """Return `[slots, 1, out, in]`."""
        module = self._manager.modules[place.module]
        return (module.lora_a_stacked if place.is_a else module.lora_b_stacked)[place.part]

    def _layer_of(self, name: str) -> str:
        from vllm.lora.utils import parse_fine_tuned_lora_name  # noqa: PLC0415 - this module is read without vLLM

        return parse_fine_tuned_lora_name(f"base_model.model.{name}", self._mapper)[0]


def _end(name: str) -> str:
    """Return the last part of the name of a tensor's layer."""
    return name.rpartition(".lora_")[0].rpartition(".")[2]
