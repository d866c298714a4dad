"""Low-rank adapters of a Hugging Face model: which layers have one, its names, shapes and start, and its arithmetic.

Used by both workers, the embedded engine and `nemo-rl export`. An adapter tensor is named after the adapted weight,
`model.layers.0.self_attn.q_proj.lora_A.weight`, which is peft's name without its prefix. Invariant: y = x W^T +
(x A^T) (s B)^T everywhere, so that engines which are sent A and s B compute in the trainer's order. Shapes: r rank,
A `[r, in]`, B `[out, r]`; of E experts `[E, r, in]` and `[E, out, r]`.

Adapters of fused experts: the forward of a Hugging Face mixture with a pair of A and B beside each expert.

Called by `lora.attach_adapters`. Invariant: with B at 0 the numbers are those of the module's own forward to the bit,
one by one as well as with grouped kernels; no merged weight is ever made. Shapes: T tokens, K experts of each, E
experts of this rank, S = T x K rows in the order of their experts, r rank; A `[E, r, in]`, B `[E, out, r]`.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.nn.modules.conv import _ConvNd
from transformers import PreTrainedModel
from transformers.integrations.moe import _grouped_linear

from nemo_rl.config.backends import ALL_LINEAR, LoraConfig
from nemo_rl.errors import ConfigError, name_some
from nemo_rl.models.hf.loading import ADAPTER_PART, EAGER, GROUPED, GROUPED_BYTES
from nemo_rl.models.policy.interfaces import TensorInfo
from nemo_rl.models.vision import family_of, is_in_tower

__all__ = [
    "A_SUFFIX",
    "B_SUFFIX",
    "AdaptedLayer",
    "Adapter",
    "AddsResult",
    "Product",
    "adapt_experts",
    "adapted_layers",
    "adapter_infos",
    "adapter_places",
    "attach_adapters",
    "experts_problem",
    "folded",
    "initial_adapter",
    "is_tied_head",
    "means_experts",
    "merged",
    "named_adapters",
    "router_layers",
    "run_experts",
    "without_adapters",
]


Product: TypeAlias = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
"""(rows `[n, in]`, matrices `[E, out, in]`, scale of the matrices) -> `[n, out]`, each row by its expert's matrix."""
AddsResult: TypeAlias = Callable[[torch.Tensor, Product], torch.Tensor]
"""(rows `[n, in]`, the product) -> `[n, out]` that is added to the result of a weight."""


def experts_problem(experts: Any, weight: str) -> str | None:
    """Return why a weight of fused experts cannot have adapters, or None where it can."""
    given = vars(experts)
    if not {"has_gate", "has_bias", "is_transposed", "num_experts"} <= given.keys():
        return "is in a mixture that computes in its own way"
    if experts.is_transposed:
        return "is stored transposed, [E, in, out], for which adapters are not written"
    if weight not in _weights(experts):
        return "is no projection of the experts"
    implementation = experts.config._experts_implementation
    if implementation not in (EAGER, GROUPED):
        return f"runs as {implementation!r}, not one by one and not with grouped kernels"
    return None


def adapt_experts(experts: Any, weight: str, adapter: torch.nn.Module) -> None:
    """Let the forward of the experts add the result of an adapter to that of one weight; once for each weight."""
    if ADAPTER_PART not in experts._modules:
        experts.add_module(ADAPTER_PART, torch.nn.ModuleDict())
        experts.forward = _with_expert_adapters(experts, experts.forward)
    experts.get_submodule(ADAPTER_PART)[weight] = adapter


def _with_expert_adapters(experts: Any, forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def with_adapters(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        adapters = {name: each for name, each in experts.get_submodule(ADAPTER_PART).items() if each.is_on}
        if not adapters:
            return forward(hidden, index, weights)
        return run_experts(experts, adapters, hidden, index, weights)

    return with_adapters


def run_experts(
    experts: Any,
    adapters: Mapping[str, AddsResult],
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Return the result of fused experts `[T, H]`, with adapters beside their weights.

    Args:
        adapters: by the name of the weight.
        hidden: `[T, H]`.
        index: `[T, K]`, the experts of each token.
        weights: `[T, K]`, those of the experts.
    """
    run = _one_by_one if experts.config._experts_implementation == EAGER else _grouped
    return run(experts, adapters, hidden, index, weights)


def _weights(experts: Any) -> tuple[str, str]:
    """Return the names of the first and the second projection."""
    return "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"


def _has(experts: Any, feature: str) -> bool:
    """Return a switch of the experts; older releases of transformers have neither feature nor switch."""
    return bool(vars(experts).get(feature, False))


def _between(experts: Any, value: torch.Tensor) -> torch.Tensor:
    return experts._apply_gate(value) if experts.has_gate else experts.act_fn(value)


def _weight(experts: Any, name: str) -> torch.Tensor:
    """Return the parameter, or what hides it: a rank's part of it is an attribute of the same name."""
    return getattr(experts, name)


def _bias(experts: Any, name: str, expert: torch.Tensor | int) -> torch.Tensor | None:
    return _weight(experts, f"{name}_bias")[expert] if experts.has_bias else None


def _one_by_one(
    experts: Any,
    adapters: Mapping[str, AddsResult],
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    linear, final = torch.nn.functional.linear, torch.zeros_like(hidden)
    first, second = _weights(experts)
    # An index of `num_experts` stands for experts of other ranks. The first expert runs also without a token: every
    # rank has to take part in reducing gradients.
    chosen = sorted({0, *index.unique().tolist()} - {experts.num_experts})
    for expert in chosen:
        slot, token = torch.where(index.t() == expert)

        def product(value: torch.Tensor, matrix: torch.Tensor, scale: float, expert: int = expert) -> torch.Tensor:
            return linear(value, matrix[expert] if scale == 1.0 else matrix[expert] * scale)

        def project(value: torch.Tensor, name: str, expert: int = expert, product: Any = product) -> torch.Tensor:
            result = linear(value, _weight(experts, name)[expert], _bias(experts, name, expert))
            return result + adapters[name](value, product) if name in adapters else result

        value = project(_between(experts, project(hidden[token], first)), second)
        if _has(experts, "has_post_expert_norm"):
            value = experts.post_expert_norm(value)
        value = value * weights[token, slot, None]
        final.index_add_(0, token, value.to(final.dtype))
    return final


def _grouped(
    experts: Any,
    adapters: Mapping[str, AddsResult],
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Compute as transformers' `grouped_mm_experts_forward`, with the products of the adapters."""
    num_top_k = index.shape[-1]
    expert_S, order_S = torch.sort(index.reshape(-1))
    count = experts.num_experts
    ends_E = torch.searchsorted(expert_S, torch.arange(count, device=index.device), right=True).to(torch.int32)
    # Rows of experts of other ranks are at the end, where the kernels neither read nor write.
    is_elsewhere_S1 = (expert_S >= count)[:, None] if _has(experts, "_is_expert_parallel") else None
    expert_S = expert_S.clamp(max=count - 1)

    def cleared(value: torch.Tensor) -> torch.Tensor:
        return value if is_elsewhere_S1 is None else value.masked_fill(is_elsewhere_S1, 0.0)

    def product(value: torch.Tensor, matrix: torch.Tensor, scale: float) -> torch.Tensor:
        return _grouped_linear(value, _aligned(matrix if scale == 1.0 else matrix * scale), ends_E)

    def project(value: torch.Tensor, name: str) -> torch.Tensor:
        bias = _bias(experts, name, expert_S)
        result = _grouped_linear(value, _weight(experts, name), ends_E, bias=bias)
        return cleared(result + adapters[name](value, product) if name in adapters else result)

    first, second = _weights(experts)
    value = cleared(hidden[order_S // num_top_k])
    value = project(_between(experts, project(value, first)), second)
    if _has(experts, "has_post_expert_norm"):
        value = experts.post_expert_norm(value)
    value = value * weights.reshape(-1)[order_S][:, None]
    value = value[torch.argsort(order_S)]
    return value.view(hidden.shape[0], num_top_k, hidden.shape[-1]).sum(dim=1).to(hidden.dtype)


def _aligned(matrix: torch.Tensor) -> torch.Tensor:
    """Return the matrices with zeros where the rank is not a multiple of what the kernels take."""
    multiple = GROUPED_BYTES // matrix.element_size()
    rows, columns = (-size % multiple for size in matrix.shape[1:])
    return torch.nn.functional.pad(matrix, (0, columns, 0, rows)) if rows or columns else matrix


A_SUFFIX, B_SUFFIX = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptedLayer:
    """A linear layer that has an adapter."""

    name: str
    """Name of the module, or of the fused weight of all experts."""
    in_features: int
    out_features: int
    num_experts: int = 0
    """Number of experts; 0: a plain linear layer."""

    def shapes(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of A and B.

        Example:
            >>> AdaptedLayer(name="q_proj", in_features=8, out_features=4).shapes(2)
            {'q_proj.lora_A.weight': (2, 8), 'q_proj.lora_B.weight': (4, 2)}
        """
        experts = (self.num_experts,) if self.num_experts else ()
        return {
            f"{self.name}{A_SUFFIX}": (*experts, rank, self.in_features),
            f"{self.name}{B_SUFFIX}": (*experts, self.out_features, rank),
        }


def adapted_layers(model: PreTrainedModel, config: LoraConfig) -> list[AdaptedLayer]:
    """Return the layers that get an adapter, in the order of the model; it may be on the meta device.

    Raises:
        ConfigError: a target matches no layer, or one that cannot have an adapter.
    """
    vision = family_of(model.config)
    linear = {
        name: module
        for name, module in model.named_modules()
        # Adapters leave a vision tower as it is: its features are the same for all rows and versions.
        if isinstance(module, torch.nn.Linear) and (vision is None or not is_in_tower(name, vision))
    }
    head = model.get_output_embeddings()
    if config.targets == ALL_LINEAR:
        vocabulary = model.get_input_embeddings().weight.shape[0]
        left_out = router_layers(model)
        chosen = {
            name: module
            for name, module in linear.items()
            if module is not head and module.out_features != vocabulary and name not in left_out
        }
        if not chosen:
            raise ConfigError(f"policy.lora.targets: {model.config.model_type!r} has no linear layers; name targets")
        return [_of_linear(name, module) for name, module in chosen.items()]
    experts = {each.name: each for each in _experts(model)}
    candidates = {name: _of_linear(name, module) for name, module in linear.items()} | experts

    def matches(target: str) -> set[str]:
        return {name for name in candidates if _ends(name, target) and (name in experts) == means_experts(target)}

    missing = [target for target in config.targets if not matches(target)]
    if missing:
        ends = sorted({name.rpartition(".")[2] for name in candidates})
        raise ConfigError(
            f"policy.lora.targets: {name_some(missing)} match no linear layer of {model.config.model_type!r}; layers "
            f"end in {', '.join(ends)}"
        )
    order = {name: place for place, (name, _) in enumerate(model.named_modules())}
    chosen_names = {name for target in config.targets for name in matches(target)}
    found = [each for name, each in candidates.items() if name in chosen_names]
    for each in found:
        _check_layer(model, each, config)
    return sorted(found, key=lambda each: order.get(each.name, order.get(each.name.rpartition(".")[0], 0)))


def adapter_infos(layers: Iterable[AdaptedLayer], config: LoraConfig) -> dict[str, TensorInfo]:
    """Return name, shape and dtype of every adapter tensor, in the order in which they are sent and stored."""
    return {
        name: TensorInfo(shape=shape, dtype="float32")
        for layer in layers
        for name, shape in layer.shapes(config.rank).items()
    }


def initial_adapter(
    infos: Mapping[str, TensorInfo], config: LoraConfig, *, seed: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the start of an adapter in float32: the same whatever the layout, for each is drawn by its name."""
    for name, info in infos.items():
        if name.endswith(B_SUFFIX):
            yield name, torch.zeros(info.shape)
            continue
        generator = torch.Generator().manual_seed((seed << 32) ^ zlib.crc32(name.encode()))
        if config.init == "gaussian":
            yield name, torch.randn(info.shape, generator=generator) / config.rank
        else:
            # The bound of a linear layer: kaiming_uniform with a = sqrt(5).
            bound = 1 / math.sqrt(info.shape[-1])
            yield name, (torch.rand(info.shape, generator=generator) * 2 - 1) * bound


class Adapter(torch.nn.Module):
    """A and B beside one linear layer, or beside one weight of all experts, whose forward adds the result of this
    one."""

    def __init__(
        self, a_shape: tuple[int, ...], b_shape: tuple[int, ...], config: LoraConfig, *, device: torch.device
    ) -> None:
        super().__init__()
        self.A = torch.nn.Parameter(torch.empty(a_shape, device=device))
        self.B = torch.nn.Parameter(torch.empty(b_shape, device=device))
        self.scale, self.dropout = config.scale, config.dropout
        self.is_on = True
        self.take: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
        """Gets the two factors of the result and returns what leaves the adapter in its place; None: the product."""

    def forward(self, value: torch.Tensor, product: Product | None = None) -> torch.Tensor:
        """Return `[..., out]` of `[..., in]`.

        Args:
            product: multiplies rows by the transposed matrices of their experts; None: there is one matrix.
        """
        if self.dropout and self.training:
            value = torch.nn.functional.dropout(value, self.dropout)
        if product is None:
            narrow, wide = torch.nn.functional.linear(value, self.A), self.B * self.scale
            return torch.nn.functional.linear(narrow, wide) if self.take is None else self.take(narrow, wide)
        return product(product(value, self.A, 1.0), self.B, self.scale)


def attach_adapters(model: PreTrainedModel, layers: Iterable[AdaptedLayer], config: LoraConfig) -> None:
    """Freeze the model and give each of these layers an `Adapter`, whose values are not set yet.

    Before the model is split or sharded; a parameter of an adapter is on the device of the layer's weight.
    """
    model.requires_grad_(False)
    for layer in layers:
        a_shape, b_shape = layer.shapes(config.rank).values()
        if layer.num_experts:
            owner, _, weight = layer.name.rpartition(".")
            experts = model.get_submodule(owner)
            device = experts.get_parameter(weight).device
            adapt_experts(experts, weight, Adapter(a_shape, b_shape, config, device=device))
            continue
        module = model.get_submodule(layer.name)
        adapter = Adapter(a_shape, b_shape, config, device=module.weight.device)  # type: ignore[arg-type]
        module.add_module(ADAPTER_PART, adapter)
        module.forward = _added(module.forward, adapter)  # type: ignore[method-assign]


def adapter_places(model: torch.nn.Module) -> Iterator[tuple[str, Adapter, str]]:
    """Yield the name of every adapter tensor, as `adapter_infos` has it, its module, and `A` or `B`."""
    for path, module in model.named_modules():
        if isinstance(module, Adapter):
            head, _, weight = path.rpartition(f".{ADAPTER_PART}")
            # Of experts the name of the weight follows.
            for matrix, suffix in (("A", A_SUFFIX), ("B", B_SUFFIX)):
                yield f"{head}{weight}{suffix}", module, matrix


def named_adapters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the parameters of all adapters, under the names of `adapter_infos`."""
    return ((name, module.get_parameter(matrix)) for name, module, matrix in adapter_places(model))


@contextmanager
def without_adapters(model: torch.nn.Module) -> Iterator[None]:
    """Switch all adapters off inside the block: the model computes as its base. Not for passes that overlap."""
    adapters = [module for module in model.modules() if isinstance(module, Adapter)]
    before = [adapter.is_on for adapter in adapters]
    for adapter in adapters:
        adapter.is_on = False
    try:
        yield
    finally:
        for adapter, is_on in zip(adapters, before, strict=True):
            adapter.is_on = is_on


def folded(adapter: Iterable[tuple[str, torch.Tensor]], scale: float) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield A and s B, as engines are sent them: nothing is left that a receiver could scale wrongly or twice."""
    return ((name, weight * scale if name.endswith(B_SUFFIX) else weight) for name, weight in adapter)


def merged(
    weights: Iterable[tuple[str, torch.Tensor]], adapter: Mapping[str, torch.Tensor], scale: float
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield W + s B A of adapted weights, computed in float32 or better, and the others as they are; changes none."""
    for name, weight in weights:
        layer = name.removesuffix(".weight")
        a, b = adapter.get(f"{layer}{A_SUFFIX}"), adapter.get(f"{layer}{B_SUFFIX}")
        if a is None or b is None:
            yield name, weight
        else:
            exact = torch.promote_types(weight.dtype, torch.float32)
            delta = (b.to(exact) * scale) @ a.to(exact)
            yield name, weight.to(exact) + delta.to(weight.device)


def _added(forward: Callable[..., torch.Tensor], adapter: Adapter) -> Callable[..., torch.Tensor]:
    def with_adapter(value: torch.Tensor) -> torch.Tensor:
        result = forward(value)
        return result + adapter(value) if adapter.is_on else result

    return with_adapter


def _of_linear(name: str, module: torch.nn.Linear) -> AdaptedLayer:
    return AdaptedLayer(name=name, in_features=module.in_features, out_features=module.out_features)


def router_layers(model: PreTrainedModel) -> set[str]:
    """Return the names of linear layers that give a score to each expert of the module which they lie in, so that an
    adapter of theirs would change routes."""
    found = set()
    for owner_name, owner in model.named_modules():
        counts = {_num_experts(child) for child in owner.children()} - {0}
        if not counts:
            continue
        experts = [name for name, child in owner.named_children() if _num_experts(child)]
        for child_name, child in owner.named_children():
            layers = {name: each for name, each in child.named_modules() if isinstance(each, torch.nn.Linear)}
            # A router is a layer of its own, or the only one of a module; a shared expert has several.
            if child_name not in experts and len(layers) == 1:
                [(name, layer)] = layers.items()
                path = ".".join(part for part in (owner_name, child_name, name) if part)
                found |= {path} if layer.out_features in counts else set()
    return found


def _num_experts(module: torch.nn.Module) -> int:
    """Return how many networks of one form a module holds beside each other, in a list or in weights with a leading
    dimension; 0 for any other module."""
    if isinstance(module, torch.nn.ModuleList):
        kinds = {type(each) for each in module}
        return len(module) if len(module) > 1 and len(kinds) == 1 else 0
    if isinstance(module, _ConvNd):
        return 0
    stacked = {len(weight) for weight in module.parameters(recurse=False) if weight.dim() == 3}
    return stacked.pop() if len(stacked) == 1 else 0


def _experts(model: PreTrainedModel) -> Iterator[AdaptedLayer]:
    """Yield the fused weights of experts, `[E, out, in]`."""
    for name, weight in model.named_parameters():
        if weight.dim() == 3 and ".experts." in name:
            count, rows, columns = weight.shape
            yield AdaptedLayer(name=name, in_features=columns, out_features=rows, num_experts=count)


def _check_layer(model: PreTrainedModel, layer: AdaptedLayer, config: LoraConfig) -> None:
    kind = f"policy.lora.targets: {layer.name} of {model.config.model_type!r}"
    if layer.num_experts:
        problem = experts_problem(model.get_submodule(layer.name.rpartition(".")[0]), layer.name.rpartition(".")[2])
        if problem is not None:
            raise ConfigError(f"{kind} {problem}; leave experts out")
        if config.dropout:
            raise ConfigError(
                f"policy.lora.dropout: {layer.name} is a weight of experts, of which peft drops no inputs; set it to 0"
            )
        return
    if config.serve == "merged" and is_tied_head(model, layer.name):
        raise ConfigError(
            f"{kind} shares its weight with the embedding, which a merged adapter would change as well; set "
            "policy.lora.serve=native, or leave the head out"
        )


def is_tied_head(model: PreTrainedModel, name: str) -> bool:
    """Return whether a layer is the head of a model and has the weight of its embedding."""
    embedding: Any = model.get_input_embeddings()
    module: Any = model.get_submodule(name)
    return embedding is not None and module is model.get_output_embeddings() and module.weight is embedding.weight


def means_experts(target: str) -> bool:
    """Return whether a target is a fused weight of experts, such as `experts.down_proj`: an end like `down_proj` means
    linear layers alone, as in peft."""
    return "experts" in target.split(".")[:-1]


def _ends(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")
