"""Names of models on the hub: the cache, the download command, and paths that are none."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import pytest
import yaml
from huggingface_hub import constants
from huggingface_hub.utils import close_session
from rich.console import Console

from nemo_rl.algorithms.preflight.checks import preflight
from nemo_rl.algorithms.setup import open_trainer
from nemo_rl.errors import ModelFolderError
from nemo_rl.models.hf.loading import is_hub_name, local_folders
from nemo_rl.utils import hub_reach
from tests.helpers.runs import LOCAL, load_recipe, write_recipe
from tests.helpers.tiny_model import write_tiny_folder

NAME = "Somebody/Tiny-0.1B"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("model"))


def fill_cache(home: Path, model: Path, *, name: str = NAME) -> Path:
    """What an earlier `hf download` has left: a snapshot of links into blobs."""
    repository = home / "hub" / f"models--{name.replace('/', '--')}"
    blobs, snapshot = repository / "blobs", repository / "snapshots" / "0123abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123abc")
    for number, file in enumerate(sorted(model.iterdir())):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(blobs / str(number))
    return snapshot


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home of Hugging Face, and no network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hf"


def test_a_name_is_owner_and_model_and_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    assert [name for name in ("Qwen/Qwen2.5-0.5B", "a/b") if not is_hub_name(name)] == []
    paths = (
        "/a/b",
        "a",
        "a/b/c",
        "./a",
        "../a/b",
        "mine/model",
        "checkpoints/starter_sort",
        "models/Qwen",
        "a/",
        "a b/c",
    )
    assert [name for name in paths if is_hub_name(name)] == []


def test_a_model_in_the_cache_is_used_and_the_config_keeps_its_name(tmp_path: Path, home: Path, model: Path) -> None:
    snapshot = fill_cache(home, model)
    config = load_recipe(write_recipe(tmp_path, model), {"policy.model_name": NAME, "policy.tokenizer.name": NAME})
    resolved = local_folders(config.policy)
    assert (resolved.model_name, resolved.tokenizer.name) == (str(snapshot), str(snapshot))
    assert config.policy.model_name == NAME


def test_half_a_download_is_none(tmp_path: Path, home: Path, model: Path) -> None:
    (fill_cache(home, model) / "model.safetensors").unlink()
    config = load_recipe(write_recipe(tmp_path, model), {"policy.model_name": NAME})
    with pytest.raises(ModelFolderError, match=rf"does not hold it whole.*run `hf download {NAME}`"):
        local_folders(config.policy)


def test_a_hub_that_does_not_answer_ends_in_seconds_with_the_download_command(tmp_path, home, model, monkeypatch):
    """A port that takes connections and says nothing: the slowest way to be unreachable."""
    config = load_recipe(write_recipe(tmp_path, model), {"policy.model_name": NAME})
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(hub_reach, "REACH_TIMEOUT_S", 0.5)
        for variable in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.delenv(variable, raising=False)
        close_session()
        with pytest.raises(ModelFolderError, match=rf"(does not answer|cannot be reached).*`hf download {NAME}`"):
            local_folders(config.policy)


def test_a_run_by_name_writes_the_name_into_its_config(tmp_path: Path, home: Path, model: Path) -> None:
    fill_cache(home, model)
    config = load_recipe(write_recipe(tmp_path, model, policy={"model_name": NAME}), LOCAL)
    with open_trainer(config, console=Console(quiet=True)):
        written = yaml.safe_load((tmp_path / "logs" / "config.yaml").read_text())
    assert written["policy"]["model_name"] == NAME


def test_a_name_that_cannot_be_had_is_one_problem(tmp_path: Path, home: Path, model: Path) -> None:
    config = load_recipe(write_recipe(tmp_path, model), {**LOCAL, "policy.model_name": NAME})
    with pytest.raises(ModelFolderError, match="HF_HUB_OFFLINE is set"):
        preflight(config)
