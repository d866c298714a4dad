"""Stop tokens that reach the engine, and rollouts that cannot be written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_rl.config.load import load_config
from nemo_rl.errors import ResourceError
from nemo_rl.experience.evaluation.evaluator import EvaluationTask, SampleFile
from nemo_rl.experience.rollout_worker import RolloutWorker
from nemo_rl.experience.rollouts import RolloutSpec
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


def open_worker(folder: Path, *keys: str) -> tuple[RolloutWorker, Remembering]:
    """A model that names two stop tokens besides the tokenizer's, token 2; two held-out prompts."""
    model = write_tiny_folder(folder / "model")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    validation = ("+data.validation={dataset_name: sort_digits, size: 2}", "grpo.val_at_end=true")
    settings = [f"{name}={value}" for name, value in LOCAL.items()]
    config = load_config(write_recipe(folder, model), [*settings, *validation, *keys])
    engine = Remembering.from_config(config.policy, weight_version=0)
    assert isinstance(engine, Remembering)
    return RolloutWorker(RolloutSpec.of(config), generation=engine), engine


@pytest.mark.parametrize(("keys", "expected"), [((), (2, 7, 9)), (("policy.generation.stop_token_ids=[11]",), (11,))])
def test_a_response_ends_at_the_tokens_of_the_model_folder_unless_the_recipe_names_others(
    tmp_path: Path, keys: tuple[str, ...], expected: tuple[int, ...]
) -> None:
    worker, engine = open_worker(tmp_path, *keys)
    worker.validate(EvaluationTask(step=0, version=0))
    worker.shutdown()
    assert engine.stop_token_ids == expected


def test_rollouts_that_cannot_be_written_are_the_users_to_mend(tmp_path: Path) -> None:
    (tmp_path / "rollouts").write_text("a file where a folder should be")
    worker, _ = open_worker(tmp_path)
    with pytest.raises(ResourceError, match=r"rollouts cannot be written to .*step_0\.jsonl"):
        path = tmp_path / "rollouts" / "step_0.jsonl"
        worker.validate(EvaluationTask(step=0, version=0, samples=SampleFile(path=path, max_rows=4)))
    worker.shutdown()
