"""Settings of the data plane (`data_plane` section)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from nemo_rl.config.base import Section

__all__ = ["DataPlaneConfig", "ObservabilityConfig", "SimpleBackendConfig"]


class SimpleBackendConfig(Section):
    """TransferQueue's in-memory storage actors (`backend: simple`)."""

    num_storage_units: PositiveInt = 1
    """Storage actors; each reserves one logical CPU, the controller one more."""
    send_recv_timeout_s: PositiveInt = 60
    """Limit of one transfer to a storage unit, in seconds (TransferQueue's own default is 200)."""


class ObservabilityConfig(Section):
    """What the client records about its own calls."""

    enabled: bool = True
    """Count calls, bytes and milliseconds per operation; they appear under `data_plane/` in the metrics."""


class DataPlaneConfig(Section):
    """Which payload store carries bulk tensors, and its limits."""

    enabled: bool = True
    """False: rows stay in this process (`noop`); needs `cluster.launcher: local`."""
    impl: Literal["noop", "transfer_queue"] = "transfer_queue"
    """`noop` works inside one process; `transfer_queue` serves Ray actors."""
    backend: Literal["simple"] = "simple"
    """TransferQueue's storage backend; read only by `impl: transfer_queue`."""
    ledger_host: Literal["in_process", "ray_actor", "socket"] | None = None
    """Where the ledger lives; null picks `in_process` for one process and `ray_actor` under Ray."""
    timeout_s: PositiveFloat = 60.0
    """Deadline of one data plane call, in seconds."""
    lease_s: PositiveFloat = 30.0
    """A claim whose consumer sends no heartbeat for so long is handed on, in seconds."""
    capacity_rows: PositiveInt = 1_000_000
    """Live rows over all partitions before a put is refused."""
    capacity_bytes: PositiveInt | None = None
    """Live payload bytes over all partitions before a put is refused; null means no limit."""
    chunk_bytes: PositiveInt = 128 * 1024
    """Target size of one chunk; a larger row is a chunk of its own."""
    simple: SimpleBackendConfig = Field(default_factory=SimpleBackendConfig)
    observability: ObservabilityConfig = Field(default_factory=ObservabilityConfig)
