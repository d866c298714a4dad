"""Routes on the wire: exact inverses, close to the bound, and nothing that no router would choose."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.config.policy import RouterReplayConfig
from nemo_rl.data_plane.chunks.columns import check_columns
from nemo_rl.data_plane.codec import encode_rows
from nemo_rl.data_plane.schema import FIELDS, ROUTE_FIELDS, route_fields
from nemo_rl.errors import SchemaMismatch
from nemo_rl.jagged import lengths_of, nest, values_of
from nemo_rl.routes.columns import (
    decode_routes,
    encode_routes,
    route_conditions,
    validate_routes,
    wire_bytes,
)
from nemo_rl.routes.digest import route_digests
from nemo_rl.routes.shape import MISSING, RouteShape, bits_per_id, bound_bits_per_token, dummy_route, route_dtype


def random_routes(shape: RouteShape, lengths: list[int], *, seed: int = 0, missing: float = 0.1) -> torch.Tensor:
    """Different ids for each token and layer, some tokens without a route."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(lengths)
    scores = torch.rand(num_tokens, len(shape.layers), shape.num_experts, generator=generator)
    ids = scores.topk(shape.top_k, dim=-1).indices.to(torch.int16)
    ids[torch.rand(num_tokens, generator=generator) < missing] = MISSING
    return nest(ids, torch.tensor(lengths))


def shape_of(num_experts: int, *, top_k: int = 2, layers: int = 3) -> RouteShape:
    return RouteShape(layers=tuple(range(1, layers + 1)), top_k=min(top_k, num_experts), num_experts=num_experts)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 700),
    st.integers(1, 9),
    st.integers(1, 4),
    st.lists(st.integers(0, 20), min_size=1, max_size=6),
    st.booleans(),
    st.sampled_from([0.0, 0.3, 1.0]),
)
def test_decoding_is_the_inverse_of_encoding(num_experts, top_k, layers, lengths, bit_packed, missing):
    shape = shape_of(num_experts, top_k=top_k, layers=layers)
    routes = random_routes(shape, lengths, missing=missing)
    columns = encode_routes(routes, shape, bit_packed=bit_packed)
    found = decode_routes(columns, shape)
    assert found.dtype == torch.int16 and lengths_of(found).tolist() == lengths
    assert torch.equal(values_of(found), values_of(routes))
    assert set(columns) == {"routed_experts_bits" if bit_packed else "routed_experts", "routed_experts_missing"}


@pytest.mark.parametrize("bit_packed", [False, True])
@pytest.mark.parametrize("num_experts", [2, 129, 255, 256, 257, 513, 32767])
def test_the_largest_id_survives(num_experts: int, bit_packed: bool) -> None:
    shape = RouteShape(layers=(0, 5), top_k=1, num_experts=num_experts)
    ids = torch.tensor([[[num_experts - 1], [0]], [[MISSING], [MISSING]]], dtype=torch.int16)
    columns = encode_routes(nest(ids, torch.tensor([2])), shape, bit_packed=bit_packed)
    assert torch.equal(values_of(decode_routes(columns, shape)), ids)


def test_ids_are_bytes_up_to_256_experts() -> None:
    assert [route_dtype(n) for n in (8, 256, 257)] == [torch.uint8, torch.uint8, torch.int16]
    assert [bits_per_id(n) for n in (1, 2, 8, 9, 128, 256, 257, 512)] == [1, 1, 3, 4, 7, 8, 9, 9]
    assert dummy_route(3).tolist() == [0, 1, 2]


def test_packed_ids_lie_end_to_end_highest_bit_first() -> None:
    shape = RouteShape(layers=(0,), top_k=3, num_experts=8)
    ids = torch.tensor([[[0b101, 0b011, 0b110]]], dtype=torch.int16)
    columns = encode_routes(nest(ids, torch.tensor([1])), shape, bit_packed=True)
    assert values_of(columns["routed_experts_bits"]).tolist() == [[0b10101111, 0b00000000]]


def test_the_bitmap_has_a_bit_per_token_and_starts_anew_in_each_row() -> None:
    shape = RouteShape(layers=(0,), top_k=1, num_experts=4)
    ids = torch.zeros(12, 1, 1, dtype=torch.int16)
    ids[[0, 8, 11]] = MISSING
    bitmap = encode_routes(nest(ids, torch.tensor([9, 3])), shape)["routed_experts_missing"]
    assert [row.tolist() for row in bitmap.unbind()] == [[1, 1], [4]]


def test_digests_are_those_of_the_install_form() -> None:
    shape = shape_of(16)
    routes = random_routes(shape, [4, 0, 3], missing=0.4)
    columns = encode_routes(routes, shape, with_digests=True)
    expected = route_digests(values_of(routes).long(), shape.layers)
    assert torch.equal(values_of(columns["routed_experts_digests"]), expected)


@pytest.mark.parametrize("num_experts", [8, 64, 128, 256, 512])
def test_bytes_on_the_wire_are_close_to_the_bound(num_experts: int) -> None:
    """Chunks with their headers, rows of 40 to 400 tokens, 24 layers, 8 experts of a token."""
    shape = shape_of(num_experts, top_k=8, layers=24)
    lengths = torch.randint(40, 400, (24,), generator=torch.Generator().manual_seed(1)).tolist()
    routes = random_routes(shape, lengths)
    bound = bound_bits_per_token(shape) / 8 * sum(lengths)
    assert bound_bits_per_token(shape) == {8: 3, 64: 6, 128: 7, 256: 8, 512: 9}[num_experts] * 192
    keys = [f"k{i}" for i in range(len(lengths))]
    ratio = {}
    for bit_packed in (False, True):
        columns = encode_routes(routes, shape, bit_packed=bit_packed)
        flat = check_columns(columns, specs={name: FIELDS[name] for name in columns}, keys=keys, where="test")
        chunks = encode_rows(flat, num_rows=len(keys), chunk_bytes=128 * 1024)
        ratio[bit_packed] = sum(chunk.nbytes for chunk in chunks) / bound
        assert wire_bytes(columns) == pytest.approx(sum(sum(chunk.sizes) for chunk in chunks))
    assert 1.0 <= ratio[True] <= 1.02
    unit = 8 * route_dtype(num_experts).itemsize / bits_per_id(num_experts)
    assert unit <= ratio[False] <= 1.005 * unit
    if num_experts in (128, 256):
        assert ratio[False] <= 1.15


FAULTS = {
    "an id twice": ([1, 1], r"of 'b', token 1, layer 4.*got \[1, 1\]"),
    "an id out of range": ([0, 8], r"of 'b', token 1, layer 4: expected 2 different ids of 0 to 7.*got \[0, 8\]"),
    "partly missing": ([MISSING, MISSING], r"of 'b', token 1, layer 4.*or -1 in every layer, got \[-1, -1\]"),
    "half a layer": ([3, MISSING], r"got \[3, -1\]"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_no_router_would_choose_is_refused_by_key_token_and_layer(fault: str) -> None:
    shape = RouteShape(layers=(2, 4), top_k=2, num_experts=8)
    values = torch.tensor([[0, 1], [2, 3]], dtype=torch.int16).repeat(6, 1, 1)
    values[2] = MISSING
    validate_routes(nest(values, torch.tensor([3, 0, 3])), shape, keys=["a", "none", "b"])
    ids, message = FAULTS[fault]
    values[4, 1] = torch.tensor(ids, dtype=torch.int16)
    with pytest.raises(SchemaMismatch, match=message):
        validate_routes(nest(values, torch.tensor([3, 0, 3])), shape, keys=["a", "none", "b"])


def test_partly_missing_and_out_of_range_ids_cannot_be_encoded() -> None:
    shape = shape_of(8)
    for bad in (MISSING, 8):
        values = values_of(random_routes(shape, [4], missing=0.0)).clone()
        values[2, 1, 0] = bad
        with pytest.raises(SchemaMismatch, match="expected ids of 0 to 7"):
            encode_routes(nest(values, torch.tensor([4])), shape)
    values[2, 1, 0], values[3, 0, 0] = 0, MISSING
    with pytest.raises(SchemaMismatch, match="expected -1 in every layer"):
        encode_routes(nest(values, torch.tensor([4])), shape)


def test_columns_of_another_model_are_refused() -> None:
    shape, other = shape_of(8, layers=3), shape_of(8, layers=7)
    for bit_packed, message in (
        (False, "expected .tokens, 7 layers, 2 experts."),
        (True, "expected 6 bytes per token"),
    ):
        columns = encode_routes(random_routes(shape, [5]), shape, bit_packed=bit_packed)
        with pytest.raises(SchemaMismatch, match=message):
            decode_routes(columns, other)
        columns["routed_experts_missing"] = nest(torch.zeros(2, dtype=torch.uint8), torch.tensor([2]))
        with pytest.raises(SchemaMismatch, match="expected one bit per token"):
            decode_routes(columns, shape)


def test_columns_exist_as_the_config_says() -> None:
    def fields(with_digests: bool = False, **keys: object) -> tuple[str, ...]:
        return route_fields(route_conditions(RouterReplayConfig(**keys, with_digests=with_digests)))

    assert fields() == fields(with_digests=True) == ()
    assert fields(enabled=True) == ("routed_experts", "routed_experts_missing")
    packed = fields(enabled=True, bit_packed=True, with_digests=True)
    shape = shape_of(8)
    columns = encode_routes(random_routes(shape, [5]), shape, bit_packed=True, with_digests=True)
    assert set(packed) == set(columns) < set(ROUTE_FIELDS)
