"""Limits that hold for the whole repository: sizes, forbidden calls, docstrings, command line flags."""

from __future__ import annotations

import ast
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.roots import LIBRARY, ROOT, ROOTS, SOURCES

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 100
MOST_IMPORTS = 30
"""Modules of ours that one module imports, inside functions and for type checkers too."""

EVERYTHING = [*SOURCES, *sorted((ROOT / "tests").rglob("*.py"))]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def dotted(node: ast.expr) -> str:
    """`torch.load` of the expression `torch.load`; empty for anything that is no plain name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        prefix = dotted(node.value)
        return f"{prefix}.{node.attr}" if prefix else ""
    return ""


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield dotted(node.func), node


def test_files_fit_the_limit() -> None:
    sizes = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in EVERYTHING}
    assert {name: size for name, size in sizes.items() if size > MAX_FILE_LINES} == {}


def test_functions_fit_the_limit() -> None:
    too_long = {}
    for path in EVERYTHING:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                size = (node.end_lineno or node.lineno) - node.lineno + 1
                if size > MAX_FUNCTION_LINES:
                    too_long[f"{name_of(path)}:{node.name}"] = size
    assert too_long == {}


def test_modules_import_few_others() -> None:
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in LIBRARY}
    sizes = {}
    for path in LIBRARY:
        nodes = [
            node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.ImportFrom)
        ]
        names = {
            whole if (whole := f"{node.module}.{alias.name}") in modules else node.module
            for node in nodes
            for alias in node.names
        }
        sizes[name_of(path)] = sum(str(name).startswith(ROOTS) for name in names)
    assert {name: size for name, size in sizes.items() if size > MOST_IMPORTS} == {}


def test_every_module_says_what_it_is() -> None:
    silent = [
        name_of(path)
        for path in EVERYTHING
        if path.read_text(encoding="utf-8").strip()
        and not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert silent == []


def test_library_never_prints_evaluates_or_unpickles() -> None:
    forbidden = {"print", "eval", "exec", "pickle.load", "pickle.loads", "cloudpickle.load", "cloudpickle.loads"}
    found = [f"{name_of(path)}: {name}" for path in LIBRARY for name, call in calls(path) if name in forbidden]
    # Pickled by the program that has started the process which unpickles it: the driver's requests, which Ray would
    # pickle anew for every rank, and a reward of a Python session.
    assert found == [
        "nemo_rl/distributed/ray_worker_groups.py: pickle.loads",
        "nemo_rl/environments/session_rewards.py: cloudpickle.loads",
    ]


def test_torch_load_reads_weights_only() -> None:
    unsafe = [
        f"{name_of(path)}:{call.lineno}"
        for path in EVERYTHING
        for name, call in calls(path)
        if name == "torch.load"
        and not any(
            k.arg == "weights_only" and isinstance(k.value, ast.Constant) and k.value.value for k in call.keywords
        )
    ]
    assert unsafe == []


def test_getattr_is_never_given_a_literal_and_a_default() -> None:
    found = [
        f"{name_of(path)}:{call.lineno}"
        for path in LIBRARY
        for name, call in calls(path)
        if name == "getattr" and len(call.args) == 3 and isinstance(call.args[1], ast.Constant)
    ]
    assert found == []


def test_source_is_ascii() -> None:
    assert [name_of(path) for path in SOURCES if not path.read_text(encoding="utf-8").isascii()] == []


FLAGS = {
    "examples/run_grpo.py": {
        *("--help", "--version", "--config", "--print-config", "--validate-only", "--preflight"),
    },
    "benchmarks/grpo_step.py": {"--help", "--json", "--steps", "--rows", "--model", "--only"},
    "examples/make_starter.py": {"--help", "--out", "--task", "--experts", "--seed", "--threads"},
    "examples/make_trait_vector.py": {
        *("--help", "--with", "--without", "--model", "--out", "--tokens", "--batch", "--threads"),
    },
}
"""A new flag is a change to this list; settings of a run belong into the recipe."""


@pytest.mark.parametrize("script", sorted(FLAGS))
def test_command_line_flags_are_the_frozen_ones(
    script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("sys.argv", [script, "--help"])
    monkeypatch.setattr("sys.path", [*sys.path])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    assert not ended.value.code
    shown = capsys.readouterr().out
    assert {word.strip("[],.") for word in shown.split() if word.strip("[],.").startswith("--")} == FLAGS[script]


def test_the_wall_clock_is_written_down_and_never_waited_for() -> None:
    """Deadlines and leases count on the monotonic clock, so that a step of the machine's clock ends nothing."""
    written = {
        "nemo_rl/data_plane/ledger/events.py",
        "nemo_rl/utils/trackers.py",
        # The date of a run.
        "nemo_rl/utils/run_lock.py",
        "nemo_rl/utils/r3_trace.py",
        "nemo_rl_tools/tracer/store.py",
        "nemo_rl_tools/tracer/hub/assembly.py",
        # The chat template shows the date of the run's first start.
        "nemo_rl/experience/conversation_setup.py",
        # Slurm tells the end of a job by it; what is left is counted on the other clock.
        "nemo_rl/utils/deadlines.py",
        # A chat template may print the date: that of the run's first start.
        "nemo_rl/algorithms/run_folder.py",
        "nemo_rl/data/messages.py",
        "nemo_rl/data/finished.py",
        # The time of a verdict; and Retry-After may be a date.
        "nemo_rl/environments/judges/kept.py",
        "nemo_rl/environments/judges/endpoint.py",
    }
    clocks = {"time.time", "time.time_ns", "datetime.now", "datetime.datetime.now", "datetime.utcnow"}
    found = {name_of(path) for path in LIBRARY for name, _ in calls(path) if name in clocks}
    assert found == written
