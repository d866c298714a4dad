"""Whole runs on megatron-core: a pipeline over Ray and TransferQueue, and its continuation in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_rl.models.adapters.folder import is_adapter_folder
from tests.helpers.runs import LOCAL, load_recipe, logged_steps, write_recipe
from tests.helpers.tiny_model import write_tiny_folder
from tests.helpers.warm_runs import WarmRuns

pytestmark = pytest.mark.slow

MEGATRON = {
    "policy.dtensor_cfg.enabled": "false",
    "policy.megatron_cfg.enabled": "true",
    "policy.optimizer": "null",
    "policy.megatron_cfg.optimizer.lr": "1.0e-3",
    "policy.megatron_cfg.optimizer.weight_decay": "0",
    "policy.megatron_cfg.optimizer.adam_beta2": "0.999",
    "policy.dynamic_batching.enabled": "false",
    "policy.sequence_packing.enabled": "true",
    "policy.sequence_packing.train_mb_tokens": "64",
    "policy.sequence_packing.logprob_mb_tokens": "64",
    "policy.generation.top_p": "0.9",
    "policy.generation.record_support": "true",
}
PIPELINE = {
    "cluster.cpu_workers_per_node": "2",
    "policy.megatron_cfg.pipeline_model_parallel_size": "2",
    "data_plane.impl": "transfer_queue",
}
ADAPTERS = {"policy.lora.enabled": "true", "policy.lora.rank": "4", "policy.lora.alpha": "8"}
SAVES = {"checkpointing.enabled": "true", "checkpointing.save_period": "2", "checkpointing.keep_top_k": "null"}


def train(runs: WarmRuns, recipe: Path, overrides: dict[str, str]) -> list[dict[str, float]]:
    config = load_recipe(recipe, {**MEGATRON, **overrides})
    runs.run(config)
    return logged_steps(config.logger.log_dir)


def learned(step: dict[str, float]) -> dict[str, float]:
    names = ("train/reward", "train/loss", "train/grad_norm", "train/kl_penalty", "rollout/mean_response_tokens")
    return {name: step[name] for name in names if name in step}


@pytest.mark.parametrize("lora", [{}, pytest.param(ADAPTERS, marks=pytest.mark.full)], ids=["weights", "adapters"])
def test_a_pipeline_gives_the_numbers_of_one_process_which_continues_from_its_checkpoint(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, warm_runs: WarmRuns, lora: dict[str, str]
) -> None:
    model = write_tiny_folder(tmp_path_factory.mktemp("model"))
    alone = train(warm_runs, write_recipe(tmp_path_factory.mktemp("alone"), model), {**LOCAL, **lora})
    folder = tmp_path_factory.mktemp("pipeline")
    checkpoints = {**SAVES, "checkpointing.checkpoint_dir": str(folder / "checkpoints")}
    together = train(
        warm_runs, write_recipe(folder, model), {**PIPELINE, **lora, **checkpoints, "grpo.max_num_steps": "2"}
    )
    resumed = train(
        warm_runs,
        write_recipe(tmp_path_factory.mktemp("resumed"), model),
        {**LOCAL, **lora, **checkpoints, "checkpointing.resume": "true"},
    )
    written = folder / "checkpoints" / "step_2" / "policy" / "weights"
    assert is_adapter_folder(written) == bool(lora) != (written / "model.safetensors").exists()
    for ours, theirs in zip([*together, *resumed], alone, strict=True):
        assert learned(ours) == pytest.approx(learned(theirs), rel=1e-4, abs=1e-6)
    # The last stage has the recorded sets.
    assert [step["train/token_mult_prob_error"] for step in together] == pytest.approx([1.0] * 2, abs=1e-5)
    assert len({step["train/grad_norm"] for step in alone}) == 3, "weights must change, or nothing is shown"
    assert all(step["data_plane/live_rows"] == 0 for step in together)
