"""No malformed input gets past its boundary: it ends as a `UserError` that names its place, and it ends.

Everything runs in one process, through the functions that the command line calls.
"""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from nemo_rl.config.data import DataConfig, DatasetConfig
from nemo_rl.config.load import load_config
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.data.datasets import build_prompt_sets
from nemo_rl.data.messages import encode_prompt, prompt_messages
from nemo_rl.data.tokenizer import load_tokenizer, stop_token_ids
from nemo_rl.environments.process_environment import build_environment
from nemo_rl.errors import UserError
from nemo_rl.models.hf.folder import open_weights
from nemo_rl.models.hf.loading import load_causal_lm, load_model_config
from nemo_rl.models.policy.fit import check_policy_fits
from tests.helpers import bad_inputs
from tests.helpers.case_selection import num_examples
from tests.helpers.tiny_model import tiny_policy, write_tiny_folder

# Without the file of all defaults, which takes longest to read.
RECIPE = Path("configs/grpo_sort_cpu.yaml").read_text(encoding="utf-8").replace("defaults: grpo_base.yaml\n", "")
DEADLINE_S = 60
"""For one input, on a busy machine; what has no end has none in a day either."""
MAX_MESSAGE = 60_000


@contextmanager
def deadline() -> Iterator[None]:
    def late(*_: object) -> None:
        raise AssertionError(f"no end after {DEADLINE_S} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(DEADLINE_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def answer(name: str, action: Callable[[], object], *, place: str = "") -> None:
    """`action` is refused with a message that names the place, or accepted where `LEGAL` says so."""
    with deadline():
        try:
            action()
        except UserError as error:
            text = str(error)
            text.encode("utf-8", errors="backslashreplace")
            assert name not in bad_inputs.LEGAL, text
            assert place in text and 0 < len(text) <= MAX_MESSAGE and "Traceback" not in text, text
            return
    assert name in bad_inputs.LEGAL, f"{name}: accepted"


def cases(table: Mapping[str, object]) -> list[object]:
    return [pytest.param(value, id=name) for name, value in table.items()]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "whole.yaml"
    path.write_text(RECIPE)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(model)


def test_there_are_about_three_hundred_of_them() -> None:
    tables = {
        "yaml": bad_inputs.YAML,
        "override": bad_inputs.OVERRIDES,
        "row": bad_inputs.ROWS,
        "config": bad_inputs.CONFIGS,
        "tokenizer": bad_inputs.TOKENIZERS,
        "weights": bad_inputs.WEIGHTS,
        "reward": bad_inputs.REWARDS,
    }
    names = {f"{kind}: {name}" for kind, table in tables.items() for name in table}
    assert len(names) >= 300
    assert names >= bad_inputs.LEGAL


@pytest.mark.parametrize(("name", "text"), bad_inputs.YAML.items(), ids=bad_inputs.YAML)
def test_a_recipe(tmp_path: Path, recipe: Path, name: str, text: str | bytes) -> None:
    inherits, recipe = f"defaults: {recipe}\n".encode(), tmp_path / "recipe.yaml"
    content = text if isinstance(text, bytes) else text.encode("utf-8", errors="surrogatepass")
    is_whole = name.startswith(("defaults", "no mapping", "UTF-16", "two documents", "bytes of", "NUL bytes"))
    mark = b"\xef\xbb\xbf"
    recipe.write_bytes(content if is_whole else mark * content.startswith(mark) + inherits + content.removeprefix(mark))
    (tmp_path / "once.yaml").write_text("grpo: {seed: 1}")
    (tmp_path / "bytes.yaml").write_bytes(bytes(range(256)))
    answer(f"yaml: {name}", lambda: load_config(recipe), place="" if "endless" in name else str(tmp_path))


@pytest.mark.parametrize(("name", "overrides"), bad_inputs.OVERRIDES.items(), ids=bad_inputs.OVERRIDES)
def test_an_override(recipe: Path, name: str, overrides: list[str]) -> None:
    answer(
        f"override: {name}", lambda: load_config(recipe, overrides), place="" if "required" in name else "command line"
    )


@pytest.mark.parametrize(("name", "text"), bad_inputs.ROWS.items(), ids=bad_inputs.ROWS)
def test_a_dataset_file(tmp_path: Path, tokenizer: PreTrainedTokenizerBase, name: str, text: str | bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8"))
    cfg = DataConfig(train=DatasetConfig(dataset_name="jsonl", data_path=path))
    answer(f"row: {name}", lambda: build_prompt_sets(cfg, tokenizer), place="data.train" if "no prompt" in name else "")
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize("name", ["missing", "a folder", "endless", "too long a name", "not to be read"])
def test_a_path_that_is_no_dataset_file(tmp_path: Path, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    paths = {
        "missing": tmp_path / "nowhere.jsonl",
        "a folder": tmp_path,
        "endless": Path("/dev/zero"),
        "too long a name": tmp_path / ("x" * 5000),
        "not to be read": Path("/proc/self/mem"),
    }
    cfg = DataConfig(train=DatasetConfig(dataset_name="jsonl", data_path=paths[name]))
    answer(name, lambda: build_prompt_sets(cfg, tokenizer), place=f"data.train.data_path: {paths[name]}")


def run_up_to_weights(folder: Path, policy: PolicyConfig) -> None:
    """What the driver and a worker do with a model folder."""
    check_policy_fits(policy)
    open_weights(folder, load_model_config(folder))
    load_causal_lm(folder)


@pytest.mark.parametrize("worker", ["dtensor", "megatron"])
@pytest.mark.parametrize(("name", "change"), bad_inputs.CONFIGS.items(), ids=bad_inputs.CONFIGS)
def test_a_model_config(
    tmp_path: Path, model: Path, name: str, change: str | bytes | dict[str, object], worker: str
) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    path = folder / "config.json"
    if isinstance(change, dict):
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    else:
        path.write_bytes(change if isinstance(change, bytes) else change.encode())
    settings = {"dtensor_cfg": {"enabled": False}, "megatron_cfg": {"enabled": True}} if worker == "megatron" else {}
    policy = tiny_policy(folder, **settings)
    answer(f"config: {name}", lambda: run_up_to_weights(folder, policy))


@pytest.mark.parametrize(("name", "change"), bad_inputs.WEIGHTS.items(), ids=bad_inputs.WEIGHTS)
def test_weights(tmp_path: Path, model: Path, name: str, change: bad_inputs.Change) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    change(folder)
    answer(f"weights: {name}", lambda: run_up_to_weights(folder, tiny_policy(folder)), place=str(folder))


@pytest.mark.parametrize(("name", "change"), bad_inputs.TOKENIZERS.items(), ids=bad_inputs.TOKENIZERS)
def test_a_tokenizer(tmp_path: Path, model: Path, name: str, change: bad_inputs.Change) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    change(folder)

    def load_and_encode() -> None:
        tokenizer = load_tokenizer(folder)
        assert int(tokenizer.pad_token_id) >= 0
        assert stop_token_ids(folder, tokenizer)
        rows = tmp_path / "rows.jsonl"
        rows.write_text(json.dumps({"input": "sort 321", "output": "123"}))
        build_prompt_sets(DataConfig(train=DatasetConfig(dataset_name="jsonl", data_path=rows)), tokenizer)

    answer(f"tokenizer: {name}", load_and_encode)


@pytest.mark.parametrize(("name", "target"), bad_inputs.REWARDS.items(), ids=bad_inputs.REWARDS)
def test_a_reward(tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch, name: str, target: str) -> None:
    monkeypatch.chdir(tmp_path)
    for file, text in bad_inputs.REWARD_MODULES.items():
        (tmp_path / file).write_text(text)

    def load() -> None:
        quoted = target.replace("'", "''")
        config = load_config(recipe, ["env.name=custom", f"env.reward_function='{quoted}'"])
        build_environment(config.env, start_timeout_s=DEADLINE_S).shutdown()

    answer(f"reward: {name}", load)


# ---- texts that nobody has thought of

LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), st.just("${grpo.seed}"), st.just("???")
)
TREES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner))
KEYS = st.sampled_from(["grpo", "policy", "data", "env", "cluster", "logger", "checkpointing", "loss_fn", "data_plane"])
# Signs of YAML, so that texts are not only words.
SNIPPETS = st.lists(st.sampled_from([*"[]{}:,&*!|>'\"%@`#-?~ \n\t0a", "${", "<<", "!!", "grpo", "seed"]), max_size=40)
FUZZ = settings(
    max_examples=num_examples(50), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def load_or_refuse(*arguments: object) -> None:
    with deadline():
        try:
            load_config(*arguments)  # type: ignore[arg-type]
        except UserError as error:
            assert str(error)


@FUZZ
@given(text=SNIPPETS.map("".join) | st.text(max_size=200))
def test_any_text_as_a_recipe(tmp_path: Path, text: str) -> None:
    (tmp_path / "r.yaml").write_text(text, encoding="utf-8", errors="surrogatepass")
    load_or_refuse(tmp_path / "r.yaml")


@FUZZ
@given(tree=st.dictionaries(KEYS, TREES, max_size=4))
def test_any_tree_as_a_recipe(tmp_path: Path, recipe: Path, tree: object) -> None:
    (tmp_path / "r.yaml").write_text(f"defaults: {recipe}\n" + str(yaml.safe_dump(tree)), encoding="utf-8")
    load_or_refuse(tmp_path / "r.yaml")


@FUZZ
@given(
    name=st.sampled_from(["grpo.seed", "policy", "data.train.options", "logger.log_dir"]), value=SNIPPETS.map("".join)
)
def test_any_value_of_an_override(recipe: Path, name: str, value: str) -> None:
    load_or_refuse(recipe, [f"{name}={value}"])


@FUZZ
@given(line=TREES.map(json.dumps) | st.text(max_size=100) | st.binary(max_size=100))
def test_any_line_of_a_dataset(tmp_path: Path, tokenizer: PreTrainedTokenizerBase, line: str | bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(line if isinstance(line, bytes) else line.encode("utf-8", errors="surrogatepass"))
    with deadline():
        try:
            build_prompt_sets(DataConfig(train=DatasetConfig(dataset_name="jsonl", data_path=path)), tokenizer)
        except UserError as error:
            assert str(error)


@FUZZ
@given(text=st.text(max_size=200))
def test_any_prompt_becomes_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    with deadline():
        try:
            assert encode_prompt(tokenizer, prompt_messages(text))
        except UserError as error:
            assert str(error)


@FUZZ
@given(
    key=st.sampled_from(["hidden_size", "num_attention_heads", "vocab_size", "layer_types", "rope_parameters"]),
    value=TREES,
)
def test_any_value_in_a_model_config(tmp_path: Path, model: Path, key: str, value: object) -> None:
    folder = tmp_path / "model"
    if not folder.exists():
        shutil.copytree(model, folder)
    given_config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**given_config, key: value}))
    with deadline():
        try:
            check_policy_fits(tiny_policy(folder))
        except UserError as error:
            assert str(error)
