"""A response ends at every token that the model folder names, unless the recipe names others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_rl.config.load import load_config
from nemo_rl.experience.sync_rollout_actor import SyncRolloutWorker
from nemo_rl.models.generation.interfaces import GenerationOutput, GenerationRequest
from nemo_rl.models.generation.torch_engine import TorchEngine
from tests.helpers.runs import LOCAL, write_recipe
from tests.helpers.tiny_model import write_tiny_folder


class Remembering(TorchEngine):
    """Remembers what it was asked for."""

    stop_token_ids: tuple[int, ...] = ()

    def generate(self, request: GenerationRequest) -> GenerationOutput:
        self.stop_token_ids = request.sampling.stop_token_ids
        return super().generate(request)


@pytest.mark.parametrize(("keys", "expected"), [((), (2, 7, 9)), (("policy.generation.stop_token_ids=[11]",), (11,))])
def test_stop_tokens_of_the_generation_config_reach_the_engine(
    tmp_path: Path, keys: tuple[str, ...], expected: tuple[int, ...]
) -> None:
    folder = write_tiny_folder(tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    validation = ("+data.validation={dataset_name: sort_digits, size: 2}", "grpo.val_at_end=true")
    settings = [f"{name}={value}" for name, value in LOCAL.items()]
    config = load_config(write_recipe(tmp_path, folder), [*settings, *validation, *keys])
    engine = Remembering.from_config(config.policy, weight_version=0)
    assert isinstance(engine, Remembering)
    worker = SyncRolloutWorker(config, generation=engine)
    worker.validate(step=0, version=0)
    worker.shutdown()
    assert engine.stop_token_ids == expected
