"""The trained model as FSDP2 sees it: `PolicyModel` around the Hugging Face model, sharded per layer and at the root.

Called by the DTensor worker. Invariant: parameters are resharded after every forward pass, so a pass always sees the
current shards, also after the shards were written in place. Shapes: n rows, S positions of the pass, s of them on this
context rank, K kept positions, M selected tokens, m of them predicted on this rank, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from contextlib import nullcontext
from typing import TypeAlias

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedModel

from nemo_rl.config.policy import PolicyConfig
from nemo_rl.distributed.collectives import ParallelGroups
from nemo_rl.models.adapters.lora import adapted_layers, attach_adapters
from nemo_rl.models.attention.varlen import ATTENTION_NAME, segments_are_known
from nemo_rl.models.dtensor.fit import attention_problem, check_model_fits
from nemo_rl.models.dtensor.layers import CompiledLayers, chooses_compiled, recompute_layers
from nemo_rl.models.dtensor.plain_head import PlainHead
from nemo_rl.models.dtensor.rope import RowFrequencies, long_rope_start
from nemo_rl.models.dtensor.tensor_parallel import TensorAxis, apply_plan
from nemo_rl.models.dtensor.tensor_plans import plan_of
from nemo_rl.models.dtensor.weights import hold_as_stored
from nemo_rl.models.head.lazy_logits import LazyLogits
from nemo_rl.models.head.logprobs import Sampling, VocabShard
from nemo_rl.models.head.top_k import TopTokens
from nemo_rl.models.hf.folder import WeightSource
from nemo_rl.models.hf.loading import DTYPES, fit_experts
from nemo_rl.models.policy.microbatch import ForwardInputs, selected_logprobs, selected_top_k, top_k_logits
from nemo_rl.models.vision import family_of, freeze_tower, row_tensors

__all__ = ["PolicyModel", "full_weight", "parallelize", "reduce_gradients"]


Wanted: TypeAlias = int | TopTokens | None
"""Request for the most likely tokens: of raw logits at every position, or of the distributions of selected tokens."""


class PolicyModel(torch.nn.Module):
    """The unit that FSDP wraps: its forward runs the model and ends in log-probabilities, never in full logits."""

    def __init__(self, hf: PreTrainedModel, *, shard: VocabShard | None = None, head: PlainHead | None = None) -> None:
        """Args:
        shard: this rank's part of the vocabulary where the head is split.
        head: takes hidden states in place of logits; None: the model computes logits at the selected positions.
        """
        super().__init__()
        self.hf = hf
        self.shard, self._head = shard, head
        self.compiled: CompiledLayers | None = None
        self.vision = family_of(hf.config)
        self._takes_segments = hf.config.get_text_config()._attn_implementation == ATTENTION_NAME
        start = long_rope_start(hf.config)
        self._frequencies = RowFrequencies(hf, start=start) if start is not None else None

    def forward(
        self, inputs: ForwardInputs, *, sampling: Sampling, top_k: Wanted = None, computed: Sequence[str] = ()
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return what `selected_logprobs` gives, the same on every tensor and context rank (collective over both).

        With `TopTokens` what `selected_top_k` gives; with a number values and ids of `top_k_logits` instead.
        """
        # No mask: padding is on the right of its sequence, so causal attention never reaches it, and sequences are
        # distinguished by their segments.
        head = None if isinstance(top_k, int) else self._head
        with (
            self._frequencies.of(inputs) if self._frequencies is not None else nullcontext(),
            segments_are_known() if self._takes_segments else nullcontext(),
            head.taking() if head is not None else nullcontext(),
        ):
            logits_nKV = self.hf(
                **self._tokens(inputs),
                attention_mask=None,
                position_ids=inputs.position_ids,
                use_cache=False,
                logits_to_keep=0 if isinstance(top_k, int) else inputs.keep_K,
                **({"segments": inputs.segments} if self._takes_segments else {}),
            ).logits
        if isinstance(top_k, int):
            return top_k_logits(logits_nKV, inputs.segments, k=top_k, shard=self.shard)
        logits = LazyLogits.given(logits_nKV) if head is None else head.taken()
        if top_k is not None:
            return selected_top_k(logits, inputs, top_k, temperature=sampling.temperature, shard=self.shard)
        return selected_logprobs(logits, inputs, sampling=sampling, shard=self.shard, computed=computed)

    def _tokens(self, inputs: ForwardInputs) -> dict[str, torch.Tensor]:
        """Return the tokens as the model takes them: their ids, or embeddings where images stand between them."""
        if self.vision is None or inputs.feature_ns is None:
            return {"input_ids": inputs.input_ids}
        rows = list(row_tensors(inputs.extras))
        return {"inputs_embeds": self.vision.embed(self.hf, inputs.input_ids, inputs.feature_ns, rows)}


def parallelize(
    hf: PreTrainedModel, *, groups: ParallelGroups, config: PolicyConfig, source: WeightSource
) -> PolicyModel:
    """Split the model over the tensor axis and shard it over data x context ranks (collective).

    A single rank on a CPU in float32 has no shards: FSDP would copy each weight before and each gradient after its use.
    Parameters are on the meta device, and stay there. They are float32; with another precision they are cast for
    computation and gradients are reduced in float32. Frozen ones are held in the precision where the source has them
    so: of a group that FSDP gathers only what is trained must have one dtype.

    Args:
        source: of the weights; only dtypes are read.

    Raises:
        ConfigError: the model cannot run in this layout.
    """
    sizes = config.dtensor_cfg
    check_model_fits(hf, config)
    head = PlainHead.of(hf)
    if config.vision.freeze_tower:
        freeze_tower(hf)
    if config.lora.enabled:
        attach_adapters(hf, adapted_layers(hf, config.lora), config.lora)
        hold_as_stored(hf, source, DTYPES[config.precision])
    fit_experts(hf, DTYPES[config.precision])
    if attention_problem(hf) is None:
        # A vision tower keeps its own, which looks both ways.
        hf.set_attn_implementation(ATTENTION_NAME if family_of(hf.config) is None else {"text_config": ATTENTION_NAME})
    recompute_layers(hf, sizes.activation_checkpointing)
    shard = _split_over_tensor_axis(hf, groups, config) if groups.tensor_mesh is not None else None
    layer_names: Set[str] = set(hf._no_split_modules or ())
    model = PolicyModel(hf, shard=shard, head=head)
    if model.vision is not None:
        layer_names = model.vision.layers(layer_names)
    layers = [module for module in hf.modules() if type(module).__name__ in layer_names]
    if chooses_compiled(hf.config, config, groups.fsdp_mesh.device_type):
        model.compiled = CompiledLayers(layers)
    if _is_alone(groups) and config.precision == "float32":
        return model
    policy = MixedPrecisionPolicy()
    if config.precision != "float32":
        policy = MixedPrecisionPolicy(param_dtype=DTYPES[config.precision], reduce_dtype=torch.float32)
    options: dict[str, object] = {"mesh": groups.fsdp_mesh, "mp_policy": policy, "reshard_after_forward": True}
    if sizes.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy()
    for layer in layers:
        fully_shard(layer, **options)  # type: ignore[call-overload]
    fully_shard(model, **options)  # type: ignore[call-overload]
    return model


def _is_alone(groups: ParallelGroups) -> bool:
    """Return whether this rank is the only one, on a CPU."""
    return groups.fsdp_mesh.size() == 1 and groups.tensor_mesh is None and groups.fsdp_mesh.device_type == "cpu"


def _split_over_tensor_axis(hf: PreTrainedModel, groups: ParallelGroups, config: PolicyConfig) -> VocabShard | None:
    mesh, sizes = groups.tensor_mesh, config.dtensor_cfg
    assert mesh is not None
    axis = TensorAxis(mesh=mesh, sequence_parallel=sizes.sequence_parallel)
    plan = plan_of(hf, custom=sizes.custom_parallel_plan, tp=axis.size, sequence_parallel=sizes.sequence_parallel)
    apply_plan(hf, plan, axis)
    head = hf.get_output_embeddings()
    weight = head.weight if head is not None else None
    if not isinstance(weight, DTensor) or not weight.placements[0].is_shard(0):
        return None
    return VocabShard(group=axis.group, first=axis.rank * (weight.shape[0] // axis.size))


def reduce_gradients(model: PolicyModel, is_on: bool) -> None:
    """Let backward passes from here on reduce gradients over the ranks, or add them up on each one."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_on)


def full_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor on every rank (collective), detached."""
    detached = weight.detach()
    if not isinstance(detached, DTensor):
        return detached
    # One axis after the other, the outer one first: torch warns of anything else.
    for axis in range(detached.device_mesh.ndim):
        kept = detached.placements[axis + 1 :]
        detached = detached.redistribute(placements=[*[Replicate()] * (axis + 1), *kept])
    return detached.to_local()
