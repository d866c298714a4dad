"""Prompt sources, and what is done to all of them alike."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
import yaml
from huggingface_hub import constants
from transformers import PreTrainedTokenizerBase

from nemo_rl.config.data import DataConfig, DatasetConfig
from nemo_rl.data import huggingface_wrapper
from nemo_rl.data.datasets import RawPrompt, build_prompt_sets, json_value
from nemo_rl.data.tokenizer import build_tokenizer
from nemo_rl.data.turn_encoder import TurnEncoder
from nemo_rl.environments.tool_schema import schema_of
from nemo_rl.environments.tools import calculator, python
from nemo_rl.errors import DatasetError
from tests.helpers.chat_templates import CASES, NOW, stop_ids_of, tokenizer_of
from tests.helpers.conversations import small_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return build_tokenizer(["sort 123", "sort 98"])


def jsonl(path: Path, *texts: str) -> DatasetConfig:
    path.write_text("".join(json.dumps({"input": text, "output": [text]}) + "\n" for text in texts), encoding="utf-8")
    return DatasetConfig(dataset_name="jsonl", data_path=path)


def digits(size: int, seed: int, **options: int) -> DatasetConfig:
    return DatasetConfig(dataset_name="sort_digits", size=size, seed=seed, options={"min_digits": 1, **options})


def test_validation_texts_are_left_out_of_training(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    cfg = DataConfig(train=jsonl(tmp_path / "t", "a", "b", "c"), validation=jsonl(tmp_path / "v", "c", "x", "a"))
    train, validation = build_prompt_sets(cfg, tokenizer).values()
    assert [(p.index, p.text, p.answer) for p in train.prompts] == [(0, "b", ["b"])]
    assert len(validation) == 3


def test_prompts_hold_their_messages_and_the_tools_that_the_template_prints(tmp_path: Path) -> None:
    case = CASES["qwen3"]
    config = DataConfig(train=jsonl(tmp_path / "t", "a <|im_end|>").model_copy(update={"system_prompt": "be brief"}))
    tool = {"type": "function", "function": {"name": "lookup", "parameters": {}}}
    [prompt] = build_prompt_sets(config, tokenizer_of(case.name), tools=[tool])["data.train"].prompts
    assert [(message.role, message.content) for message in prompt.messages] == [
        ("system", "be brief"),
        ("user", "a <|im_end|>"),
    ]
    encoder = TurnEncoder(tokenizer_of(case.name), stop_ids=stop_ids_of(case.name), tools=[tool], now=NOW)
    assert prompt.ids == encoder.prompt(prompt.messages)
    assert '"name": "lookup"' in tokenizer_of(case.name).decode(prompt.ids)


def test_texts_of_every_validation_set_are_left_out_of_training(tmp_path, tokenizer):
    sets = {"one": jsonl(tmp_path / "one", "b"), "two": jsonl(tmp_path / "two", "x", "c")}
    cfg = DataConfig(train=jsonl(tmp_path / "t", "a", "b", "c", "d"), validation=jsonl(tmp_path / "v", "a"))
    found = build_prompt_sets(cfg.model_copy(update={"validation_sets": sets}), tokenizer)
    assert [prompt.text for prompt in found.pop("data.train").prompts] == ["d"]
    held_out = {"data.validation": 1, "data.validation_sets.one": 1, "data.validation_sets.two": 2}
    assert {where: len(prompts) for where, prompts in found.items()} == held_out


def test_a_category_is_a_column_of_each_prompt(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    path = tmp_path / "v"
    path.write_text('{"input": "a", "output": "1", "level": 3}\n{"input": "b", "output": "2"}\n')
    held = DatasetConfig(dataset_name="jsonl", data_path=path, category_key="level")
    cfg = DataConfig(train=jsonl(tmp_path / "t", "x"), validation=held)
    with pytest.raises(
        DatasetError, match=r"data.validation: prompt 1: category_key 'level': expected a text.*nothing"
    ):
        build_prompt_sets(cfg, tokenizer)
    one = cfg.model_copy(update={"validation": held.model_copy(update={"size": 1})})
    assert [prompt.category for prompt in build_prompt_sets(one, tokenizer)["data.validation"].prompts] == ["3"]
    path.write_text('{"input": "a", "output": "1", "extra": {"level": 3}}\n')
    nested = one.model_copy(update={"validation": held.model_copy(update={"category_key": "extra.level"})})
    assert [prompt.category for prompt in build_prompt_sets(nested, tokenizer)["data.validation"].prompts] == ["3"]
    by_length = digits(9, 2, max_digits=2).model_copy(update={"category_key": "digits"})
    found = build_prompt_sets(cfg.model_copy(update={"validation": by_length}), tokenizer)["data.validation"]
    assert [prompt.category for prompt in found.prompts] == [str(len(str(prompt.answer))) for prompt in found.prompts]


def test_generated_validation_prompts_are_avoided_and_the_size_is_kept(tokenizer: PreTrainedTokenizerBase) -> None:
    cfg = DataConfig(train=digits(50, 1, max_digits=2), validation=digits(20, 2, max_digits=2))
    train, validation = build_prompt_sets(cfg, tokenizer).values()
    assert (len(train), len(validation)) == (50, 20)
    assert not {p.text for p in train.prompts} & {p.text for p in validation.prompts}


def test_long_prompts_are_skipped_and_counted_or_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    source = jsonl(tmp_path / "t", "short", "long" * 50, "also short")
    train = build_prompt_sets(DataConfig(train=source, max_input_seq_length=60), tokenizer)["data.train"]
    assert [p.text for p in train.prompts] == ["short", "also short"]
    assert [p.index for p in train.prompts] == [0, 1]
    assert train.num_skipped_overlong == 1
    assert max(len(p.ids) for p in train.prompts) <= 60
    with pytest.raises(DatasetError, match=r"data.train: prompt 1 has \d+ tokens"):
        build_prompt_sets(DataConfig(train=source, max_input_seq_length=60, overlong_prompts="error"), tokenizer)
    longest = max(len(p.ids) for p in train.prompts)
    for limit, expected in ((longest, ["short", "also short"]), (longest - 1, ["short"])):
        fitting = build_prompt_sets(DataConfig(train=source, max_input_seq_length=limit), tokenizer)["data.train"]
        assert [p.text for p in fitting.prompts] == expected


def test_nothing_left_is_an_error_that_says_why(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(DatasetError, match="no prompt is left of 1 read: 1 are longer"):
        build_prompt_sets(DataConfig(train=jsonl(tmp_path / "t", "long" * 50), max_input_seq_length=60), tokenizer)
    with pytest.raises(DatasetError, match="no prompt is left of 0 read"):
        build_prompt_sets(DataConfig(train=jsonl(tmp_path / "empty")), tokenizer)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"input": "a", "output": 1}\n{broken', "t:2: expected a JSON object per line"),
        ("[1]\n", "t:1: expected a JSON object, got list"),
        ('\n{"question": "a", "output": 1}\n', "t:2: no 'input', got .*question.*; set input_key"),
        ('{"input": 3, "output": 1}\n', "t:1: 'input': expected a text, got 3"),
    ],
)
def test_malformed_lines_are_named(tmp_path, tokenizer, content, message):
    path = tmp_path / "t"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(DatasetError, match=message):
        build_prompt_sets(DataConfig(train=DatasetConfig(data_path=path)), tokenizer)


def test_missing_file_is_an_error(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(DatasetError, match="data.train.data_path: .*gone cannot be read: No such file"):
        build_prompt_sets(DataConfig(train=DatasetConfig(data_path=tmp_path / "gone")), tokenizer)


def _saved(folder: Path) -> str | None:
    import datasets

    datasets.Dataset.from_list(ROWS).save_to_disk(str(folder))
    return None


def _saved_with_splits(folder: Path) -> str | None:
    import datasets

    train, test = datasets.Dataset.from_list(ROWS), datasets.Dataset.from_list(ROWS[:1])
    datasets.DatasetDict({"train": train, "test": test}).save_to_disk(str(folder))
    return "train"


def _parquet(folder: Path) -> str | None:
    import datasets

    folder.mkdir()
    datasets.Dataset.from_list(ROWS).to_parquet(str(folder / "part-0.parquet"))
    return None


def _json_files(folder: Path) -> str | None:
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "test.jsonl").write_text(json.dumps({"question": "held out", "answer": "0"}) + "\n")
    return "train"


ROWS = [{"question": "one", "answer": "1"}, {"question": "two", "answer": "2"}]


@pytest.mark.parametrize("make", [_saved, _saved_with_splits, _parquet, _json_files])
def test_huggingface_reads_local_files(tmp_path, tokenizer, make):
    split = make(tmp_path / "d")
    cfg = DatasetConfig(
        dataset_name="huggingface",
        data_path=tmp_path / "d",
        split=split,
        input_key="question",
        output_key="answer",
        size=2,
    )
    train = build_prompt_sets(DataConfig(train=cfg), tokenizer)["data.train"]
    assert [(p.text, p.answer) for p in train.prompts] == [("one", "1"), ("two", "2")]


def test_huggingface_problems_are_dataset_errors(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    def load(path: Path, split: str | None = None) -> None:
        cfg = DatasetConfig(dataset_name="huggingface", data_path=path, split=split)
        build_prompt_sets(DataConfig(train=cfg), tokenizer)

    with pytest.raises(DatasetError, match="does not exist"):
        load(tmp_path / "gone")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DatasetError, match="expected a folder written by save_to_disk"):
        load(tmp_path / "empty")
    _json_files(tmp_path / "d")
    with pytest.raises(DatasetError, match=r"data.train.split: expected one of \['test', 'train'\], got None"):
        load(tmp_path / "d")


HUB_NAME = "somebody/sums-1.0"


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What `hf download` has left of a dataset with two subsets, and no network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "hub" / f"datasets--{HUB_NAME.replace('/', '--')}"
    files = {
        "README.md": "---\n" + yaml.safe_dump({"configs": [_hub_config(name) for name in ("main", "hard")]}) + "---\n",
        **{
            f"{name}/{split}-0.jsonl": _row(f"{name} {split}")
            for name in ("main", "hard")
            for split in ("train", "test")
        },
    }
    for number, (file, text) in enumerate(files.items()):
        path = repository / "snapshots" / "0123abc" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        blob = repository / "blobs" / str(number)
        blob.parent.mkdir(exist_ok=True)
        blob.write_text(text)
        path.symlink_to(blob)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123abc")
    return repository


def _hub_config(name: str) -> dict[str, object]:
    files = [{"split": split, "path": f"{name}/{split}-*"} for split in ("train", "test")]
    return {"config_name": name, "data_files": files}


def _row(text: str) -> str:
    return json.dumps({"question": text, "answer": "1"}) + "\n"


def _of_hub(name: str = HUB_NAME, **keys: object) -> DataConfig:
    train = {"dataset_name": name, "input_key": "question", "output_key": "answer", **keys}
    return DataConfig.model_validate({"train": train})


@pytest.mark.parametrize(("subset", "split"), [("main", "train"), ("main", "test"), ("hard", "train")])
def test_a_dataset_of_the_hub_is_read_by_name_subset_and_split(hub_cache, tokenizer, subset, split):
    train = build_prompt_sets(_of_hub(subset=subset, split=split), tokenizer)["data.train"]
    assert [(p.text, p.answer) for p in train.prompts] == [(f"{subset} {split}", "1")]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"split": "train"}, r"data.train.subset: expected one of main, hard, got None"),
        ({"subset": "easy"}, r"data.train.subset: expected one of main, hard, got 'easy'"),
        ({"subset": "main"}, r"data.train.split: expected one of \['test', 'train'\], got None"),
        ({"name": "somebody/gone"}, "not in the cache .*, and HF_HUB_OFFLINE is set; run `hf download --repo-type "),
        ({"name": "other/gone"}, "dataset_name=jsonl with data_path"),
    ],
)
def test_a_dataset_of_the_hub_that_cannot_be_had_is_refused_with_what_to_do(hub_cache, tokenizer, given, said):
    with pytest.raises(DatasetError, match=said):
        build_prompt_sets(_of_hub(**given), tokenizer)


def test_half_a_download_and_a_missing_library_are_refused(hub_cache, tokenizer, monkeypatch):
    (hub_cache / "blobs" / "77.incomplete").touch()
    with pytest.raises(DatasetError, match="did not end, and HF_HUB_OFFLINE is set; run `hf download"):
        build_prompt_sets(_of_hub(subset="main", split="train"), tokenizer)
    monkeypatch.setattr(huggingface_wrapper, "has_datasets", lambda: False)
    with pytest.raises(DatasetError, match=r"needs the datasets library; run `pip install -e '\.\[data\]'`"):
        build_prompt_sets(_of_hub(subset="main", split="train"), tokenizer)


def test_only_the_files_of_a_subset_are_asked_for() -> None:
    split_of = {"config_name": "a", "data_files": [{"split": "train", "path": ["a/*.parquet", "b.json"]}]}
    assert huggingface_wrapper._files_of(split_of) == ["a/*.parquet", "b.json"]
    assert huggingface_wrapper._files_of({"config_name": "a", "data_files": "x.csv"}) == ["x.csv"]
    assert huggingface_wrapper._files_of({"config_name": "a", "data_dir": "d"}) == ["d/*"]
    assert "*.parquet" in huggingface_wrapper._files_of(None)


def test_reasoning_gym_task_by_name(tokenizer: PreTrainedTokenizerBase) -> None:
    def load(task: str, **options: int) -> list[str]:
        cfg = DatasetConfig(dataset_name="reasoning_gym", task=task, size=5, seed=3, options=options)
        return [p.text for p in build_prompt_sets(DataConfig(train=cfg), tokenizer)["data.train"].prompts]

    texts = load("chain_sum", min_terms=2, max_terms=2)
    assert len(texts) == 5
    assert texts == load("chain_sum", min_terms=2, max_terms=2)
    with pytest.raises(DatasetError, match="did you mean 'chain_sum'"):
        load("chainsum")
    with pytest.raises(DatasetError, match=r"data.train.options: .*'chain_sum' refuses them: .*terms"):
        load("chain_sum", terms=2)
    with pytest.raises(DatasetError, match="min_terms must be positive"):
        load("chain_sum", min_terms=0)


def test_values_of_columns_become_json_values() -> None:
    given = {
        "day": date(2025, 1, 2),
        "at": datetime(2025, 1, 2, 3, 4, tzinfo=UTC),
        "price": Decimal("1.50"),
        "took": timedelta(minutes=1),
        "text": "h\u00e9".encode(),
        "array": np.arange(2),
        "in a list": [{"n": np.int64(3)}, (np.bool_(True), None)],
    }
    assert json_value(given) == {
        "day": "2025-01-02",
        "at": "2025-01-02T03:04:00+00:00",
        "price": "1.50",
        "took": 60.0,
        "text": "h\u00e9",
        "array": [0, 1],
        "in a list": [{"n": 3}, [True, None]],
    }


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"\xff\xfe", "2 bytes that are not UTF-8 text"),
        ({"a": [object()]}, r"got object at a\[0\]"),
        ({"x"}, "got set"),
        ({(1, 2): 3}, r"texts as keys, got \(1, 2\)"),
    ],
)
def test_a_column_that_is_no_json_is_named_with_its_row(tokenizer, value, message):
    cfg = DatasetConfig(dataset_name=f"{__name__}:odd_rows", options={})
    VALUES[:] = ["fine", value, value]
    pattern = f"(?s)data.train: prompt 1: column 'c': expected .*{message}.*of 3 rows read these cannot be used: 2 with"
    with pytest.raises(DatasetError, match=pattern):
        build_prompt_sets(DataConfig(train=cfg), tokenizer)


VALUES: list[object] = []


def odd_rows(cfg: DatasetConfig, where: str, exclude: Collection[str]) -> Iterator[RawPrompt]:
    del cfg, where, exclude
    for number, value in enumerate(VALUES):
        yield RawPrompt(text=f"p {number}", answer=1, metadata={"c": value})


def test_all_rows_that_cannot_be_used_are_counted_and_the_first_of_each_kind_named(tmp_path, tokenizer):
    rows = [{"input": "fine"}, *({"input": each} for each in (None, 3, " \n", "", [], "x" * 900, {}))]
    (tmp_path / "t").write_text("".join(json.dumps(row | {"output": "1"}) + "\n" for row in rows))
    cfg = DataConfig(train=DatasetConfig(data_path=tmp_path / "t"), overlong_prompts="error", max_input_seq_length=200)
    with pytest.raises(DatasetError) as raised:
        build_prompt_sets(cfg, tokenizer)
    *lines, summary = str(raised.value).splitlines()
    assert [line for line in lines if "t:2: 'input': expected a text, got None" in line]
    assert "prompt 6 has" in lines[-1] and lines[-1].endswith("t:7)") and len(lines) == 6
    assert summary == "data.train: of 8 rows read these cannot be used: 6 without a prompt; 1 too long"


def test_the_digest_of_a_set_is_of_its_rows_and_of_what_is_put_around_them(tmp_path, tokenizer):
    def digest(*texts: str, **keys: object) -> str:
        cfg = jsonl(tmp_path / "t", *texts).model_copy(update=keys)
        return build_prompt_sets(DataConfig(train=cfg), tokenizer)["data.train"].digest

    first = digest("a", "b")
    assert digest("a", "b") == first
    others = [digest("b", "a"), digest("a", "c"), digest("a"), digest("a", "b", prompt_template="{input}!")]
    others.append(digest("a", "b", system_prompt="s"))
    assert len({first, *others}) == 6


def test_prompts_of_a_section_show_the_tools_that_it_names() -> None:
    tokenizer, schemas = small_tokenizer(), [schema_of(calculator), schema_of(python)]
    shared = {"dataset_name": "sort_digits", "size": 2, "options": {"min_digits": 1}}
    train = {
        "all": shared,
        "one": {**shared, "seed": 3, "tools": ["python"]},
        "none": {**shared, "seed": 5, "tools": []},
    }
    cfg = DataConfig.model_validate({"train": train, "max_input_seq_length": 4096})
    sets = build_prompt_sets(cfg, tokenizer, tools=schemas)
    shown = {
        where.rpartition(".")[2]: [name for name in ("calculator", "python") if f"{name}(" in text]
        for where, found in sets.items()
        for text in [tokenizer.decode(list(found.prompts[0].ids))]
    }
    assert shown == {"all": ["calculator", "python"], "one": ["python"], "none": []}
    assert len({found.digest for found in sets.values()}) == 3
    wrong = DataConfig.model_validate({"train": {"one": {**shared, "tools": ["abacus"]}}})
    with pytest.raises(DatasetError, match=r"data\.train\.one\.tools: expected some of .*, got 'abacus'"):
        build_prompt_sets(wrong, tokenizer, tools=schemas)
