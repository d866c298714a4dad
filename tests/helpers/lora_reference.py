"""The slow reference of adapters: peft on the plain Hugging Face model, one row at a time."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from unittest.mock import patch
from warnings import catch_warnings, simplefilter

import peft
import torch
from peft.tuners.lora.layer import ParamWrapper
from transformers import PreTrainedModel

from nemo_rl.config.backends import LoraConfig
from nemo_rl.models.adapters.lora import A_SUFFIX, B_SUFFIX, adapted_layers
from nemo_rl.models.hf.loading import load_causal_lm
from nemo_rl.models.policy.interfaces import TensorInfo
from tests.helpers.hf_reference import global_scale, hf_logprobs
from tests.helpers.parallel_layouts import ADAM, LOSS, MAX_GRAD_NORM, ROWS, STEPS, Arrays, Outcome, layout_batch

EXPERTS = ".experts."
"""Part of the names of targets that are parameters, not modules."""


Prepare = Callable[[PreTrainedModel], None]


def random_adapter(infos: Mapping[str, TensorInfo]) -> dict[str, torch.Tensor]:
    """Return an adapter of which neither matrix is 0, so that both have gradients, drawn by name."""
    found = {}
    for name, info in infos.items():
        draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        found[name] = torch.randn(info.shape, generator=draw) * 0.1
    return found


def peft_model(
    folder: Path, config: LoraConfig, *, dtype: torch.dtype, prepare: Prepare = lambda _: None
) -> peft.PeftModel:
    model = load_causal_lm(folder, dtype=dtype)
    prepare(model)
    # Grouped kernels do not know float64.
    model.set_experts_implementation("eager")
    return with_peft(model, config)


def with_peft(model: PreTrainedModel, config: LoraConfig) -> peft.PeftModel:
    layers = [layer.name for layer in adapted_layers(model, config)]
    given = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        use_rslora=config.rslora,
        target_modules=[name for name in layers if EXPERTS not in name],
        target_parameters=[name for name in layers if EXPERTS in name],
    )
    # Of a mixture peft takes `gate_proj` and the like for experts of earlier releases, also where layers are dense.
    with patch("peft.utils.transformers_weight_conversion.convert_peft_config_for_transformers"), catch_warnings():
        # One end of a tie is adapted on purpose.
        simplefilter("ignore", UserWarning)
        return peft.get_peft_model(model, given)


def peft_parameters(model: peft.PeftModel) -> dict[str, torch.nn.Parameter]:
    """Return peft's own parameters under our names, in peft's shapes."""
    found = {}
    for path, module in model.named_modules():
        if not isinstance(module, peft.tuners.lora.LoraLayer):
            continue
        name = path.removeprefix("base_model.model.").replace(".base_layer", "")
        if isinstance(module, ParamWrapper):
            name = f"{name}.{module.parameter_name}"
        found[f"{name}{A_SUFFIX}"] = module.lora_A["default"].weight
        found[f"{name}{B_SUFFIX}"] = module.lora_B["default"].weight
    return found


def to_peft(name: str, ours: torch.Tensor) -> torch.Tensor:
    """Return our tensor in peft's shape, which has the experts beside the ranks."""
    if ours.dim() == 2:
        return ours
    return ours.flatten(0, 1) if name.endswith(A_SUFFIX) else ours.permute(1, 2, 0).flatten(1)


def from_peft(name: str, value: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    if len(shape) == 2 or name.endswith(A_SUFFIX):
        return value.reshape(shape)
    experts, rows, rank = shape
    return value.reshape(rows, rank, experts).permute(2, 0, 1)


def peft_reference(
    folder: Path,
    config: LoraConfig,
    adapter: Mapping[str, torch.Tensor],
    *,
    dtype: torch.dtype,
    prepare: Prepare = lambda _: None,
) -> Outcome:
    """Train the adapter on one process, one row at a time; weights and gradients of the outcome are A and B."""
    batch, model = layout_batch(), peft_model(folder, config, dtype=dtype, prepare=prepare)
    parameters = peft_parameters(model)
    assert sorted(parameters) == sorted(adapter), "peft adapts other layers"
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    assert {id(weight) for weight in trained} == {id(weight) for weight in parameters.values()}
    with torch.no_grad():
        for name, weight in parameters.items():
            weight.copy_(to_peft(name, adapter[name]))

    def arrays(values: Mapping[str, torch.Tensor]) -> Arrays:
        return {
            name: from_peft(name, value.detach(), tuple(adapter[name].shape)).numpy().copy()
            for name, value in values.items()
        }

    adam = torch.optim.AdamW(trained, **ADAM)
    losses, norms = [], []
    first, gradients = torch.empty(0), Arrays()
    for step in range(STEPS):
        logprobs = hf_logprobs(model, batch)
        loss = LOSS(logprobs, batch, scale=global_scale(batch)).loss
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(trained, MAX_GRAD_NORM).item())
        if step == 0:
            first = logprobs.detach()
            gradients = arrays({name: weight.grad for name, weight in parameters.items() if weight.grad is not None})
        adam.step()
        adam.zero_grad()
        losses.append(loss.item())
    return Outcome(
        rows=tuple(range(ROWS)),
        num_microbatches=ROWS,
        logprobs=first.numpy(),
        losses=tuple(losses),
        norms=tuple(norms),
        weights=arrays(parameters),
        gradients=gradients,
    )
