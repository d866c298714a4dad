"""What embedded engines show of their decoding, through a real hub: all tokens, of all engines, in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from nemo_rl.experience.scheduler import split_request
from nemo_rl.models.generation.interfaces import GenerationOutput, GenerationRequest, SamplingParams, traced_row
from nemo_rl.models.generation.torch_engine.engine import TorchEngine
from nemo_rl.models.generation.torch_engine.tracing import DecodeTracing
from nemo_rl.models.policy.tracing import TraceSpec
from nemo_rl.tracer.frame import Frame, FrameTable
from nemo_rl.tracer.process import HubSpec, open_job
from nemo_rl.tracer.protocol import RankGroup
from nemo_rl.tracer.reducer import STATS
from tests.helpers.model_families import config_of
from tests.helpers.tiny_model import tiny_model
from tests.helpers.tracer_recordings import frames_of, tokens_of

STOPS = tuple(range(0, 320, 9))
"""A ninth of the vocabulary, so that rows end at different times."""
GROUP, TOP_K = 3, 2
KEYS = tuple(traced_row(engine, row) for engine in range(2) for row in range(12))
WATCHES = ("tokens | stats | generation", "tokens, layer.out | full | generation")
Engines = Sequence[TorchEngine]


def moe_model() -> PreTrainedModel:
    torch.manual_seed(4)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config_of("qwen3_moe"))
    return model.eval()


def request(*lengths: int, seed: int = 100) -> GenerationRequest:
    """Prompts of so many tokens."""
    generator = torch.Generator().manual_seed(seed)
    return GenerationRequest(
        prompt_ids=tuple(tuple(torch.randint(7, 300, (n,), generator=generator).tolist()) for n in lengths),
        seeds=tuple(range(seed, seed + GROUP * len(lengths))),
        sampling=SamplingParams(temperature=1.0, max_new_tokens=8, stop_token_ids=STOPS),
    )


def generate(engines: Engines, asked: GenerationRequest) -> GenerationOutput:
    parts = split_request(asked, num_engines=len(engines), batch_rows=1024)
    return GenerationOutput.joined([engine.generate(part) for engine, part in zip(engines, parts, strict=False)])


def shown(
    folder: Path,
    body: Callable[[Engines], object],
    *,
    watches: Sequence[str] = WATCHES,
    make: Callable[[], PreTrainedModel] = tiny_model,
    max_batch_size: int = 1024,
) -> tuple[dict[tuple[str, str, str], Frame], dict[str, FrameTable]]:
    """Frames and tables of a step in which two engines do what `body` says."""
    with open_job(HubSpec(folder=folder, run="run", start_timeout_s=300, record=True), {"name": "test"}) as job:
        spec, engines = TraceSpec(address=job.address, run="run", memory_bytes=64 << 20), []
        for number in range(2):
            model = make()
            tracing = DecodeTracing(spec, model, number=number, num_engines=2)
            engine = TorchEngine(
                model,
                tokenizer=None,
                max_total_length=64,
                max_batch_size=max_batch_size,
                weight_version=0,
                number=number,
                tracing=tracing,
            )
            tracing.begin(1, watches=watches, keys=KEYS)
            engines.append(engine)
        job.link.say({"type": "step", "step": 1, "keys": KEYS, "group": RankGroup.GENERATION.value})
        body(engines)
        for engine in engines:
            engine._tracing.end()
            engine.shutdown()
    return frames_of(folder)


def test_engines_give_one_picture_of_all_requests_of_a_step(tmp_path: Path) -> None:
    """The second request has a prompt for one engine only, and batches cut groups."""
    asked = [request(3, 9, 5, 6), request(4, seed=7)]
    sampled: list[GenerationOutput] = []
    frames, tables = shown(
        tmp_path, lambda engines: sampled.extend(generate(engines, each) for each in asked), max_batch_size=4
    )
    rows: dict[str, dict[int, int]] = {}
    for key, position, token in tokens_of(frames["generation", "tokens", "full"], tables):
        rows.setdefault(key, {})[position] = token
    assert list(rows) == [key for key in KEYS if key in rows]
    # Two prompts for each engine, then one for the first of them.
    places = [(0, 0), (0, 3), (1, 0), (1, 3), (0, 6)]
    prompts = [prompt for each in asked for prompt in each.prompt_ids]
    responses = [row for output in sampled for row in output.token_ids.split(output.lengths.tolist())]
    fed = 0
    for number, (prompt, (engine, first)) in enumerate(zip(prompts, places, strict=True)):
        of_prompt = [rows.pop(traced_row(engine, first + sample), {}) for sample in range(GROUP)]
        for sample, shown_tokens in enumerate(of_prompt):
            whole = dict(enumerate([*prompt, *responses[number * GROUP + sample].tolist()[:-1]]))
            response = {at: token for at, token in whole.items() if at >= len(prompt)}
            assert shown_tokens in ((whole,) if sample == 0 else (whole, response))
        fed += sum(map(len, of_prompt))
    assert not rows
    stats = dict(zip(STATS, frames["generation", "tokens", "stats"].payload, strict=True))
    assert stats["count"] == fed


def test_watching_changes_no_bit(tmp_path: Path) -> None:
    asked, sampled = request(3, 9, 5, 6), list[GenerationOutput]()
    shown(
        tmp_path, lambda engines: sampled.append(generate(engines, asked)), watches=["* | stats; digest | generation"]
    )
    engine = TorchEngine(tiny_model(), tokenizer=None, max_total_length=64, weight_version=0)
    plain = generate([engine, engine], asked)
    assert torch.equal(plain.token_ids, sampled[0].token_ids)
    assert torch.equal(plain.logprobs, sampled[0].logprobs)


def test_experts_of_padding_do_not_count(tmp_path: Path) -> None:
    asked, sampled = request(3, 9, 5, 6), list[GenerationOutput]()
    watches = ["tokens | stats | generation", "moe.topk_ids, moe.logits | stats | generation"]
    watches.append("moe.topk_ids | counts | generation")
    frames, _ = shown(
        tmp_path, lambda engines: sampled.append(generate(engines, asked)), watches=watches, make=moe_model
    )
    fed = sum(map(len, asked.prompt_ids)) + int((sampled[0].lengths - 1).sum())
    counts = [frame for (_, _, reducer), frame in frames.items() if reducer == "counts"]
    assert counts and all(int(frame.payload.sum()) == TOP_K * fed for frame in counts)


def test_parts_of_much_are_sent_before_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of several messages give the picture of one."""
    asked = request(3, 9, 5, 6)
    whole, tables = shown(tmp_path / "whole", lambda engines: generate(engines, asked))
    monkeypatch.setattr("nemo_rl.tracer.link.GATHERED_BYTES", 2000)
    parts, other_tables = shown(tmp_path / "parts", lambda engines: generate(engines, asked))
    assert whole.keys() == parts.keys()
    for name, frame in whole.items():
        assert frame.payload.tobytes() == parts[name].payload.tobytes()
        if frame.table is not None:
            assert tokens_of(frame, tables) == tokens_of(parts[name], other_tables)
            assert parts[name].num_parts > frame.num_parts or name[1] == "tokens"
