"""`RefitExtension`: what runs of ours in the workers of vLLM, which mix it into their own class: refit, and seeds.

vLLM reloads layer by layer: a layer keeps what comes for it, and is fused and packed anew when it is whole. Invariant:
between `begin_weights` and `finish_weights` nothing may be generated.
"""

from __future__ import annotations

from typing import Any

import torch
from safetensors.torch import load, save
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from nemo_rl.models.generation.vllm.decoding import draw_by_position, force_rows
from nemo_rl.models.weight_sync.receipt.fingerprint import Fingerprints

__all__ = ["RefitExtension", "pack"]


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
                found.append(name)
        return found

    def _finalize(self, model: torch.nn.Module) -> None:
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(model, self.model_runner.model_config)
        if current_platform.is_cpu():
            # No weight comes for a head that is tied to the embedding, so vLLM leaves it packed from the old one.
            for module in model.modules():
                if isinstance(module, ParallelLMHead):
                    module.quant_method.process_weights_after_loading(module)
