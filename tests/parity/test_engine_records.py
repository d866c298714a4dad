"""Tensors of generation engines beside those of the trainer: they agree, and a planted fault is named by its site."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.console import Console

from nemo_rl.algorithms.kept_steps.folder import StepsFolder
from nemo_rl.algorithms.run import run
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.config.run import ClusterConfig
from nemo_rl.errors import ConfigError, UserError
from nemo_rl.models.generation.interfaces import EngineSpec, GenerationOutput, GenerationRequest, SamplingParams
from nemo_rl.models.generation.torch_engine.worker import build_engine_worker
from nemo_rl.models.generation.vllm.worker import build_vllm_worker
from nemo_rl.models.hf.loading import load_causal_lm
from nemo_rl.models.policy.recording import RecordSpec, recorded_model
from nemo_rl_tools.compare.comparison import RecordingComparison
from nemo_rl_tools.compare.folders import compare_folders
from nemo_rl_tools.runner.layout_text import LayoutText
from nemo_rl_tools.runner.prompts import PromptSpec
from nemo_rl_tools.runner.rank import engine_policy
from nemo_rl_tools.runner.run import RECORDS, ProbeResult, ProbeSpec, run_probe
from nemo_rl_tools.verdict import Verdict
from tests.helpers.engine_process import NO_VLLM, EngineProxy, has_vllm, vllm_policy, vllm_process
from tests.helpers.model_families import write_dense
from tests.helpers.runs import LOCAL, ROOT, load_recipe, write_recipe
from tests.helpers.tiny_model import tiny_policy, write_tiny_folder

Engine = Callable[[Path], AbstractContextManager[object]]
LENGTH, PROMPT = 21, 9
FAULTS: Mapping[str, str] = {
    "model.layers.0.input_layernorm.weight": "attn.q[0]",
    "model.layers.0.self_attn.q_proj.weight": "attn.q[0]",
    "model.layers.0.self_attn.k_proj.weight": "attn.k[0]",
    "model.layers.1.self_attn.v_proj.weight": "attn.v[1]",
    "model.layers.1.self_attn.q_norm.weight": "attn.context[1]",
    "model.layers.0.self_attn.o_proj.weight": "attn.out[0]",
    "model.layers.1.post_attention_layernorm.weight": "mlp.in[1]",
    "model.layers.1.mlp.gate_proj.weight": "mlp.gate[1]",
    "model.layers.0.mlp.up_proj.weight": "mlp.up[0]",
    "model.layers.1.mlp.down_proj.weight": "mlp.out[1]",
}
"""A weight that is 2 % too large in the engine -> the first site that differs."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dense(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> tuple[ProbeResult, Path]:
    """The rows, and the records of the DTensor worker of them."""
    out = tmp_path_factory.mktemp("trainer")
    spec = ProbeSpec(
        policy=tiny_policy(folder),
        cluster=ClusterConfig(),
        seed=42,
        layout=LayoutText.parse("worker=dtensor"),
        prompt=PromptSpec(length=LENGTH, num_rows=3),
        dump="*",
        out=out,
    )
    return run_probe(spec), out / RECORDS


def record_spec(policy: PolicyConfig, out: Path) -> RecordSpec:
    model = replace(recorded_model(policy), engine=policy.generation.backend)
    return RecordSpec(folder=out / "step_{step}", sites="*", phases=("generation",), model=model)


@contextmanager
def torch_engine(out: Path, *, folder: Path) -> Iterator[object]:
    policy = tiny_policy(folder)
    worker = build_engine_worker(EngineSpec(policy=policy, weight_version=0, record=record_spec(policy, out)))
    yield worker
    worker.shutdown()


def build_recorded(spec: EngineSpec, *, out: Path) -> object:
    return build_vllm_worker(replace(spec, weight_version=0, record=record_spec(spec.policy, out)))


@contextmanager
def vllm_engine(out: Path, *, folder: Path) -> Iterator[object]:
    with vllm_process(vllm_policy(folder), build=partial(build_recorded, out=out)) as child:
        yield EngineProxy(child)


ENGINES = {"torch": torch_engine, "vllm": vllm_engine}
NEEDS_VLLM = pytest.mark.skipif(not has_vllm(), reason=NO_VLLM)


def forced(probe: ProbeResult, *, with_keys: bool = True) -> GenerationRequest:
    """Return the request that lets an engine decode the rows of the probe."""
    responses = tuple(ids[PROMPT:] for ids in probe.rows.ids)
    return GenerationRequest(
        prompt_ids=tuple(ids[:PROMPT] for ids in probe.rows.ids),
        seeds=(0,) * len(responses),
        sampling=SamplingParams(temperature=1.0, max_new_tokens=LENGTH, stop_token_ids=()),
        forced=responses,
        keys=probe.rows.keys if with_keys else (),
    )


def record(engine: object, request: GenerationRequest, step: int) -> GenerationOutput:
    engine.begin_recording(step=step)  # type: ignore[attr-defined]
    output = engine.generate(request=request)  # type: ignore[attr-defined]
    engine.end_recording()  # type: ignore[attr-defined]
    assert isinstance(output, GenerationOutput)
    return output


@pytest.mark.parametrize("name", ["torch", pytest.param("vllm", marks=NEEDS_VLLM)])
def test_an_engine_agrees_with_the_trainer_and_a_fault_is_named(tmp_path, folder, trainer, name):
    probe, theirs = trainer
    weights = dict(load_causal_lm(folder, dtype=torch.float32).state_dict())

    def compared(step: int) -> RecordingComparison:
        return compare_folders(theirs, tmp_path / f"step_{step}")

    with ENGINES[name](tmp_path, folder=folder) as engine:
        request = forced(probe)
        silent = engine.generate(request=forced(probe, with_keys=False))  # type: ignore[attr-defined]
        output = record(engine, request, 0)
        assert torch.equal(output.token_ids, silent.token_ids) and torch.equal(output.logprobs, silent.logprobs)
        clean = compared(0)
        assert clean.verdict is Verdict.PASS, list(clean.lines())
        rows = {result.site.short: result.num_rows for result in clean.sites}
        fed = len(probe.rows.ids) * (LENGTH - 1)
        assert rows["layer.out[1]"] == rows["attn.context[0]"] == rows["tokens"] == fed, "each token but the last"
        assert rows["logits"] == rows["logprob"] == len(probe.rows.ids) * (LENGTH - PROMPT)
        assert {"embed", "layer.in[0]", "mlp.act[1]", "mlp.gate[0]", "attn.v[1]"} <= rows.keys()

        found = {}
        for step, fault in enumerate(FAULTS, start=1):
            planted = {n: weight * 1.02 if n == fault else weight for n, weight in weights.items()}
            engine.update_weights(weights=list(planted.items()), version=step)  # type: ignore[attr-defined]
            record(engine, request, step)
            comparison = compared(step)
            assert comparison.verdict is Verdict.MISMATCH and comparison.first is not None
            found[fault] = comparison.first.site.short
        assert found == dict(FAULTS)


def drawn(*, keys: tuple[str, ...]) -> GenerationRequest:
    return GenerationRequest(
        prompt_ids=((5, 6, 7), (9, 8), (5, 6, 7, 3)),
        seeds=tuple(range(6)),
        sampling=SamplingParams(temperature=1.0, max_new_tokens=7, stop_token_ids=(3,)),
        keys=keys,
    )


@pytest.mark.parametrize("name", ["torch"])
def test_the_same_tokens_are_drawn_while_it_is_recorded(tmp_path: Path, folder: Path, name: str) -> None:
    with ENGINES[name](tmp_path, folder=folder) as engine:
        plain = engine.generate(request=drawn(keys=()))  # type: ignore[attr-defined]
        recorded = record(engine, drawn(keys=tuple(f"g{row // 2}_g{row % 2}" for row in range(6))), 1)
        engine.begin_recording(step=2)  # type: ignore[attr-defined]
        engine.generate(request=drawn(keys=()))  # type: ignore[attr-defined]
        engine.end_recording()  # type: ignore[attr-defined]
    assert torch.equal(plain.token_ids, recorded.token_ids) and torch.equal(plain.logprobs, recorded.logprobs)
    assert (tmp_path / "step_1" / "rank_00000.bin").stat().st_size > 0
    assert (tmp_path / "step_2" / "rank_00000.bin").stat().st_size == 0, "a request without keys leaves nothing"


def test_a_layout_of_an_engine_refuses_what_engines_have_not(folder: Path) -> None:
    policy = tiny_policy(folder)
    for text, message in (
        ("engine=vllm cp=2", "an engine has no cp"),
        ("engine=vllm sp packed worker=dtensor", "an engine has no worker, sp, packed"),
        ("engine=torch tp=2", "an engine has no tp"),
    ):
        with pytest.raises(UserError, match=message):
            engine_policy(policy, LayoutText.parse(text), longest=8)
    with pytest.raises(UserError, match="prompt is for an engine"):
        LayoutText.parse("worker=dtensor prompt=3")
    made = engine_policy(policy, LayoutText.parse("engine=vllm tp=2 precision=bfloat16"), longest=900)
    assert made.generation.vllm_cfg.tensor_parallel_size == 2 and made.generation.precision == "bfloat16"
    assert made.max_total_sequence_length == 901


def test_a_run_records_its_engine_beside_its_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    recipe = write_recipe(
        tmp_path,
        write_tiny_folder(tmp_path / "model"),
        grpo={"max_num_steps": 2, "drop_zero_advantage_groups": False},
        diagnostics={"record": {"steps": [2], "sites": "*", "phases": ["prev_logprobs", "generation"]}},
    )
    config = load_recipe(recipe, LOCAL)
    run(config, console=Console(file=io.StringIO()))
    records = StepsFolder(config.logger.log_dir).records()
    assert list(records) == [2]
    found = compare_folders(records[2] / "generation", records[2])
    assert found.verdict is Verdict.PASS, list(found.lines())
    rows = {result.site.short: result.num_rows for result in found.sites}
    assert rows["logprob"] > 16 and rows["layer.out[1]"] > rows["logprob"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {
                "policy.generation.backend": "benchmarks.sleep_engine:build_sleep_engine",
                "policy.generation.receipt.enabled": "false",
            },
            "cannot be recorded",
        ),
        ({"grpo.async.enabled": "true", "grpo.async.max_staleness": "1"}, "rows join and leave the batch"),
    ],
)
def test_an_engine_that_cannot_be_recorded_is_refused_at_load(tmp_path, changes, message):
    recipe = write_recipe(tmp_path, tmp_path, diagnostics={"record": {"steps": [2], "phases": ["generation"]}})
    with pytest.raises(ConfigError, match=message):
        load_recipe(recipe, changes)
