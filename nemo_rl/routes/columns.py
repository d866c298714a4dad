"""Routes of experts as columns: from what a rollout records to what crosses the wire, and back.

Decoded routes are what recorders give and routers take: int16 ids `[..., L, K]`, all -1 for a token whose route is
missing. On the wire ids have no sign, as whole bytes or in as many bits as they need, and a bitmap marks the tokens
without a route. Invariant: decoding is the exact inverse of encoding. No loop over rows or tokens. Shapes: S tokens of
all rows, L layers with routed experts, K experts of a token, E experts of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from nemo_rl.config.policy import RouterReplayConfig
from nemo_rl.errors import SchemaMismatch
from nemo_rl.jagged import lengths_of, nest, values_of
from nemo_rl.routes.digest import route_digests
from nemo_rl.routes.shape import MISSING, RouteShape, bits_per_id, route_dtype

__all__ = [
    "decode_routes",
    "encode_routes",
    "route_conditions",
    "validate_routes",
    "wire_bytes",
]

IDS, BITS, BITMAP, DIGESTS = (
    "routed_experts",
    "routed_experts_bits",
    "routed_experts_missing",
    "routed_experts_digests",
)


def wire_bytes(columns: Mapping[str, torch.Tensor]) -> int:
    """Return the bytes of encoded routes, digests left out."""
    routes = [values_of(columns[name]) for name in (IDS, BITS, BITMAP) if name in columns]
    return sum(values.numel() * values.element_size() for values in routes)


def route_conditions(replay: RouterReplayConfig) -> tuple[str, ...]:
    """Return the conditions of the schema that hold in a run: which columns carry its routes."""
    if not replay.enabled:
        return ()
    form = "routes_bit_packed" if replay.bit_packed else "routes_whole"
    return ("routes", form, *(("route_digests",) if replay.with_digests else ()))


def encode_routes(
    routes: torch.Tensor, shape: RouteShape, *, bit_packed: bool = False, with_digests: bool = False
) -> dict[str, torch.Tensor]:
    """Return the decoded routes as columns of the schema.

    Args:
        routes: jagged `[N, (tokens), L, K]` int16.
        with_digests: adds the column that later stages check their routes against.

    Returns:
        `routed_experts` jagged `[N, (tokens), L, K]` uint8 or int16, or `routed_experts_bits` jagged
        `[N, (tokens), bytes]` uint8; `routed_experts_missing` jagged `[N, (bytes)]` uint8; `routed_experts_digests`
        jagged `[N, (tokens), L]` int64.

    Raises:
        SchemaMismatch: another shape, or a token with a route in some of its layers only.
    """
    values, lengths = values_of(routes), lengths_of(routes)
    _check_layout(values, shape)
    is_missing = values[:, 0, 0] == MISSING
    any_missing = bool(is_missing.any())
    ids = values.masked_fill(is_missing[:, None, None], 0) if any_missing else values
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < shape.num_experts:
        raise SchemaMismatch(
            f"routed_experts: expected ids of 0 to {shape.num_experts - 1}, or {MISSING} in every layer of a token, "
            f"got {int(ids.min())} to {int(ids.max())}; the recorder and the model differ, or a route is partly missing"
        )
    if any_missing and not bool((values[is_missing] == MISSING).all()):
        raise SchemaMismatch(
            f"routed_experts: expected {MISSING} in every layer of a token without a route, got other ids in some"
        )
    columns: dict[str, torch.Tensor] = {}
    if bit_packed:
        columns[BITS] = nest(_pack_bits(ids.flatten(1), bits_per_id(shape.num_experts)), lengths)
    else:
        columns[IDS] = nest(ids.to(route_dtype(shape.num_experts)), lengths)
    columns[BITMAP] = _bitmap(is_missing, lengths)
    if with_digests:
        columns[DIGESTS] = nest(route_digests(values.long(), shape.layers), lengths)
    return columns


def decode_routes(columns: Mapping[str, torch.Tensor], shape: RouteShape) -> torch.Tensor:
    """Return the inverse of `encode_routes`: jagged `[N, (tokens), L, K]` int16, -1 where a route is missing.

    Raises:
        SchemaMismatch: columns of another model, or rows that differ between them.
    """
    where = IDS if IDS in columns else BITS
    wire, lengths = values_of(columns[where]), lengths_of(columns[where])
    num_layers, top_k = len(shape.layers), shape.top_k
    if where == BITS:
        bits = bits_per_id(shape.num_experts)
        num_bytes = -(-num_layers * top_k * bits // 8)
        if wire.shape[1:] != (num_bytes,):
            raise SchemaMismatch(
                f"{BITS}: expected {num_bytes} bytes per token ({num_layers} layers, {top_k} experts of "
                f"{shape.num_experts}), got {list(wire.shape[1:])}"
            )
        ids = _unpack_bits(wire, bits, num_layers * top_k).view(-1, num_layers, top_k)
    else:
        ids = wire.to(torch.int16)
        _check_layout(ids, shape)
    is_missing = _from_bitmap(columns[BITMAP], lengths)
    return nest(ids.masked_fill_(is_missing[:, None, None], MISSING) if bool(is_missing.any()) else ids, lengths)


def validate_routes(routes: torch.Tensor, shape: RouteShape, *, keys: Sequence[str]) -> None:
    """Refuse routes that no router would have chosen.

    Args:
        routes: jagged `[N, (tokens), L, K]` int16.
        keys: of the N rows, for the message.

    Raises:
        SchemaMismatch: another shape, an id out of range, an id twice for one token and layer, or a route that is
            missing in part; names the first such key, token and layer.
    """
    values = values_of(routes)
    _check_layout(values, shape)
    lowest = values.flatten(1).amin(1) if values.numel() else values.new_zeros(values.shape[0])
    is_missing = values.flatten(1).amax(1) == MISSING if values.numel() else lowest.bool()
    ordered = values.sort(dim=-1).values
    is_wrong = (ordered[..., 0] < 0) | (ordered[..., -1] >= shape.num_experts)
    is_wrong |= (ordered.diff(dim=-1) == 0).any(-1)
    is_wrong &= ~is_missing[:, None]
    if not bool(is_wrong.any()):
        return
    token, column = (int(at) for at in is_wrong.nonzero()[0])
    lengths = lengths_of(routes)
    ends = lengths.cumsum(0)
    row = int(torch.searchsorted(ends, token, right=True))
    within = token - int(ends[row] - lengths[row])
    raise SchemaMismatch(
        f"routed_experts of {keys[row]!r}, token {within}, layer {shape.layers[column]}: expected {shape.top_k} "
        f"different ids of 0 to {shape.num_experts - 1}, or {MISSING} in every layer, got "
        f"{values[token, column].tolist()}; the recorder and the model differ, or a route is partly missing"
    )


def _check_layout(values: torch.Tensor, shape: RouteShape) -> None:
    expected = (len(shape.layers), shape.top_k)
    if values.dim() != 3 or tuple(values.shape[1:]) != expected:
        raise SchemaMismatch(
            f"routed_experts: expected [tokens, {expected[0]} layers, {expected[1]} experts], got "
            f"{list(values.shape)}; the routes were recorded with another model"
        )


# ---- the bitmap of tokens without a route


def _bitmap(is_missing: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return `[S]` bool -> jagged `[N, (ceil(tokens / 8))]` uint8; bit t % 8 of byte t // 8 is token t of the row."""
    num_bytes = (lengths + 7) // 8
    bitmap = torch.zeros(int(num_bytes.sum()), dtype=torch.int32)
    tokens = is_missing.nonzero().squeeze(1)
    if len(tokens):
        byte, bit = _bit_of_tokens(lengths)
        bitmap.index_add_(0, byte[tokens], torch.ones_like(bit[tokens]) << bit[tokens])
    return nest(bitmap.to(torch.uint8), num_bytes)


def _from_bitmap(bitmap: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return `[S]` bool."""
    values, expected = values_of(bitmap), (lengths + 7) // 8
    if lengths_of(bitmap).tolist() != expected.tolist():
        raise SchemaMismatch(
            f"{BITMAP}: expected one bit per token, {expected.tolist()[:5]}... bytes, got "
            f"{lengths_of(bitmap).tolist()[:5]}..."
        )
    if not bool(values.any()):
        return torch.zeros(int(lengths.sum()), dtype=torch.bool)
    byte, bit = _bit_of_tokens(lengths)
    return ((values[byte].to(torch.int32) >> bit) & 1).bool()


def _bit_of_tokens(lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the position of the bit of each token: `[S]` int64 byte over all rows, `[S]` int32 bit in it."""
    num_bytes = (lengths + 7) // 8
    token_start = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    byte_start = (num_bytes.cumsum(0) - num_bytes).repeat_interleave(lengths)
    within = torch.arange(int(lengths.sum())) - token_start
    return byte_start + within // 8, (within % 8).to(torch.int32)


# ---- ids in as many bits as they need
#
# The ids of a token are laid end to end, highest bit first; eight ids of b bits fill b bytes, so each byte of such a
# block takes its bits from the same one or two places in every block.


def _pack_bits(ids: torch.Tensor, bits: int) -> torch.Tensor:
    """Return `[S, n]` ids -> `[S, ceil(n * bits / 8)]` uint8."""
    num_tokens, num_ids = ids.shape
    blocks = -(-num_ids // 8)
    wide = torch.zeros(8, num_tokens, blocks, dtype=torch.int32)
    for i in range(min(8, num_ids)):
        column = ids[:, i::8]
        wide[i, :, : column.shape[1]] = column
    packed = torch.empty(num_tokens, blocks, bits, dtype=torch.uint8)
    for byte in range(bits):
        total = torch.zeros(num_tokens, blocks, dtype=torch.int32)
        for i, left in _overlaps(byte, bits):
            total |= wide[i] << left if left >= 0 else wide[i] >> -left
        packed[..., byte] = total & 0xFF
    return packed.flatten(1)[:, : -(-num_ids * bits // 8)].contiguous()


def _unpack_bits(packed: torch.Tensor, bits: int, num_ids: int) -> torch.Tensor:
    """Return `[S, bytes]` uint8 -> `[S, n]` int16."""
    num_tokens, blocks = packed.shape[0], -(-num_ids // 8)
    padded = torch.nn.functional.pad(packed, (0, blocks * bits - packed.shape[1]))
    wide = padded.view(num_tokens, blocks, bits).permute(2, 0, 1).to(torch.int32).contiguous()
    ids = torch.empty(num_tokens, blocks, 8, dtype=torch.int16)
    totals = torch.zeros(8, num_tokens, blocks, dtype=torch.int32)
    for byte in range(bits):
        for i, left in _overlaps(byte, bits):
            totals[i] |= wide[byte] >> left if left >= 0 else wide[byte] << -left
    for i in range(8):
        ids[..., i] = totals[i] & ((1 << bits) - 1)
    return ids.flatten(1)[:, :num_ids].contiguous()


def _overlaps(byte: int, bits: int) -> list[tuple[int, int]]:
    """Return the ids of a block with bits in this byte, and how far an id is shifted to the left to lie over it."""
    end = 8 * byte + 8
    return [(i, end - (i + 1) * bits) for i in range(8) if i * bits < end and (i + 1) * bits > end - 8]
