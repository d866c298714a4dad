"""The weights of an architecture: names and shapes in a Hugging Face module, place and split in megatron-core.

`convert` reads this table in both directions, so each rule is written once. Invariant: `pack` and `unpack`, and
`shard` and `join`, are inverse to each other, to the bit.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product

import torch

from nemo_rl.config.policy import PolicyConfig
from nemo_rl.errors import ConfigError, name_some
from nemo_rl.models.adapters.lora import AdaptedLayer
from nemo_rl.models.hf.files import Box
from nemo_rl.models.hf.loading import ADAPTER_PART
from nemo_rl.models.megatron.architecture import Architecture, Mixture, layers_of_stages

__all__ = [
    "AdaptedLinear",
    "Weight",
    "adapted_linears",
    "adapter_weights",
    "check_adapters_fit",
    "table_name",
    "weights_of",
]

OTHER_NAMES = (
    (r"self_attention\.linear_qkv\.layer_norm_weight$", "input_layernorm.weight"),
    (r"mlp\.linear_fc1\.layer_norm_weight$", "pre_mlp_layernorm.weight"),
    (r"mlp\.experts\.(linear_fc\d)\.weight(\d+)$", r"mlp.experts.local_experts.\2.\1.weight"),
)
"""Names in Transformer Engine's modules, which hold a norm with the matrix behind it and experts together, and ours."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSplit:
    """The division of a weight over the ranks of a tensor parallel group.

    Example:
        Rows `g0 g1 u0 u1` of two halves over two ranks: rank 0 has `g0 u0`, rank 1 has `g1 u1`.
        >>> HALVES.shard(torch.tensor([10, 11, 20, 21]), rank=1, size=2).tolist()
        [11, 21]
    """

    dim: int | None = None
    """Dim that is divided; None where every rank has the whole."""
    runs: int = 1
    """Equal runs of this dimension, each of which is divided by itself."""

    def shard(self, whole: torch.Tensor, *, rank: int, size: int) -> torch.Tensor:
        if self.dim is None:
            return whole
        divided = whole.unflatten(self.dim, (self.runs, size, -1))
        return divided.select(self.dim + 1, rank).flatten(self.dim, self.dim + 1)

    def join(self, shards: torch.Tensor) -> torch.Tensor:
        """Return the whole from all ranks' parts, `[size, ...]`."""
        if self.dim is None:
            return shards[0]
        divided = shards.unflatten(self.dim + 1, (self.runs, -1))
        return divided.movedim(0, self.dim + 1).flatten(self.dim, self.dim + 2)


WHOLE = WeightSplit()
ROWS = WeightSplit(dim=0)
COLUMNS = WeightSplit(dim=1)
HALVES = WeightSplit(dim=0, runs=2)


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightPart:
    """A weight of the Hugging Face module."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """A weight of megatron-core, or one of each expert of a layer.

    Example:
        With 2 groups, rows of `parts` q `q0 q1 q2 q3`, k `k0 k1` and v `v0 v1` pack to `q0 q1 k0 v0 q2 q3 k1 v1`.
    """

    local: str
    """Name in megatron-core, layers counted over the whole model; of experts with `{expert}`, counted on the rank."""
    layer: int
    """Its pipeline stage is that of this layer."""
    parts: tuple[WeightPart, ...]
    """Parts in the Hugging Face module; experts have a single one, whose first dim is the expert."""
    split: WeightSplit = WHOLE
    """Over the tensor parallel ranks, or over the expert tensor parallel ones."""
    groups: int = 1
    """The parts' rows alternate in so many groups."""
    num_experts: int = 0
    """0 of a weight that is not one of an expert."""
    is_copy: bool = False
    """True where another entry has the same weight: it is loaded twice and exported once."""
    is_float32: bool = False
    """Whatever the precision of the model."""

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.parts[0].shape
        return (sum(part.shape[0] for part in self.parts), *first[1:])

    def pack(self, parts: Sequence[torch.Tensor], *, dim: int = 0) -> torch.Tensor:
        """Return all parts as one tensor of `shape`; a single one as it is, so that what lies in a file stays there.

        Args:
            dim: that holds the rows, of tensors that have other dims before them.
        """
        if len(parts) == 1:
            return parts[0]
        return torch.cat([part.unflatten(dim, (self.groups, -1)) for part in parts], dim=dim + 1).flatten(dim, dim + 1)

    def unpack(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts of a contiguous tensor of `shape`, contiguous too."""
        rows = [part.shape[0] // self.groups for part in self.parts]
        return [part.flatten(0, 1) for part in packed.unflatten(0, (self.groups, -1)).split(rows, dim=1)]

    def held(self, *, rank: int, size: int) -> Iterator[HeldPart]:
        """Yield the parts that make up the shard of a rank; of experts those of one expert, without its dim.

        Example:
            With `groups` 2, as above, rank 1 of 2 holds rows 0-1 of `q2 q3 k1 v1` as rows 2-3 of q, and so on.
        """
        starts = [0, *accumulate(part.shape[0] for part in self.parts)]
        if self.num_experts:
            ids = [torch.arange(length) for length in self.shape[1:]]
            starts = [0, self.shape[1]]
        else:
            rows = [torch.arange(start, end) for start, end in pairwise(starts)]
            ids = [self.pack(rows), *(torch.arange(length) for length in self.shape[1:])]
        if self.split.dim is not None:
            divided = WeightSplit(dim=0, runs=self.split.runs)
            ids[self.split.dim] = divided.shard(ids[self.split.dim], rank=rank, size=size)
        runs = [_runs(of_dim, set(starts) if dim == 0 else set()) for dim, of_dim in enumerate(ids)]
        for chosen in product(*runs):
            place, start, count = zip(*chosen, strict=True)
            part = bisect_right(starts, start[0]) - 1
            yield HeldPart(
                part=self.parts[part],
                box=Box(start=(start[0] - starts[part], *start[1:]), size=count),
                local=Box(start=place, size=count),
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldPart:
    """A box of a weight of the Hugging Face module in the shard of a rank."""

    part: WeightPart
    box: Box
    """Box of the part; of one expert without its dim."""
    local: Box
    """Box of the shard."""


def _runs(ids: torch.Tensor, starts: set[int]) -> list[tuple[int, int, int]]:
    """Return place, first number and length of each run of numbers that follow each other; a run begins at `starts`."""
    begins = [0, *((ids.diff() != 1).nonzero()[:, 0] + 1).tolist()]
    begins += [place for start in starts for place in (ids == start).nonzero()[:, 0].tolist()]
    places = sorted({*begins, len(ids)})
    return [(place, int(ids[place]), end - place) for place, end in pairwise(places)]


def table_name(name: str, *, first_layer: int) -> str:
    """Return a name in megatron-core's module as the table has it.

    Example:
        >>> table_name("decoder.layers.0.mlp.experts.linear_fc1.weight3", first_layer=4)
        'decoder.layers.4.mlp.experts.local_experts.3.linear_fc1.weight'

    Args:
        first_layer: of the whole model, that this pipeline stage has.
    """
    name = re.sub(r"^decoder\.layers\.(\d+)", lambda match: f"decoder.layers.{int(match[1]) + first_layer}", name)
    for other, ours in OTHER_NAMES:
        name = re.sub(other, ours, name)
    return name


def weights_of(shape: Architecture) -> Iterator[Weight]:
    vocabulary = (shape.vocab_size, shape.hidden_size)
    embedding = (WeightPart(name="model.embed_tokens.weight", shape=vocabulary),)
    yield Weight(local="embedding.word_embeddings.weight", layer=0, parts=embedding, split=ROWS)
    for layer, has_experts in enumerate(shape.expert_layers):
        yield from _attention(shape, layer)
        yield _norm(shape, layer, local="pre_mlp_layernorm", name="post_attention_layernorm")
        if shape.mixture is not None and has_experts:
            yield from _experts(shape, shape.mixture, layer)
        else:
            yield from _feed_forward(shape, layer, where="mlp", rows=shape.intermediate_size)
    last = shape.num_layers - 1
    norm = (WeightPart(name="model.norm.weight", shape=(shape.hidden_size,)),)
    yield Weight(local="decoder.final_layernorm.weight", layer=last, parts=norm)
    head = embedding if shape.is_tied else (WeightPart(name="lm_head.weight", shape=vocabulary),)
    yield Weight(local="output_layer.weight", layer=last, parts=head, split=ROWS, is_copy=shape.is_tied)


def _attention(shape: Architecture, layer: int) -> Iterator[Weight]:
    head, hidden = shape.head_dim, shape.hidden_size
    heads, groups = shape.num_heads * head, shape.num_groups * head
    yield _norm(shape, layer, local="input_layernorm", name="input_layernorm")
    for kind, columns in (("weight", (hidden,)), ("bias", ()))[: 2 if shape.has_qkv_bias else 1]:
        yield Weight(
            local=f"decoder.layers.{layer}.self_attention.linear_qkv.{kind}",
            layer=layer,
            parts=tuple(
                WeightPart(name=f"model.layers.{layer}.self_attn.{name}_proj.{kind}", shape=(rows, *columns))
                for name, rows in (("q", heads), ("k", groups), ("v", groups))
            ),
            split=ROWS,
            groups=shape.num_groups,
        )
    yield Weight(
        local=f"decoder.layers.{layer}.self_attention.linear_proj.weight",
        layer=layer,
        parts=(WeightPart(name=f"model.layers.{layer}.self_attn.o_proj.weight", shape=(hidden, heads)),),
        split=COLUMNS,
    )
    for name in "qk" if shape.has_head_norms else "":
        yield Weight(
            local=f"decoder.layers.{layer}.self_attention.{name}_layernorm.weight",
            layer=layer,
            parts=(WeightPart(name=f"model.layers.{layer}.self_attn.{name}_norm.weight", shape=(head,)),),
        )


def _norm(shape: Architecture, layer: int, *, local: str, name: str) -> Weight:
    part = WeightPart(name=f"model.layers.{layer}.{name}.weight", shape=(shape.hidden_size,))
    return Weight(local=f"decoder.layers.{layer}.{local}.weight", layer=layer, parts=(part,))


def _feed_forward(shape: Architecture, layer: int, *, where: str, rows: int) -> Iterator[Weight]:
    local, name, hidden = f"decoder.layers.{layer}.{where}", f"model.layers.{layer}.{where}", shape.hidden_size
    gate_up = tuple(WeightPart(name=f"{name}.{half}_proj.weight", shape=(rows, hidden)) for half in ("gate", "up"))
    down = (WeightPart(name=f"{name}.down_proj.weight", shape=(hidden, rows)),)
    yield Weight(local=f"{local}.linear_fc1.weight", layer=layer, parts=gate_up, split=HALVES)
    yield Weight(local=f"{local}.linear_fc2.weight", layer=layer, parts=down, split=COLUMNS)


def _experts(shape: Architecture, mixture: Mixture, layer: int) -> Iterator[Weight]:
    local, name = f"decoder.layers.{layer}.mlp", f"model.layers.{layer}.mlp"
    count, rows, hidden = mixture.num_experts, mixture.intermediate_size, shape.hidden_size
    gate = (WeightPart(name=f"{name}.gate.weight", shape=(count, hidden)),)
    yield Weight(local=f"{local}.router.weight", layer=layer, parts=gate)
    if mixture.score == "sigmoid":
        bias = (WeightPart(name=f"{name}.gate.e_score_correction_bias", shape=(count,)),)
        yield Weight(local=f"{local}.router.expert_bias", layer=layer, parts=bias, is_float32=True)
    for linear, projection, columns, split in (
        ("linear_fc1", "gate_up_proj", (2 * rows, hidden), HALVES),
        ("linear_fc2", "down_proj", (hidden, rows), COLUMNS),
    ):
        yield Weight(
            local=f"{local}.experts.local_experts.{{expert}}.{linear}.weight",
            layer=layer,
            parts=(WeightPart(name=f"{name}.experts.{projection}", shape=(count, *columns)),),
            split=split,
            num_experts=count,
        )
    if mixture.shared_intermediate_size:
        yield from _feed_forward(shape, layer, where="mlp.shared_experts", rows=mixture.shared_intermediate_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptedLinear:
    """A linear layer of megatron-core, and the adapters of the projections that it holds."""

    weight: Weight
    layers: tuple[AdaptedLayer | None, ...]
    """Layer of the Hugging Face module for each part of the weight; None where the layer has no adapter."""

    @property
    def module(self) -> str:
        return self.weight.local.removesuffix(".weight")

    @property
    def splits_inputs(self) -> bool:
        """Return whether tensor ranks divide the inputs, and not the rows."""
        return self.weight.split == COLUMNS

    def shares_rows(self, size: int) -> bool:
        """Return whether tensor ranks divide the rows within a group of the parts: B is whole on every rank then."""
        return self.weight.split == ROWS and len(self.weight.parts) > 1 and self.weight.groups % size > 0

    def on_rank(self, size: int) -> Weight:
        """Return the layout of a tensor rank's rows, which are whole groups."""
        return self.weight if self.weight.groups == 1 else replace(self.weight, groups=self.weight.groups // size)

    def tensors(self, layer: AdaptedLayer, *, rank: int, size: int) -> Iterator[Weight]:
        """Yield A and B of one of the layers as parts of the model.

        Args:
            rank: of the adapter.
            size: tensor parallel ranks.
        """
        (a_name, a_shape), (b_name, b_shape) = layer.shapes(rank).items()
        where = f"{self.module}.{ADAPTER_PART}.{projection_of(layer)}"
        b_split = WHOLE if self.splits_inputs or self.shares_rows(size) else ROWS
        for matrix, name, shape, split in (
            ("A", a_name, a_shape, COLUMNS if self.splits_inputs else WHOLE),
            ("B", b_name, b_shape, b_split),
        ):
            part = WeightPart(name=name, shape=shape)
            yield Weight(local=f"{where}.{matrix}", layer=self.weight.layer, parts=(part,), split=split)


def projection_of(layer: AdaptedLayer) -> str:
    """Return the last part of the name of a layer, such as `q_proj`."""
    return layer.name.rpartition(".")[2]


def adapted_linears(shape: Architecture, layers: Sequence[AdaptedLayer]) -> list[AdaptedLinear]:
    """Return the linear layers of megatron-core that hold adapted projections, in the order of the model.

    Raises:
        ConfigError: a layer has no counterpart that takes an adapter.
    """
    by_name = {layer.name: layer for layer in layers}
    found = []
    for weight in weights_of(shape):
        if weight.split != WHOLE and not weight.num_experts and not weight.is_copy and len(weight.shape) == 2:
            parts = tuple(by_name.pop(part.name.removesuffix(".weight"), None) for part in weight.parts)
            if any(parts):
                found.append(AdaptedLinear(weight=weight, layers=parts))
    if by_name:
        _refuse_layers(list(by_name.values()))
    return found


def adapter_weights(shape: Architecture, layers: Sequence[AdaptedLayer], *, rank: int, size: int) -> tuple[Weight, ...]:
    """Return A and B of every layer, in the order of `layers`.

    Args:
        rank: of the adapter.
        size: tensor parallel ranks.
    """
    holders = {layer.name: linear for linear in adapted_linears(shape, layers) for layer in linear.layers if layer}
    return tuple(weight for layer in layers for weight in holders[layer.name].tensors(layer, rank=rank, size=size))


def check_adapters_fit(shape: Architecture, layers: Sequence[AdaptedLayer], config: PolicyConfig) -> None:
    """Compare the adapted layers with the model and `policy.megatron_cfg`.

    Raises:
        ConfigError: names the key and what to set.
    """
    linears = adapted_linears(shape, layers)
    if config.megatron_cfg.moe_router_bias_update_rate:
        raise ConfigError(
            "policy.megatron_cfg.moe_router_bias_update_rate: it changes the bias of routers, a weight of the base, "
            "which adapters leave as it is; set it to 0"
        )
    last = 0
    for stage, count in enumerate(layers_of_stages(shape, config)):
        first, last = last, last + count
        if not any(first <= linear.weight.layer < last for linear in linears):
            raise ConfigError(
                f"policy.lora.targets: none of the layers {first} to {last - 1}, which are stage {stage} of the "
                "pipeline, has an adapter, and a stage needs something to train; add targets, or set a smaller "
                "policy.megatron_cfg.pipeline_model_parallel_size"
            )


def _refuse_layers(layers: Sequence[AdaptedLayer]) -> None:
    names = name_some([layer.name for layer in layers])
    instead = "leave them out, or set policy.megatron_cfg.enabled=false and policy.dtensor_cfg.enabled=true"
    if any(layer.num_experts for layer in layers):
        raise ConfigError(
            f"policy.lora.targets: {names} are weights of experts; the grouped kernels that multiply them on "
            f"megatron-core take no adapters; {instead}"
        )
    raise ConfigError(f"policy.lora.targets: {names} have no counterpart in megatron-core; {instead}")
