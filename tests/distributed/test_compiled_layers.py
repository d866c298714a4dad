"""Two ranks of FSDP whose layers are compiled, recomputed and adapted have the bits of ranks whose layers are not."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from nemo_rl.algorithms.losses.policy_loss import PolicyLoss
from nemo_rl.config.backends import DTensorConfig, LoraConfig
from nemo_rl.config.loss import LossConfig
from nemo_rl.distributed.packing import PackPlan
from nemo_rl.models.dtensor import parallelize
from nemo_rl.models.dtensor.layers import CompiledLayers
from nemo_rl.utils.metrics import merge_metrics, values
from tests.helpers.gloo import run_ranks
from tests.helpers.tiny_model import tiny_batch, tiny_policy, tiny_worker, write_tiny_folder

PLANS = [
    (PackPlan(microbatches=((first, second),), steps=(2,), pad_to=24, packed=True))
    for first, second in (((0, 1), (2, 3)), ((2,), (3, 1, 0)), ((3, 0, 2), (1,)))
]


def _two_ranks(rank: int, folder: Path) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], float]:
    """Return adapters of eager and compiled layers after three steps, and the number of graphs."""
    # Graphs are run operation by operation: another kernel would give other bits.
    parallelize.CompiledLayers = partial(CompiledLayers, backend="aot_eager")  # type: ignore[misc, assignment]
    found, num_graphs = {}, 0.0
    for mode in ("off", "on"):
        sizes = DTensorConfig(compile=mode, activation_checkpointing="selective")  # type: ignore[arg-type]
        config = tiny_policy(folder, dtensor_cfg=sizes, lora=LoraConfig(enabled=True, rank=4, alpha=8.0))
        worker = tiny_worker(config, rank=rank, world_size=2)
        for plan in PLANS:
            result = worker.train(tiny_batch(4, seed=rank), PolicyLoss(config=LossConfig()), gbs=8, plan=plan)
        num_graphs = values(merge_metrics(result.metrics)).get("compiled_graphs", 0.0)
        found[mode] = {name: tensor.float().numpy().copy() for name, tensor in worker.engine.full_adapter()}
        worker.shutdown()
    return found["off"], found["on"], num_graphs


@pytest.mark.slow
def test_compiled_recomputed_and_adapted_layers_train_under_fsdp(tmp_path: Path) -> None:
    for eager, compiled, num_graphs in run_ranks(2, _two_ranks, write_tiny_folder(tmp_path / "model"), timeout_s=300):  # type: ignore[misc]
        assert eager.keys() == compiled.keys() and num_graphs == 1.0
        assert all(np.array_equal(value, compiled[name]) for name, value in eager.items())
