"""What routes of one token take in the data plane, for models of several sizes and both forms on the wire."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import torch

from benchmarks.router_replay_report import Bytes
from nemo_rl.config.data_plane import DataPlaneConfig
from nemo_rl.data_plane.factory import build_data_plane_client
from nemo_rl.jagged import nest, values_of
from nemo_rl.routes.columns import decode_routes, encode_routes
from nemo_rl.routes.shape import RouteShape, bound_bits_per_token

__all__ = ["measure_bytes"]

NUM_LAYERS, TOP_K = 24, 8
NUM_EXPERTS = (8, 64, 128, 256, 512)
LENGTHS = (130, 517, 64, 1024, 265, 800, 31, 333)
"""Tokens of the rows; some end inside a byte of the bitmap."""
BITS_PER_BYTE = 8
FORMS = {"whole": False, "bit_packed": True}


def measure_bytes(num_experts: Sequence[int] = NUM_EXPERTS) -> list[Bytes]:
    """Random routes of each model, put and read back; bytes are those of the chunks."""
    found = []
    for experts in num_experts:
        shape = RouteShape(layers=tuple(range(NUM_LAYERS)), top_k=min(TOP_K, experts // 2), num_experts=experts)
        routes = random_routes(shape)
        per_token = {form: _stored_bytes(routes, shape, is_packed) / sum(LENGTHS) for form, is_packed in FORMS.items()}
        found.append(
            Bytes(
                num_experts=experts,
                top_k=shape.top_k,
                num_layers=NUM_LAYERS,
                bound_per_token=bound_bits_per_token(shape) / BITS_PER_BYTE,
                per_token=per_token,
            )
        )
    return found


def random_routes(shape: RouteShape, *, seed: int = 0) -> torch.Tensor:
    """Jagged `[N, (tokens), L, K]` int16: different experts of every token and layer."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(sum(LENGTHS), len(shape.layers), shape.num_experts, generator=generator)
    return nest(scores.topk(shape.top_k, dim=-1).indices.to(torch.int16), torch.tensor(LENGTHS))


def _stored_bytes(routes: torch.Tensor, shape: RouteShape, is_bit_packed: bool) -> float:
    columns = encode_routes(routes, shape, bit_packed=is_bit_packed)
    client = build_data_plane_client(DataPlaneConfig(impl="noop"), run_id=f"bytes-{uuid.uuid4().hex}")
    try:
        keys = [f"row_{i}" for i in range(len(LENGTHS))]
        client.register_partition("routes", list(columns), num_samples=len(keys), consumer_tasks=["train"])
        client.kv_batch_put(keys, "routes", columns)
        stored = client.stats()["live_bytes"]
        assert isinstance(stored, int | float)
        back = client.kv_batch_get(keys, "routes", list(columns))
        same = torch.equal(
            values_of(decode_routes({name: back.get(name) for name in columns}, shape)), values_of(routes)
        )
        assert same, f"routes of {shape.num_experts} experts came back changed"
        client.kv_clear(None, "routes")
    finally:
        client.close()
    return stored
