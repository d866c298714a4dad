"""README and docs say what is there: paths, functions, settings, messages, make targets, pictures, the field table."""

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
from nemo_rl.config.schema_walk import iter_fields, place_of
from nemo_rl.data_plane.metrics_endpoint import docs_table as metrics_table
from nemo_rl.data_plane.schema import FIELDS, docs_table
from nemo_rl.records.sites import SiteKind
from nemo_rl.tracer.reducer import REDUCERS
from nemo_rl_tools.runner.layout_text import CHOICES, SIZES, SWITCHES
from tests.helpers.roots import LIBRARY, ROOT
from tests.repo import picture
from tests.repo.docs_site import BLOCK, LINK
from tests.repo.walk_docs import make_targets

FRONT = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")
PAGES = [*(ROOT / name for name in FRONT), *sorted((ROOT / "docs").rglob("*.md"))]
PAGE_IDS = [str(page.relative_to(ROOT)) for page in PAGES]
README, GUIDE = ROOT / "README.md", ROOT / "docs" / "guide.md"
README_LINES = 200
"""A newcomer reads it in one sitting; the rest is in docs."""

CODE = re.compile(r"`([^`\n]+)`")
NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(\(\))?")
OVERRIDE = re.compile(r"(?<![\w-])[+~]?([a-z_]+(?:\.[a-z_]+)+)=")
SUFFIXES = {".py", ".md", ".yaml", ".toml"}

OUTSIDE = {
    # Files and folders of a run or a checkout.
    *("metrics.jsonl", "reward.log", "reward_curve.png", "training_info.json", "manifest.json", "latest", "step_N"),
    *("step_20", "step_20.json", "staging"),
    *("schedule.jsonl", "outcome.json", "error.txt", "config.yaml", "diff"),
    # States of a run, and a key of the JSON of a step.
    *("ok", "running", "ended", "stopped", "failed", "unusual"),
    # From Python: the package's lazy names, columns of rows, arguments of rewards in TRL's form, datasets by name.
    *("nemo_rl.train", "completions", "prompts", "prompt", "messages", "question", "problem", "solution", "target"),
    *("ground_truth", "output", "input", "held_out", "reward", "owner/name", "evaluate", "sample", "export"),
    # Built-in estimators of turns.
    *("outcome_plus_turn", "discounted_return"),
    # Columns of images, by the names of transformers.
    *("pixel_values", "image_grid_thw"),
    # Variables of NCCL.
    *("NCCL_ALGO", "NCCL_PROTO"),
    # Values of `activation_checkpointing`.
    *("selective", "none"),
    # Of torch, and values of `compile` and `gradient_accumulation`.
    *("sharded", "whole"),
    *("on", "off", "torch.compile", "TORCHINDUCTOR_CACHE_DIR", "~/.cache/nemo_rl/inductor"),
    # Names in messages of the public page of an older tracer.
    *("InputTokens", "TileCompressor"),
    # Values of settings, and words of the data plane that are strings in the code.
    *("sort", "noop", "math", "reasoning_gym", "transfer_queue", "train", "val", "reward", "answer"),
    # Adapters: values of settings, names of layers, a key and a file of their folders, recipes.
    *("native", "merged", "base", "start", "finish", "q_proj", "experts.gate_up_proj", "experts.down_proj"),
    *("target_parameters", "nemo_rl_base.json", "policy/weights", "grpo_sort_lora_cpu", "grpo_sort_lora_vllm_cpu"),
    # The package, an extra of pyproject.toml, torch's launcher.
    *("nemo_rl", "envs", "torchrun"),
    # Slurm's commands, the script of a job, its defaults.
    *("sbatch", "scancel", "ray.sub", "slurm_logs", "python", "auto", "RAY_ADDRESS"),
    # Variables of glibc.
    *("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_"),
    # Ways of a refit, and variables of NCCL and gloo.
    *("ipc", "broadcast", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_DEBUG", "GLOO_SOCKET_IFNAME"),
}
"""Names in backticks that no line of the library defines."""


def anchors(page: Path) -> set[str]:
    """Names that a link can give after `#`: one for each heading."""
    headings = re.findall(r"^#+ (.+)$", BLOCK.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


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
    names = {name for path in LIBRARY for name in definitions(path)}
    for key, _ in iter_fields():
        parts = key.split(".")
        names |= {".".join(parts[: end + 1]) for end in range(len(parts))} | {parts[-1]}
    layouts = {*SIZES, *SWITCHES, *(f"{name}={value}" for name, values in CHOICES.items() for value in values)}
    for file in ("ray.sub", "nemo_rl/slurm/job.py"):
        names |= set(re.findall(r"\b[A-Z]+(?:_[A-Z]+)*\b", (ROOT / file).read_text(encoding="utf-8")))
    return frozenset(names | set(FIELDS) | set(dir(builtins)) | OUTSIDE | set(SiteKind) | set(REDUCERS) | layouts)


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_links_lead_to_files_that_define_what_they_name(page: Path) -> None:
    wrong = []
    for text, target in LINK.findall(page.read_text(encoding="utf-8")):
        if target.startswith("http"):
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        if not path.exists():
            wrong.append(f"{target} does not exist")
        elif path.suffix == ".py" and text.strip("`") not in {path.name, *definitions(path)}:
            wrong.append(f"{target} does not define {text}")
        elif anchor and anchor not in anchors(path):
            wrong.append(f"{target} has no such heading")
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
    places = {key: place_of(key.split(".")) for key in OVERRIDE.findall(text)}
    keys = {key for key, place in places.items() if place.is_known and not place.is_free}
    # Free sections, and the placeholder of the explanation.
    free = ("policy.optimizer.kwargs.", "env.reward_weights.", "a.b")
    assert {key for key in OVERRIDE.findall(text) if key not in keys and not key.startswith(free)} == set()
    targets = set(make_targets())
    assert set(re.findall(r"(?:`|^)make ([a-z0-9-]+)", text, re.MULTILINE)) <= targets


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= README_LINES, "move details to a page of docs"


def test_pages_are_ascii() -> None:
    assert [page.name for page in PAGES if not page.read_text(encoding="utf-8").isascii()] == []


def test_messages_of_the_troubleshooting_table_are_in_the_source() -> None:
    page = ROOT / "docs" / "troubleshooting.md"
    shown = re.findall(r"^\| `([^`]+)` \|", page.read_text(encoding="utf-8"), re.MULTILINE)
    source = "\n".join(path.read_text(encoding="utf-8") for path in LIBRARY)
    assert len(shown) >= 10
    assert [message for message in shown if message not in source] == []


def test_python_blocks_of_the_guide_run() -> None:
    names: dict[str, Callable[..., object]] = {}
    for language, body in BLOCK.findall(GUIDE.read_text(encoding="utf-8")):
        if language == "python":
            exec(compile(body, GUIDE.name, "exec"), names)
    assert names["brevity"]("p", "the answer is 4", 4) == pytest.approx(0.85)
    assert names["brevity"]("p", "five", 4) == 0.0
    assert names["judged"]("p", "4", 4, truncated=True) == {"correct": 1.0, "format": 0.0}


@pytest.mark.parametrize(
    ("name", "steps"), [("guide", 3), ("index", 100), ("coming_from_trl", 500), ("coming_from_verl", 1e5)]
)
def test_the_recipe_of_a_page_loads(tmp_path: Path, name: str, steps: int) -> None:
    text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    (recipe,) = (body for language, body in BLOCK.findall(text) if language == "yaml")
    (tmp_path / "recipe.yaml").write_text(recipe.replace("defaults: ", f"defaults: {ROOT}/"))
    config = load_config(tmp_path / "recipe.yaml")
    assert config.grpo.max_num_steps == steps and config.data.train.data_path


def test_rewards_of_other_libraries_are_called_in_their_form() -> None:
    names: dict[str, Callable[..., object]] = {}
    for name in ("coming_from_trl", "coming_from_verl"):
        text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
        (code,) = (body for language, body in BLOCK.findall(text) if language == "python")
        exec(compile(code, name, "exec"), names)
    rows = [{"level": 1}, {"level": 2, "source": "a"}]
    assert names["rewards"](["1+1", "1+2"], ["2", " 4"], ["2", "3"], row=rows) == [
        {"accuracy": 1.0, "brief": pytest.approx(0.999)},
        {"accuracy": 0.0, "brief": pytest.approx(0.998)},
    ]
    assert names["reward"]("1+1", "2", "2", data_source="sums", extra_info={}) == {"score": 1.0, "acc": 1.0}


def test_one_process_as_the_guide_says() -> None:
    (line,) = (code for code in CODE.findall(GUIDE.read_text(encoding="utf-8")) if "launcher=local" in code)
    config = load_config(ROOT / "configs/grpo_sort_cpu.yaml", line.split())
    assert config.cluster.launcher == "local" and config.data_plane.impl == "noop"


def test_the_field_table_is_the_generated_one() -> None:
    text = (ROOT / "docs" / "data_plane.md").read_text(encoding="utf-8")
    shown = text.partition("<!-- fields: docs_table() -->\n")[2].partition("<!-- end of fields -->")[0]
    assert shown.strip() == docs_table().strip(), "paste the output of nemo_rl.data_plane.schema.docs_table()"


def test_the_table_of_metrics_is_the_generated_one() -> None:
    text = (ROOT / "docs" / "data_plane.md").read_text(encoding="utf-8")
    shown = text.partition("<!-- metrics: docs_table() -->\n")[2].partition("<!-- end of metrics -->")[0]
    assert shown.strip() == metrics_table().strip(), (
        "paste the output of nemo_rl.data_plane.metrics_endpoint.docs_table()"
    )


@pytest.mark.parametrize("name", ["grpo_sync", "stages.bodies"])
def test_the_diagram_of_a_module_names_functions_that_exist(name: str) -> None:
    module = importlib.import_module(f"nemo_rl.algorithms.{name}")
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


def test_pictures_are_the_generated_ones() -> None:
    folder = ROOT / "docs" / "images"
    for name, text in picture.files(folder).items():
        assert (folder / name).read_text(encoding="utf-8") == text, f"{name}: run `make picture`"


def test_the_glossary_is_short() -> None:
    rows = re.findall(r"^\| (?!word|---)", (ROOT / "docs/glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert 10 <= len(rows) <= 40
