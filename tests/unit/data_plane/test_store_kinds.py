"""Every store that a recipe can name has a record, and reading one imports no store."""

from __future__ import annotations

import subprocess
import sys

from nemo_rl.config.data_plane import CONTROLLER_CPUS, DataPlaneConfig
from nemo_rl.config.parts import STORES
from nemo_rl.data_plane import store_kinds
from nemo_rl.data_plane.store_kinds import kind_named, transport_environment


def test_every_built_in_store_has_a_record() -> None:
    assert store_kinds._BUILTIN.keys() == STORES.builtin.keys()


def test_records_are_read_without_any_store() -> None:
    asked = "k.cpus(c), k.environment(c), k.memory_plan(c, 2), k.needs_ledger_actor(c)"
    code = f"""
import sys
from nemo_rl.config.data_plane import DataPlaneConfig
from nemo_rl.data_plane.store_kinds import kind_named
for name in {list(STORES.builtin)}:
    k, c = kind_named(name), DataPlaneConfig(impl=name)
    {asked}
sys.exit(bool({{"ray", "torch", "mooncake", "transfer_queue"}} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_a_store_of_ones_own_has_the_defaults() -> None:
    config = DataPlaneConfig(impl="my_package.stores:Store")
    kind = kind_named("my_package.stores:Store")
    assert (kind.ledger_host, kind.ledger_host_without_ray, kind.has_processes) == ("ray_actor", "socket", False)
    assert kind.cpus(config) == 0 and kind.memory_plan(config, 3) == "" and not kind.needs_ledger_actor(config)
    assert transport_environment(config) == store_kinds.WARM_MEMORY


def test_mooncake_under_the_queue_is_told_as_mooncake() -> None:
    queue = DataPlaneConfig(impl="transfer_queue", backend="mooncake_cpu")
    assert "MC_RPC_TIMEOUT_MS" in transport_environment(queue)
    assert kind_named("transfer_queue").cpus(queue) == CONTROLLER_CPUS
    assert "MC_RPC_TIMEOUT_MS" not in transport_environment(DataPlaneConfig(impl="transfer_queue"))
