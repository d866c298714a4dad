"""Runs every command of README and docs in order, and every make target, as somebody would who has just cloned.

    python tests/repo/walk_docs.py [--folder DIR] [--only WORDS] [--with-tests]

Everything happens in a copy of the tracked files where nothing ran before; one shell environment goes on from block to
block, so what a page says to activate is active on the next. A fenced block says what it is: `bash`, further words
`cheap` (takes seconds, needs nothing before it), `bounds` (a benchmark: a missed bound is no failure of the page),
`tests` (the suite itself), `serves` (runs until Ctrl-C, which the walk sends when an address is printed), `gpu` or
`cluster` (left out). `python` and `yaml` blocks that start with the name of a file
are written there. A block fails when its exit code is not 0 or when it prints a traceback.
"""

from __future__ import annotations

import argparse
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (
    *(
        "README.md",
        "docs/guide.md",
        "docs/python.md",
        "docs/parallel.md",
        "docs/data_plane.md",
        "docs/router_replay.md",
    ),
    *("docs/extending.md", "docs/troubleshooting.md", "docs/one_step.md", "docs/architecture.md", "docs/install.md"),
    *("docs/contributing.md", "docs/coming_from_nemo_rl.md", "docs/debugging.md", "docs/tracer.md", "docs/cluster.md"),
    *(
        "docs/generation.md",
        "docs/async.md",
        "docs/environments.md",
        "docs/lora.md",
        "docs/data.md",
        "docs/sft.md",
        "docs/judges.md",
        "docs/algorithms.md",
        "docs/model_support.md",
        "docs/vision.md",
        "docs/trainer.md",
        "docs/workers.md",
        "docs/gpu.md",
    ),
    *("docs/observability.md", "docs/failures.md", "docs/limitations.md", "docs/glossary.md", "docs/index.md"),
    *("docs/coming_from_trl.md", "docs/coming_from_verl.md"),
)
LANGUAGES = {"bash", "python", "yaml", "text"}
WORDS = {"cheap", "bounds", "tests", "serves", "gpu", "cluster"}
LEFT_OUT = {"gpu", "cluster"}
BLOCK_TIMEOUT_S = 3600.0
START_TIMEOUT_S = 120.0
INTERRUPTED = 130
"""Exit code of a shell whose command was ended by Ctrl-C."""
END_TIMEOUT_S = 60.0
"""A run ends its processes in order."""
OUTPUT_SHOWN = 3000
"""Characters of the output of a block that failed."""

TARGETS: Mapping[str, str] = {
    "help": "",
    "docs": "",
    "lint": "",
    "types": "",
    "imports": "",
    "configs": "",
    "picture": "",
    "wheels": "",
    "step-trace": "",
    "model-support": "llama qwen3",
    "constraints": "",
    "learn-first": "grpo.max_num_steps=2",
    "learn-sort": "grpo.max_num_steps=2",
    "learn-sort-tp2": "grpo.max_num_steps=2",
    "learn-sort-megatron": "grpo.max_num_steps=2",
    "learn-chain-sum": "grpo.max_num_steps=2",
    "learn-curriculum": "--steps 4 --seeds 1 --reached 0 --bounds 9 9",
    "learn-guess": "grpo.max_num_steps=2",
    "learn-guess-async": "grpo.max_num_steps=2",
    "learn-calculator": "grpo.max_num_steps=2",
    "learn-sort-moe": "grpo.max_num_steps=2",
    "learn-algorithms": "grpo.max_num_steps=2",
    "learn-sort-lora": "grpo.max_num_steps=2",
    "learn-sort-lora-vllm": "grpo.max_num_steps=2",
    "learn-sort-moe-lora": "grpo.max_num_steps=2",
    "learn-vlm-shapes": "grpo.max_num_steps=2",
    "learn-sort-distill": "grpo.max_num_steps=2",
    "learn-sort-async": "grpo.max_num_steps=2",
    "learn-sort-async-vllm": "grpo.max_num_steps=2",
    "resume-kills": "--kills 2 --saves 1",
    "async-kills": "--kills 2",
    "ledger-kills": "--kills 2 --run-kills 1",
    "store-kills": "--kills 2",
    "replay-draw": "--steps 4 --draws 2 --only tp2",
    "leaks": "--steps 8 --stores ray",
    "check-ledger": "--depth 4",
    "stress-data-plane": "--ops 600",
    "corrupt-payloads": "--trials 60",
    "bench-step": "--steps 2 --rows 64",
    "bench-data-plane": "--turns 2",
    "bench-packing": "--quick",
    "bench-router-replay": "--quick",
    "bench-tracer": "--quick",
    "bench-generation": "--quick",
    "bench-driver": "--quick",
    "bench-scale": "--quick",
    "bench-async": "--quick",
    "bench-conversations": "--quick",
    "bench-lora": "--quick",
    "bench-async-learning": "--steps 2 --bounds 1 --least 0",
    "bench-train-pass": "--quick",
    "bench-checkpoint": "--quick",
    "bench-plan-time": "--quick",
    "watch-trait": "grpo.max_num_steps=2",
    "clean": "",
}
"""Targets that no page runs, with the ARGS that make them short."""
TARGETS_LEFT_OUT = {
    "test": "runs by itself, as CI",
    "test-fast": "runs by itself",
    "test-full": "runs by itself",
    "chaos": "takes half an hour; a part of it is in the suite",
    "mutants": "takes ten minutes; its list is checked in the suite",
    "walk-docs": "this is it",
    "same-numbers": "needs the repository's history, which the copy lacks",
    "uplot": "needs npm; what it fetches lies in the repository",
    "gpu-wheels": "for a GPU machine",
    "gpu-setup": "for a GPU machine",
    "gpu-report": "for a GPU machine; its small form is in the suite",
    "test-gpu": "for a GPU machine",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One fenced block of a page."""

    page: str
    line: int
    language: str
    words: frozenset[str]
    body: str

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def file_name(self) -> str | None:
        """The file that a `python` or `yaml` block is written to."""
        first = re.match(r"# ([\w./-]+\.(?:py|yaml))\n", self.body)
        return first[1] if first and self.language in ("python", "yaml") else None


def blocks_of(page: str, root: Path = ROOT) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found: list[Block] = []
    info, start, body = None, 0, []
    for number, line in enumerate((root / page).read_text(encoding="utf-8").splitlines(), start=1):
        if line.startswith("```"):
            if info is None:
                info, start, body = line[3:].split(), number, []
            else:
                language, words = (info[0], frozenset(info[1:])) if info else ("", frozenset())
                text = "\n".join(body) + "\n"
                found.append(Block(page=page, line=start, language=language, words=words, body=text))
                info = None
        elif info is not None:
            body.append(line)
    return found


def make_targets(root: Path = ROOT) -> list[str]:
    """Return the names of the Makefile's targets for people, those of its patterns included."""
    text = (root / "Makefile").read_text(encoding="utf-8")
    named = re.findall(r"^(LEARN|BENCH)_([a-z][a-z0-9-]*) :=", text, re.MULTILINE)
    of_patterns = [f"{pattern.lower()}-{name}" for pattern, name in named]
    return re.findall(r"^([a-z0-9-]+):", text, re.MULTILINE) + of_patterns


def targets_named(block: Block) -> set[str]:
    return set(re.findall(r"^make ([a-z0-9-]+)", block.body, re.MULTILINE)) if block.language == "bash" else set()


def copy_tracked(target: Path) -> None:
    """The tracked files as they are in the working tree, and nothing else."""
    names = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], check=True, capture_output=True, timeout=60)
    for name in names.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


class Walk:
    """A shell that goes from block to block.

    Args:
        folder: where the copy lies.
        environment: what the shell starts with.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder = folder
        self._environment = dict(environment)
        self.failures: list[str] = []
        self._written: set[str] = set()
        self._made: set[str] = set()

    def visit(self, block: Block) -> None:
        """Writes or runs one block, whatever it is."""
        if block.file_name is not None:
            # A name that comes again goes on where it ended, as a reader would take it.
            mode = "a" if block.file_name in self._written else "w"
            self._written.add(block.file_name)
            with (self._folder / block.file_name).open(mode, encoding="utf-8") as file:
                file.write(block.body)
        elif block.language == "bash" and not self._is_made(block):
            serves = "serves" in block.words
            self.run(block.body, where=block.where, may_miss_bounds="bounds" in block.words, serves=serves)

    def _is_made(self, block: Block) -> bool:
        """Return whether the block only makes what an earlier one has made: pages name some targets again."""
        commands = {line.partition("#")[0].strip() for line in block.body.splitlines()} - {""}
        is_made = all(command.startswith("make ") for command in commands) and commands <= self._made
        self._made |= commands
        return is_made

    def run(self, script: str, *, where: str, may_miss_bounds: bool = False, serves: bool = False) -> None:
        """Runs a script and keeps the environment that it leaves."""
        started, after = time.monotonic(), self._folder / ".environment"
        whole = f"set -eu -o pipefail\n{script}\nenv -0 > '{after}'\n"
        code, output = self._run_bash(script if serves else whole, serves=serves)
        code = 0 if serves and code == INTERRUPTED else code
        is_bad = "Traceback (most recent call last)" in output or (code != 0 and not may_miss_bounds)
        verdict = "FAILED" if is_bad else "ok" if code == 0 else "ok, bounds missed"
        print(
            f"{where:28} {time.monotonic() - started:6.1f} s  {verdict:8} {script.strip().splitlines()[0][:90]}",
            flush=True,
        )
        if is_bad:
            self.failures.append(f"{where}: exit code {code}\n{output[-OUTPUT_SHOWN:]}")
            print(self.failures[-1], flush=True)
        if after.is_file():
            pairs = (pair.partition("=") for pair in after.read_text(encoding="utf-8").split("\0") if pair)
            self._environment = {name: value for name, _, value in pairs}
            after.unlink()

    def _run_bash(self, script: str, *, serves: bool) -> tuple[int, str]:
        """Exit code and output; whatever the script has started is ended when the walk is."""
        process = subprocess.Popen(
            ["bash", "-c", script],
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        shown = b""
        try:
            if serves:
                shown = _until_an_address(process)
                os.killpg(process.pid, signal.SIGINT)
            output, _ = process.communicate(timeout=END_TIMEOUT_S if serves else BLOCK_TIMEOUT_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(END_TIMEOUT_S)
            raise
        return process.returncode, (shown + output).decode("utf-8", "backslashreplace")


def _until_an_address(process: subprocess.Popen[bytes]) -> bytes:
    """Return what a server prints until it has named its address, or has ended."""
    assert process.stdout is not None
    shown, deadline = b"", time.monotonic() + START_TIMEOUT_S
    while b"http://" not in shown and process.poll() is None:
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"no address within {START_TIMEOUT_S:.0f} s: {shown.decode('utf-8', 'replace')}")
        # Not `read`, which would wait for more.
        shown += os.read(process.stdout.fileno(), 1 << 16)
    return shown


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--folder", type=Path, help="an empty folder for the copy, kept; default: a temporary one")
    parser.add_argument("--only", nargs="+", default=[], help="only blocks with one of these words, such as cheap")
    parser.add_argument("--with-tests", action="store_true", help="the test suite too, where a page runs it")
    given = parser.parse_args(arguments)
    left_out = LEFT_OUT | (set() if given.with_tests else {"tests"})
    with tempfile.TemporaryDirectory(prefix="walk_docs_") as temporary:
        folder = given.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        copy_tracked(folder)
        # Not this environment's Python: the copy makes its own.
        paths = [path for path in os.environ["PATH"].split(":") if Path(path) != Path(sys.executable).parent]
        walk = Walk(folder, {**os.environ, "PATH": ":".join(paths)} if not given.only else os.environ)
        ran: set[str] = set()
        for page in PAGES:
            for block in blocks_of(page, folder):
                is_wanted = not given.only or block.words & set(given.only) or block.file_name is not None
                if is_wanted and not block.words & left_out:
                    walk.visit(block)
                    ran |= targets_named(block)
        for target, short in TARGETS.items() if not given.only else ():
            if target not in ran:
                walk.run(f"make {target} ARGS='{short}'", where=f"make {target}", may_miss_bounds="bench" in target)
    print(f"{len(walk.failures)} failed")
    return 1 if walk.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
