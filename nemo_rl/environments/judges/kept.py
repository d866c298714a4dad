"""`KeptVerdicts`: the verdicts of a run on disk, one JSON line each, and those that need not be asked for again.

Used by `JudgeEnvironment`. Invariant: a verdict that is taken from the file has the bits that it had; a failure
of this run is written, and never taken.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_rl.config.judges import JudgeConfig
from nemo_rl.environments.judges.verdicts import Case, Verdict
from nemo_rl.errors import ConfigError

__all__ = ["KeptVerdicts"]

_DECIDES = ("kind", "model", "mode", "rubric", "scale", "shows_answer", "hides_thoughts", "temperature", "max_tokens")
"""Settings that a verdict depends on, beside the texts."""


class KeptVerdicts:
    """Verdicts by judge and case.

    Args:
        path: the file of the run, made with the first verdict; None keeps nothing.
        judges: settings by name.
    """

    def __init__(self, path: Path | None, judges: Mapping[str, JudgeConfig]) -> None:
        self._path, self._lock = path, threading.Lock()
        self._judges = {name: _decisive(judge) for name, judge in judges.items()}
        self._scores: dict[str, tuple[float, ...]] = {}
        self._failures: dict[str, tuple[str, str]] = {}
        """Texts and kinds of failures of other runs alone, which are repeated as they were."""
        self.spent: dict[str, tuple[int, int]] = {}
        """Tokens that the run has had read and written so far, by judges."""
        others = [Path(judge.verdicts) for judge in judges.values() if judge.verdicts is not None]
        if missing := [file for file in others if not file.is_file()]:
            raise ConfigError(f"env.judges: verdicts: no file {missing[0]}; it is verdicts.jsonl of a run folder")
        for file in [*dict.fromkeys(others), *([path] if path is not None and path.is_file() else [])]:
            for line in file.read_bytes().splitlines():
                self._read(line, is_own=file == path)

    def key(self, judge: str, case: Case) -> str:
        """Return what a verdict is kept under: settings of the judge and texts of the case."""
        parts = [self._judges[judge], case.prompt, list(case.responses), case.answer]
        return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()

    def find(self, key: str) -> Verdict | None:
        """Return the verdict of a key; None where it has to be asked for."""
        scores = self._scores.get(key)
        if scores is not None:
            return Verdict(scores=scores, is_kept=True)
        failure = self._failures.get(key)
        return None if failure is None else Verdict(scores=None, failure=failure[0], kind=failure[1], is_kept=True)

    def keep(
        self, judge: str, key: str, case: Case, verdict: Verdict, *, asked: Sequence[Mapping[str, str]] = ()
    ) -> None:
        """Write an outcome with what was asked, the judge's text and the time."""
        record = {"judge": judge, "key": key, "time": time.time(), "scores": verdict.scores}
        record |= {"failure": verdict.failure, "kind": verdict.kind, "text": verdict.text, "messages": list(asked)}
        record |= {"prompt": case.prompt, "responses": case.responses, "seconds": round(verdict.seconds, 6)}
        record |= {"tries": verdict.tries, "tokens": verdict.tokens}
        line = json.dumps(record) + "\n"
        with self._lock:
            self._take(record, is_own=True)
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(line)

    def _read(self, line: bytes, *, is_own: bool) -> None:
        try:
            record = json.loads(line)
            self._take(record, is_own=is_own)
        except (ValueError, KeyError, TypeError):
            return  # the line in which a run was killed

    def _take(self, record: Mapping[str, Any], *, is_own: bool) -> None:
        if record["scores"] is not None:
            self._scores[record["key"]] = tuple(map(float, record["scores"]))
        elif not is_own:
            self._failures[record["key"]] = (str(record["failure"]), str(record["kind"]))
        if is_own:
            read, written = self.spent.get(record["judge"], (0, 0))
            self.spent[record["judge"]] = (read + record["tokens"][0], written + record["tokens"][1])


def _decisive(judge: JudgeConfig) -> dict[str, Any]:
    """Return the settings that a verdict depends on; options only where there are any, as a class of the user's has."""
    found = judge.model_dump(mode="json", include=set(_DECIDES))
    return found | ({"options": judge.options} if judge.options else {})
