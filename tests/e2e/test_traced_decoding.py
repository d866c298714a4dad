"""Runs whose decoding is watched: every token that is fed is shown once, and the same tokens are sampled."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from nemo_rl.algorithms.grpo_sync import GRPOTrainer
from nemo_rl.algorithms.setup import open_trainer
from nemo_rl.algorithms.step_tracing import LiveTracing
from nemo_rl.errors import NonFiniteError
from nemo_rl.models.generation.interfaces import GenerationOutput, GenerationRequest, traced_row
from nemo_rl.models.generation.torch_engine.worker import EngineWorker
from nemo_rl.models.hf.loading import load_causal_lm
from nemo_rl.tracer.frame import Frame, FrameTable
from nemo_rl.tracer.reducer import STATS
from nemo_rl_tools.tracer.entry import EntryKind
from nemo_rl_tools.tracer.stream_reader import StreamReader
from tests.helpers.runs import LOCAL, load_recipe, logged_steps, write_recipe
from tests.helpers.tracer_recordings import tokens_of

TRACER = {"diagnostics.tracer.enabled": "true", "diagnostics.tracer.max_hz": "1000", "diagnostics.tracer.rows": "6"}
TRAIN_ONLY = "layer.out | stats"
GENERATION = ("layer.out, tokens | stats", "layer.out, logits | full", "moe.topk_ids | counts")
GROUP = 4
"""Samples of each prompt."""
CACHED = 2e-5
"""Relative to the largest value of a layer: attention over a cache and over a whole row sums in other orders."""


@dataclass
class Watched:
    """What was sampled, and what was shown of it."""

    metrics: list[dict[str, float]] = field(default_factory=list)
    asked: list[GenerationRequest] = field(default_factory=list)
    sampled: list[GenerationOutput] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    """Steps that the engine was told of."""
    frames: list[Frame] = field(default_factory=list)
    tables: dict[str, FrameTable] = field(default_factory=dict)
    messages: list[dict[str, object]] = field(default_factory=list)

    def generation(self, site: str, reducer: str, *, step: int) -> Frame:
        (found,) = [
            frame
            for frame in self.frames
            if (frame.where.phase, frame.where.site.text, str(frame.where.reducer), frame.where.step)
            == ("generation", site, reducer, step)
        ]
        return found


def engine_of(trainer: GRPOTrainer) -> EngineWorker:
    [tracing] = [each for each in trainer._parts.observers.all if isinstance(each, LiveTracing)]
    engine = tracing._engines._engines.members[0]._worker
    assert isinstance(engine, EngineWorker)
    return engine


def num_hooks(engine: EngineWorker) -> int:
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in engine._loaded_model().modules())


@contextmanager
def opened(folder: Path, model: Path, *watches: str, **overrides: str) -> Iterator[tuple[GRPOTrainer, Watched]]:
    """A trainer in this process; what it samples is noted."""
    selectors = {"diagnostics.tracer.selectors": json.dumps(watches)}
    config = load_recipe(write_recipe(folder, model), {**LOCAL, **TRACER, **selectors, **overrides})
    found = Watched()
    with open_trainer(config, console=Console(file=io.StringIO())) as trainer:
        trainer.open_run()
        yield trainer, found
    found.metrics = logged_steps(folder / "logs")
    for entry in StreamReader(folder / "logs" / "tracer").entries():
        if entry.kind is EntryKind.MESSAGE:
            found.messages.append(json.loads(entry.body))
        elif isinstance(message := entry.frame() if entry.kind is not EntryKind.BEGIN else None, Frame):
            found.frames.append(message)
        elif isinstance(message, FrameTable):
            found.tables[message.name] = message


def taken(folder: Path, model: Path, *watches: str, steps: int = 2) -> Watched:
    """Steps of a run, with all that its engine was asked."""
    with opened(folder, model, *watches) as (trainer, found):
        engine = engine_of(trainer)
        generate, begin = engine.generate, engine.begin_tracing

        def noted(request: GenerationRequest) -> GenerationOutput:
            output = generate(request)
            if request.forced is None:  # else it is the probe of a receipt
                found.asked.append(request)
                found.sampled.append(output)
            return output

        def begun(step: int, **arguments: object) -> None:
            found.calls.append(step)
            begin(step, **arguments)

        engine.generate, engine.begin_tracing = noted, begun
        for _ in range(steps):
            trainer._after_step(trainer.step())
        assert num_hooks(engine) == 0
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Watched:
    return taken(tmp_path_factory.mktemp("plain"), model, TRAIN_ONLY)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Watched:
    return taken(tmp_path_factory.mktemp("watched"), model, *(f"{each} | generation" for each in GENERATION))


def test_decoding_is_shown_only_where_a_watch_names_it(plain: Watched, watched: Watched) -> None:
    assert plain.calls == [] and plain.frames
    assert not any(frame.where.phase == "generation" for frame in plain.frames)
    assert watched.calls == [1, 2]
    assert {frame.where.phase for frame in watched.frames} == {"generation"}
    assert not any(frame.missing or frame.dropped or frame.num_not_finite for frame in watched.frames)


def test_a_run_whose_decoding_is_watched_samples_the_same_tokens(plain: Watched, watched: Watched) -> None:
    assert plain.metrics == watched.metrics
    for one, other in zip(plain.sampled, watched.sampled, strict=True):
        assert torch.equal(one.token_ids, other.token_ids)
        assert torch.equal(one.logprobs, other.logprobs)


def test_every_token_that_is_fed_counts_once(watched: Watched) -> None:
    for step, (asked, sampled) in enumerate(zip(watched.asked, watched.sampled, strict=True), start=1):
        distinct = set(asked.prompt_ids)
        # A prompt runs once for its rows, and the last token of a response is never fed.
        num_tokens = sum(map(len, distinct)) + int((sampled.lengths - 1).sum())
        for site, num_features in (("tokens", 1), ("layer.out[0]", 32), ("layer.out[1]", 32)):
            stats = dict(zip(STATS, watched.generation(site, "stats", step=step).payload, strict=True))
            assert stats["count"] == num_tokens * num_features, site
        fed = [token for prompt in distinct for token in prompt]
        for response in sampled.token_ids.split(sampled.lengths.tolist()):
            fed += response[:-1].tolist()
        assert dict(zip(STATS, watched.generation("tokens", "stats", step=step).payload, strict=True))["sum"] == sum(
            fed
        )


def rows_of(frame: Frame, tables: dict[str, FrameTable]) -> dict[str, list[tuple[int, int, np.ndarray]]]:
    """Position, token and value of each shown token, by row."""
    rows: dict[str, list[tuple[int, int, np.ndarray]]] = {}
    for (key, position, token), value in zip(tokens_of(frame, tables), frame.payload, strict=True):
        rows.setdefault(key, []).append((position, token, value))
    return rows


@pytest.mark.parametrize("site", ["layer.out[0]", "layer.out[1]", "logits"])
def test_shown_tokens_have_the_values_of_a_plain_forward_pass(site: str, watched: Watched, model: Path) -> None:
    """Of the first step, whose weights are those of the folder."""
    [asked, *_], [sampled, *_] = watched.asked, watched.sampled
    shown = rows_of(watched.generation(site, "full", step=1), watched.tables)
    assert list(shown) == [traced_row(0, row) for row in range(6)]
    reference = load_causal_lm(model)
    responses = sampled.token_ids.split(sampled.lengths.tolist())
    for row in range(6):
        prompt = asked.prompt_ids[row // GROUP]
        tokens = [*prompt, *responses[row].tolist()][:-1]
        # The first row of a prompt shows it; logits of a prompt are computed at its end alone.
        first = (0 if site != "logits" else len(prompt) - 1) if row % GROUP == 0 else len(prompt)
        positions, ids, values = zip(*shown[traced_row(0, row)], strict=True)
        assert list(positions) == list(range(first, len(tokens)))
        assert list(ids) == tokens[first:]
        with torch.no_grad():
            output = reference(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
        wanted = {"logits": output.logits, "layer.out[0]": output.hidden_states[1]}.get(site)
        if wanted is None:
            # The last of the hidden states has gone through the norm, as the model's own layers are asked here.
            wanted = last_layer(reference, tokens)
        np.testing.assert_allclose(
            np.stack(values), wanted[0, first:].numpy(), rtol=0, atol=CACHED * float(wanted.abs().max())
        )


def last_layer(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    """Its output, before the norm."""
    found = []
    with model.model.norm.register_forward_pre_hook(lambda _, args: found.append(args[0])), torch.no_grad():
        model(torch.tensor([tokens]), use_cache=False)
    return found[0]


def test_a_generation_that_fails_leaves_no_hook_and_is_named(tmp_path: Path, model: Path) -> None:
    with pytest.raises(NonFiniteError), opened(tmp_path, model, "mlp.out | stats | generation") as (trainer, _):
        engine = engine_of(trainer)
        with torch.no_grad():
            engine._loaded_model().model.layers[1].mlp.down_proj.weight[3, 5] = torch.nan
        try:
            trainer.step()
        finally:
            assert num_hooks(engine) == 0
    frames = [
        entry.frame() for entry in StreamReader(tmp_path / "logs" / "tracer").entries() if entry.kind is EntryKind.FRAME
    ]
    bad = {frame.where.site.text: frame.num_not_finite > 0 for frame in frames if isinstance(frame, Frame)}
    assert bad == {"mlp.out[0]": False, "mlp.out[1]": True}
    assert not any(frame.missing for frame in frames)


def test_an_engine_of_a_recipe_is_not_asked_and_the_hub_says_so(tmp_path: Path, model: Path) -> None:
    backend = "nemo_rl.models.generation.torch_engine.worker:build_engine_worker"
    watches = (TRAIN_ONLY, "layer.out | stats | generation")
    with opened(tmp_path, model, *watches, **{"policy.generation.backend": backend}) as (trainer, found):
        trainer._after_step(trainer.step())
        trainer._after_step(trainer.step())
    assert not any(frame.where.phase == "generation" for frame in found.frames)
    texts = [str(message["text"]) for message in found.messages if message["type"] == "problem"]
    assert len(texts) == 1 and "generation engine shows nothing" in texts[0]
