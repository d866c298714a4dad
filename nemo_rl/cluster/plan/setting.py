"""`Setting`: a recipe with the architecture of its model and the device it is planned for; what all estimates read."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cached_property

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from nemo_rl.cluster.known_models import sizes_of
from nemo_rl.cluster.plan.gpus import GPU
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.config.schema import MasterConfig
from nemo_rl.distributed.layout import ParallelLayout
from nemo_rl.errors import ModelFolderError, boundary
from nemo_rl.models.loading import DTYPES, named_weights
from nemo_rl.models.megatron.architecture import Architecture, check_fits, layers_of_stages
from nemo_rl.utils.flops import TransformerShape

__all__ = ["FLOAT32_BYTES", "Model", "Setting"]

FLOAT32_BYTES = 4


class Model:
    """An architecture, in the terms of both workers; nothing of it has weights."""

    def __init__(self, config: PretrainedConfig) -> None:
        self.config: PretrainedConfig = config.get_text_config()
        given = sizes_of(self.config)
        self.flops_shape = TransformerShape.from_config(given)
        self.top_k = int(given.get("num_experts_per_tok") or 1)
        """Experts that a token chooses; 1 without experts."""

    @cached_property
    def hf(self) -> PreTrainedModel:
        """The Hugging Face model on the meta device."""
        what = f"--model-config: {self.config.model_type!r} describes no causal language model"
        with boundary(ModelFolderError, what), torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model: PreTrainedModel = AutoModelForCausalLM.from_config(self.config, trust_remote_code=False)
        return model

    @cached_property
    def num_parameters(self) -> int:
        return sum(weight.numel() for weight in self.hf.parameters())

    @cached_property
    def has_head_norms(self) -> bool:
        """Whether queries and keys have norms of their own."""
        return any(name.endswith(".q_norm") for name, _ in self.hf.named_modules())

    @cached_property
    def has_gated_mlp(self) -> bool:
        """Whether a feed-forward block multiplies two projections of its input."""
        return any("gate" in name.rpartition(".")[2] for name, _ in self.hf.named_modules())

    @cached_property
    def units(self) -> dict[str, int]:
        """Number by the prefix of the names of each module that FSDP takes as a unit."""
        kinds = set(self.hf._no_split_modules or ())
        names = [name for name, module in self.hf.named_modules() if type(module).__name__ in kinds]
        return {f"{name}.": number for number, name in enumerate(names)}

    @cached_property
    def whole_weights(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all weights and persistent buffers by their Hugging Face names; tied ones once."""
        return {name: tuple(weight.shape) for name, weight in named_weights(self.hf)}

    @cached_property
    def architecture(self) -> Architecture:
        """Of the models that the Megatron worker trains."""
        return Architecture.of(self.config)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is planned."""

    config: MasterConfig
    model: Model
    gpu: GPU | None
    """None: the workers run on CPUs."""

    @property
    def policy(self) -> PolicyConfig:
        return self.config.policy

    @property
    def is_megatron(self) -> bool:
        return self.policy.megatron_cfg.enabled

    @cached_property
    def layout(self) -> ParallelLayout:
        """As the run makes it.

        Raises:
            ConfigError: the ranks do not divide.
        """
        return ParallelLayout.of_policy(self.policy, world_size=self.config.cluster.num_workers)

    @property
    def element_bytes(self) -> int:
        """Of the dtype that the policy computes in."""
        return DTYPES[self.policy.precision].itemsize

    @property
    def engine_element_bytes(self) -> int:
        return DTYPES[self.policy.generation.precision or self.policy.precision].itemsize

    @property
    def has_kernels(self) -> bool:
        """Whether Transformer Engine is taken to be installed: on GPUs, for the Megatron worker."""
        return self.is_megatron and self.gpu is not None

    @cached_property
    def stage_layers(self) -> tuple[int, ...]:
        """Layers of each pipeline stage."""
        if not self.is_megatron:
            return (self.model.flops_shape.num_layers,)
        check_fits(self.model.architecture, self.policy)
        return layers_of_stages(self.model.architecture, self.policy)

    def layers_of(self, stage: int) -> range:
        """Numbers of the layers of a pipeline stage."""
        first = sum(self.stage_layers[:stage])
        return range(first, first + self.stage_layers[stage])
