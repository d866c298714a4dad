"""Rows with images in both engines: log-probabilities are those of Hugging Face in float64, also after new weights."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from nemo_rl.algorithms.losses.policy_loss import PolicyLoss
from nemo_rl.config.backends import LoraConfig
from nemo_rl.config.loss import LossConfig
from nemo_rl.config.policy import PolicyConfig, VisionConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.worker_groups import Call, ask
from nemo_rl.errors import ConfigError
from nemo_rl.models.generation.interfaces import (
    EngineSpec,
    GenerationOutput,
    GenerationRequest,
    GroupSamples,
    SamplingParams,
)
from nemo_rl.models.generation.torch_engine.engine import TorchEngine
from nemo_rl.models.generation.torch_engine.worker import EngineWorker
from nemo_rl.models.generation.turn_batch import ContinuousSpec, in_order
from nemo_rl.models.generation.vllm.start import check_vllm_spec
from nemo_rl.models.generation.vllm.worker import build_vllm_worker
from nemo_rl.models.hf.loading import load_causal_lm, named_weights
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker
from nemo_rl.models.vision import PIXELS, PromptImages, family_of, is_in_tower
from nemo_rl.models.weight_sync.factory import PayloadWeightSync
from tests.helpers.engine_process import (
    NO_VLLM,
    EngineProxy,
    has_vllm,
    parties_of,
    policy_of,
    vllm_policy,
    vllm_process,
)
from tests.helpers.tiny_model import tiny_policy
from tests.helpers.vision_models import FAMILIES, hf_logits, vision_batch, write_vision_folder

BOUND = 1e-5
"""Largest difference of a log-probability: rounding of float32."""
SAMPLES = 2
SCALES = {1: 1.0, 2: 1.1, 3: 1.0, 4: 1.1}
TOKENS = 10


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_folder(tmp_path_factory.mktemp("engines") / request.param, request.param)


def request_of(folder: Path, **changes: object) -> GenerationRequest:
    """Return a prompt per row of `vision_batch`: all of a row but its last three tokens."""
    config = load_causal_lm(folder).config
    batch, family = vision_batch(config), family_of(config)
    assert family is not None
    lengths = batch.tensor("input_lengths").tolist()
    rows = [{column.name: batch[column.name][row] for column in family.columns} for row in range(len(lengths))]
    prompts = [ids[: length - 3] for ids, length in zip(batch.tensor("input_ids").tolist(), lengths, strict=True)]
    given: dict[str, object] = {
        "prompt_ids": tuple(map(tuple, prompts)),
        "seeds": tuple(range(100, 100 + SAMPLES * len(prompts))),
        "sampling": SamplingParams(temperature=1.0, max_new_tokens=TOKENS, stop_token_ids=()),
        "images": tuple(PromptImages.of(row) if len(row[PIXELS]) else None for row in rows),
    }
    return GenerationRequest(**{**given, **changes})


def check(folder: Path, asked: GenerationRequest, output: GenerationOutput, scales: Mapping[int, float]) -> None:
    """Compare every log-probability with Hugging Face's.

    Args:
        scales: version -> its weights are so many times those of the folder.
    """
    models = {version: _model(folder, scale) for version, scale in scales.items()}
    family = family_of(next(iter(models.values())).config)
    assert family is not None
    first = 0
    for number, (length, spans) in enumerate(zip(output.lengths.tolist(), output.row_spans, strict=True)):
        prompt, images = asked.prompt_ids[number // SAMPLES], asked.images[number // SAMPLES]
        tokens = output.token_ids[first : first + length].long()
        found = output.logprobs[first : first + length]
        first += length
        ids = torch.cat([torch.tensor(prompt), tokens])
        row = family.empty_row() if images is None else images.tensors
        columns = {name: [tensor] for name, tensor in row.items()}
        one = BatchedDataDict({"input_ids": ids[None].int(), "input_lengths": torch.tensor([len(ids)]), **columns})
        ends = [*(start for start, _ in spans[1:]), length]
        for (start, version), end in zip(spans, ends, strict=True):
            with torch.no_grad():
                logits = hf_logits(models[version], one, 0)[len(prompt) - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
            error = float((found - expected)[start:end].abs().max())
            assert error <= BOUND, f"row {number}, version {version} differs by {error:.1e}"


def _model(folder: Path, scale: float) -> PreTrainedModel:
    model = load_causal_lm(folder, dtype=torch.float64)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(scale)
    return model


def scaled(folder: Path, scale: float) -> list[tuple[str, torch.Tensor]]:
    return [(name, weight.detach() * scale) for name, weight in named_weights(load_causal_lm(folder))]


def embedded(folder: Path) -> TorchEngine:
    return TorchEngine(load_causal_lm(folder), tokenizer=None, max_total_length=128, weight_version=0)


def check_engine(folder: Path, call: Callable[..., Any]) -> None:
    """Check rows before and after new weights, of which those of the tower differ as well.

    Args:
        call: calls a method of the engine.
    """
    asked = request_of(folder)
    call("update_weights", weights=scaled(folder, 1.0), version=1)
    before = call("generate", request=asked)
    check(folder, asked, before, SCALES)
    call("update_weights", weights=scaled(folder, 1.1), version=2)
    check(folder, asked, call("generate", request=asked), SCALES)
    call("update_weights", weights=scaled(folder, 1.0), version=3)
    assert torch.equal(call("generate", request=asked).token_ids, before.token_ids)


def test_the_embedded_engine_gives_the_log_probabilities_of_hugging_face(folder: Path) -> None:
    engine = embedded(folder)
    check_engine(folder, lambda method, **given: getattr(engine, method)(**given))


class ContinuousEngine:
    """A continuous engine whose weights are replaced while it decodes."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker

    @classmethod
    def vllm(cls, spec: EngineSpec) -> ContinuousEngine:
        """Return vLLM with room for all rows at once."""
        return cls(build_vllm_worker(replace(spec, continuous=True)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.worker, name)

    def update_under(
        self, request: GenerationRequest, weights: list[tuple[str, torch.Tensor]], version: int
    ) -> GenerationOutput:
        """Sample, and bring new weights when every row has some tokens."""
        found = list[GroupSamples]()
        thread = threading.Thread(target=lambda: found.extend(self.worker.stream(request)))
        decoding = self.worker._decoding
        until = decoding._turns + 5
        thread.start()
        give_up = time.monotonic() + 60.0
        while decoding._turns < until:
            assert time.monotonic() < give_up and thread.is_alive()
            time.sleep(0.0005)
        self.worker.update_weights(weights, version=version)
        thread.join(60.0)
        return in_order(found, request)


def named_request(folder: Path) -> GenerationRequest:
    """Return long rows of groups with names, which go on under new weights."""
    asked = request_of(folder, sampling=SamplingParams(temperature=1.0, max_new_tokens=40, stop_token_ids=()))
    return replace(asked, names=tuple(f"{number}.0" for number in range(len(asked.prompt_ids))))


def check_under_new_weights(folder: Path, call: Callable[..., Any]) -> None:
    asked = named_request(folder)
    output = call("update_under", request=asked, weights=scaled(folder, 1.1), version=4)
    assert any(len(spans) > 1 for spans in output.row_spans), "no row was running when the weights came"
    check(folder, asked, output, SCALES)


def test_rows_that_join_a_running_batch_and_are_read_anew_keep_their_numbers(folder: Path) -> None:
    engine = embedded(folder)
    # Fewer places than rows, so that rows join while others run.
    engine.decode_continuously(ContinuousSpec(number=0, places=6))
    continuous = ContinuousEngine(engine)
    engine.update_weights(scaled(folder, 1.0), version=1)
    check_under_new_weights(folder, lambda method, **given: getattr(continuous, method)(**given))
    engine.shutdown()


def test_the_tower_runs_once_for_all_samples_of_a_prompt(folder: Path) -> None:
    engine, seen = embedded(folder), []
    model = engine._loaded_model()
    family = family_of(model.config)
    assert family is not None
    tower = model.get_submodule(family.tower[0])
    tower.register_forward_pre_hook(lambda *_: seen.append(1))
    asked = request_of(folder).of_groups([0])
    several = replace(asked, seeds=tuple(range(7)))
    engine.generate(several)
    assert seen == [1]


def test_a_prompt_whose_placeholders_do_not_fit_its_images_is_refused(folder: Path) -> None:
    asked = request_of(folder)
    moved = (asked.images[1], asked.images[0], *asked.images[2:])
    with pytest.raises(ValueError, match=r"prompt 1: expected \d+ placeholder tokens .* of 1 images, got 0"):
        embedded(folder).generate(replace(asked, images=moved))


def check_refits(folder: Path, config: PolicyConfig, engine: object, *, freezes: bool = False) -> int:
    """Refit an engine twice, with a receipt each time: whole, and what a step of training with images has changed.

    Returns:
        Bytes of the second refit.
    """
    batch, vision = vision_batch(load_causal_lm(folder).config), VisionConfig(freeze_tower=freezes)
    with policy_of(tiny_policy(folder, max_total_sequence_length=128, vision=vision)) as policy:
        parties = replace(parties_of(config, [engine], policy), delta_full_every=1000)
        sync = PayloadWeightSync(parties)
        sync.sync(0)
        assert sync.report is not None and sync.report.receipt is not None
        for request in (
            ask(PolicyWorker.prepare_for_training),
            ask(PolicyWorker.train, batch=batch, loss_fn=PolicyLoss(config=LossConfig())),
        ):
            policy.run(Call(request=request, stage="train", timeout_s=60))
        sync.sync(1)
        assert sync.report.receipt is not None and sync.version == 1
        return sync.report.bytes_sent


def test_refits_are_proved_and_carry_nothing_of_a_frozen_tower(folder: Path) -> None:
    config = tiny_policy(folder, max_total_sequence_length=128)
    whole, frozen = (
        check_refits(folder, config, EngineWorker.from_config(config), freezes=freezes) for freezes in (False, True)
    )
    model = load_causal_lm(folder)
    family = family_of(model.config)
    assert family is not None
    tower = sum(weight.nbytes for name, weight in named_weights(model) if is_in_tower(name, family))
    assert whole - frozen == pytest.approx(tower, rel=0.02)


@pytest.mark.slow
@pytest.mark.skipif(not has_vllm(), reason=NO_VLLM)
@pytest.mark.parametrize(
    "folder", ["qwen2_5_vl", pytest.param("smolvlm", marks=pytest.mark.full)], indirect=True, scope="module"
)
def test_vllm_gives_the_log_probabilities_of_hugging_face(folder: Path) -> None:
    policy = vllm_policy(folder, generation={"vllm_cfg": {"kv_cache_gib": 0.1}}, max_total_sequence_length=128)
    with vllm_process(policy, build=ContinuousEngine.vllm) as engine:
        check_engine(folder, engine)
        check_under_new_weights(folder, engine)
        check_refits(folder, policy, EngineProxy(engine))


@pytest.mark.full
@pytest.mark.skipif(not has_vllm(), reason=NO_VLLM)
def test_two_ranks_of_vllm_give_the_same(folder: Path) -> None:
    sizes = {"kv_cache_gib": 0.1, "tensor_parallel_size": 2}
    policy = vllm_policy(folder, generation={"vllm_cfg": sizes}, max_total_sequence_length=128)
    with vllm_process(policy) as engine:
        check_engine(folder, engine)
        check_refits(folder, policy, EngineProxy(engine))


def test_what_vllm_cannot_serve_of_a_vision_model_is_said(folder: Path) -> None:
    staged = vllm_policy(folder, generation={"vllm_cfg": {"pipeline_parallel_size": 2}})
    adapted = vllm_policy(folder, lora=LoraConfig(enabled=True))
    for policy, key in ((staged, "pipeline_parallel_size: a"), (adapted, "policy.lora.serve: native, but adapters of")):
        with pytest.raises(ConfigError, match=key):
            check_vllm_spec(EngineSpec(policy=policy))
