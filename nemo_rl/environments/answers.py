"""`AnswerCheck`: gold answers that a reward cannot read are found before their prompts are drawn.

The rollout worker and the preflight check have one. All sets are looked at for a few seconds at the start, the rest of
a large one in a thread beside the run. Invariant: no prompt is drawn whose answer has not been looked at.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from nemo_rl.config.data import DataConfig
from nemo_rl.data.datasets import Prompt, PromptSet, RowProblems
from nemo_rl.environments.interfaces import ChecksAnswers, Environment
from nemo_rl.errors import NAMES_SHOWN, DatasetError, shorten

__all__ = ["AnswerCheck", "drop_unreadable"]

FIRST_S = 10.0
"""A start may take so long for it: some 3,000 mathematical answers."""
AT_ONCE = 256
"""Answers between two looks at the clock."""


class AnswerCheck:
    """Looks at the gold answers of sets of prompts.

    Args:
        environment: one that is no `ChecksAnswers`, and None, can read every answer.
        sets: by the dotted paths of their sections.
    """

    def __init__(self, environment: Environment | None, sets: Mapping[str, PromptSet]) -> None:
        self._environment = environment if isinstance(environment, ChecksAnswers) else None
        self._sets = sets
        self._seen: dict[str, set[int]] = {where: set() for where in sets}
        self._problems = {where: RowProblems(where) for where in sets}
        self._lock = threading.Lock()
        """Lock of one look: a prompt that is drawn waits for the one that goes on."""
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def look(self, *, seconds: float = FIRST_S) -> bool:
        """Look at the answers for so long; True when all have been looked at.

        Raises:
            DatasetError: some cannot be read.
        """
        deadline = time.monotonic() + seconds
        is_done = all(self._look_at(where, prompts, deadline) for where, prompts in self._parts())
        self._raise()
        return is_done

    def go_on(self) -> None:
        """Look at the rest in a thread; `require` raises what it finds."""
        self._thread = threading.Thread(target=self._look_at_all, name="gold answers", daemon=True)
        self._thread.start()

    def require(self, where: str, numbers: Iterable[int]) -> None:
        """Require that the answers of these prompts of a set can be read, and that no other one is known that cannot.

        Raises:
            DatasetError: some cannot.
        """
        prompts = self._sets[where].prompts
        self._look_at(where, [prompts[number] for number in numbers], None)
        self._raise()

    def close(self) -> None:
        """End the thread at its next look at the clock. Idempotent."""
        self._is_closed = True

    def _parts(self) -> list[tuple[str, Sequence[Prompt]]]:
        return [(where, found.prompts) for where, found in self._sets.items()]

    def _look_at_all(self) -> None:
        try:
            for where, prompts in self._parts():
                self._look_at(where, prompts, None)
        except Exception:
            # The scoring processes end with the run; everything else is met again when the prompt is drawn.
            if not self._is_closed:
                raise

    def _look_at(self, where: str, prompts: Sequence[Prompt], deadline: float | None) -> bool:
        """Look at answers; return False when there was no time for all."""
        if self._environment is None:
            return True
        seen = self._seen[where]
        new = [prompt for prompt in prompts if prompt.index not in seen]
        for start in range(0, len(new), AT_ONCE):
            if self._is_closed or (deadline is not None and time.monotonic() > deadline):
                return False
            with self._lock:
                part = [prompt for prompt in new[start : start + AT_ONCE] if prompt.index not in seen]
                found = self._environment.answer_problems(part)
                for prompt, problem in zip(part, found, strict=True):
                    seen.add(prompt.index)
                    if problem is not None:
                        line = f"{where}: {prompt.place}: gold answer {shorten(repr(prompt.answer))}: {problem}"
                        line += f"; correct it, or set {where}.unreadable=drop"
                        self._problems[where].add("with a gold answer that the reward cannot read", line)
        return True

    def _raise(self) -> None:
        for where, problems in self._problems.items():
            problems.check(len(self._seen[where]))


def drop_unreadable(
    data: DataConfig, environment: Environment | None, sets: Mapping[str, PromptSet]
) -> dict[str, PromptSet]:
    """Return sets by the dotted paths of their sections, without the rows that `unreadable: drop` leaves out.

    Raises:
        DatasetError: no row of a set is left.
    """
    sections, found = data.sections, dict(sets)
    for where, prompts in sets.items():
        if sections[where].unreadable != "drop" or not isinstance(environment, ChecksAnswers):
            continue
        problems = environment.answer_problems(prompts.prompts)
        rows = list(zip(prompts.prompts, problems, strict=True))
        dropped = [f"{prompt.place}: {shorten(repr(prompt.answer))}: {why}" for prompt, why in rows if why is not None]
        if len(dropped) == len(rows):
            raise DatasetError(f"{where}: no gold answer can be read; {dropped[0]}; correct data and output_key")
        if dropped:
            kept = (prompt for prompt, why in rows if why is None)
            line = f"{where}: of {len(rows)} rows {len(dropped)} dropped, whose gold answer cannot be read: "
            found[where] = replace(
                prompts,
                prompts=tuple(replace(prompt, index=index) for index, prompt in enumerate(kept)),
                remarks=(*prompts.remarks, line + "; ".join(dropped[:NAMES_SHOWN])),
            )
    return found
