"""README and docs say what is there: paths, functions, settings, messages, make targets, the tree, the field table."""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nemo_rl.config.load import load_config
from nemo_rl.config.schema_walk import iter_fields
from nemo_rl.data_plane.schema import FIELDS, docs_table

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGE_IDS = [str(page.relative_to(ROOT)) for page in PAGES]
IN_TREE = ("nemo_rl", "examples", "configs", "docs", "benchmarks")
"""Folders of which every file has a line, or lies in a folder that has one."""

LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(\(\))?")
OVERRIDE = re.compile(r"(?<![\w-])[+~]?([a-z_]+(?:\.[a-z_]+)+)=")
SUFFIXES = {".py", ".md", ".yaml", ".toml"}

OUTSIDE = {
    # Files and folders of a run or a checkout.
    *("metrics.jsonl", "reward.log", "reward_curve.png", "training_info.json", "manifest.json", "latest", "step_N"),
    # Values of settings, and words of the data plane that are strings in the code.
    *("sort", "noop", "math", "reasoning_gym", "transfer_queue", "train", "val", "reward", "answer"),
    # The package, and an extra of pyproject.toml.
    *("nemo_rl", "envs"),
}
"""Names in backticks that no line of the library defines."""


def prose(page: Path) -> str:
    """The text without code blocks and links."""
    return LINK.sub(" ", BLOCK.sub("", page.read_text(encoding="utf-8")))


def definitions(path: Path) -> Iterator[str]:
    """`f`, `C` and `C.f` of a file, and its constants and fields."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        if isinstance(node, ast.ClassDef):
            yield from (f"{node.name}.{item.name}" for item in node.body if isinstance(item, ast.FunctionDef))
        if isinstance(node, ast.Module | ast.ClassDef):
            for item in node.body:
                targets = (
                    item.targets
                    if isinstance(item, ast.Assign)
                    else [item.target]
                    if isinstance(item, ast.AnnAssign)
                    else []
                )
                yield from (target.id for target in targets if isinstance(target, ast.Name))


@functools.cache
def known_names() -> frozenset[str]:
    names = {name for path in (ROOT / "nemo_rl").rglob("*.py") for name in definitions(path)}
    for key, _ in iter_fields():
        parts = key.split(".")
        names |= {".".join(parts[: end + 1]) for end in range(len(parts))} | {parts[-1]}
    return frozenset(names | set(FIELDS) | set(dir(builtins)) | OUTSIDE)


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_links_lead_to_files_that_define_what_they_name(page: Path) -> None:
    wrong = []
    for text, target in LINK.findall(page.read_text(encoding="utf-8")):
        path = (page.parent / target.partition("#")[0]).resolve()
        if target.startswith("http"):
            continue
        if not path.exists():
            wrong.append(f"{target} does not exist")
        elif path.suffix == ".py" and text.strip("`") not in set(definitions(path)):
            wrong.append(f"{target} does not define {text}")
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_paths_and_names_in_backticks_exist(page: Path) -> None:
    unknown = []
    for code in CODE.findall(prose(page)):
        if "/" in code and (Path(code).suffix in SUFFIXES or code.endswith("/")):
            is_known = (ROOT / code).exists()
        else:
            is_known = not NAME.fullmatch(code) or code.removesuffix("()") in known_names()
        if not is_known:
            unknown.append(code)
    assert unknown == [], "correct the page, or add a name that is no part of the library to OUTSIDE"


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_settings_and_make_targets_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    keys = {key for key, _ in iter_fields()}
    # Free sections, and the placeholder of the explanation.
    free = ("policy.optimizer.kwargs.", "env.reward_weights.", "a.b")
    assert {key for key in OVERRIDE.findall(text) if key not in keys and not key.startswith(free)} == set()
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"(?:`|^)make ([a-z0-9-]+)", text, re.MULTILINE)) <= targets


def test_pages_are_ascii() -> None:
    assert [page.name for page in PAGES if not page.read_text(encoding="utf-8").isascii()] == []


def test_messages_of_the_troubleshooting_table_are_in_the_source() -> None:
    section = PAGES[0].read_text(encoding="utf-8").partition("## Troubleshooting")[2].partition("\n## ")[0]
    shown = re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)
    source = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "nemo_rl").rglob("*.py")))
    assert len(shown) >= 10
    assert [message for message in shown if message not in source] == []


def test_python_blocks_of_the_readme_run() -> None:
    names: dict[str, Callable[..., object]] = {}
    for language, body in BLOCK.findall(PAGES[0].read_text(encoding="utf-8")):
        if language == "python":
            exec(compile(body, "README.md", "exec"), names)
    assert names["brevity"]("p", "the answer is 4", 4) == pytest.approx(0.85)
    assert names["brevity"]("p", "five", 4) == 0.0
    assert names["judged"]("p", "4", 4, truncated=True) == {"correct": 1.0, "format": 0.0}


def test_the_recipe_of_the_readme_loads(tmp_path: Path) -> None:
    (recipe,) = (body for language, body in BLOCK.findall(PAGES[0].read_text(encoding="utf-8")) if language == "yaml")
    (tmp_path / "recipe.yaml").write_text(recipe.replace("defaults: ", f"defaults: {ROOT}/"))
    config = load_config(tmp_path / "recipe.yaml")
    assert config.grpo.max_num_steps == 3 and config.data.train.dataset_name == "jsonl"


def test_one_process_as_the_readme_says() -> None:
    (line,) = (code for code in CODE.findall(PAGES[0].read_text(encoding="utf-8")) if "launcher=local" in code)
    config = load_config(ROOT / "configs/grpo_sort_cpu.yaml", line.split())
    assert config.cluster.launcher == "local" and config.data_plane.impl == "noop"


def tree_lines() -> list[str]:
    section = PAGES[0].read_text(encoding="utf-8").partition("## Tree")[2]
    (_, body) = BLOCK.findall(section)[0]
    return [line.split()[0] for line in body.splitlines() if line.strip()]


def test_the_tree_names_what_exists_once() -> None:
    named = tree_lines()
    assert [path for path in named if not (ROOT / path).exists()] == []
    assert sorted(set(named)) == sorted(named)


def test_the_tree_leaves_no_file_out() -> None:
    named = tree_lines()
    folders = tuple(path for path in named if path.endswith("/"))
    files = [
        str(path.relative_to(ROOT))
        for top in IN_TREE
        for path in sorted((ROOT / top).rglob("*"))
        if path.suffix in SUFFIXES and path.name != "__init__.py"
    ]
    missing = [file for file in files if file not in named and not file.startswith(folders)]
    assert missing == [], "add a line to the tree in README.md"


def test_the_field_table_is_the_generated_one() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    shown = text.partition("<!-- fields: docs_table() -->\n")[2].partition("<!-- end of fields -->")[0]
    assert shown.strip() == docs_table().strip(), "paste the output of nemo_rl.data_plane.schema.docs_table()"


def test_the_diagram_of_the_trainer_names_functions_that_exist() -> None:
    module = importlib.import_module("nemo_rl.algorithms.grpo_sync")
    diagram = (module.__doc__ or "").partition("\n\n")[2].rpartition("\n\n")[0]
    first = re.search(r"[\w.]+", diagram)
    assert first is not None
    listed = [name for group in re.findall(r"\(([^()]+)\)", diagram) for name in group.split(",")]
    names = [first[0], *(name.strip() for name in listed if name.strip() != "...")]
    assert len(names) >= 10
    for name in names:
        place: object = module
        for part in name.split("."):
            assert hasattr(place, part), f"{name}: {place!r} has no {part!r}"
            place = getattr(place, part)
        assert callable(place), name
