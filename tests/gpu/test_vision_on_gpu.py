"""Rows with images on a CUDA device: the DTensor worker and both engines have the numbers of Hugging Face."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nemo_rl.algorithms.losses.policy_loss import PolicyLoss
from nemo_rl.config.loss import LossConfig
from nemo_rl.config.policy import SequencePackingConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.generation.interfaces import EngineSpec, GenerationOutput, GenerationRequest, SamplingParams
from nemo_rl.models.generation.torch_engine import TorchEngine
from nemo_rl.models.hf.loading import load_causal_lm, load_model_config
from nemo_rl.models.vision import PIXELS, PromptImages, family_of
from tests.helpers.tiny_model import tiny_policy, tiny_worker
from tests.helpers.vision_models import FAMILIES, hf_logits, vision_batch, write_vision_folder, write_vision_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BOUND = {"float32": 5e-3, "bfloat16": 0.3}
"""Largest difference of a log-probability: convolutions of the tower run in TF32."""
DEVICE = "cuda"


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_model(tmp_path_factory.mktemp("vision") / request.param, request.param)


@torch.no_grad()
def logprobs_of(folder: Path, batch: BatchedDataDict, row: int) -> torch.Tensor:
    """Return `[L - 1]` of Hugging Face in float64 on the CPU."""
    model = load_causal_lm(folder, dtype=torch.float64)
    ids = batch.tensor("input_ids")[row, : int(batch.tensor("input_lengths")[row])].long()
    return hf_logits(model, batch, row)[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]


@pytest.mark.parametrize("precision", list(BOUND))
@pytest.mark.parametrize("is_packed", [False, True])
def test_the_worker_scores_and_trains_rows_with_images(folder: Path, precision: str, is_packed: bool) -> None:
    batch = vision_batch(load_causal_lm(folder).config)
    packing = SequencePackingConfig(enabled=is_packed)
    config = tiny_policy(folder, precision=precision, sequence_packing=packing, max_total_sequence_length=128)
    worker = tiny_worker(config, device=DEVICE)
    every = BatchedDataDict({name: column for name, column in batch.items() if name != "token_mask"})
    found = worker.get_logprobs(every)
    for row, length in enumerate(batch.tensor("input_lengths").tolist()):
        error = (found[row, 1:length] - logprobs_of(folder, batch, row)).abs().max()
        assert float(error) <= BOUND[precision], f"row {row} differs by {float(error):.1e}"
    assert worker.train(batch, PolicyLoss(config=LossConfig())).grad_norm[0] > 0
    worker.shutdown()


def request_of(folder: Path) -> GenerationRequest:
    """Return a prompt per row of `vision_batch`: all of a row but its last three tokens."""
    config = load_model_config(folder)
    batch, family = vision_batch(config), family_of(config)
    assert family is not None
    rows = [{column.name: batch[column.name][row] for column in family.columns} for row in range(batch.size)]
    lengths = batch.tensor("input_lengths").tolist()
    prompts = [ids[: length - 3] for ids, length in zip(batch.tensor("input_ids").tolist(), lengths, strict=True)]
    return GenerationRequest(
        prompt_ids=tuple(map(tuple, prompts)),
        seeds=tuple(range(batch.size)),
        sampling=SamplingParams(temperature=1.0, max_new_tokens=8, stop_token_ids=()),
        images=tuple(PromptImages.of(row) if len(row[PIXELS]) else None for row in rows),
    )


def check(folder: Path, asked: GenerationRequest, output: GenerationOutput, *, bound: float) -> None:
    """Compare every log-probability with Hugging Face's."""
    family = family_of(load_model_config(folder))
    assert family is not None
    lengths = output.lengths.tolist()
    for number, tokens in enumerate(output.token_ids.split(lengths)):
        prompt, images = asked.prompt_ids[number], asked.images[number]
        ids = torch.tensor([[*prompt, *tokens.tolist()]])
        row = family.empty_row() if images is None else images.tensors
        columns = {name: [tensor] for name, tensor in row.items()}
        one = BatchedDataDict({"input_ids": ids.int(), "input_lengths": torch.tensor([ids.shape[1]]), **columns})
        expected = logprobs_of(folder, one, 0)[len(prompt) - 1 :]
        error = float((output.logprobs.split(lengths)[number] - expected).abs().max())
        assert error <= bound, f"row {number} differs by {error:.1e}"


def test_the_embedded_engine_samples_rows_with_images(folder: Path) -> None:
    model, asked = load_causal_lm(folder).to(DEVICE), request_of(folder)
    engine = TorchEngine(model, tokenizer=None, max_total_length=128, weight_version=0)
    check(folder, asked, engine.generate(asked), bound=BOUND["float32"])


def vllm_on_a_gpu(spec: EngineSpec) -> object:
    from nemo_rl.models.generation.vllm.worker import build_vllm_worker

    return build_vllm_worker(replace(spec, use_gpu=True, weight_version=0))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed; run `make vllm`")
def test_vllm_samples_rows_with_images(family: str, tmp_path: Path) -> None:
    from tests.helpers.engine_process import vllm_policy, vllm_process

    folder = write_vision_folder(tmp_path / family, family)
    sizes = {"gpu_memory_utilization": 0.2, "enforce_eager": True}
    policy = vllm_policy(folder, generation={"vllm_cfg": sizes, "precision": "bfloat16"}, max_total_sequence_length=128)
    with vllm_process(policy, build=vllm_on_a_gpu) as engine:
        asked = request_of(folder)
        output = engine("generate", request=asked)
    assert isinstance(output, GenerationOutput)
    check(folder, asked, output, bound=BOUND["bfloat16"])
