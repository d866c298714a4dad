"""`RefitExtension`: what runs of ours in the workers of vLLM, which mix it into their own class: refit, and seeds; and
`VllmWeights`, the engine's side, which hands it new weights one by one, by the names of the Hugging Face model.

vLLM reloads layer by layer: a layer keeps what comes for it, and is fused and packed anew when it is whole. So vLLM's
own tensors cannot be compared with anybody's: `fingerprints` are of what came, and of what vLLM's loaders were given.
Invariant: between `begin_weights` and `finish_weights` nothing may be generated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from transformers import PreTrainedModel
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from nemo_rl.errors import name_some
from nemo_rl.models.generation.vllm.adapters import WorkerAdapters
from nemo_rl.models.generation.vllm.decoding import draw_by_position, force_rows
from nemo_rl.models.hf_files import FileNames, as_stored
from nemo_rl.models.loading import DTYPES, load_model_config, model_without_weights
from nemo_rl.models.weight_sync.receipt.fingerprint import Fingerprints

__all__ = ["Hand", "RefitExtension", "VllmWeights", "expected_weights", "pack"]


COLUMNS = 8
"""Columns of a packed weight that are compared, at least, where it has as many."""


def pack(named: list[tuple[str, torch.Tensor]]) -> bytes:
    """Return weights for workers in other processes: messages to them hold no tensors."""
    # Experts share the memory of their layer, which the format refuses.
    return save({name: weight.detach().cpu().contiguous().clone() for name, weight in named})


class RefitExtension:
    """The methods that `collective_rpc` calls on every worker."""

    model_runner: Any
    vllm_config: Any
    use_v2_model_runner: bool
    is_reloading = False
    loaded = Fingerprints()
    adapters: WorkerAdapters

    def prepare_rows(self, forced: str) -> None:
        """Prepare the model runner, once, before the first request. vLLM's second model runner draws by seed and
        position, and replays given responses, by itself.

        Args:
            forced: name of the extra argument of a request that has the tokens of its response.
        """
        if not self.use_v2_model_runner:
            draw_by_position(self.model_runner)
            force_rows(self.model_runner, name=forced)

    def begin_weights(self) -> None:
        """Begin new weights, anew after a refit that broke off."""
        model = self.model_runner.get_model()
        if self.is_reloading:
            self._finalize(model)
        if current_platform.is_cpu():
            # vLLM packs experts for CPUs only where it makes their kernel; a kernel that is kept computes with weights
            # that are not packed, without an error. Needed until vLLM packs in a reload as well.
            for module in model.modules():
                if isinstance(module, RoutedExperts):
                    module.quant_method.moe_kernel = None
        self.is_reloading, self.loaded = True, Fingerprints()
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)

    def take_weights(self, named: list[tuple[str, torch.Tensor]] | bytes) -> None:
        """Take some weights, named as the files of the model name them; the tensors are kept and must not change."""
        if isinstance(named, bytes):
            named = list(load(named).items())
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.get_model().load_weights(self.loaded.passing(named))

    def finish_weights(self) -> None:
        """Finish the weights, when all have come."""
        self._finalize(self.model_runner.get_model())
        self.is_reloading = False
        self.model_runner.reset_encoder_cache()

    def prepare_adapters(self, shapes: dict[str, tuple[int, ...]]) -> list[str]:
        """Find the place of each of these tensors of adapters; return those that have none."""
        self.adapters = WorkerAdapters(self.model_runner.lora_manager._adapter_manager)
        return self.adapters.prepare(shapes)

    def take_adapter(self, number: int, tensors: dict[str, torch.Tensor], rank: int, gone: list[int]) -> None:
        """Register an adapter in place of others."""
        self.adapters.take(number, tensors, rank, gone)

    def adapter_fingerprints(self, number: int, rank: int) -> dict[str, str]:
        """Return name -> fingerprint of each tensor in the slot of an adapter."""
        return self.adapters.fingerprints(number, rank)

    def loaded_fingerprints(self) -> dict[str, str]:
        """Name in files -> fingerprint of what the model's loaders were given since `begin_weights`."""
        return self.loaded.result()

    def stale_copies(self) -> list[str]:
        """Return layers whose packed copy has other values than the weight that they keep beside it, as a tied head
        does.

        A product with a unit vector is a column of the weight, to the last bit.
        """
        found = []
        for name, layer in self.model_runner.get_model().named_modules():
            if not hasattr(layer, "cpu_linear") or layer.weight.dim() != 2:
                # Not packed, or the packed one is all that there is.
                continue
            weight = layer.weight
            columns = torch.arange(0, weight.shape[1], max(1, weight.shape[1] // COLUMNS))
            units = torch.nn.functional.one_hot(columns, weight.shape[1]).to(weight.dtype)
            if not torch.equal(layer.quant_method.apply(layer, units), weight[:, columns].T):
                found.append(name.removesuffix(".base_layer"))
        return found

    def _finalize(self, model: torch.nn.Module) -> None:
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(model, self.model_runner.model_config)
        if current_platform.is_cpu():
            # No weight comes for a head that is tied to the embedding, so vLLM leaves it packed from the old one.
            for module in model.modules():
                if isinstance(module, ParallelLMHead):
                    module.quant_method.process_weights_after_loading(module)


Hand = Callable[[str, Sequence[tuple[str, torch.Tensor]]], Sequence[object]]
"""(method of `RefitExtension`, weights under the names of the model's files) -> what it returns in every worker."""


def expected_weights(folder: str | Path, *, precision: str) -> PreTrainedModel:
    """Return the model whose weights are expected: names, shapes and dtypes, without memory for them."""
    model = model_without_weights(load_model_config(folder), folder)
    return model.to(DTYPES[precision])  # type: ignore[arg-type]


class VllmWeights:
    """Hands new weights to one vLLM engine.

    Args:
        hand: to vLLM's workers.
    """

    def __init__(self, model: PreTrainedModel, hand: Hand) -> None:
        self._hand, self._file_names = hand, FileNames(model)
        names: dict[int, str] = {}
        state = model.state_dict(keep_vars=True)
        self._first = {name: names.setdefault(id(weight), name) for name, weight in state.items()}
        """Name of a weight -> its first name, which vLLM is told: a tied weight has several."""
        self._fingerprints, self._parts = Fingerprints(), Fingerprints()
        self._files: dict[str, tuple[str, ...]] = {}
        """Names in files of each weight that was handed over."""
        self._taken: set[str] = set()

    def begin(self) -> None:
        """Begin new weights."""
        self._taken = set()
        self._fingerprints, self._parts, self._files = Fingerprints(), Fingerprints(), {}
        self._hand("begin_weights", ())

    def take(self, name: str, weight: torch.Tensor) -> None:
        """Take one of them, in the engine's dtype; it must not change from here on."""
        self._fingerprints.add(name, weight)
        first = self._first[name]
        if first not in self._taken:
            self._taken.add(first)
            stored = list(as_stored(first, weight, self._file_names))
            self._files[first] = tuple(file_name for file_name, _ in stored)
            for file_name, part in stored:
                self._parts.add(file_name, part)
            self._hand("take_weights", stored)

    def finish(self) -> None:
        """Finish the weights: vLLM computes with them from here on.

        Raises:
            RuntimeError: some have not come.
        """
        missing = set(self._first.values()) - self._taken
        if missing:
            raise RuntimeError(f"{len(missing)} weights were not received, first {min(missing)!r}")
        self._hand("finish_weights", ())

    def fingerprints(self) -> Mapping[str, str]:
        """Name -> fingerprint of what came last; of what vLLM has loaded in its place, where that is something else."""
        handed, found = self._parts.result(), self._fingerprints.result()
        for loaded in self._hand("loaded_fingerprints", ()):
            assert isinstance(loaded, Mapping), "the workers answer by name"
            for name in found:
                files = self._files.get(self._first[name], ())
                wrong = [file for file in files if loaded.get(file) != handed[file]]
                if wrong:
                    is_whole = len(files) == 1
                    got = loaded.get(wrong[0], "nothing")
                    found[name] = got if is_whole else f"{got} in vLLM as {name_some(wrong)}"
        for layers in self._hand("stale_copies", ()):
            assert isinstance(layers, list), "the workers answer with names"
            for layer in layers:
                name = f"{layer}.weight"
                # A tied weight came under its first name.
                found[self._first.get(name, name)] = f"other values in the packed copy of vLLM's {layer}"
        return found
