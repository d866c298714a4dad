"""Every shipped recipe loads, on a machine that has neither torch nor Ray."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nemo_rl.config.load import load_config
from nemo_rl.config.schema_walk import iter_fields, section_class
from tests.helpers.config_reads import texts, unread_keys

ROOT = Path(__file__).parents[2]
RECIPES = sorted(path for path in (ROOT / "configs").rglob("*.yaml") if path.name != "grpo_base.yaml")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: str(path.relative_to(ROOT / "configs")))
def test_recipe_loads(recipe: Path) -> None:
    load_config(recipe)


def test_every_key_is_read_somewhere() -> None:
    """A key that is accepted has an effect; this finds those that no code outside the config package reads."""
    library = texts(ROOT / "nemo_rl", ROOT / "examples", but="config")
    assert unread_keys(library, config_sources=texts(ROOT / "nemo_rl" / "config")) == set()


def test_a_key_of_another_section_with_the_same_name_is_no_reader() -> None:
    text = """
class Holder:
    def __init__(self, cfg: DataPlaneConfig | None, other: Thing) -> None:
        self._cfg, self._other = cfg, other

    def use(self) -> object:
        store = self._cfg.mooncake if self._cfg.enabled else self._other
        return store.host, self._other.lease_s, self._other.checkpointing.enabled
"""
    unread = unread_keys([text], config_sources=[])
    read = {key for key, field in iter_fields() if section_class(field.annotation) is None} - unread
    assert read == {"data_plane.enabled", "data_plane.mooncake.host"}


def test_loading_a_recipe_imports_neither_torch_nor_ray() -> None:
    script = (
        "import sys; from nemo_rl.config.load import load_config; from nemo_rl.config.render import to_yaml; "
        "to_yaml(load_config('configs/grpo_sort_cpu.yaml')); "
        "heavy = {'torch', 'ray', 'numpy', 'transformers', 'tensordict', 'transfer_queue'} & set(sys.modules); "
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "shown"),
    [
        (["--validate-only"], 0, "configs/grpo_sort_cpu.yaml: ok, the config only; not looked at: model folder, data"),
        (["--print-config", "grpo.seed=7"], 0, "seed: 7"),
        (["grpo.sed=7"], 2, "grpo.sed: unknown key 'sed'; did you mean 'seed'?"),
        (["policy.model_name=no/such/folder", "--validate-only"], 0, "ok"),
    ],
)
def test_script_and_nemo_rl_train_check_a_recipe_alike(arguments: list[str], code: int, shown: str) -> None:
    ended = []
    for command in (("examples/run_grpo.py", "--config"), ("-m", "nemo_rl.cli.main", "train")):
        done = subprocess.run(
            [sys.executable, *command, "configs/grpo_sort_cpu.yaml", *arguments],
            cwd=ROOT,
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == code, done.stderr
        assert shown in done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        ended.append((done.stdout, done.stderr))
    assert ended[0] == ended[1]


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (["examples/run_grpo.py", "--help"], "--preflight"),
        (["examples/run_grpo.py", "--version"], "nemo-rl 0."),
        (["examples/run_grpo.py", "--config", "configs/grpo_sort_cpu.yaml", "--validate-only"], "ok"),
        (["nemo_rl/cli/main.py", "--help"], "data-plane"),
        (["nemo_rl/cli/main.py", "--version"], "nemo-rl 0."),
        (["nemo_rl/cli/main.py", "data-plane", "--help"], "explain"),
        (["nemo_rl/cli/main.py", "train", "configs/grpo_sort_cpu.yaml", "--validate-only"], "ok"),
    ],
)
def test_help_version_and_validation_import_nothing_heavy(command: list[str], shown: str) -> None:
    script = (
        "import atexit, runpy, sys; sys.argv = sys.argv[1:]; "
        "heavy = {'torch', 'ray', 'transformers', 'tensordict', 'transfer_queue'}; "
        "atexit.register(lambda: print('imported:', sorted(heavy & set(sys.modules)))); "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *command], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout and done.stdout.endswith("imported: []\n"), done.stdout
