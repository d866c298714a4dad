"""Whole runs of vision-language models: rows with images over every store, both engines, kept and replayed."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from nemo_rl.algorithms.kept_steps.folder import ROLLOUT_FILE, StepsFolder
from nemo_rl.algorithms.run import run
from nemo_rl.cli.main import app
from nemo_rl.data_plane.column_io import read_column_file, rows_as_list
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.errors import UserError
from nemo_rl.models.vision.processor import processor_for
from nemo_rl_tools.step_replay.chain import ReplayRequest
from nemo_rl_tools.step_replay.replay import replay_step
from nemo_rl_tools.verdict import Verdict
from tests.helpers import mooncake
from tests.helpers.engine_process import NO_VLLM, has_vllm
from tests.helpers.runs import LOCAL, load_recipe, logged_steps, write_recipe
from tests.helpers.vision_models import hf_logits, picture, write_vision_folder

MICROBATCHES = {"enabled": True, "train_mb_tokens": 416, "logprob_mb_tokens": 416}
RAY = {"cluster.cpu_workers_per_node": "1"}
TWO_RANKS = {"cluster.cpu_workers_per_node": "2", "policy.dtensor_cfg.tensor_parallel_size": "2"}
VLLM = {"policy.generation.backend": "vllm", "policy.generation.vllm_cfg.kv_cache_gib": "0.05"}
RUNS = {
    "shm": {**LOCAL, "data_plane.impl": "shm"},
    "mooncake": {**LOCAL, "data_plane.impl": "mooncake"},
    "transfer_queue": {**RAY, "data_plane.impl": "transfer_queue"},
    "ray-tp2": TWO_RANKS,
    "ray-vllm-packed": {**RAY, **VLLM},
    "ray-tp2-vllm-packed": {**TWO_RANKS, **VLLM},
}
MARKS = {name: pytest.mark.full for name in ("transfer_queue", "ray-tp2", "ray-vllm-packed")}
MARKS |= {"ray-tp2-vllm-packed": pytest.mark.slow}
"""Left to larger runs of the tests; TransferQueue carries extra columns in `test_extra_columns`."""
SAME_BITS = ("shm", "mooncake", "transfer_queue")
"""Runs with the arithmetic of one process."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        family: write_vision_folder(tmp_path_factory.mktemp(family), family) for family in ("qwen2_5_vl", "smolvlm")
    }


def train(folder: Path, model: Path, overrides: dict[str, str], *, is_packed: bool = False, **data: object) -> Path:
    """Return the log folder of two steps."""
    shapes = {"dataset_name": "shapes", "size": 32, "apply_chat_template": False}
    recipe = write_recipe(
        folder,
        model,
        data={"train": {**shapes, **data}, "validation": {**shapes, "size": 8, "seed": 9}, "max_input_seq_length": 96},
        policy={
            "max_total_sequence_length": 104,
            "dynamic_batching": {"enabled": False} if is_packed else MICROBATCHES,
            "sequence_packing": MICROBATCHES if is_packed else {"enabled": False},
        },
        grpo={"max_num_steps": 2, "drop_zero_advantage_groups": False, "val_period": 2, "max_val_samples": 8},
        diagnostics={"keep_steps": {"enabled": True}},
        checkpointing={"enabled": True, "save_period": 2, "save_optimizer": False},
    )
    config = load_recipe(recipe, overrides)
    run(config, console=Console(file=io.StringIO()))
    return config.logger.log_dir


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> dict[str, Path]:
    return {family: train(tmp_path_factory.mktemp("run"), model, LOCAL) for family, model in models.items()}


def learning(logs: Path) -> list[dict[str, float]]:
    return [
        {name: value for name, value in step.items() if name.startswith(("train/", "val/"))}
        for step in logged_steps(logs)
    ]


def images_of(logs: Path) -> list[object]:
    columns = read_column_file(StepsFolder(logs).path / "step_2" / ROLLOUT_FILE)
    return [row.tolist() for name in ("pixel_values", "image_grid_thw") for row in rows_as_list(columns[name])]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "smolvlm"])
def test_engine_and_trainer_agree_on_rows_with_images(alone: dict[str, Path], family: str) -> None:
    steps = learning(alone[family])
    assert len(steps) == 2
    for step in steps:
        assert abs(step["train/token_mult_prob_error"] - 1) < 1e-5 and step["train/grad_norm"] > 0.1
    assert all(step["data_plane/live_rows"] == 0 for step in logged_steps(alone[family]))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "smolvlm"])
def test_a_step_with_images_is_replayed_to_the_last_bit(alone: dict[str, Path], family: str) -> None:
    report = replay_step(ReplayRequest(run=alone[family], step=2))
    assert report.verdict is Verdict.PASS, list(report.lines())
    assert not any(site.difference for site in report.sites)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "smolvlm"])
def test_an_export_is_a_model_that_reads_pictures(
    alone: dict[str, Path], models: dict[str, Path], family: str, tmp_path: Path
) -> None:
    app(["export", str(alone[family]), "--out", str(tmp_path / "out")], standalone_mode=False)
    pixels = AutoImageProcessor.from_pretrained(str(tmp_path / "out"), local_files_only=True, backend="pil")
    original = AutoImageProcessor.from_pretrained(str(models[family]), local_files_only=True, backend="pil")
    assert pixels.to_dict() == original.to_dict()
    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path / "out"))
    encoder = processor_for(tmp_path / "out", tokenizer)
    ids, images = encoder.expand(encoder._ids(encoder.image_text + "how many"), [picture(1, (32, 16))])
    batch = {"input_ids": torch.tensor([ids]), "input_lengths": torch.tensor([len(ids)])}
    columns = {name: [tensor] for name, tensor in images.tensors.items()}
    saved = alone[family] / "checkpoints" / "step_2" / "policy" / "weights"
    with torch.no_grad():
        found, expected = (
            hf_logits(
                AutoModelForImageTextToText.from_pretrained(str(folder), dtype=torch.float32).eval(),
                BatchedDataDict({**batch, **columns}),
                0,
            )
            for folder in (tmp_path / "out", saved)
        )
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    app(
        [
            "eval",
            str(alone[family]),
            str(alone[family] / "config.yaml"),
            "--limit",
            "2",
            "--out",
            str(tmp_path / "eval"),
        ],
        standalone_mode=False,
    )
    assert json.loads((tmp_path / "eval" / "evaluation.json").read_text())["sets"]["validation"]["num_prompts"] == 2


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("shm", "mooncake") else [MARKS[name]]) for name in RUNS]
)
def test_stores_layouts_and_engines_give_the_numbers_of_one_process(
    tmp_path: Path, models: dict[str, Path], alone: dict[str, Path], name: str
) -> None:
    if name == "mooncake" and (why := mooncake.why_not()):
        pytest.skip(why)
    if "vllm" in name and not has_vllm():
        pytest.skip(NO_VLLM)
    logs = train(tmp_path, models["qwen2_5_vl"], RUNS[name], is_packed="packed" in name)
    found, expected = learning(logs), learning(alone["qwen2_5_vl"])
    if name in SAME_BITS:
        assert found == expected and images_of(logs) == images_of(alone["qwen2_5_vl"])
    elif "vllm" in name:
        assert all(abs(step["train/token_mult_prob_error"] - 1) < 1e-4 for step in found)
        assert len({step["train/grad_norm"] for step in found}) == 2, "weights must change, or a refit shows nothing"
    else:
        losses = [[step["train/loss"] for step in steps] for steps in (found, expected)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4, abs=1e-6)


def test_images_come_from_files_beside_a_json_lines_file(tmp_path: Path, models: dict[str, Path]) -> None:
    (tmp_path / "pictures").mkdir()
    rows = []
    for number in range(8):
        picture(number, (8 * (1 + number % 3), 16)).save(tmp_path / "pictures" / f"{number}.png")
        names = [f"pictures/{number}.png"] * (number % 3)
        rows.append({"input": "how many", "output": str(number), "image": names or None})
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    logs = train(
        tmp_path / "run",
        models["qwen2_5_vl"],
        {**LOCAL, "data.validation": "null", "grpo.val_period": "0"},
        dataset_name="jsonl",
        data_path=str(path),
        image_key="image",
        size=None,
    )
    counts = {len(row) for row in images_of(logs)}
    assert 0 in counts and len(counts) > 2, "rows without, with one and with two pictures"
    (tmp_path / "pictures" / "4.png").unlink()
    with pytest.raises(UserError, match=r"4.png: the picture cannot be read: No such file.*rows.jsonl:5"):
        train(
            tmp_path / "again",
            models["qwen2_5_vl"],
            {**LOCAL, "data.validation": "null", "grpo.val_period": "0"},
            dataset_name="jsonl",
            data_path=str(path),
            image_key="image",
            size=None,
        )
