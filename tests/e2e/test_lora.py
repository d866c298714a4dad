"""Runs that train an adapter: sent, saved, resumed, exported, evaluated, replayed, and begun again from."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from nemo_rl.algorithms.grpo_sync import GRPOTrainer
from nemo_rl.algorithms.kept_steps.folder import STEP_FILE, StepsFolder
from nemo_rl.algorithms.run import run
from nemo_rl.algorithms.scheduled_batches import SCHEDULE_FILE
from nemo_rl.algorithms.setup import open_parts
from nemo_rl.cli.main import app, main
from nemo_rl.distributed.worker_groups import ask
from nemo_rl.models.adapters.folder import base_identity, base_of, load_model_at
from nemo_rl.models.hf.folder import open_weights
from nemo_rl.models.hf.loading import load_causal_lm, named_weights
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker
from nemo_rl.models.weight_sync.receipt.fingerprint import fingerprints
from nemo_rl.models.weight_sync.target import RefitTarget
from nemo_rl.utils.checkpoint import Manifest
from nemo_rl.utils.trackers import read_metrics
from nemo_rl_tools.run_replay import replay_run
from nemo_rl_tools.step_replay.chain import ReplayRequest
from nemo_rl_tools.step_replay.replay import replay_step
from nemo_rl_tools.verdict import Verdict
from tests.helpers.runs import LOCAL, load_recipe, logged_steps, write_recipe
from tests.helpers.tiny_model import write_tiny_folder

LORA = {"enabled": True, "rank": 4, "alpha": 8}
STEPS = 4
DIGITS = {"dataset_name": "sort_digits", "options": {"min_digits": 3, "max_digits": 4}}
ASYNC = {
    "grpo.async.enabled": "true",
    "grpo.async.max_staleness": "1",
    "grpo.use_generation_logprobs_as_prev": "false",
    "loss_fn.use_importance_sampling_correction": "true",
    "loss_fn.truncated_importance_sampling_type": "tis",
    "loss_fn.truncated_importance_sampling_ratio": "2.0",
    "policy.generation.in_flight": "finish",
}
MEASURES = ("reward", "pass@1", "greedy_reward")
OWN_TRAFFIC = ("data_plane/", "keep/", "train/tflops")
"""Metrics of the processes, not of what they have learned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Frozen:
    """The weights under the adapter, after the last step of a run."""

    trainer: dict[str, torch.Tensor]
    engine: dict[str, str]
    """Fingerprints."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """A run of `STEPS` steps, each saved, kept and validated."""

    model: Path
    logs: Path
    frozen: Frozen

    def checkpoint(self, step: int) -> Path:
        return self.logs / "checkpoints" / f"step_{step}"

    def weights(self, step: int = STEPS) -> Path:
        return self.checkpoint(step) / "policy" / "weights"

    @property
    def adapter(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the last step."""
        return load_file(self.weights() / "adapter_model.safetensors")


def recipe_of(folder: Path, model: Path, **policy: object) -> Path:
    return write_recipe(
        folder,
        model,
        grpo={"max_num_steps": STEPS, "val_period": 1, "max_val_samples": 8},
        evaluation={"greedy": True, "pass_reward": 0.6},
        policy={"lora": LORA, "optimizer": {"kwargs": {"lr": 2.0e-2, "weight_decay": 0}}, **policy},
        data={"train": {**DIGITS, "size": 64, "seed": 1}, "validation": {**DIGITS, "size": 8, "seed": 2}},
        checkpointing={"enabled": True, "save_period": 1, "keep_top_k": None},
        diagnostics={"keep_steps": {"enabled": True}},
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("run")
    model = write_tiny_folder(folder / "model")
    config = load_recipe(recipe_of(folder, model), LOCAL)
    with open_parts(config, console=Console(file=io.StringIO())) as parts:
        GRPOTrainer(parts).fit()
        parties = parts.weight_sync._parties
        parties.run_policy(ask(PolicyWorker.prepare_for_training))
        [weights] = parties.run_policy(ask(PolicyWorker.export_weights))
        [answer] = parties.run_engines(ask(RefitTarget.answer_receipt, probe=None)).values()
        frozen = Frozen(trainer=dict(weights), engine=dict(answer.fingerprints))
    return Trained(model=model, logs=config.logger.log_dir, frozen=frozen)


@pytest.fixture(scope="module")
def exported(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The adapter of the last step."""
    folder = tmp_path_factory.mktemp("exported") / "adapter"
    command("export", trained.logs, "--out", folder)
    return folder


@pytest.fixture
def copied(trained: Trained, tmp_path: Path) -> Path:
    """The log folder, for a test that changes it."""
    return Path(shutil.copytree(trained.logs, tmp_path / "logs", symlinks=True))


def command(*arguments: object) -> None:
    app([str(each) for each in arguments], standalone_mode=False)


def refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: object) -> str:
    """What a command says that ends with exit code 2."""
    monkeypatch.setattr("sys.argv", ["nemo-rl", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "Traceback" not in said
    return " ".join(said.split())


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.double().eval()(input_ids=torch.arange(3, 43).view(4, 10)).logits


def learned(log_dir: Path) -> list[dict[str, float]]:
    return [
        {name: row[name] for name in sorted(row) if not name.startswith(OWN_TRAFFIC)} for row in logged_steps(log_dir)
    ]


def evaluated(trained: Trained, out: Path, given: Path, *settings: str) -> dict[str, float]:
    command("eval", given, trained.logs / "config.yaml", *settings, "--out", out)
    found = json.loads((out / "evaluation.json").read_text())["sets"]["validation"]
    return {name: found[name]["value"] for name in MEASURES}


def validated(trained: Trained, step: int) -> dict[str, float]:
    [row] = [row for row in logged_steps(trained.logs) if row["step"] == step]
    return {name: row[f"val/{name}"] for name in MEASURES}


def write_manifest(folder: Path) -> None:
    """Write the manifest of a folder that was changed, as if it had been saved so."""
    (folder / "manifest.json").unlink()
    Manifest.write(folder)


def test_every_refit_sends_the_adapter_alone_and_has_a_receipt(trained: Trained) -> None:
    adapter = trained.adapter
    num_bytes = sum(4 * weight.numel() for weight in adapter.values())
    whole = sum(4 * weight.numel() for weight in trained.frozen.trainer.values())
    steps = logged_steps(trained.logs)
    assert len(steps) == STEPS and num_bytes < whole / 4
    for row in steps:
        assert num_bytes <= row["refit/bytes_sent"] <= 1.1 * num_bytes
        assert row["refit/num_adapters"] <= 2
        assert row["train/token_mult_prob_error"] == pytest.approx(1, abs=1e-5)
    for row in read_metrics(trained.logs / "metrics.jsonl"):
        assert row["refit/receipt_tensors"] == len(adapter)
        # The last refit has no rows after it, and scores no probe.
        assert row["step"] == STEPS or row["refit/receipt_moved"] > 1e-3


def test_the_weights_under_the_adapter_are_those_of_the_model_to_the_last_bit(trained: Trained) -> None:
    before = dict(named_weights(load_causal_lm(trained.model)))
    assert before.keys() == trained.frozen.trainer.keys()
    assert all(torch.equal(before[name], weight) for name, weight in trained.frozen.trainer.items())
    expected = fingerprints(before.items())
    assert expected and {name: trained.frozen.engine.get(name) for name in expected} == expected


def test_a_checkpoint_holds_the_adapter_its_optimizer_and_the_identity_of_the_base(trained: Trained) -> None:
    for step in range(1, STEPS + 1):
        files = {str(path.relative_to(trained.weights(step))) for path in trained.weights(step).rglob("*")}
        tokenizer = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
        assert files - tokenizer == {"adapter_config.json", "adapter_model.safetensors", "nemo_rl_base.json"}
        adapter = load_file(trained.weights(step) / "adapter_model.safetensors")
        assert all(name.endswith((".lora_A.weight", ".lora_B.weight")) for name in adapter) and len(adapter) == 28
        optimizer = trained.checkpoint(step) / "policy" / "optimizer"
        state = torch.distributed.checkpoint.FileSystemReader(str(optimizer)).read_metadata().state_dict_metadata
        moments = [name for name in state if name.endswith((".exp_avg", ".exp_avg_sq"))]
        assert len(moments) == 2 * len(adapter) and all("low_rank" in name or "lora_" in name for name in moments)
    source = open_weights(trained.model, load_causal_lm(trained.model).config)
    assert base_of(trained.weights()) == base_identity(source)


def test_a_resumed_run_has_the_numbers_and_the_adapter_of_one_that_was_left_alone(
    trained: Trained, tmp_path: Path
) -> None:
    recipe = recipe_of(tmp_path, trained.model)
    kept = tmp_path / "logs" / "checkpoints"
    # As if it had been killed after its second step.
    for step in (1, 2):
        shutil.copytree(trained.checkpoint(step), kept / f"step_{step}")
    config = load_recipe(recipe, {**LOCAL, "checkpointing.resume": "true"})
    run(config, console=Console(file=io.StringIO()))
    rows = learned(config.logger.log_dir)
    assert rows == learned(trained.logs)[2:] and [row["step"] for row in rows] == [3, 4]
    for step in (3, 4):
        name = Path(f"step_{step}") / "policy" / "weights" / "adapter_model.safetensors"
        assert (kept / name).read_bytes() == (trained.logs / "checkpoints" / name).read_bytes()


def test_peft_loads_an_exported_adapter_and_computes_what_was_trained(trained: Trained, exported: Path) -> None:
    saved = {path.name: path.read_bytes() for path in trained.weights().iterdir()}
    assert saved == {path.name: path.read_bytes() for path in exported.iterdir()}
    expected = logits(load_model_at(exported, dtype=torch.float32))
    base = load_causal_lm(trained.model)
    assert (logits(base) - expected).abs().max() > 0.1
    theirs = PeftModel.from_pretrained(load_causal_lm(trained.model), str(exported))
    torch.testing.assert_close(logits(theirs), expected, rtol=0, atol=1e-10)


def test_transformers_loads_a_merged_export_and_computes_what_was_trained(
    trained: Trained, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "merged"
    command("export", trained.logs, "--merged", "--out", out, "--dtype", "float32")
    said = capsys.readouterr().out
    assert f"step {STEPS} merged into" in said and "lost" not in said
    assert not list(out.glob("adapter*")) and not (out / "nemo_rl_base.json").exists()
    model = AutoModelForCausalLM.from_pretrained(str(out), dtype=torch.float32)
    expected = logits(load_model_at(exported, dtype=torch.float32))
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5)
    command("export", trained.logs, "--merged", "--out", tmp_path / "half", "--dtype", "bfloat16", "--step", 1)
    assert "rounding to bfloat16 has lost" in capsys.readouterr().out
    assert {str(weight.dtype) for weight in load_file(tmp_path / "half" / "model.safetensors").values()} == {
        "torch.bfloat16"
    }


def test_what_an_export_cannot_do_is_refused_with_what_to_set(
    trained: Trained,
    copied: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def said(*arguments: object) -> str:
        return refused(capsys, monkeypatch, "export", *arguments, "--out", tmp_path / "out")

    assert "add --merged, or leave them out" in said(trained.logs, "--dtype", "float32")
    assert "add --merged, or leave them out" in said(trained.logs, "--base", trained.model)
    other = write_tiny_folder(tmp_path / "other", seed=1)
    assert "base with other weights" in said(trained.logs, "--merged", "--base", other)
    weights = copied / "checkpoints" / f"step_{STEPS}" / "policy" / "weights"
    described = json.loads((weights / "adapter_config.json").read_text())
    changed = {**described, "base_model_name_or_path": str(tmp_path / "gone")}
    (weights / "adapter_config.json").write_text(json.dumps(changed))
    write_manifest(copied / "checkpoints" / f"step_{STEPS}")
    assert "gone: the model under the adapter is not there; name its folder with --base" in said(copied, "--merged")
    assert not (tmp_path / "out").exists()
    command("export", copied, "--merged", "--base", trained.model, "--out", tmp_path / "found")
    assert (tmp_path / "found" / "model.safetensors").is_file()
    # As the checkpoint of a run that trains all weights.
    shutil.rmtree(weights)
    shutil.copytree(trained.model, weights)
    write_manifest(copied / "checkpoints" / f"step_{STEPS}")
    for option in (("--merged",), ("--adapter",), ("--base", trained.model)):
        assert "holds whole models and no adapter" in said(copied, *option)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("serve", ["native", "merged"])
def test_an_evaluated_checkpoint_has_the_numbers_of_the_validation_after_its_step(
    trained: Trained, tmp_path: Path, serve: str
) -> None:
    found = evaluated(trained, tmp_path, trained.logs, f"policy.lora.serve={serve}")
    assert found == validated(trained, STEPS) != validated(trained, 1)


def test_an_evaluated_adapter_folder_has_the_greedy_numbers_of_the_validation(
    trained: Trained, exported: Path, tmp_path: Path
) -> None:
    found = evaluated(trained, tmp_path, exported)["greedy_reward"]
    assert found == validated(trained, STEPS)["greedy_reward"]
    assert found != evaluated(trained, tmp_path / "base", trained.model)["greedy_reward"]


@pytest.mark.parametrize("serve", ["native", "merged"])
def test_an_adapter_is_not_evaluated_on_other_weights_than_it_was_trained_on(
    trained: Trained,
    exported: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    serve: str,
) -> None:
    other = write_tiny_folder(tmp_path / "other", seed=1)
    settings = (f"policy.model_name={other}", f"policy.lora.serve={serve}", "--out", tmp_path / "out")
    said = refused(capsys, monkeypatch, "eval", exported, trained.logs / "config.yaml", *settings)
    assert "it was trained on a base with other weights" in said and "set policy.model_name" in said


def test_the_recipe_of_an_asynchronous_run_evaluates_adapters_and_whole_models(
    trained: Trained, exported: Path, tmp_path: Path
) -> None:
    settings = [f"{name}={value}" for name, value in ASYNC.items()]
    for name, given in (("adapter", exported), ("base", trained.model)):
        assert evaluated(trained, tmp_path / name, given, *settings)["reward"] > 0


def test_steps_of_an_adapter_are_replayed_to_the_last_bit(trained: Trained) -> None:
    report = replay_step(ReplayRequest(run=trained.logs, step=3))
    assert report.verdict is Verdict.PASS, list(report.lines())
    assert not any(site.difference for site in report.sites)
    assert {"prev_logprobs", "reference_logprobs", "grad_norm", "weights"} <= {
        site.name for site in report.sites if site.step == 3
    }
    digests = [step.read().outcome.weights for step in StepsFolder(trained.logs).all()]
    assert len({digest.bits for digest in digests}) == STEPS, "of what is trained, which changes in each step"


@pytest.mark.parametrize("planted", ["kept digest", "adapter of the checkpoint"])
def test_a_replay_finds_another_adapter(copied: Path, planted: str) -> None:
    if planted == "kept digest":
        folder = copied / "steps" / "step_3"
        record = json.loads((folder / STEP_FILE).read_text())
        digest = record["outcome"]["weights"]
        digest["bits"] = digest["bits"][::-1]
        (folder / STEP_FILE).write_text(json.dumps(record))
    else:
        folder = copied / "checkpoints" / "step_2"
        path = folder / "policy" / "weights" / "adapter_model.safetensors"
        tensors = load_file(path)
        name = next(name for name in tensors if "1.mlp.down_proj.lora_B" in name)
        tensors[name] = tensors[name] * 1.001
        save_file(tensors, path, metadata={"format": "pt"})
    write_manifest(folder)
    report = replay_step(ReplayRequest(run=copied, step=3))
    assert report.verdict is Verdict.MISMATCH, list(report.lines())
    assert report.first is not None and report.first.step == 3
    if planted == "kept digest":
        assert report.first.name == "weights"


@pytest.mark.slow
@pytest.mark.parametrize("reference", ["start", pytest.param("base", marks=pytest.mark.full)])
def test_a_run_that_starts_from_an_adapter_has_the_reference_that_its_recipe_names(
    trained: Trained, exported: Path, tmp_path: Path, reference: str
) -> None:
    start = {**LORA, "adapter": str(exported), "reference": reference}
    # One update, so that every row of the first step is scored with the weights that the run starts from.
    recipe = recipe_of(tmp_path, trained.model, lora=start, train_global_batch_size=16)
    two = {**LOCAL, "grpo.max_num_steps": "2"}
    run(load_recipe(recipe, two), console=Console(file=io.StringIO()))
    logs = tmp_path / "logs"
    first, second = rows = learned(logs)
    assert second["train/reference_kl"] > 1e-4
    if reference == "start":
        assert first["train/reference_kl"] == 0
    else:
        assert first["train/reference_kl"] > 1e-2
    # From where it started, and with the same reference after a resume.
    assert replay_step(ReplayRequest(run=logs, step=1)).verdict is Verdict.PASS
    (logs / "checkpoints" / "latest").unlink()
    shutil.rmtree(logs / "checkpoints" / "step_2")
    run(load_recipe(recipe, {**two, "checkpointing.resume": "true"}), console=Console(file=io.StringIO()))
    assert learned(logs) == rows


@pytest.mark.slow
@pytest.mark.parametrize("serve", ["native", "merged"])
def test_an_engine_in_16_bit_is_sent_its_own_dtype_and_a_merged_one_says_what_it_loses(
    trained: Trained, tmp_path: Path, serve: str
) -> None:
    settings = {"policy.lora.serve": serve, "policy.generation.precision": "bfloat16", "grpo.max_num_steps": "2"}
    run(load_recipe(recipe_of(tmp_path, trained.model), {**LOCAL, **settings}), console=Console(file=io.StringIO()))
    sent = trained.adapter if serve == "native" else trained.frozen.trainer
    num_bytes = 2 * sum(weight.numel() for weight in sent.values())
    for row in logged_steps(tmp_path / "logs"):
        assert num_bytes <= row["refit/bytes_sent"] <= 1.1 * num_bytes
        # A step of 2e-2 moves many elements by less than a bit.
        assert row.get("refit/lora_merge_loss", 0) == 0 if serve == "native" else row["refit/lora_merge_loss"] > 1e-3


MEGATRON = {
    "policy.dtensor_cfg.enabled": "false",
    "policy.megatron_cfg.enabled": "true",
    "policy.optimizer": "null",
    "policy.megatron_cfg.optimizer.lr": "2.0e-2",
    "policy.megatron_cfg.optimizer.weight_decay": "0",
    "policy.sequence_packing.enabled": "true",
    "policy.sequence_packing.train_mb_tokens": "64",
    "policy.sequence_packing.logprob_mb_tokens": "64",
}


@pytest.mark.slow
def test_the_megatron_worker_saves_evaluates_replays_and_resumes_an_adapter_to_the_last_bit(
    trained: Trained, tmp_path: Path
) -> None:
    recipe = recipe_of(tmp_path, trained.model, dynamic_batching={"enabled": False})
    run(load_recipe(recipe, {**LOCAL, **MEGATRON}), console=Console(file=io.StringIO()))
    its = replace(trained, logs=tmp_path / "logs")
    rows, adapter = learned(its.logs), its.adapter
    first, other = rows[0], learned(trained.logs)[0]
    assert [first[name] for name in ("train/reward", "train/reference_kl")] == pytest.approx(
        [other[name] for name in ("train/reward", "train/reference_kl")], rel=1e-3
    )
    assert {name: value.shape for name, value in adapter.items()} == {
        name: value.shape for name, value in trained.adapter.items()
    }
    assert evaluated(its, tmp_path / "eval", its.logs) == validated(its, STEPS)
    assert replay_step(ReplayRequest(run=its.logs, step=3)).verdict is Verdict.PASS
    (its.logs / "checkpoints" / "latest").unlink()
    for step in (3, 4):
        shutil.rmtree(its.checkpoint(step))
    resumed = {**LOCAL, **MEGATRON, "checkpointing.resume": "true"}
    run(load_recipe(recipe, resumed), console=Console(file=io.StringIO()))
    assert learned(its.logs) == rows
    assert all(torch.equal(value, adapter[name]) for name, value in its.adapter.items())


@pytest.mark.full
@pytest.mark.slow
def test_two_ranks_and_two_engines_learn_what_one_process_does_which_goes_on_from_their_checkpoint(
    trained: Trained, tmp_path: Path
) -> None:
    together = {"data_plane.impl": "ray", "policy.generation.num_replicas": "2", "grpo.max_num_steps": "2"}
    run(load_recipe(recipe_of(tmp_path, trained.model), together), console=Console(file=io.StringIO()))
    rest = {**LOCAL, "checkpointing.resume": "true"}
    run(load_recipe(recipe_of(tmp_path, trained.model), rest), console=Console(file=io.StringIO()))
    rows = logged_steps(tmp_path / "logs")
    names = ("train/reward", "train/loss", "train/grad_norm", "train/reference_kl", "val/reward")
    assert len(rows) == STEPS
    for ours, theirs in zip(rows, logged_steps(trained.logs), strict=True):
        assert [ours[name] for name in names] == pytest.approx([theirs[name] for name in names], rel=1e-3, abs=1e-5)
        assert ours["refit/bytes_sent"] == theirs["refit/bytes_sent"]


LONG_ROWS = {
    "grpo.max_num_steps": "3",
    "grpo.num_prompts_per_step": "8",
    "grpo.num_generations_per_prompt": "2",
    "policy.train_global_batch_size": "16",
    "policy.max_total_sequence_length": "88",
    "policy.generation.max_new_tokens": "64",
    "policy.generation.max_batch_size": "4",
    "policy.generation.stop_token_ids": "[100, 101, 102]",
}
"""Two of eight groups at a time, of unequal lengths: sampling takes longer than training, so that rows run when the
adapter changes."""


@pytest.mark.slow
def test_rows_of_two_versions_are_trained_in_one_step_and_the_schedule_replays_to_the_last_bit(
    trained: Trained, tmp_path: Path
) -> None:
    changes = {
        **LONG_ROWS,
        **ASYNC,
        "grpo.val_period": "3",
        "checkpointing.save_period": "3",
    }
    run(load_recipe(recipe_of(tmp_path, trained.model), {**LOCAL, **changes}), console=Console(file=io.StringIO()))
    logs = tmp_path / "logs"
    steps = list(read_metrics(logs / "metrics.jsonl"))
    ages = [{age for age in (0, 1, 2) if row.get(f"async/rows_of_staleness/{age}")} for row in steps]
    assert len(steps) == 3 and {0, 1} in ages and not any(2 in each for each in ages), ages
    assert max(row["refit/num_adapters"] for row in steps) == 3
    events = [json.loads(line) for line in (logs / SCHEDULE_FILE).read_text().splitlines()]
    moves = [event for event in events if event["event"] == "engine"]
    assert any(
        one["kind"] == "swap" and other["kind"] == "join" and one["turn"] < other["turn"]
        for one, other in pairwise(moves)
    ), "rows run while the adapter changes"
    report = replay_run(logs, start=0, stop=3, console=Console(file=io.StringIO()))
    assert report.verdict is Verdict.PASS, "\n".join(report.lines())
    assert report.facts == {"last_step": 3, "num_groups": 3 * 8, "num_weights": 3}
