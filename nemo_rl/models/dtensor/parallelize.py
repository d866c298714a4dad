"""The trained model as FSDP2 sees it: `PolicyModel` around the Hugging Face model, sharded per layer and at the root.

Called by the DTensor worker. Invariant: parameters are resharded after every forward pass, so a pass always sees the
current shards, also after the shards were written in place. Shapes: n rows, S positions of the pass, s of them on this
context rank, K kept positions, M selected tokens, m of them predicted on this rank, V vocabulary.

`PlainHead`: takes hidden states and weights from a Hugging Face model's head, in place of logits.

Attached by `parallelize` before adapters and tensor parallelism wrap the head's forward, so that in a pass it sees the
hidden states as they are brought in, and this rank's part of the weights. Invariant: a model has one only if its logits
follow from the head's product by a factor and a cap, which is compared with the model's own code.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedModel

from nemo_rl.config.policy import PolicyConfig
from nemo_rl.distributed.collectives import ParallelGroups
from nemo_rl.errors import shorten
from nemo_rl.models.adapters.lora import Adapter, adapted_layers, attach_adapters
from nemo_rl.models.attention.varlen import ATTENTION_NAME, segments_are_known
from nemo_rl.models.dtensor.layers import CompiledLayers, chooses_compiled, recompute_layers
from nemo_rl.models.dtensor.rope import RowFrequencies, long_rope_start
from nemo_rl.models.dtensor.tensor_parallel import TensorAxis, apply_plan, plan_of
from nemo_rl.models.dtensor.weights import hold_as_stored
from nemo_rl.models.head.logits import LazyLogits
from nemo_rl.models.head.logprobs import Sampling, TopTokens, VocabShard
from nemo_rl.models.hf.folder import WeightSource
from nemo_rl.models.hf.loading import ADAPTER_PART, DTYPES, fit_experts
from nemo_rl.models.policy.fit import attention_problem, check_model_fits
from nemo_rl.models.policy.microbatch import ForwardInputs, selected_logprobs, selected_top_k, top_k_logits
from nemo_rl.models.vision import family_of, freeze_tower, row_tensors

__all__ = ["PlainHead", "PolicyModel", "full_weight", "parallelize", "reduce_gradients"]

logger = logging.getLogger(__name__)


PROBES = (-60.0, -7.0, -0.5, 0.0, 0.25, 3.0, 20.0, 80.0)
"""Products that are handed to the model's own code to see what it makes of them."""
SCALES = {"logit_scale": 1.0, "logits_scaling": -1.0}
"""Key of a config -> power to which its value scales the logits."""
CAP = "final_logit_softcapping"


class PlainHead:
    """The head of one model."""

    def __init__(self, head: torch.nn.Linear) -> None:
        self._head = head
        self._product = head.forward
        self._is_taking = False
        self._taken: LazyLogits | None = None
        self._placeholder = torch.tensor(PROBES)
        self.scale, self.cap = 1.0, None

    @classmethod
    def of(cls, hf: PreTrainedModel) -> PlainHead | None:
        """Return the head, attached; None, with a line in the log, where logits are not known to be a plain product."""
        head = hf.get_output_embeddings()
        try:
            if type(head) is not torch.nn.Linear:
                raise TypeError(f"the head is a {type(head).__name__}")
            found = cls(head)
            found._find_form(hf)
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            # The model's own code ran with a placeholder for its layers.
            logger.info("%s keeps its logits whole: %s", type(hf).__name__, shorten(repr(error)))
            return None
        head.forward = found._forward  # type: ignore[assignment]
        return found

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Let the passes inside compute no logits; what they hand out in their place means nothing."""
        adapter = self._head._modules.get(ADAPTER_PART)
        self._is_taking = True
        if isinstance(adapter, Adapter):
            adapter.take = self._take_adapter
        try:
            yield
        finally:
            self._is_taking = False
            if isinstance(adapter, Adapter):
                adapter.take = None

    def taken(self) -> LazyLogits:
        """Return the logits of the last pass, with its leading dimensions, and forget them."""
        taken, self._taken = self._taken, None
        assert taken is not None, "the model has not called its head"
        return taken

    # Private parts.

    def _forward(self, hidden: torch.Tensor) -> torch.Tensor:
        # Tensor parallelism lets the attributes be this rank's parts while the forward runs.
        weight, bias = self._head.weight, self._head.bias
        if not self._is_taking:
            return torch.nn.functional.linear(hidden, weight, bias)
        self._taken = LazyLogits(hidden_MD=hidden, weight_VD=weight, bias_V=bias, scale=self.scale, cap=self.cap)
        return self._shown(hidden, weight, bias)

    def _take_adapter(self, narrow: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
        assert self._taken is not None
        self._taken = replace(self._taken, narrow_Mr=narrow, wide_Vr=wide)
        return self._shown(narrow, wide, None)

    def _shown(self, left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return what leaves the head: where somebody looks at its logits these, else a placeholder."""
        if self._head._forward_hooks:
            with torch.no_grad():
                return torch.nn.functional.linear(left, right, bias)
        if self._placeholder.device != left.device:
            self._placeholder = self._placeholder.to(left.device)
        return self._placeholder.to(left.dtype).expand(*left.shape[:-1], len(PROBES))

    def _find_form(self, hf: PreTrainedModel) -> None:
        """Find factor and cap of the logits; raise ValueError where they are another function of the product."""
        base: Any = hf.base_model
        if base is hf:
            raise ValueError("the layers are no part of their own")
        config = hf.config.get_text_config().to_dict()
        probe = self._placeholder[None, None].double()
        with (
            torch.no_grad(),
            _replaced(base, lambda *_, **__: _Decoded(torch.zeros(1, 1, 1))),
            _replaced(self._head, lambda _: probe),
        ):
            found = hf(input_ids=torch.zeros(1, 1, dtype=torch.int64), use_cache=False).logits
        scales = [1.0, *(float(config[key]) ** power for key, power in SCALES.items() if config.get(key))]
        for cap in {None, config.get(CAP)}:
            for scale in scales:
                expected = scale * probe if cap is None else cap * torch.tanh(scale * probe / cap)
                if found.shape == expected.shape and torch.allclose(found.double(), expected, rtol=1e-5):
                    self.scale, self.cap = scale, cap
                    return
        raise ValueError("its logits are no product of hidden states and head with a known factor and cap")


class _Decoded:
    """Output of a decoder that has not run."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, place: int) -> torch.Tensor:
        return self.last_hidden_state


@contextmanager
def _replaced(module: Any, forward: Any) -> Iterator[None]:
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


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
    """Split the model over the tensor axis and shard it over data x context ranks, or copies of it (collective).

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


def reduce_gradients(model: PolicyModel, *, over_shards: bool, over_copies: bool) -> None:
    """Let backward passes from here on reduce gradients over the ranks that share a copy of the weights, and then over
    the copies; or add up on each rank what is not reduced yet."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(over_shards)
        model.set_requires_all_reduce(over_copies)


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
