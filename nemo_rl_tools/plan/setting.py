"""`PlanSetting`: a recipe with the architecture of its model and the GPU it is planned for, and the batches of a step.

All estimates read them. Batches are planned by the run's own planners, with every row as long as it may be: then there
are the most microbatches, and none is larger. Invariant: `PassTokens` are upper bounds for the rank that has most of
them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from transformers import PretrainedConfig, PreTrainedModel

from nemo_rl.algorithms.grpo import plan_logprobs, plan_train
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.config.schema import MasterConfig
from nemo_rl.distributed.layout import ParallelLayout
from nemo_rl.distributed.packing import round_up
from nemo_rl.distributed.worker_pass import WorkerPass
from nemo_rl.errors import ConfigError, ModelFolderError, boundary
from nemo_rl.models.hf.loading import DTYPES, model_class, named_weights
from nemo_rl.models.megatron.architecture import Architecture, check_fits, layers_of_stages
from nemo_rl.models.vision import family_of
from nemo_rl.utils.flops import TransformerShape, theoretical_tflops
from nemo_rl_tools.known_models import sizes_of

__all__ = [
    "FLOAT32_BYTES",
    "GPU",
    "GPUS",
    "Batches",
    "Model",
    "PassTokens",
    "PlanSetting",
    "gpu_named",
    "pass_tokens",
    "passes_of",
    "plan_batches",
]

GB = 10**9
MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class GPU:
    """One accelerator and how it is connected; rates of the vendors' data sheets, in bytes per second."""

    name: str
    device_name: str
    """The name that CUDA gives the device, by which `utils.flops` knows its peak."""
    memory_bytes: int
    """Bytes that the driver gives to processes."""
    memory_rate: float
    link_rate: float
    """Bytes per second to another GPU of the node, in one direction."""
    network_rate: float
    """Bytes per second to another node, in one direction, of the usual network card per GPU."""

    def tflops(self, precision: str) -> float:
        """Return the dense peak in this precision, in 1e12 operations per second."""
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
"""GPUs by the name of the product and its memory."""


def gpu_named(name: str) -> GPU:
    """Return the GPU of that name, whatever the case of its letters.

    Raises:
        ConfigError: the name is not known.
    """
    found = {known.lower(): gpu for known, gpu in GPUS.items()}.get(name.lower())
    if found is None:
        raise ConfigError(f"--gpu: expected one of {', '.join(GPUS)}, got {name!r}")
    return found


FLOAT32_BYTES = 4


class Model:
    """An architecture, in the terms of both workers; nothing of it has weights."""

    def __init__(self, config: PretrainedConfig) -> None:
        self.config: PretrainedConfig = config.get_text_config()
        self._whole = self.config if family_of(config) is None else config
        given = sizes_of(self.config)
        self.flops_shape = TransformerShape.from_config(given)
        self.top_k = int(given.get("num_experts_per_tok") or 1)
        """Experts that a token chooses; 1 without experts."""

    @cached_property
    def hf(self) -> PreTrainedModel:
        """Return the Hugging Face model on the meta device."""
        what = f"--model-config: {self.config.model_type!r} describes no causal language model"
        with boundary(ModelFolderError, what), torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model: PreTrainedModel = model_class(self._whole).from_config(self._whole, trust_remote_code=False)
        return model

    @cached_property
    def num_parameters(self) -> int:
        return sum(weight.numel() for weight in self.hf.parameters())

    @cached_property
    def has_head_norms(self) -> bool:
        """Return whether queries and keys have norms of their own."""
        return any(name.endswith(".q_norm") for name, _ in self.hf.named_modules())

    @cached_property
    def has_gated_mlp(self) -> bool:
        """Return whether a feed-forward block multiplies two projections of its input."""
        return any("gate" in name.rpartition(".")[2] for name, _ in self.hf.named_modules())

    @cached_property
    def units(self) -> dict[str, int]:
        """Return the number of units by the prefix of the names of each module that FSDP takes as a unit."""
        kinds = set(self.hf._no_split_modules or ())
        names = [name for name, module in self.hf.named_modules() if type(module).__name__ in kinds]
        return {f"{name}.": number for number, name in enumerate(names)}

    @cached_property
    def full_weights(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all weights and persistent buffers by their Hugging Face names; tied ones once."""
        return {name: tuple(weight.shape) for name, weight in named_weights(self.hf)}

    @cached_property
    def architecture(self) -> Architecture:
        return Architecture.of(self.config)


@dataclass(frozen=True, kw_only=True)
class PlanSetting:
    """The recipe that is planned, with its model and its GPU."""

    config: MasterConfig
    model: Model
    gpu: GPU | None
    """The GPU of the workers, or None where they run on CPUs."""
    teacher: PlanSetting | None = None
    """The recipe as a teacher's workers see it, with its model; None without distillation."""

    @property
    def policy(self) -> PolicyConfig:
        return self.config.policy

    @property
    def is_megatron(self) -> bool:
        return self.policy.megatron_cfg.enabled

    @cached_property
    def layout(self) -> ParallelLayout:
        """Return the layout as the run makes it.

        Raises:
            ConfigError: the ranks do not divide.
        """
        return ParallelLayout.of_policy(self.policy, world_size=self.config.cluster.num_workers)

    @property
    def element_bytes(self) -> int:
        """Return the bytes of an element of the dtype in which the policy computes."""
        return DTYPES[self.policy.precision].itemsize

    @property
    def engine_element_bytes(self) -> int:
        return DTYPES[self.policy.generation.precision or self.policy.precision].itemsize

    @property
    def steps_alive(self) -> int:
        """Return the number of steps whose groups an asynchronous run may have at one time; 1 of a synchronous run."""
        section = self.config.grpo.async_
        return 1 + section.steps_ahead if section.takes_stale_rows else 1

    @property
    def groups_alive(self) -> int:
        """Return the number of groups that engines may have at one time; without the rounds of dynamic sampling."""
        return self.config.grpo.num_prompts_per_step * self.steps_alive

    @property
    def has_kernels(self) -> bool:
        """Return whether Transformer Engine is taken to be installed: on GPUs, for the Megatron worker."""
        return self.is_megatron and self.gpu is not None

    @cached_property
    def stage_layers(self) -> tuple[int, ...]:
        if not self.is_megatron:
            return (self.model.flops_shape.num_layers,)
        check_fits(self.model.architecture, self.policy)
        return layers_of_stages(self.model.architecture, self.policy)

    def layers_of(self, stage: int) -> range:
        first = sum(self.stage_layers[:stage])
        return range(first, first + self.stage_layers[stage])


@dataclass(frozen=True, kw_only=True, slots=True)
class PassTokens:
    """Sizes of one forward pass on one context rank."""

    rows: int
    """Rows of the pass: 1 when they are packed."""
    width: int
    """Positions of a row on this rank."""
    predicted: int
    """Positions of a row whose logits are computed."""
    selected: int
    """Tokens of all rows whose log-probabilities are computed."""
    sequence: int
    """Longest sequence over all context ranks."""
    is_packed: bool

    @property
    def tokens(self) -> int:
        return self.rows * self.width


@dataclass(frozen=True, kw_only=True, slots=True)
class Batches:
    """The batches of one step with rows of full length."""

    rows: int
    """Samples of a step."""
    row_tokens: int
    prompt_tokens: int
    response_tokens: int
    global_batches: int
    """Optimizer steps."""
    global_batch_rows: int
    rows_per_rank: int
    """Rows of a global batch on one data-parallel rank."""
    train_microbatches: int
    """Microbatches of a global batch on one data-parallel rank."""
    logprob_microbatches: int
    """Microbatches of the step on one data-parallel rank."""
    train: PassTokens
    logprob: PassTokens

    @property
    def tokens(self) -> int:
        """Return the most tokens of a step."""
        return self.rows * self.row_tokens


def plan_batches(setting: PlanSetting) -> Batches:
    """Raise ConfigError where a row does not fit a microbatch, or rows do not divide."""
    grpo, policy, layout = setting.config.grpo, setting.policy, setting.layout
    rows, size = grpo.num_prompts_per_step * grpo.num_generations_per_prompt, policy.train_global_batch_size
    width, response = policy.max_total_sequence_length, policy.longest_response
    sizes = [min(size, rows - start) for start in range(0, rows, size)]
    lengths = [width] * rows
    plan = plan_train(lengths, sizes, policy, layout=layout)
    logprobs = plan_logprobs(plan, lengths, policy, layout=layout)
    packing, dynamic = policy.sequence_packing, policy.dynamic_batching
    capped = packing if packing.is_on else dynamic if dynamic.enabled else None
    rows_per_rank = math.ceil(max(sizes) / layout.dp)
    padded = round_up(width, layout.round_up_multiple(policy.make_sequence_length_divisible_by))
    fixed = (policy.train_micro_batch_size, policy.logprob_batch_size or policy.train_micro_batch_size)
    caps = (
        (capped.train_mb_tokens, capped.logprob_mb_tokens) if capped is not None else [rows * padded for rows in fixed]
    )
    per_rank = (rows_per_rank * padded, math.ceil(rows / layout.dp) * padded)
    train, logprob = (
        pass_tokens(
            setting, tokens=min(cap, most), width=padded, predicted=min(response, width - 1), is_packed=packing.is_on
        )
        for cap, most in zip(caps, per_rank, strict=True)
    )
    return Batches(
        rows=rows,
        row_tokens=width,
        prompt_tokens=min(setting.config.data.max_input_seq_length, width - 1),
        response_tokens=response,
        global_batches=len(sizes),
        global_batch_rows=max(sizes),
        rows_per_rank=rows_per_rank,
        train_microbatches=max(plan.steps),
        logprob_microbatches=max(len(part) for part in logprobs.microbatches),
        train=train,
        logprob=logprob,
    )


def pass_tokens(setting: PlanSetting, *, tokens: int, width: int, predicted: int, is_packed: bool) -> PassTokens:
    """Return the pass of the context rank with the most tokens to predict.

    Args:
        tokens: of the pass over all context ranks.
        width: of a row.
        predicted: positions of a row that predict; the logits of padded rows are computed where any of them does.
    """
    rows, cp = max(1, tokens // width), setting.layout.cp
    if is_packed:
        local = tokens // cp
        selected = min(local, rows * predicted + max(0, tokens - rows * width))
        return PassTokens(
            rows=1, width=local, predicted=selected, selected=selected, sequence=width, is_packed=rows > 1
        )
    # Shorter rows may use the cap better than those of full length.
    local = tokens // rows // cp
    count = min(local, predicted)
    return PassTokens(rows=rows, width=local, predicted=count, selected=rows * count, sequence=width, is_packed=False)


def passes_of(setting: PlanSetting) -> tuple[WorkerPass, ...]:
    """Return the worker passes that a step of this recipe has, in order."""
    chosen = [WorkerPass.TRAIN]
    if setting.config.loss_fn.reference_policy_kl_penalty > 0:
        chosen.insert(0, WorkerPass.REFERENCE_LOGPROBS)
    if setting.config.has_prev_logprobs_pass:
        chosen.insert(0, WorkerPass.PREV_LOGPROBS)
    return tuple(chosen)
