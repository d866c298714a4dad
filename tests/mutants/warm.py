"""Runs pytest again and again, each time in a fresh fork of a process that has imported the large libraries.

    PYTHONPATH=<copy> python -m tests.mutants.warm      (in the folder of the copy, started by `tests.mutants.run`)

A request is a JSON line `{"tests": [...], "timeout_s": 60.0, "keeps_bytecode": false}`; its reply is one too, with
the exit code of pytest (null past the deadline), the end of the output and the seconds. Nothing of the project is
imported before the fork, so every run sees the files as they are then.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

LIBRARIES = (
    *("torch", "torch.distributed.tensor", "torch.distributed.fsdp", "torch.nn.attention.flex_attention"),
    *("transformers.modeling_utils", "transformers.models.qwen3.modeling_qwen3", "tensordict", "safetensors.torch"),
    *("pydantic", "msgpack", "numpy", "psutil", "yaml", "typer", "rich"),
)
"""What most tests import and no test looks at: neither Ray, which they start, nor megatron-core, which is adapted, nor
plugins of pytest, which are rewritten."""
PACKAGE = "nemo_rl"
PLUGINS = ("pytest_timeout", "_hypothesis_pytestplugin")
"""By name, for pytest warns of plugins that came with a library before the fork, and warnings are errors."""
PYTEST = (
    *("-x", "-q", "--durations=0", "-p", "no:cacheprovider", "--disable-plugin-autoload"),
    *(word for plugin in PLUGINS for word in ("-p", plugin)),
    "--hypothesis-seed=0",
)
"""Properties draw the same examples every time: what is caught today is caught tomorrow."""
OTHER_CODE = 100
"""Exit code, beyond those of pytest: the run has imported the project from somewhere else than the copy."""
OUTPUT_BYTES = 2000


def main() -> None:
    """Answers until there are no more requests."""
    requests, replies = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    # What a library or a test writes to these is no request and no reply.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    for name in LIBRARIES:
        importlib.import_module(name)
    assert PACKAGE not in sys.modules, f"{PACKAGE} must be imported by each run itself"
    for line in requests:
        replies.write(json.dumps(answer(json.loads(line))) + "\n")
        replies.flush()


def answer(request: Mapping[str, object]) -> dict[str, object]:
    """Runs the tests of a request."""
    tests, timeout_s = request["tests"], request["timeout_s"]
    assert isinstance(tests, list) and isinstance(timeout_s, int | float), f"malformed request: {request}"
    started, output = time.monotonic(), Path(".output")
    child = os.fork()
    if child == 0:
        run(tests, output=output, keeps_bytecode=bool(request["keeps_bytecode"]))
    # Both sides do it: the group is there whoever comes first.
    with suppress(ProcessLookupError):
        os.setpgid(child, child)
    try:
        descriptor = os.pidfd_open(child)
        try:
            has_ended = bool(select.select([descriptor], [], [], timeout_s)[0])
        finally:
            os.close(descriptor)
    finally:
        # Also whatever the tests have left behind.
        os.killpg(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status) if has_ended else None
    text = output.read_bytes()[-OUTPUT_BYTES:].decode("utf-8", "backslashreplace")
    return {"exit_code": code, "output": text, "seconds": time.monotonic() - started}


def run(tests: Sequence[str], *, output: Path, keeps_bytecode: bool) -> NoReturn:
    """In the fork: pytest, with its output in a file."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if not keeps_bytecode:
        # A fault leaves no bytecode: that of the file as it was stays good.
        sys.dont_write_bytecode, os.environ["PYTHONDONTWRITEBYTECODE"] = True, "1"
    code = OTHER_CODE
    try:
        try:
            code = int(importlib.import_module("pytest").main([*PYTEST, *tests]))
        except Warning:
            # What a failed test has left open, noticed when pytest was done: in a process of its own this is a 1 too.
            traceback.print_exc()
            code = 1
        places = list(importlib.import_module(PACKAGE).__path__)
        if places != [str(Path.cwd() / PACKAGE)]:
            print(f"expected the code of {Path.cwd()}, got {places}")
            code = OTHER_CODE
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Not the end of the process that was forked: its other half goes on.
        os._exit(code)


if __name__ == "__main__":
    main()
