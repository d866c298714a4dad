"""Tensor and sequence parallelism of a Hugging Face model: each module's style decides its split and its collectives.

Called by `parallelize` before FSDP. A style gives every parameter of a module a placement on the tensor axis, as
DTensor, so that FSDP, checkpoints and exports know the whole; the module's forward then sees this rank's part as a
plain tensor. Invariant: a gradient is reduced over the tensor axis exactly once: where ranks see different tokens or
heads the placement of the gradient says so, and FSDP sums it. Shapes: n rows, S positions, h hidden size. `plan_of`
says the style of each module.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from transformers import PreTrainedModel

from nemo_rl.distributed.collectives import copy_to, gather_along, reduce_from, scatter_along
from nemo_rl.errors import ConfigError, shorten
from nemo_rl.models.hf.loading import ADAPTER_PART

__all__ = ["STYLES", "TensorAxis", "apply_plan", "check_plan", "plan_of", "split_dims"]


MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Model types with their own plan, which also serves sequence parallelism."""

# Styles of a model's own plan, and what they are called here.
HF_STYLES: Mapping[str, str] = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "embedding_rowwise": "vocab_embedding",
    "replicated_with_grad_allreduce": "replicated_partial",
}
# Of the head only: log-probabilities are taken from logits that stay split.
HF_HEAD_STYLES: Mapping[str, str] = {**HF_STYLES, "colwise_gather_output": "colwise"}
HEAD = "lm_head"


def plan_of(
    model: PreTrainedModel, *, custom: Mapping[str, str] | str | None, tp: int, sequence_parallel: bool
) -> dict[str, str]:
    """Return pattern of module names -> style: the user's, the one of its type, or what the model says of itself.

    Raises:
        ConfigError: nothing is known about this model, what is known does not serve sequence parallelism, or the user's
            plan cannot be imported.
    """
    kind = str(model.config.model_type)
    if custom is not None:
        return _imported(custom) if isinstance(custom, str) else dict(custom)
    _check_heads(model, tp)
    if kind in MODEL_TYPES:
        return _plan_by_type(model)
    if sequence_parallel:
        raise ConfigError(
            f"policy.dtensor_cfg.sequence_parallel: {kind!r} has no plan for it (known: {', '.join(MODEL_TYPES)}); set "
            "it to false or give policy.dtensor_cfg.custom_parallel_plan"
        )
    return _own_plan(model, kind)


def _imported(name: str) -> dict[str, str]:
    """Return the dictionary that `module:name` or `module.name` stands for."""
    key = "policy.dtensor_cfg.custom_parallel_plan"
    module, _, attribute = name.rpartition(":" if ":" in name else ".")
    try:
        found = vars(importlib.import_module(module))[attribute]
    except KeyError:
        raise ConfigError(f"{key}: module {module!r} has no {attribute!r}; expected a dictionary of styles") from None
    except Exception as error:
        # A module of the user's may fail in any way while it is imported.
        raise ConfigError(
            f"{key}: {name!r} cannot be imported: {type(error).__name__}: {error}; is its folder on PYTHONPATH?"
        ) from error
    wanted = "expected a dictionary, pattern of module names -> name of a style such as 'colwise'"
    if not isinstance(found, Mapping):
        raise ConfigError(f"{key}: {name!r}: {wanted}, got {shorten(repr(found))}")
    wrong = [pair for pair in found.items() if not all(isinstance(part, str) for part in pair)]
    if wrong:
        got = shorten(repr(wrong[0]))
        raise ConfigError(f"{key}: {name!r}: {wanted}, got {got}; name the style instead of its object")
    return dict(found)


def _plan_by_type(model: PreTrainedModel) -> dict[str, str]:
    attention = "model.layers.*.self_attn"
    plan = {
        "model.embed_tokens": "vocab_embedding",
        attention: "block",
        f"{attention}.q_proj": "column",
        f"{attention}.k_proj": "column",
        f"{attention}.v_proj": "column",
        f"{attention}.o_proj": "rowwise",
        "model.layers.*.input_layernorm": "norm",
        "model.layers.*.post_attention_layernorm": "norm",
        "model.norm": "final_norm",
        HEAD: "column",
    }
    names = {name for name, _ in model.named_modules()}
    # Norms of single heads see this rank's heads only.
    for optional in ("q_norm", "k_norm"):
        if f"model.layers.0.self_attn.{optional}" in names:
            plan[f"{attention}.{optional}"] = "replicated_partial"
    # A mixture of experts may have layers without one, so each layer is named.
    for layer in sorted(name for name in names if name.startswith("model.layers.") and name.endswith(".mlp")):
        if f"{layer}.experts" in names:
            plan |= {layer: "moe_block", f"{layer}.gate": "replicated_partial", f"{layer}.experts": "experts"}
        else:
            plan |= {layer: "block", f"{layer}.gate_proj": "column", f"{layer}.up_proj": "column"}
            plan[f"{layer}.down_proj"] = "rowwise"
    return plan


def _own_plan(model: PreTrainedModel, kind: str) -> dict[str, str]:
    styles: dict[str, str] = dict(model._tp_plan or {})
    if not styles:
        raise ConfigError(
            f"policy.dtensor_cfg.tensor_parallel_size: nothing is known about {kind!r} (known: "
            f"{', '.join(MODEL_TYPES)}); set it to 1 or give policy.dtensor_cfg.custom_parallel_plan"
        )
    plan = {name: (HF_HEAD_STYLES if name == HEAD else HF_STYLES).get(style) for name, style in styles.items()}
    unknown = sorted({styles[name] for name, style in plan.items() if style is None})
    if unknown:
        raise ConfigError(
            f"policy.dtensor_cfg.tensor_parallel_size: the plan of {kind!r} uses styles {unknown}, which do not "
            "compose with FSDP here; set it to 1 or give policy.dtensor_cfg.custom_parallel_plan"
        )
    return {name: style for name, style in plan.items() if style is not None}


def _check_heads(model: PreTrainedModel, tp: int) -> None:
    config = model.config.get_text_config()
    for name in ("num_attention_heads", "num_key_value_heads"):
        count = config.to_dict().get(name)
        if isinstance(count, int) and count % tp:
            raise ConfigError(
                f"policy.dtensor_cfg.tensor_parallel_size: {name}={count} of {model.config.model_type!r} does not "
                f"divide by {tp}; use a divisor of {count}"
            )


Forward = Callable[..., object]
SEQUENCE_DIM = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorAxis:
    """The tensor-parallel ranks, and how activations enter and leave the parts of the model that they share."""

    mesh: DeviceMesh
    sequence_parallel: bool

    @property
    def group(self) -> dist.ProcessGroup:
        return self.mesh.get_group()

    @property
    def rank(self) -> int:
        return int(self.mesh.get_local_rank())

    @property
    def size(self) -> int:
        return int(self.mesh.size())

    def enter(self, value: torch.Tensor) -> torch.Tensor:
        """Return `[n, S, h]` for a part of which each rank computes a piece; gather S where it is split
        (collective)."""
        if self.sequence_parallel:
            return gather_along(value, self.group, dim=SEQUENCE_DIM)
        return copy_to(value, self.group)

    def leave(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' pieces; keep this rank's S where it is split (collective)."""
        if self.sequence_parallel:
            return scatter_along(value, self.group, dim=SEQUENCE_DIM)
        return reduce_from(value, self.group)


def check_plan(model: torch.nn.Module, plan: Mapping[str, str], *, size: int) -> None:
    """Refuse a plan that cannot be applied over `size` ranks; needs no weights, a model on the meta device will do.

    Args:
        plan: pattern of module names, `*` for one part of a name, to a key of `STYLES`.

    Raises:
        ConfigError: unknown style, a pattern without a module, or sizes that do not divide.
    """
    unknown = {pattern: style for pattern, style in plan.items() if style not in STYLES}
    for pattern, style in unknown.items():
        raise ConfigError(f"tensor parallel plan: {pattern!r}: unknown style {style!r}; known are {sorted(STYLES)}")
    for name, style in _styles_of_modules(model, plan).items():
        if style not in SPLIT_SIZES:
            continue
        what, count_of = SPLIT_SIZES[style]
        count = count_of(model.get_submodule(name))
        if count % size:
            raise ConfigError(
                f"policy.dtensor_cfg.tensor_parallel_size: {count} {what} of {name} do not divide by {size} ranks; "
                f"use a divisor of {count}"
            )


def apply_plan(model: torch.nn.Module, plan: Mapping[str, str], axis: TensorAxis) -> None:
    """Split the model over the axis in place (collective: every rank holds the same full weights before).

    Args:
        plan: as in `check_plan`. Modules that it leaves out are the same on every rank.

    Raises:
        ConfigError: as `check_plan`, or modules that share a weight are split differently.
    """
    check_plan(model, plan, size=axis.size)
    chosen, tied = _styles_of_modules(model, plan), _tied_parameters(model)
    for name, module in list(model.named_modules()):
        layer, is_adapter, _ = f"{name}.".rpartition(f".{ADAPTER_PART}.")
        if is_adapter:
            _split_adapter(module, axis, style=chosen.get(layer, "replicated"))
        else:
            STYLES[chosen.get(name, "replicated")](module, axis)
    for first, others in tied.items():
        for other in others:
            _tie(model, first, other)


def _styles_of_modules(model: torch.nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    names = [name for name, _ in model.named_modules() if f".{ADAPTER_PART}." not in f"{name}."]
    chosen: dict[str, str] = {}
    for pattern, style in plan.items():
        matches = [name for name in names if _pattern(pattern).fullmatch(name)]
        if not matches:
            raise ConfigError(f"tensor parallel plan: {pattern!r} matches no module of {type(model).__name__}")
        chosen.update(dict.fromkeys(matches, style))
    return chosen


# ---- styles


def _replicated(module: torch.nn.Module, axis: TensorAxis) -> None:
    """Every rank computes the same from the same tokens."""
    _own_parameters(module, axis, dict.fromkeys(module._parameters, Replicate()), grad=Replicate())


def _replicated_partial(module: torch.nn.Module, axis: TensorAxis) -> None:
    """The same weights on different tokens, heads or experts: gradients are parts of a sum."""
    _own_parameters(module, axis, dict.fromkeys(module._parameters, Replicate()), grad=Partial())


def _norm(module: torch.nn.Module, axis: TensorAxis) -> None:
    (_replicated_partial if axis.sequence_parallel else _replicated)(module, axis)


def _final_norm(module: torch.nn.Module, axis: TensorAxis) -> None:
    """The norm before a head that is split over the vocabulary."""
    _norm(module, axis)
    _wrap(module, lambda forward, *args, **kwargs: axis.enter(forward(*args, **kwargs)))


def _column(module: Any, axis: TensorAxis) -> None:
    """A linear layer whose outputs are split; its block has brought the input in."""
    _own_parameters(module, axis, _split("column", module))


def _colwise(module: torch.nn.Module, axis: TensorAxis) -> None:
    """`column` that brings its input in by itself."""
    _column(module, axis)
    _wrap(module, lambda forward, value: forward(axis.enter(value)))


def _rowwise(module: Any, axis: TensorAxis) -> None:
    """A linear layer whose inputs are split; its outputs are summed."""
    # Each rank would add the bias; only the first one's counts.
    _own_parameters(module, axis, _split("rowwise", module))
    if module._parameters.get("bias") is not None:
        _own_parameters(module, axis, {"bias": Replicate()}, grad=Partial(), scale=1.0 if axis.rank == 0 else 0.0)
    _wrap(module, lambda forward, value: axis.leave(forward(value)))


def _block(module: torch.nn.Module, axis: TensorAxis) -> None:
    """Attention or a gated MLP: the input comes in once for all its column layers."""
    _replicated(module, axis)
    _wrap(module, lambda forward, *args, **kwargs: forward(*_enter_hidden(axis, args, kwargs), **kwargs))


def _moe_block(module: torch.nn.Module, axis: TensorAxis) -> None:
    """A mixture of experts: the input comes in, the experts' outputs are summed."""
    _replicated(module, axis)
    _wrap(module, lambda forward, value: axis.leave(forward(axis.enter(value))))


def _experts(module: Any, axis: TensorAxis) -> None:
    """Fused experts `[E, ...]`: each rank holds E / size of them and leaves the other tokens out."""
    if module.config._experts_implementation == "eager":
        # One by one, experts that no token chose stay out of the graph; a rank that has no others still has to take
        # part in reducing their gradients.
        names = list(module._parameters)
        _wrap(module, lambda forward, *args: forward(*args) + sum(module.__dict__[name][:0].sum() for name in names))
    _own_parameters(module, axis, _split("experts", module))
    count = module.num_experts // axis.size
    first = axis.rank * count
    # The experts' own code understands this: an index of `num_experts` or more means "elsewhere".
    module.num_experts, module._is_expert_parallel = count, True

    def forward_local(forward: Forward, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> object:
        is_here = (index >= first) & (index < first + count)
        return forward(hidden, torch.where(is_here, index - first, count), weights.masked_fill(~is_here, 0.0))

    _wrap(module, forward_local)


def _vocab_embedding(module: Any, axis: TensorAxis) -> None:
    """Each rank looks up its part of the vocabulary."""
    count = module.num_embeddings // axis.size
    first = axis.rank * count
    padding = module.padding_idx
    # The row of the padding token gets no gradient, as in the whole embedding.
    module.padding_idx = padding - first if padding is not None and first <= padding < first + count else None

    def look_up(forward: Forward, ids: torch.Tensor) -> torch.Tensor:
        is_here = (ids >= first) & (ids < first + count)
        # The module's own look-up: some families scale what they find. Ids of other ranks find a row that is dropped.
        found = forward(torch.where(is_here, ids - first, 0))
        assert isinstance(found, torch.Tensor)
        return axis.leave(found * is_here[..., None])

    _wrap(module, look_up)
    _own_parameters(module, axis, _split("vocab_embedding", module))


def _split_adapter(module: torch.nn.Module, axis: TensorAxis, *, style: str) -> None:
    """Split the adapter of a layer as the layer is.

    The layer's own forward calls it with the input that has come in, and what the layer does with its output it does
    with the sum of both; no collective is added.
    """
    if style not in ADAPTER_SPLITS:
        STYLES[style if style in ("replicated", "replicated_partial") else "replicated"](module, axis)
        return
    for name, placement in ADAPTER_SPLITS[style].items():
        # Of a matrix that is whole on every rank each one computes the part of the gradient of its outputs or inputs.
        grad = Partial() if placement.is_replicate() else None
        _own_parameters(module, axis, {name: placement}, grad=grad)


def _split(style: str, module: torch.nn.Module) -> dict[str, Placement]:
    return {name: Shard(dim) for name in module._parameters if (dim := split_dim(style, name)) is not None}


STYLES: Mapping[str, Callable[[torch.nn.Module, TensorAxis], None]] = {
    "replicated": _replicated,
    "replicated_partial": _replicated_partial,
    "norm": _norm,
    "final_norm": _final_norm,
    "column": _column,
    "colwise": _colwise,
    "rowwise": _rowwise,
    "block": _block,
    "moe_block": _moe_block,
    "experts": _experts,
    "vocab_embedding": _vocab_embedding,
}
SPLIT_SIZES: Mapping[str, tuple[str, Callable[[Any], int]]] = {
    "column": ("outputs", lambda module: int(module.weight.shape[0])),
    "colwise": ("outputs", lambda module: int(module.weight.shape[0])),
    "rowwise": ("inputs", lambda module: int(module.weight.shape[1])),
    "experts": ("experts", lambda module: int(module.num_experts)),
    "vocab_embedding": ("tokens of the vocabulary", lambda module: int(module.num_embeddings)),
}
"""Style -> name and size of what the number of ranks must divide."""
SPLIT_DIMS: Mapping[str, int] = {"column": 0, "colwise": 0, "rowwise": 1, "experts": 0, "vocab_embedding": 0}
"""Dimension of the weights that the ranks share; styles that are not listed leave them whole."""
ADAPTER_SPLITS: Mapping[str, Mapping[str, Placement]] = {
    "column": {"A": Replicate(), "B": Shard(0)},
    "colwise": {"A": Replicate(), "B": Shard(0)},
    "rowwise": {"A": Shard(1), "B": Replicate()},
    "experts": {"A": Shard(0), "B": Shard(0)},
}
"""Style of a layer -> placements of the matrices of its adapter; of layers that are whole, both are."""


def split_dim(style: str, parameter: str) -> int | None:
    """Return the dimension of a module's parameter that the ranks share; None: every rank has the whole.

    Example:
        >>> split_dim("rowwise", "weight"), split_dim("rowwise", "bias"), split_dim("norm", "weight")
        (1, None, None)
    """
    # The outputs of a row-wise layer are sums, to which its bias is added once.
    return None if (style, parameter) == ("rowwise", "bias") else SPLIT_DIMS.get(style)


def split_dims(model: torch.nn.Module, plan: Mapping[str, str]) -> dict[str, int | None]:
    """Return the split dim of each parameter by its name, for a model with or without weights; tied ones have all
    their names."""
    chosen = _styles_of_modules(model, plan)
    return {
        f"{name}.{parameter}" if name else parameter: split_dim(chosen.get(name, "replicated"), parameter)
        for name, module in model.named_modules()
        for parameter in module._parameters
    }


# ---- machinery


def _own_parameters(
    module: torch.nn.Module,
    axis: TensorAxis,
    placements: Mapping[str, Placement],
    *,
    grad: Placement | None = None,
    scale: float = 1.0,
) -> None:
    """Make the parameters DTensors, and let the module's forward see the local parts.

    Args:
        grad: placement of the gradient of the local part; null is that of the parameter.
        scale: of the local part.
    """
    split = {name: place for name, place in placements.items() if module._parameters.get(name) is not None}
    if not split:
        return
    for name, placement in split.items():
        parameter = module._parameters[name]
        assert parameter is not None
        whole = distribute_tensor(parameter.detach(), axis.mesh, [placement], src_data_rank=None)
        module._parameters[name] = torch.nn.Parameter(whole, requires_grad=parameter.requires_grad)

    def with_local(forward: Forward, *args: object, **kwargs: object) -> object:
        with _local_parameters(module, split, grad, scale):
            return forward(*args, **kwargs)

    _wrap(module, with_local)


@contextmanager
def _local_parameters(
    module: torch.nn.Module, placements: Mapping[str, Placement], grad: Placement | None, scale: float
) -> Iterator[None]:
    # An attribute of the instance hides the parameter of the same name, which stays registered.
    try:
        for name, placement in placements.items():
            parameter = module._parameters[name]
            if isinstance(parameter, DTensor):
                local = parameter.to_local(grad_placements=[grad or placement])
                module.__dict__[name] = local if scale == 1.0 else local * scale
        yield
    finally:
        for name in placements:
            module.__dict__.pop(name, None)


def _wrap(module: torch.nn.Module, around: Callable[..., object]) -> None:
    forward = module.forward
    module.forward = lambda *args, **kwargs: around(forward, *args, **kwargs)  # type: ignore[method-assign]


def _enter_hidden(axis: TensorAxis, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[object, ...]:
    """Bring the hidden states in, whether they are the first argument or `hidden_states`."""
    if args:
        assert isinstance(args[0], torch.Tensor)
        return (axis.enter(args[0]), *args[1:])
    hidden = kwargs["hidden_states"]
    assert isinstance(hidden, torch.Tensor)
    kwargs["hidden_states"] = axis.enter(hidden)
    return ()


def _tied_parameters(model: torch.nn.Module) -> dict[str, list[str]]:
    """Return first name of each shared parameter -> its other names."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {first: others for first, *others in names.values() if others}


def _tie(model: torch.nn.Module, first: str, other: str) -> None:
    shared, own = model.get_parameter(first), model.get_parameter(other)
    if isinstance(shared, DTensor) and isinstance(own, DTensor) and shared.placements != own.placements:
        raise ConfigError(
            f"tensor parallel plan: {first} and {other} are one tensor, but are split as {shared.placements} and "
            f"{own.placements}; give both modules styles that split alike"
        )
    owner, _, attribute = other.rpartition(".")
    model.get_submodule(owner)._parameters[attribute] = shared


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(re.escape(text).replace(r"\*", "[^.]+"))
