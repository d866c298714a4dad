"""The memory of one rank's pass besides weights: tensors kept for the backward pass, logits, and what comes and goes.

Counted are the bytes of all tensors that a pass makes, as torch's allocator sees them, without whole gradients.
Attention is that of torch's fused kernels, which keep no scores: the CPU's and, on a GPU, the one that is assumed.
`scores_bytes` says what the plain one would add. Tokens are taken to spread evenly over the experts.
Invariant: within 15 % of what a real rank allocates, in the layouts of `tests/unit/tools/plan/test_measured.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from nemo_rl.config.backends import MegatronConfig
from nemo_rl.models.head.logits import CHUNK_ELEMENTS
from nemo_rl.models.head.logprobs import Sampling
from nemo_rl_tools.plan.setting import FLOAT32_BYTES, PassTokens, PlanSetting
from nemo_rl_tools.plan.weights import NOTHING_GATHERED, GatheredBytes

__all__ = ["PassActivations", "layer_bytes", "pass_activations", "scores_bytes"]

OWN_GATED, OWN_GATED_MEGATRON, FUSED_GATED = 4, 5, 3
"""Widths of a gated MLP that are kept: both halves, the activation, the product; megatron-core copies one half;
Transformer Engine keeps the halves and the product."""
KEPT_BYTES, TOP_K_BYTES, TOP_P_BYTES, ENTROPY_BYTES, TWO_BYTES = 12, 10, 22, 17, 21
"""Per element of a tile of logits whose log-probabilities are computed under recorded sets, under top-k, under top-p,
which sorts it, with entropies, whose gradients are another tile and its probabilities, or with and without a filter."""
SHARED_BYTES = 1
"""The same besides, as measured, of a float32 tile whose columns tensor ranks share; others are copied anyway."""
EXPERT_BYTES = 5
"""Per token and expert, of the scores and the map of a router."""
ROUTES_SORTED = 24
"""Per token and chosen expert: places in three orders, in int64."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerBytes:
    """The bytes that one layer keeps for the backward pass."""

    norms: int
    attention: int
    """Bytes from the projections of queries, keys and values to the input of the output projection."""
    core: int
    """The part of `attention` between the projections, which `core_attn` recomputes."""
    mlp: int
    entry: int
    """The layer's input alone, which is what is kept of a recomputed layer."""
    products: int
    """Outputs of matrix products and of attention, which the DTensor worker may keep of a recomputed layer."""
    backward: int
    """Bytes that the backward pass of the layer makes besides."""
    forward: int
    """The most that a forward pass without gradients makes."""

    @property
    def kept(self) -> int:
        return self.norms + self.attention + self.mlp


@dataclass(frozen=True, kw_only=True, slots=True)
class PassActivations:
    """The bytes that a pass of one rank holds besides weights."""

    layers: int
    """Kept by the layers of one microbatch."""
    head: int
    """Kept by the last norm and the head's input; 0 before the last stage."""
    logits: int
    """Bytes of the largest part of the logits that exists at one time, counted once."""
    in_flight: int
    """Microbatches that this pipeline stage holds at one time."""
    peak: int
    """Most at any time, weights that are gathered meanwhile included."""


def pass_activations(
    setting: PlanSetting,
    tokens: PassTokens,
    *,
    stage: int,
    gathered: GatheredBytes = NOTHING_GATHERED,
    num_microbatches: int,
    with_gradients: bool,
) -> PassActivations:
    """Return the activations of a rank of a pipeline stage.

    Args:
        gathered: what FSDP gathers while the pass runs; it is in the peak.
    """
    layers = [layer_bytes(setting, tokens, layer) for layer in setting.layers_of(stage)]
    is_last = stage == setting.layout.pp - 1
    logits = _tile_elements(setting, tokens) * setting.element_bytes if is_last else 0
    seam = _seam(setting, tokens, with_gradients=with_gradients) if is_last else 0
    seam += gathered.root
    inside = gathered.root + 2 * gathered.layer
    if not with_gradients:
        # A pipeline stage has what it got and what it sends.
        streams = 2 if setting.layout.pp > 1 else 1
        stream = streams * tokens.tokens * _stream_width(setting) * setting.element_bytes
        # On a GPU the next layer's weights are gathered while a layer runs.
        inside -= gathered.layer if setting.gpu is None else 0
        peak = stream + max(seam, *(layer.forward + inside for layer in layers))
        return PassActivations(layers=0, head=0, logits=logits, in_flight=1, peak=peak)
    kept = [_kept(setting, layer, number) for number, layer in enumerate(layers)]
    again = [layer.kept - held for layer, held in zip(layers, kept, strict=True)]
    head = _head_bytes(setting, tokens) if is_last else 0
    in_flight = min(setting.layout.pp - stage, num_microbatches)
    # The last layer's weights are gathered while the head still runs backwards.
    seam, inside = seam + gathered.layer, inside + gathered.layer_gradients
    # What the head keeps has gone when the last layer runs backwards.
    seam += in_flight * head
    rest = (in_flight - 1) * head
    passing = max(seam, *(rest + gone + layer.backward + inside for gone, layer in zip(again, layers, strict=True)))
    return PassActivations(
        layers=sum(kept),
        head=head,
        logits=logits,
        in_flight=in_flight,
        peak=in_flight * sum(kept) + passing,
    )


def layer_bytes(setting: PlanSetting, tokens: PassTokens, layer: int) -> LayerBytes:
    """Return the bytes of the layer with this number."""
    count, size, stream = tokens.tokens, setting.element_bytes, _stream_width(setting)
    norms = _norm_bytes(setting, tokens) * 2
    core, projections, moving = _attention_bytes(setting, tokens)
    has_experts = layer in _expert_layers(setting)
    mlp = _experts_bytes(setting, tokens) if has_experts else _mlp_bytes(setting, tokens, _mlp_width(setting))
    # Without grouped kernels experts run one by one, and what one kept has gone when the next runs backwards.
    at_once = setting.model.flops_shape.num_experts if has_experts and setting.gpu is None else 1
    whole = count * _hidden(setting) * size
    return LayerBytes(
        norms=norms,
        attention=core + projections,
        core=core,
        mlp=mlp,
        entry=count * stream * size,
        products=_products_bytes(setting, tokens, has_experts=has_experts),
        # The gradients of the widest part, the float32 sides of a norm and the input's gradient.
        backward=max(mlp * 3 // (4 * at_once), moving - mlp) + 2 * whole,
        forward=max(mlp, moving) + 2 * whole,
    )


def scores_bytes(setting: PlanSetting, tokens: PassTokens) -> int:
    """Return the bytes of attention without a fused kernel in one layer: a probability per head, query and key."""
    heads = setting.model.flops_shape.num_heads // setting.layout.tp
    return heads * tokens.tokens * tokens.sequence * setting.element_bytes


# ---- the seam between the model and its log-probabilities


def _tile_elements(setting: PlanSetting, tokens: PassTokens) -> int:
    """Return the elements of the largest part of the logits that exists at one time."""
    limit = CHUNK_ELEMENTS["cuda" if setting.config.cluster.gpus_per_node > 0 else "cpu"]
    return min(tokens.selected * _columns(setting), limit)


def _seam(setting: PlanSetting, tokens: PassTokens, *, with_gradients: bool) -> int:
    """Return the bytes at the loss: one tile of logits several times, mostly in float32, the gradient of the head's
    weight where it is made, and that of its input."""
    size, generation, loss = setting.element_bytes, setting.policy.generation, setting.config.loss_fn
    half = size if size < FLOAT32_BYTES else 0
    per_element = [2 * FLOAT32_BYTES + half]
    sampling = Sampling(top_k=generation.top_k, top_p=generation.top_p)
    if generation.record_support:
        per_element.append(KEPT_BYTES)
    elif sampling.has_filter:
        per_element.append((TOP_P_BYTES if sampling.top_p < 1 else TOP_K_BYTES) + half)
    if with_gradients and loss.entropy_coefficient > 0:
        per_element.append(ENTROPY_BYTES + half)
    if with_gradients and loss.reference_policy_kl_penalty > 0 and sampling.has_filter:
        per_element.append(TWO_BYTES + half)
    states = tokens.selected * _hidden(setting) * (FLOAT32_BYTES + 2 * size) if with_gradients else 0
    shared = SHARED_BYTES if setting.layout.tp > 1 and not half else 0
    return _tile_elements(setting, tokens) * (max(per_element) + shared) + states


# ---- widths of this rank


def _hidden(setting: PlanSetting) -> int:
    return setting.model.flops_shape.hidden_size


def _stream_width(setting: PlanSetting) -> int:
    """Return the width of the activations between the blocks, per position of the pass."""
    return _hidden(setting) // (setting.layout.tp if setting.layout.sequence_parallel else 1)


def _columns(setting: PlanSetting) -> int:
    return setting.model.flops_shape.vocab_size // setting.layout.tp


def _mlp_width(setting: PlanSetting) -> int:
    shape = setting.model.flops_shape
    return (shape.dense_mlp_size if shape.num_experts else shape.mlp_size) // setting.layout.tp


def _expert_layers(setting: PlanSetting) -> frozenset[int]:
    shape = setting.model.flops_shape
    if not shape.num_experts:
        return frozenset()
    if setting.is_megatron:
        return frozenset(i for i, has_experts in enumerate(setting.model.architecture.expert_layers) if has_experts)
    return frozenset(range(shape.num_dense_layers, shape.num_layers))


# ---- parts of a layer, in bytes


def _norm_bytes(setting: PlanSetting, tokens: PassTokens) -> int:
    """Return the bytes of the input in float32, the scaled input, and the output, which the block's first matrices
    keep."""
    width, size = _stream_width(setting), setting.element_bytes
    # A DTensor block keeps what it has gathered; megatron-core gathers again in the backward pass.
    out = _hidden(setting) if not setting.is_megatron else width
    if setting.has_kernels:
        return tokens.tokens * (width * size + out * size + FLOAT32_BYTES)
    return tokens.tokens * (width * (FLOAT32_BYTES + size) + out * size + FLOAT32_BYTES)


def _attention_bytes(setting: PlanSetting, tokens: PassTokens) -> tuple[int, int, int]:
    """Return the bytes of the part between the projections, of head norms and the input of the output projection, and
    the bytes while it runs."""
    shape, layout, size = setting.model.flops_shape, setting.layout, setting.element_bytes
    heads, groups = shape.num_heads // layout.tp, max(1, shape.num_kv_heads // layout.tp)
    queries, keys = heads * shape.head_dim, groups * shape.head_dim
    is_split, repeats = layout.cp > 1, heads > groups
    # Each rank attends from two chunks of a sequence to all that comes before them.
    seen = (2 * layout.cp + 1) / 2 if is_split else 1.0
    core = size * (2 * queries + 2 * seen * (queries if repeats else keys)) + FLOAT32_BYTES * heads
    rest = 0.0
    if setting.model.has_head_norms:
        rest += (queries + keys) * (FLOAT32_BYTES + size) + FLOAT32_BYTES * (heads + groups)
    if setting.is_megatron or tokens.is_packed or is_split:
        rest += size * queries
    rotary = tokens.width * 4 * shape.head_dim * size if setting.is_megatron else 0
    mask = 0
    if is_split and setting.gpu is None:
        chunk = tokens.sequence // (2 * layout.cp)
        mask = chunk * chunk * (2 * layout.cp + 1) * size
    moving = tokens.tokens * size * (2 * queries + 2 * keys) + tokens.tokens * core
    return int(tokens.tokens * core) + mask, int(tokens.tokens * rest) + rotary, int(moving)


def _mlp_bytes(setting: PlanSetting, tokens: PassTokens, width: int) -> int:
    kept = FUSED_GATED if setting.has_kernels else OWN_GATED_MEGATRON if setting.is_megatron else OWN_GATED
    return tokens.tokens * width * kept * setting.element_bytes


def _experts_bytes(setting: PlanSetting, tokens: PassTokens) -> int:
    shape, layout, size = setting.model.flops_shape, setting.layout, setting.element_bytes
    sizes = setting.policy.parallel_sizes
    top_k = setting.model.top_k
    width = shape.mlp_size // top_k
    shared = _mlp_bytes(setting, tokens, shape.shared_mlp_size // layout.tp)
    if not setting.is_megatron:
        # Every tensor rank has a place for every choice, also of experts that are elsewhere.
        per_choice = size * (2 * shape.hidden_size + 4 * width) + ROUTES_SORTED
        return tokens.tokens * (top_k * per_choice + FLOAT32_BYTES * shape.num_experts) + shared
    mine = tokens.tokens // (layout.tp if layout.sequence_parallel else 1)
    kept = FUSED_GATED if setting.has_kernels else OWN_GATED_MEGATRON + 1
    per_choice = size * (shape.hidden_size * sizes.expert_tensor + kept * width)
    return mine * (top_k * per_choice + EXPERT_BYTES * shape.num_experts) + shared


def _products_bytes(setting: PlanSetting, tokens: PassTokens, *, has_experts: bool) -> int:
    """Return the bytes of the outputs of a layer's matrix products and of its attention, with its sums of scores."""
    shape, layout, size = setting.model.flops_shape, setting.layout, setting.element_bytes
    heads, groups = shape.num_heads // layout.tp, max(1, shape.num_kv_heads // layout.tp)
    width = (2 * heads + 2 * groups) * shape.head_dim + 2 * shape.hidden_size
    if has_experts:
        top_k, shared = setting.model.top_k, shape.shared_mlp_size // layout.tp
        width += top_k * (2 * shape.mlp_size // top_k + shape.hidden_size) - shape.hidden_size + shape.num_experts
        width += 2 * shared + (shape.hidden_size if shared else 0)
    else:
        width += (2 if setting.model.has_gated_mlp else 1) * _mlp_width(setting)
    return tokens.tokens * (width * size + FLOAT32_BYTES * heads)


def _head_bytes(setting: PlanSetting, tokens: PassTokens) -> int:
    width, size = _stream_width(setting), setting.element_bytes
    norm = tokens.tokens * (width * (FLOAT32_BYTES + size) + FLOAT32_BYTES)
    return norm + tokens.rows * tokens.predicted * _hidden(setting) * size


# ---- recomputation


def _kept(setting: PlanSetting, layer: LayerBytes, number: int) -> int:
    """Return the bytes that a layer keeps where parts of it, or all, are recomputed."""
    if not setting.is_megatron:
        held = {"none": layer.kept, "full": layer.entry, "selective": layer.entry + layer.products}
        return min(layer.kept, held[setting.policy.dtensor_cfg.activation_checkpointing])
    section = setting.policy.megatron_cfg
    if not section.activation_checkpointing:
        return layer.kept
    if section.recompute_granularity == "selective":
        return layer.kept - _selected(section, layer)
    if section.recompute_method == "block":
        return layer.entry if number < section.recompute_num_layers else layer.kept
    return layer.entry if number % section.recompute_num_layers == 0 else 0


def _selected(section: MegatronConfig, layer: LayerBytes) -> int:
    """Return the bytes of the parts that the section names to recompute; none of the others is recomputed."""
    modules = set(section.recompute_modules)
    total = layer.core if "core_attn" in modules else 0
    total += layer.mlp if modules & {"mlp", "moe"} else layer.mlp // 4 if "moe_act" in modules else 0
    return total + (layer.norms // 3 if "layernorm" in modules else 0)
