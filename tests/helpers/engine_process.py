"""A generation engine in a process of its own: vLLM changes the threads and random numbers of the process it is in."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from nemo_rl.config.policy import PolicyConfig
from nemo_rl.errors import from_record, to_record
from nemo_rl.models.generation.interfaces import EngineSpec
from nemo_rl.models.generation.vllm.start import build_vllm_worker
from tests.helpers.tiny_model import tiny_policy

ANSWER_S = 120.0
"""Most that one call may take, the start included."""
NO_VLLM = "vLLM is not installed; run `make vllm`"


def has_vllm() -> bool:
    return importlib.util.find_spec("vllm") is not None


def vllm_policy(folder: Path, *, generation: dict[str, object] | None = None, **changes: object) -> PolicyConfig:
    """A float32 policy whose engine is vLLM with a small cache."""
    given = {"backend": "vllm", "vllm_cfg": {"kv_cache_gib": 0.05}, "max_batch_size": 64, **(generation or {})}
    return tiny_policy(folder, generation=given, **changes)


class EngineChild:
    """Calls methods of the worker over there; errors come back as ours, or as `RuntimeError` with their kind."""

    def __init__(self, line: Connection) -> None:
        self._line = line
        self.refusals: list[str] = []
        """What was said of the policies that were tried first, with the kind of error in front."""

    def __call__(self, method: str, **arguments: object) -> object:
        self._line.send((method, arguments))
        return self.answer()

    def answer(self) -> object:
        assert self._line.poll(ANSWER_S), f"no answer in {ANSWER_S:.0f} s"
        is_ok, found = self._line.recv()
        if is_ok:
            return found
        error = from_record(found)
        raise error if type(error).__name__ == found["kind"] else RuntimeError(f"{found['kind']}: {found['text']}")


@contextmanager
def vllm_child(
    policy: PolicyConfig,
    *,
    refused: Sequence[PolicyConfig] = (),
    build: Callable[[EngineSpec], object] = build_vllm_worker,
) -> Iterator[EngineChild]:
    """One vLLM worker, from its start to its end; nothing of it is left.

    Args:
        build: makes the worker over there.
        refused: tried first in the same process, which has imported vLLM only once then.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, policy, tuple(refused), build), daemon=False)
    process.start()
    there.close()
    child = EngineChild(here)
    try:
        child.refusals = [str(child.answer()) for _ in refused]
        child.answer()
        yield child
    finally:
        here.close()
        process.join(10)
        if process.is_alive():
            process.kill()
            process.join()


def _serve(
    line: Connection,
    policy: PolicyConfig,
    refused: Sequence[PolicyConfig],
    build: Callable[[EngineSpec], object],
) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    for each in refused:
        line.send((True, _refusal(each)))
    try:
        worker = build(EngineSpec(policy=policy))
        line.send((True, None))
    except Exception as error:  # noqa: BLE001 - raised on the other side
        line.send((False, to_record(error)))
        return
    while True:
        try:
            method, arguments = line.recv()
        except EOFError:
            break
        try:
            found = getattr(worker, method)
            line.send((True, found(**arguments) if callable(found) else found))
        except Exception as error:  # noqa: BLE001 - raised on the other side
            line.send((False, to_record(error)))
    worker.shutdown()
    # The end of the interpreter takes vLLM seconds; Ray ends its workers as suddenly.
    os._exit(0)


def _refusal(policy: PolicyConfig) -> str:
    try:
        build_vllm_worker(EngineSpec(policy=policy)).shutdown()
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return f"{type(error).__name__}: {error}"
    return "started"
