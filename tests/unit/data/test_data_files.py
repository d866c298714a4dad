"""Files and folders of rows: their splits, their values, and what is said of them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from nemo_rl.config.data import DatasetConfig
from nemo_rl.data.datasets import Prompt, raw_prompts
from nemo_rl.data.huggingface_wrapper import split_named
from nemo_rl.data.messages import Message, prompt_messages
from nemo_rl.data.pictures import IMAGE
from nemo_rl.errors import DatasetError

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

ROWS = [{"input": "one", "output": "014"}, {"input": "two", "output": "NA"}]


def write(path: Path, rows: Sequence[Mapping[str, object]] = ROWS) -> Path:
    """Write rows in the form that the suffixes say."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    cells = "input,output\n" + "".join(",".join(map(str, row.values())) + "\n" for row in rows)
    kind = "".join(path.suffixes)[1:]
    if kind == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
        return path
    content = {"json": json.dumps(list(rows)), "jsonl": lines, "csv": cells, "tsv": cells.replace(",", "\t")}[
        kind.split(".")[0]
    ]
    if kind.endswith(".gz"):
        path.write_bytes(gzip.compress(content.encode()))
    elif kind.endswith(".zst"):
        path.write_bytes(pyarrow.compress(content.encode(), codec="zstd", asbytes=True))
    else:
        path.write_text(content)
    return path


def read(path: Path, *, source: str = "huggingface", **keys: object) -> list[tuple[object, object]]:
    given = DatasetConfig.model_validate({"dataset_name": source, "data_path": path, **keys})
    return [(raw.text, raw.answer) for raw in raw_prompts(given, "data.train")]


@pytest.mark.parametrize(
    "name", ["a.json", "a.jsonl", "a.csv", "a.tsv", "a.parquet", "a.jsonl.gz", "a.csv.gz", "a.jsonl.zst", "a.csv.zst"]
)
def test_values_are_what_each_kind_of_file_says(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name)
    assert read(path) == [("one", "014"), ("two", "NA")]
    if ".jsonl" in name:
        assert read(path, source="jsonl") == read(path)


@pytest.mark.parametrize("source", ["jsonl", "huggingface"])
def test_numbers_of_json_keep_their_digits(tmp_path: Path, source: str) -> None:
    values = ["12345678901234567890123", "0.1", "1.10", "1e5", "12345678901234567.89", "null", '"null"', '"2025-01-02"']
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"input": "x", "output": {value}}}\n' for value in values))
    expected = [12345678901234567890123, 0.1, 1.1, 100000.0, "12345678901234567.89", None, "null", "2025-01-02"]
    assert [answer for _, answer in read(path, source=source)] == expected


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train.jsonl", "train"), ("gsm8k-train-00000-of-00002.parquet", "train"), ("training.csv", "train"),
        ("val.jsonl", "validation"), ("my_dev.jsonl", "validation"), ("valid1.jsonl", "validation"),
        ("validation-0.parquet", "validation"), ("test.jsonl", "test"), ("math.eval.jsonl", "test"),
        ("evaluation.csv", "test"), ("train_test.jsonl", "test"), ("rows.jsonl", None), ("trainers.jsonl", None),
        ("devices.jsonl", None), ("contest.jsonl", None),
    ],
)  # fmt: skip
def test_names_say_splits(name: str, split: str | None) -> None:
    assert split_named(name) == split


def test_a_folder_is_read_by_split_and_says_what_is_left_out(tmp_path: Path) -> None:
    taken = ["train/more.jsonl", "train-00000.jsonl"]
    others = [
        "dev.jsonl",
        "eval/train.jsonl",
        "notes.jsonl",
        ".cache/train.jsonl",
        "._train.jsonl",
        "__MACOSX/train.jsonl",
    ]
    for name in (*taken, *others):
        write(tmp_path / name, [{"input": name, "output": "1"}])
    (tmp_path / "train.jsonl~").write_text("old")
    (tmp_path / "train.zip").write_bytes(b"PK")
    assert [text for text, _ in read(tmp_path, split="train")] == taken
    assert [text for text, _ in read(tmp_path, split="val")] == ["dev.jsonl"]
    given = DatasetConfig(dataset_name="huggingface", data_path=tmp_path, split="train")
    first, *rest = raw_prompts(given, "data.train")
    assert "split train is read from train/more.jsonl, train-00000.jsonl; left out: " in first.remark
    assert "validation (dev.jsonl)" in first.remark and "test (eval/train.jsonl)" in first.remark
    assert "__MACOSX" in first.remark and not any(raw.remark for raw in rest)


@pytest.mark.parametrize(
    ("files", "keys", "said"),
    [
        (["train.jsonl", "train.csv"], {}, "files of one kind for split train"),
        (["train.jsonl", "test.jsonl"], {}, r"data.train.split: expected one of \['test', 'train'\]"),
        (["train.jsonl"], {"subset": "main"}, "data.train.subset: expected no subset, since the dataset has no card"),
        (
            ["notes.txt.jsonl~"],
            {},
            "data.train.data_path: .* expected a folder written by save_to_disk, or files among",
        ),
    ],
)
def test_folders_that_cannot_be_read_for_certain_are_refused(tmp_path, files, keys, said):
    for name in files:
        write(tmp_path / name) if not name.endswith("~") else (tmp_path / name).touch()
    with pytest.raises(DatasetError, match=said):
        read(tmp_path, **keys)


@pytest.mark.parametrize("outside", ["../x.jsonl", "/etc/x.jsonl"])
def test_a_card_names_subsets_and_files_of_its_folder_alone(tmp_path: Path, outside: str) -> None:
    for name in ("main/a.jsonl", "hard/a.jsonl"):
        write(tmp_path / name, [{"input": name, "output": "1"}])
    card = "---\nconfigs:\n- {config_name: main, data_files: main/*}\n- {config_name: hard, data_files: %s}\n---\n"
    (tmp_path / "README.md").write_text(card % outside)
    assert read(tmp_path, subset="main") == [("main/a.jsonl", "1")]
    with pytest.raises(DatasetError, match=r"data\.train\.subset: expected one of main, hard, got None"):
        read(tmp_path)
    with pytest.raises(DatasetError, match="outside of the folder"):
        read(tmp_path, subset="hard")


@pytest.mark.parametrize(
    ("name", "content"), [("a.csv", b"a,b\n1,2,3\n"), ("a.parquet", b"PAR1"), ("a.csv.gz", b"\x1f\x8b")]
)
def test_damaged_files_are_refused_with_their_name(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DatasetError, match=name):
        read(tmp_path / name)


USER, SYSTEM = {"role": "user", "content": "2+2?"}, {"role": "system", "content": "be brief"}
PARTS = [
    {"role": role, "content": [{"type": "text", "text": text}]}
    for role, text in (("developer", "be brief"), ("user", "2+2?"))
]
TURNS = [{"from": role, "value": text} for role, text in (("system", "be brief"), ("human", "2+2?"), ("gpt", "4"))]
REWARD = {"style": "rule", "ground_truth": "4"}
FORMS: dict[str, tuple[dict[str, object], dict[str, str]]] = {
    "verl": (
        {"data_source": "d", "prompt": [SYSTEM, USER], "reward_model": REWARD},
        {"input_key": "prompt", "output_key": "reward_model.ground_truth"},
    ),
    "trl": ({"prompt": [SYSTEM, USER], "answer": "4"}, {"input_key": "prompt", "output_key": "answer"}),
    "openai": ({"messages": [SYSTEM, USER, {"role": "assistant", "content": "4"}]}, {"input_key": "messages"}),
    "openai parts": ({"messages": PARTS, "output": "4"}, {"input_key": "messages"}),
    "sharegpt": ({"conversations": TURNS}, {"input_key": "conversations"}),
    "nemo-rl": ({"messages": [SYSTEM, USER], "task_name": "math", "output": "4"}, {"input_key": "messages"}),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_rows_of_other_libraries_are_read_by_their_keys(tmp_path: Path, form: str, name: str) -> None:
    row, keys = FORMS[form]
    path = write(tmp_path / name, [row])
    given = DatasetConfig.model_validate({"dataset_name": "huggingface", "data_path": path, **keys})
    (raw,) = raw_prompts(given, "data.train")
    assert (raw.text, raw.answer) == ("2+2?", "4")
    assert [(message.role, message.content) for message in raw.history] == [("system", "be brief")]
    assert form != "verl" or raw.metadata["data_source"] == "d"


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([SYSTEM], "input_key 'input': expected a last message of the user"),
        ([{"role": "tool", "content": "4"}], "expected a text of system, user or assistant"),
        (["2+2?"], "message 0: expected role and content, or from and value"),
        ([{"role": "user", "content": [{"type": "audio"}]}], "expected parts of type text or image"),
    ],
)
def test_conversations_that_open_no_prompt_are_refused(tmp_path: Path, messages: list[object], said: str) -> None:
    with pytest.raises(DatasetError, match=said):
        read(write(tmp_path / "a.jsonl", [{"input": messages, "output": "4"}]))


PNG = "data:image/png;base64,iVBORw0KGgo="
PICTURE_PARTS: list[dict[str, object]] = [
    {"type": "image", "image": PNG},
    {"type": "image_url", "image_url": {"url": PNG}},
    {"type": "text", "text": "2+2?"},
]


def test_pictures_of_a_message_are_its_parts(tmp_path: Path) -> None:
    row = {"messages": [SYSTEM, {"role": "user", "content": PICTURE_PARTS}], "output": "4"}
    path = write(tmp_path / "a.jsonl", [row])
    keys = {"dataset_name": "jsonl", "data_path": path, "input_key": "messages", "image_key": "messages"}
    (raw,) = raw_prompts(DatasetConfig.model_validate(keys), "data.train")
    assert (raw.text, raw.images, raw.metadata) == (f"{IMAGE}{IMAGE}2+2?", PICTURE_PARTS[:2], {})


@pytest.mark.parametrize(
    ("image_key", "roles", "said"),
    [
        (None, ["user"], "set image_key to 'messages' where these hold the pictures"),
        ("messages", ["user", "assistant", "user"], "expected pictures in the last message of the user alone, got one"),
        ("images", ["user"], "no 'images'"),
    ],
)
def test_pictures_of_messages_that_no_key_names_are_refused(tmp_path, image_key, roles, said):
    messages = [{"role": role, "content": PICTURE_PARTS if role == "user" else "4"} for role in roles]
    path = write(tmp_path / "a.jsonl", [{"messages": messages, "output": "4"}])
    keys = {"dataset_name": "jsonl", "data_path": path, "input_key": "messages", "image_key": image_key}
    with pytest.raises(DatasetError, match=said):
        list(raw_prompts(DatasetConfig.model_validate(keys), "data.train"))


def test_messages_before_the_text_are_rendered_and_tell_prompts_apart(tmp_path: Path) -> None:
    first = Message(role="assistant", content="a")
    opened = prompt_messages("b", system_prompt="s", history=[first])
    assert [message.content for message in opened] == ["s", "a", "b"]
    own = Message(role="system", content="own")
    assert [message.content for message in prompt_messages("b", system_prompt="s", history=[own])] == ["own", "b"]
    one, two = (Prompt(index=0, text="b", answer=1, ids=(1,), history=history) for history in ((), (first,)))
    assert one.identity != two.identity
