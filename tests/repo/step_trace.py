"""`make step-trace`: one step of the demo in this process, and how much of `nemo_rl` it enters.

Counts the functions that a step enters between its two ends, their lines, the files that they are in, and the frames of
this library between the trainer's `step` and two ends of the work: the policy term of the loss, and the store that
gives the bytes of a column. The second step is traced, so that lazy loading in the first one does not count.

    python -m tests.repo.step_trace [recipe] [key=value ...]
    python -m tests.repo.step_trace --processes [recipe] [key=value ...]

With `--processes` the recipe runs as it is written, and what all of its processes enter is counted; the frames are
those of the process that does the work.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType

from rich.console import Console

from nemo_rl.algorithms.losses import terms
from nemo_rl.algorithms.setup import open_trainer
from nemo_rl.config.load import load_config
from nemo_rl.data_plane.interfaces import PayloadStore
from tests.helpers.roots import ROOT, ROOTS

__all__ = ["StepTrace", "trace_step"]

PACKAGES = tuple(f"{ROOT / name}/" for name in ROOTS)
DEMO = "configs/grpo_sort_cpu.yaml"
IN_ONE_PROCESS = ("cluster.launcher=local", "cluster.cpu_workers_per_node=1", "data_plane.impl=noop")
IN_ONE_PROCESS += ("policy.generation.num_replicas=1", "checkpointing.enabled=false", "grpo.val_at_start=false")

WRITE_S = 3.0
"""Until every process has seen that a trace begins or ends."""


@dataclass(kw_only=True, slots=True)
class StepTrace:
    """The code of this library that one step enters."""

    functions: dict[str, dict[str, int]] = field(default_factory=dict)
    """Lines of each function that is entered, by file and qualified name."""
    loss: list[str] = field(default_factory=list)
    """Names of the frames from the step to the policy term, both included."""
    column: list[str] = field(default_factory=list)
    """Names of the frames from the step to the store, when a stage reads a column."""

    @property
    def num_lines(self) -> int:
        """Lines of all functions that are entered."""
        return sum(sum(lines.values()) for lines in self.functions.values())

    def text(self) -> str:
        """Return the report that the command prints."""
        per_file = {path: sum(lines.values()) for path, lines in self.functions.items()}
        lines = [f"{count:5} {path}" for path, count in sorted(per_file.items(), key=lambda item: -item[1])]
        num_functions = sum(map(len, self.functions.values()))
        lines += [f"{len(self.functions)} files, {num_functions} functions of {self.num_lines} lines"]
        for what, frames in (("the loss", self.loss), ("the bytes of a column", self.column)):
            lines += [f"{len(frames)} frames to {what}: " + " > ".join(frames)]
        return "\n".join(lines)


def trace_step(recipe: str = DEMO, overrides: Sequence[str] = ()) -> StepTrace:
    """Run two steps of a recipe in this process and trace the second one.

    Raises:
        UserError: the recipe or its model folder is not there.
    """
    found, term_codes = StepTrace(), _codes_of_terms()
    with tempfile.TemporaryDirectory(prefix="step_trace_") as folder:
        config = load_config(recipe, [*IN_ONE_PROCESS, f"logger.log_dir={folder}/logs", *overrides])
        with open_trainer(config, console=Console(file=io.StringIO())) as trainer:
            trainer.open_run()
            trainer.step()
            step_code = type(trainer).step.__code__

            def entered(frame: FrameType, event: str, argument: object) -> None:
                code = frame.f_code
                if event != "call" or not code.co_filename.startswith(PACKAGES):
                    return
                path = str(Path(code.co_filename).relative_to(ROOT))
                found.functions.setdefault(path, {})[code.co_qualname] = _num_lines(code)
                if code in term_codes and not found.loss:
                    found.loss = _frames(frame, step_code)
                if _is_read(frame) and not found.column:
                    found.column = _frames(frame, step_code)

            sys.setprofile(entered)
            try:
                trainer.step()
            finally:
                sys.setprofile(None)
    return found


def trace_processes(recipe: str, overrides: Sequence[str] = ()) -> StepTrace:
    """Run two steps of a recipe in its own processes and trace the second one in all of them.

    Raises:
        UserError: the recipe or its model folder is not there.
    """
    found, terms_ = StepTrace(), {code.co_qualname for code in _codes_of_terms()}
    with tempfile.TemporaryDirectory(prefix="step_trace_") as folder:
        hook = str(Path(__file__).parent / "every_process")
        paths = os.pathsep.join((hook, str(ROOT), os.environ.get("PYTHONPATH", "")))
        os.environ.update(NRL_STEP_TRACE=folder, NRL_STEP_TRACE_ROOTS=os.pathsep.join(PACKAGES), PYTHONPATH=paths)
        sys.path.insert(0, hook)
        import sitecustomize  # noqa: F401 - hooks this process; it reads the environment

        off = ("checkpointing.enabled=false", "grpo.val_at_start=false", f"logger.log_dir={folder}/logs")
        with open_trainer(load_config(recipe, [*off, *overrides]), console=Console(file=io.StringIO())) as trainer:
            trainer.open_run()
            trainer.step()
            switch = Path(folder) / "on"
            switch.touch()
            time.sleep(WRITE_S)
            trainer.step()
            switch.unlink()
            time.sleep(WRITE_S)
        for path in sorted(Path(folder).glob("*.json")):
            for file, name, lines, stack in json.loads(path.read_text()):
                found.functions.setdefault(str(Path(file).relative_to(ROOT)), {})[name] = lines
                if name in terms_:
                    found.loss = stack
                if name.endswith("Store.get") and "TQWorker.train_presharded" in stack:
                    found.column = stack
    return found


def _num_lines(code: CodeType) -> int:
    last = max((line for _, _, line in code.co_lines() if line is not None), default=code.co_firstlineno)
    return last - code.co_firstlineno + 1


def _codes_of_terms() -> set[CodeType]:
    return {value.__code__ for name in terms.__all__ if hasattr(value := vars(terms)[name], "__code__")}


def _is_read(frame: FrameType) -> bool:
    """Return whether a payload store is asked for columns."""
    owner = frame.f_locals.get("self")
    return frame.f_code.co_name == "get" and isinstance(owner, PayloadStore)


def _frames(frame: FrameType, step_code: CodeType) -> list[str]:
    """Return the names of this library's frames from the step to this one; what it calls through does not count."""
    names: list[str] = []
    at: FrameType | None = frame
    while at is not None:
        if at.f_code.co_filename.startswith(PACKAGES) and not at.f_code.co_name.startswith("<"):
            names.append(at.f_code.co_qualname)
        if at.f_code is step_code:
            break
        at = at.f_back
    return names[::-1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--processes", action="store_true", help="count what all processes of the recipe enter")
    parser.add_argument("recipe", nargs="?", default=DEMO)
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args(arguments)
    trace = trace_processes if given.processes else trace_step
    print(trace(given.recipe, given.overrides).text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
