"""What `preflight` finds before anything is started: every problem, at once."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path

import pytest

from nemo_rl.algorithms.preflight.checks import CHECKS, busy_machine, preflight, run_checks
from nemo_rl.algorithms.preflight.inputs import Subject, turn_lines
from nemo_rl.config.run import ClusterConfig
from nemo_rl.data.tokenizer import CHATML_TEMPLATE, TOOLS_TEMPLATE
from nemo_rl.data_plane.adapters import mooncake_master
from nemo_rl.errors import CheckpointError, NemoRLError, ResourceError, RewardError, UserError
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.run_lock import lock_folder
from tests.helpers.runs import LOCAL, load_recipe, write_recipe
from tests.helpers.tiny_model import write_tiny_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("model"))


def found(recipe: Path, *checks: str, **settings: str) -> list[str]:
    """Lines of what these checks, by default all, find wrong; none when nothing is."""
    config = load_recipe(recipe, {**LOCAL, **{key.replace("__", "."): value for key, value in settings.items()}})
    try:
        run_checks(config, checks) if checks else preflight(config)
    except UserError as error:
        return str(error).splitlines()
    return []


def test_a_sound_recipe_passes_and_nothing_is_left_behind(tmp_path: Path, model: Path) -> None:
    recipe = write_recipe(tmp_path, model)
    before = sorted(tmp_path.rglob("*"))
    assert found(recipe) == []
    assert sorted(tmp_path.rglob("*")) == before


def test_all_problems_are_told_at_once(tmp_path: Path, model: Path) -> None:
    data = {
        "train": {"dataset_name": "jsonl", "data_path": str(tmp_path / "train.jsonl")},
        "validation": {"dataset_name": "jsonl", "data_path": str(tmp_path / "validation.jsonl")},
    }
    (tmp_path / "validation.jsonl").write_text('{"input": 3}\n')
    (tmp_path / "logs").write_text("a file where a folder should be")
    recipe = write_recipe(
        tmp_path,
        tmp_path / "nowhere",
        data=data,
        env={"reward_function": "no_such_module:f"},
        grpo={"val_at_end": True},
        cluster={"gpus_per_node": 1000, "cpu_workers_per_node": None, "num_cpus": 1},
        policy={"train_global_batch_size": 16, "model_name": str(tmp_path / "nowhere")},
        logger={"wandb_enabled": False},
    )
    lines = preflight_lines(recipe)
    for fragment in (
        f"model folder '{tmp_path / 'nowhere'}': no such folder; set policy.model_name",
        f"tokenizer folder '{tmp_path / 'nowhere'}'",
        f"data.train.data_path: {tmp_path / 'train.jsonl'} cannot be read",
        f"{tmp_path / 'validation.jsonl'}:1: no 'output'",
        "reward function 'no_such_module:f'",
        "1000 GPUs are asked for",
        f"logger.log_dir: {tmp_path / 'logs'}: expected a folder",
        "logical CPUs are needed",
    ):
        assert len([line for line in lines if fragment in line]) == 1, (fragment, lines)


def preflight_lines(recipe: Path) -> list[str]:
    with pytest.raises(UserError) as caught:
        preflight(load_recipe(recipe))
    return str(caught.value).splitlines()


def test_what_the_model_cannot_do_is_known_before(tmp_path: Path, model: Path) -> None:
    recipe = write_recipe(tmp_path, model, grpo={"use_generation_logprobs_as_prev": False})
    (line,) = found(recipe, "model", policy__router_replay__enabled="true")
    assert "'qwen3' has no routed experts" in line


def test_a_tokenizer_of_another_model_is_noticed(tmp_path: Path, model: Path) -> None:
    other = Path(shutil.copytree(model, tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "vocab_size": 100}))
    lines = found(write_recipe(tmp_path, other), "tokenizer", "prompts")
    assert any("the tokens of a prompt of data.train go up to" in line and "knows 100" in line for line in lines)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("policy__optimizer__name", "torch.optim.Nope", "policy.optimizer.name: cannot find 'torch.optim.Nope'"),
        ("policy__optimizer__kwargs__lr", "-1", "AdamW refuses"),
        ("policy__scheduler", "[{name: torch.optim.lr_scheduler.StepLR}]", "missing 1 required"),
    ],
)
def test_an_optimizer_that_cannot_be_made_is_known_before(tmp_path, model, key, value, said):
    (line,) = found(write_recipe(tmp_path, model), "optimizer", **{key: value})
    assert said in line


def test_a_prompt_template_that_the_tokenizer_refuses_is_noticed(tmp_path: Path, model: Path) -> None:
    recipe = write_recipe(tmp_path, model)
    (line,) = found(recipe, "tokenizer", "prompts", policy__tokenizer__chat_template="\"{{ raise_exception('no') }}\"")
    assert "the chat template fails" in line


def test_too_few_prompts_are_counted_without_reading_all(tmp_path: Path, model: Path) -> None:
    (line,) = found(write_recipe(tmp_path, model), "prompts", data__train__size="3")
    assert "expected at least grpo.num_prompts_per_step=4 prompts, got 3" in line
    # Ten million problems are drawn later, if anybody wants them.
    assert found(write_recipe(tmp_path, model), "prompts", data__train__size="10_000_000") == []


def test_a_model_that_fits_neither_memory_nor_disk_is_refused(tmp_path: Path, model: Path) -> None:
    large = Path(shutil.copytree(model, tmp_path / "large"))
    (large / "model.safetensors").unlink()
    names = {f"w{i}": f"model-{i:05d}-of-00256.safetensors" for i in range(256)}
    (large / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    rows = 2**30
    for name, file in names.items():
        header = json.dumps({name: {"dtype": "F32", "shape": [rows], "data_offsets": [0, rows * 4]}}).encode()
        with (large / file).open("wb") as opened:
            opened.write(len(header).to_bytes(8, "little") + header)
            # Holes take no room.
            opened.truncate(8 + len(header) + rows * 4)
    saving = {"enabled": True, "save_period": 1, "checkpoint_dir": str(tmp_path / "ck"), "metric_name": "train:reward"}
    lines = found(write_recipe(tmp_path, large, checkpointing=saving), "memory", "disk")
    assert any("274,877,906,944 parameters need at least" in line and "of memory" in line for line in lines)
    assert any("checkpointing.checkpoint_dir: a checkpoint has about" in line for line in lines)


def test_a_folder_with_a_run_is_told_apart_from_one_in_use(tmp_path: Path, model: Path) -> None:
    recipe = write_recipe(tmp_path, model)
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "metrics.jsonl").write_text('{"step": 1}\n')
    (line,) = found(recipe, "run folder")
    assert "already holds a run" in line and "logger.overwrite=true" in line
    with lock_folder(logs):
        (line,) = found(recipe, "run folder")
    assert f"{logs} is in use by another run: process {os.getpid()}" in line


def test_a_run_that_resumes_needs_a_checkpoint(tmp_path: Path, model: Path) -> None:
    recipe = write_recipe(tmp_path, model, checkpointing={"enabled": True, "keep_top_k": None, "resume": True})
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        run_checks(load_recipe(recipe, LOCAL), ["checkpoint"])
    manager = CheckpointManager(tmp_path / "logs" / "checkpoints", keep_top_k=None, metric_name="")
    manager.save(1, write=lambda folder: None, state={"sampler": {}})
    with pytest.raises(CheckpointError, match="holds no optimizer state"):
        run_checks(load_recipe(recipe, LOCAL), ["checkpoint"])
    run_checks(load_recipe(recipe, {**LOCAL, "checkpointing.load_optimizer": "false"}), ["checkpoint"])


def test_processes_without_number_are_a_slip(tmp_path: Path, model: Path) -> None:
    recipe = write_recipe(tmp_path, model)
    with pytest.raises(NemoRLError, match=r"env\.num_workers: 1000000000000 processes on"):
        preflight(load_recipe(recipe, {**LOCAL, "env.num_workers": "1000000000000"}))


def test_a_reward_is_loaded_in_a_process_of_its_own(tmp_path: Path, model: Path) -> None:
    recipe = write_recipe(tmp_path, model, env={"reward_function": "time:no_such_function"})
    (line,) = found(recipe, "reward")
    assert "no_such_function" in line


def test_every_check_has_a_name() -> None:
    assert {"model", "prompts", "reward", "memory", "disk", "run folder"} <= CHECKS.keys()


@pytest.mark.parametrize("settings", [{"impl": "mooncake"}, {"impl": "transfer_queue", "backend": "mooncake_cpu"}])
def test_a_store_that_is_not_installed_is_known_before(tmp_path, model, monkeypatch, settings):
    def missing() -> None:
        raise ResourceError("Mooncake is not installed")

    monkeypatch.setattr(mooncake_master, "check_installed", missing)
    recipe = write_recipe(tmp_path, model)
    with pytest.raises(UserError, match="Mooncake is not installed"):
        run_checks(
            load_recipe(recipe, {f"data_plane.{name}": value for name, value in settings.items()}), ["data plane"]
        )
    assert found(recipe, "data plane") == []


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        (
            "explode",
            {},
            ["raised ValueError: this reward always fails", "rewards.py:", " explode", "-> a finite number"],
        ),
        ("returns_none", {}, ["returned None, expected a finite number", "rewards.py:", " returns_none"]),
        ("hang", {"env__timeout_s": "0.3"}, ["took longer than env.timeout_s 0.3 s", "env.preflight_reward=false"]),
        ("short_batch", {"env__reward_batch_size": "4"}, []),
        ("explode", {"env__reward_batch_size": "4"}, ["always fails", "(prompts, responses, answers) -> a list"]),
        ("parts", {"env__reward_weights": "{speed: 1}"}, ["returned the components", "expected speed"]),
        ("explode", {"env__preflight_reward": "false"}, []),
        ("of_columns", {}, []),
    ],
)
def test_a_reward_scores_an_empty_response_before_the_run(tmp_path, model, name, settings, said):
    recipe = write_recipe(tmp_path, model, env={"reward_function": f"tests.helpers.rewards:{name}"})
    config = load_recipe(recipe, {**LOCAL, **{key.replace("__", "."): value for key, value in settings.items()}})
    try:
        assert CHECKS["reward"](Subject(config)) == [] and not said
    except RewardError as error:
        assert said and all(text in str(error) for text in said), str(error)
        assert "response: ''" in str(error) or name == "hang"


def test_a_taken_port_for_the_metrics_is_known_before(tmp_path: Path, model: Path) -> None:
    recipe = write_recipe(tmp_path, model)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with pytest.raises(UserError, match=f"metrics_port: port {port} of 127.0.0.1 cannot be used"):
            run_checks(load_recipe(recipe, {**LOCAL, "data_plane.observability.metrics_port": port}), ["data plane"])


@pytest.mark.parametrize(
    ("cores", "load", "cluster", "said"),
    [
        (2, 0.3, {"cpu_workers_per_node": 2}, None),
        (2, 1.4, {"cpu_workers_per_node": 2}, None),
        (2, 1.9, {"cpu_workers_per_node": 2}, "busy machine: load 1.9 on 2 cores, steps take longer"),
        (2, 1.6, {"threads_per_worker": 2}, "load 1.6 and 2 threads on 2 cores; set cluster.threads_per_worker=1"),
        (
            8,
            0.0,
            {"cpu_workers_per_node": 4, "threads_per_worker": 4},
            "load 0.0 and 16 threads on 8 cores; set cluster.threads_per_worker=2",
        ),
        (64, 9.0, {"cpu_workers_per_node": 8, "threads_per_worker": 4}, None),
        (2, 9.0, {"gpus_per_node": 1, "threads_per_worker": 4}, None),
        (2, 9.0, {"address": "auto"}, None),
    ],
)
def test_a_busy_machine_is_warned_of_with_its_load(cores, load, cluster, said, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    assert busy_machine(ClusterConfig.model_validate(cluster)) == said


def test_a_busy_machine_is_named_in_one_line_and_after_errors(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(os, "getloadavg", lambda: (99.0, 0.0, 0.0))
    config = load_recipe(write_recipe(tmp_path, write_tiny_folder(tmp_path / "model")), LOCAL)
    run_checks(config, ["CPUs"])
    assert len(caplog.records) == 1 and "busy machine: load 99.0" in caplog.text
    caplog.clear()
    broken = config.model_copy(update={"logger": config.logger.model_copy(update={"log_dir": Path("/dev/null/logs")})})
    with pytest.raises(UserError, match="logger.log_dir") as refused:
        run_checks(broken, ["folders", "CPUs"])
    assert "busy machine" in refused.value.__notes__[0] and not caplog.records


@pytest.mark.parametrize(
    ("key", "problem", "line"),
    [
        ("auto", [], "  env.tools.format: auto takes hermes, which reads the calls of the chat template"),
        ("hermes", [], "  env.tools.format: hermes reads the calls of the chat template"),
        ("glm", ["glm does not read the calls", "set it to auto, or to hermes"], None),
    ],
)
def test_the_format_of_calls_is_that_of_the_template(tmp_path, model, key, problem, line):
    recipe = write_recipe(
        tmp_path,
        model,
        experience={"conversation": {"enabled": True}},
        env={"tools": {"use": [{"name": "calculator"}], "format": key}},
        policy={"tokenizer": {"chat_template": TOOLS_TEMPLATE}},
    )
    config = load_recipe(recipe, LOCAL)
    problems = CHECKS["turns"](Subject(config))
    assert len(problems) == bool(problem) and all(part in problems[0] for part in problem)
    assert line is None or line in turn_lines(config)


def test_a_template_that_takes_no_results_of_tools_is_refused_before_a_run(tmp_path: Path, model: Path) -> None:
    conversation = {"conversation": {"enabled": True}}
    env = {"tools": {"use": [{"name": "calculator"}]}}
    no_tools = "{% for m in messages if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endfor %}"
    recipe = write_recipe(
        tmp_path,
        model,
        experience=conversation,
        env=env,
        policy={"tokenizer": {"chat_template": no_tools + CHATML_TEMPLATE}},
    )
    config = load_recipe(recipe, LOCAL)
    *problems, about_calls = CHECKS["turns"](Subject(config))
    assert "env.tools.format: no format reads" in about_calls and "set policy.tokenizer.chat_template" in about_calls
    assert [line.split(": ")[1] for line in problems] == [
        "tool result",
        "tool result to thoughts",
        "parallel tool results",
        "tool result, then user",
    ]
    assert all("no tools here" in line for line in problems)
    assert "  user reply: seam ['\\n']" in turn_lines(config)
    assert turn_lines(load_recipe(write_recipe(tmp_path, model), LOCAL)) == []
